"""The arms of a cell, run and captured, ready to be timed: what `kda tune` and `kda gate regret` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kda_backend.gate.cells import OPTIONS
from kda_kernels.checking import verifies_unchecked
from kda_tooling.bench.arms import Arm, peer_arms
from kda_tooling.bench.bits import BitsCheck
from kda_tooling.bench.sweep import build_problems, calls_of, rotation_layers
from kda_tooling.bench.timing import Replayable, Timing, measure_interleaved, record, run_once
from kda_tooling.peers import Peer
from kda_tooling.terminal import in_a_line
from kda_tooling.tuning.compiling import REFERENCE, arm_of
from kda_tooling.tuning.settings import Group, TuneSettings
from kda_tooling.tuning.sharing import gpu_shared, gpu_turn

SECONDS_PER_PASS = 5e-4
"""Time of an arm in a pass; medians of five of them are steady to tenths of a per cent."""

Times = dict[str, tuple[float, float | None]]
"""Arm name -> microseconds per layer of a verify, and of a round where rounds decide."""

OnFailure = Callable[[Arm, Exception], None]


class ContextLostError(RuntimeError):
    """A failure on the GPU after which this process gets no more work done there."""


@dataclass(frozen=True)
class Captured:
    """Arms whose calls of every layer are captured.

    Args:
        arms: those that could be, the peers' after ours.
        graphs: kind, "verify" or where rounds decide "round" too -> arm's name -> graph of one call per layer.
        layers: of the rotation.
        device: where.
    """

    arms: list[Arm]
    graphs: dict[str, dict[str, Replayable]]
    layers: int
    device: str

    def times(self, names: Sequence[str], passes: int) -> Times:
        """Median times of the arms of these ``names``, interleaved, L2-cold; nobody else has kernels on the GPU."""
        timed: dict[str, dict[str, Timing]] = {}
        with gpu_turn(self.device):
            # Kinds apart, rounds first: one right after verifies of what it would fold has less to do.
            for kind, graphs in reversed(self.graphs.items()):
                chosen = {name: graphs[name] for name in names}
                timed[kind] = measure_interleaved(chosen, self.layers, passes=passes, seconds_per_pass=SECONDS_PER_PASS)
        rounds = timed.get("round")
        return {name: (timed["verify"][name].median_us, rounds[name].median_us if rounds else None) for name in names}


@contextmanager
def captured_arms(
    settings: TuneSettings,
    group: Group,
    batch: int,
    arms: Sequence[Arm],
    l2_bytes: int,
    seed: int,
    device: str = "cuda",
    peers: Sequence[Peer] = (),
    on_failure: OnFailure | None = None,
) -> Iterator[Captured]:
    """``arms`` and those of ``peers`` on inputs of ``seed``: their bits compared, run once, and captured.

    Args:
        on_failure: called with an arm that does not write what `REFERENCE` writes on these inputs, or cannot run; the
            others are captured without it. None: bits are not compared, and what fails is raised.

    Raises:
        ContextLostError: an arm's failure left the GPU unusable.
    """
    sweep = settings.sweep_settings(group, seed)
    layers, _ = rotation_layers(sweep, group.draft_tokens, batch, l2_bytes)
    kinds = ("verify",) if group.option == OPTIONS[0] else ("verify", "round")
    reference = arm_of(settings, group, group.lanes[0], REFERENCE)
    calls: dict[str, dict[str, list[Callable[[], object]]]] = {}
    graphs: dict[str, dict[str, Replayable]] = {kind: {} for kind in kinds}

    def bits(arm: Arm) -> None:
        written.run(arm)
        if arm.fold_on_verify:
            problems.folding.reset()

    def first_run(arm: Arm) -> None:
        calls[arm.name] = {kind: calls_of(kind, arm, problems, accept_lens) for kind in kinds}
        for these in calls[arm.name].values():
            run_once([these[0], these[-1]])  # all layers are alike; of a round, the last is the commit
        if device == "cuda":
            torch.cuda.synchronize()  # what fails on the device fails here, and not under another arm's name

    def graph(arm: Arm) -> None:
        with verifies_unchecked():  # `first_run` has had one of each kind checked
            for kind, these in calls[arm.name].items():
                graphs[kind][arm.name] = record(these)

    with gpu_shared(device):
        _free(device)
        problems = build_problems(sweep, group.draft_tokens, batch, layers, device)
        accept = sweep.accept_for(group.draft_tokens)
        accept_lens = torch.full((batch,), accept, dtype=torch.int32, device=device)
        arms = [*arms, *(arm for peer in peers for arm in peer_arms(peer, problems.layers[0]))]
        if len(kinds) > 1:
            for problem in problems.layers:  # the first commit would make states of records that nobody wrote
                reference.verify(problem)
    if on_failure is not None:
        written = BitsCheck(problems.layers[0], reference)
        arms = passing(bits, arms, device, on_failure)
    arms = passing(first_run, arms, device, on_failure)
    arms = [arm for arm in arms if succeeds(graph, arm, device, on_failure)]
    try:
        yield Captured(arms, graphs, layers, device)
    finally:
        graphs.clear()


def succeeds(do: Callable[[Arm], None], arm: Arm, device: str, on_failure: OnFailure | None) -> bool:
    """Whether ``do(arm)`` does; a failure goes to ``on_failure``, or is raised where there is none."""
    try:
        do(arm)
    except Exception as error:
        ensure_alive(device, arm, error)
        if on_failure is None:
            raise
        _free(device)
        on_failure(arm, error)
        return False
    return True


def passing(
    do: Callable[[Arm], None], arms: Sequence[Arm], device: str, on_failure: OnFailure | None = None
) -> list[Arm]:
    """The arms for which ``do(arm)`` succeeds, each in a turn of its own: whoever times waits for one arm at most."""
    found = []
    for arm in arms:
        with gpu_shared(device):
            if succeeds(do, arm, device, on_failure):
                found.append(arm)
    return found


def _free(device: str) -> None:
    """Give back memory that is only kept for reuse, of the cell before or of an arm that failed."""
    if device == "cuda":
        torch.cuda.empty_cache()


def ensure_alive(device: str, arm: Arm, failed: Exception) -> None:
    """Raise `ContextLostError` if the GPU takes no more work of this process since ``arm`` has ``failed``."""
    if device != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise ContextLostError(
            f"{arm.name} left the GPU unusable for this process ({in_a_line(failed)}). What was measured before is in "
            "the table: --resume in a new process goes on from there"
        ) from failed


def deciding(times: tuple[float, float | None]) -> float:
    """The figure that counts: the round's where there is one."""
    return times[0] if times[1] is None else times[1]
