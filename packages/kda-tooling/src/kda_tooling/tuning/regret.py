"""What a table's decisions cost: the chosen lane beside every lane and configuration that the table knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kda_backend.gate import Decision, Table, decide, load_table
from kda_backend.gate.cells import GATES
from kda_backend.gate.env import TABLES
from kda_kernels import LaunchConfig
from kda_tooling.bench.arms import OURS, config_name
from kda_tooling.bench.machine import Machine, describe_machine
from kda_tooling.bench.settings import DTYPES
from kda_tooling.bench.sweep import build_arms, build_problems
from kda_tooling.bench.warmup import compile_all, compile_jobs
from kda_tooling.peers import load_peer
from kda_tooling.tuning.capturing import captured_arms, deciding
from kda_tooling.tuning.compiling import Compiling, Job, arm_of, compile_target
from kda_tooling.tuning.loading import load_kernels
from kda_tooling.tuning.measure import FINAL_PASSES
from kda_tooling.tuning.run import count_of, table_file, target_of
from kda_tooling.tuning.settings import Group, TuneSettings
from kda_tooling.tuning.sharing import gpu_turn, measured_in_processes


@dataclass(frozen=True)
class Regret:
    """A decision at one cell, measured.

    Args:
        group, draft_tokens, batch: which cell.
        lane, config: what the gate chose.
        us: its time; of a round where rounds decide.
        best, best_us: the fastest arm of ours in the same run, and its time.
        unfused_us: our fastest unfused configuration.
        peer, peer_us: the fastest arm of a peer; None without peers.
        arms: name -> time of every arm, ours and the peers'.
    """

    group: str
    draft_tokens: int
    batch: int
    lane: str
    config: str
    us: float
    best: str
    best_us: float
    unfused_us: float
    peer: str | None = None
    peer_us: float | None = None
    arms: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The chosen over the best, minus 1."""
        return self.us / self.best_us - 1

    @property
    def over_unfused(self) -> float:
        """The chosen over our unfused lane, minus 1."""
        return self.us / self.unfused_us - 1

    @property
    def over_peer(self) -> float | None:
        """The chosen over the best of the peers."""
        return None if self.peer_us is None else self.us / self.peer_us

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"regret": round(self.share, 5), "over_unfused": round(self.over_unfused, 5)}


@dataclass(frozen=True)
class RegretResult:
    """All cells, what they were measured on, how long it took, and the groups that the table has nothing of."""

    machine: Machine
    table: str
    cells: list[Regret]
    seconds: float
    left_out: list[str] = field(default_factory=list)

    def within(self, share: float) -> float:
        """The share of cells whose regret is at most ``share``."""
        return sum(cell.share <= share for cell in self.cells) / len(self.cells)


def decision_at(settings: TuneSettings, group: Group, batch: int, machine: Machine, folder: Path) -> Decision:
    """What the gate decides there on ``machine`` by the tables in ``folder``."""
    return decide(
        settings.shape, mode=group.mode, batch=batch, draft_tokens=group.draft_tokens, device_name=machine.gpu,
        target=target_of(machine), form=group.form, safe_gate=group.gate == GATES[0], option=group.option,
        dtype=DTYPES[settings.dtype], environ={TABLES: str(folder)},
    )  # fmt: skip


def alternatives(table: Table, group: Group) -> list[tuple[str, LaunchConfig]]:
    """(lane, configuration) of all that the gate may answer from for the group, at any B: see `Table.buckets`."""
    cells = table.buckets(
        gate=group.gate, form=group.form, mode=group.mode, option=group.option, draft_tokens=group.draft_tokens
    )
    found = {
        (lane, figures.config): None
        for cell in cells.values()
        for lane, figures in cell.lanes.items()
        if figures.config is not None
    }
    return list(found)


def measure_regret(
    settings: TuneSettings,
    folder: Path,
    *,
    peers: Sequence[str] = (),
    processes: int | None = None,
    on_compiled: Callable[[int, int], None] = lambda done, of: None,
    on_group: Callable[[RegretResult, int, int], None] = lambda so_far, done, of: None,
) -> RegretResult:
    """Measure every cell of ``settings`` on the current CUDA device, decided by the table in ``folder``.

    Args:
        settings: which cells.
        folder: of the table.
        peers: specs for `kda_tooling.peers.load_peer`.
        processes, on_compiled: as `kda_tooling.tuning.run.run_tune`.
        on_group: called with (all that is measured so far, groups done, of) after each group.

    Raises:
        TableError: there is no table for this GPU, or it cannot be read.
        ValueError: the table has nothing of what is asked for.
    """
    started = time.monotonic()
    with gpu_turn("cuda"):
        machine = describe_machine()
    path = table_file(settings, machine, folder)
    table = load_table(path)
    groups = {group: found for group in settings.groups() if (found := alternatives(table, group))}
    if not groups:
        raise ValueError(f"{path} has no cell of what is asked for")
    left_out = [str(group) for group in settings.groups() if group not in groups]
    jobs: list[Job] = [(group, lane, config) for group, found in groups.items() for lane, config in found]
    count = count_of(processes, settings, list(groups), machine)
    result = RegretResult(machine, path.name, [], 0.0, left_out)
    _compile_peers(settings, [group for group in groups if group.mode == "ring"], peers)
    with Compiling(settings, jobs, compile_target(machine), on_compiled, references=False) as compiling:

        def prepared(group: Group) -> list[tuple[str, LaunchConfig]]:
            compiling.of(group)
            return groups[group]

        measure = partial(_measure_group, settings, folder, machine, tuple(peers))
        cells: dict[Group, list[Regret]] = {}
        with closing(measured_in_processes(list(groups), prepared, measure, count)) as ended:
            for group, _, of_group in ended:
                cells[group] = of_group
                measured = [cell for one in groups if one in cells for cell in cells[one]]
                result = replace(result, cells=measured, seconds=time.monotonic() - started)
                on_group(result, len(cells), len(groups))
    return result


def _compile_peers(settings: TuneSettings, groups: Sequence[Group], peers: Sequence[str]) -> None:
    """Fill Triton's disk cache with the peers' kernels: compiled one by one they would hold up every turn."""
    loaded = [load_peer(spec) for spec in peers]
    if not loaded or not groups:
        return
    lengths = tuple(dict.fromkeys(group.draft_tokens for group in groups))
    kinds = {(group.gate, group.option): group for group in groups}
    for kind in kinds.values():
        sweep = replace(settings.sweep_settings(kind), peers=tuple(peers), draft_tokens=lengths)
        arms = {t: build_arms(sweep, build_problems(sweep, t, 1, 1, "cuda").layers[0], loaded) for t in lengths}
        jobs = [(t, batch, index) for t, batch, index in compile_jobs(sweep, arms) if arms[t][index].owner != OURS]
        compile_all(sweep, jobs, on_done=lambda name: None)


def _measure_group(
    settings: TuneSettings,
    folder: Path,
    machine: Machine,
    peers: Sequence[str],
    group: Group,
    found: Sequence[tuple[str, LaunchConfig]],
) -> list[Regret]:
    """All batch sizes of a group; ``found`` is what `alternatives` gives."""
    loaded = [load_peer(spec) for spec in peers] if group.mode == "ring" else []  # it is all that peers are measured in
    load_kernels(settings, group, [arm_of(settings, group, lane, config) for lane, config in found], "cuda")
    results = []
    for batch in settings.batch_sizes:
        decision = decision_at(settings, group, batch, machine, folder)
        chosen = arm_of(settings, group, decision.lane, decision.launch)
        arms = {chosen.name: chosen}
        for lane, config in found:
            arm = arm_of(settings, group, lane, config)
            arms.setdefault(arm.name, arm)
        with captured_arms(
            settings, group, batch, list(arms.values()), machine.l2_bytes, settings.seed, peers=loaded
        ) as captured:
            times = captured.times([arm.name for arm in captured.arms], FINAL_PASSES)
        us = {name: deciding(time) for name, time in times.items()}
        lanes = {name: arm.lane for name, arm in arms.items()}
        results.append(regret_of(group, batch, decision, chosen.name, lanes, us))
    return results


def regret_of(
    group: Group, batch: int, decision: Decision, chosen: str, lanes: Mapping[str, str], us: Mapping[str, float]
) -> Regret:
    """The cell in which arms took ``us``: ours, whose ``lanes`` are given, ``chosen`` among them, and the peers'."""
    best = min(lanes, key=us.__getitem__)
    unfused = min(us[name] for name, lane in lanes.items() if lane == group.lanes[0])
    peer = min((name for name in us if name not in lanes), key=us.__getitem__, default=None)
    return Regret(
        group=str(group), draft_tokens=group.draft_tokens, batch=batch, lane=decision.lane,
        config=config_name(decision.launch), us=round(us[chosen], 4),
        best=best, best_us=round(us[best], 4), unfused_us=round(unfused, 4), peer=peer,
        peer_us=None if peer is None else round(us[peer], 4),
        arms={name: round(time, 4) for name, time in us.items()},
    )  # fmt: skip
