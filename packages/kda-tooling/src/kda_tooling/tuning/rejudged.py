"""What a table's choices would have cost in a stored run of `kda gate regret`; no GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kda_backend.gate import load_table
from kda_backend.gate.cells import GATES, MOST_DRAFT_TOKENS, OPTIONS, is_time, whole
from kda_backend.gate.decisions import SOURCES
from kda_backend.lanes import OLDEST_ARCH
from kda_kernels import KdaShape
from kda_tooling.bench.arms import OURS, config_name
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.results import checked_machine
from kda_tooling.names import TABLE_NAME, short_dtype
from kda_tooling.tuning.compiling import arm_of
from kda_tooling.tuning.regret import Regret, RegretResult, decision_at, regret_of
from kda_tooling.tuning.run import table_file
from kda_tooling.tuning.settings import Group, TuneSettings

ARM = re.compile(r"\w+ [\w+]+( [\w.+-]+)*")
"""An arm's name: owner, lane, and what else it is about."""

LEAST_JUDGED = 0.5
"""Share of a run's cells below which nothing is said: a verdict over a few cells would be taken for one over all."""


def rejudge(run: object, folder: Path) -> RegretResult:
    """The cells of a run, decided by the table that ``folder`` has now, with the times of that run.

    A cell of which the table says nothing, or in which the run did not time what it chooses, is left out, and named.
    Environment variables are not looked at.

    Args:
        run: what ``kda gate regret --json`` wrote.
        folder: of the table.

    Raises:
        TableError: there is no such table, or it cannot be read.
        ValueError: ``run`` is no such result.
    """
    settings, machine, cells = _read(run)
    path = table_file(settings, machine, folder)
    if (arch := load_table(path).arch) != f"sm{machine.sm}":
        raise ValueError(f"machine.sm must be that of the table, which is for {arch}, got {machine.sm}")
    judged: list[Regret] = []
    left_out = []
    for (group, batch), us in cells.items():
        decision = decision_at(settings, group, batch, machine, folder)
        chosen = arm_of(settings, group, decision.lane, decision.launch).name
        lanes = {name: name.split()[1] for name in us if name.startswith(f"{OURS} ")}
        if decision.source != SOURCES[1]:
            left_out.append(f"{group}, B={batch} (the table has nothing of it)")
        elif chosen not in lanes:
            left_out.append(f"{group}, B={batch} ({decision.lane} {config_name(decision.launch)} was not timed)")
        else:
            judged.append(regret_of(group, batch, decision, chosen, lanes, us))
    return RegretResult(machine, path.name, judged, 0.0, left_out)


def joined(runs: Sequence[RegretResult]) -> RegretResult:
    """What several runs say of one table, together: a cell that some of them share counts once, by the worst of them.

    Raises:
        ValueError: fewer than `LEAST_JUDGED` of their cells are judged.
    """
    worst: dict[str, Regret] = {}
    for cell in (cell for run in runs for cell in run.cells):
        name = f"{cell.group}, B={cell.batch}"
        # Of two that are as bad, the one that says something of the peers.
        if name not in worst or _rank(cell) > _rank(worst[name]):
            worst[name] = cell
    cells = list(worst.values())
    names = dict.fromkeys(name for run in runs for name in run.left_out)
    left_out = [name for name in names if name.partition(" (")[0] not in worst]
    every = len(cells) + len(left_out)
    if len(cells) < max(1, LEAST_JUDGED * every):
        raise ValueError(
            f"what {runs[0].table} chooses was timed in {len(cells)} of {every} cells; fewer than half say nothing of "
            "the table"
        )
    return replace(runs[0], cells=cells, left_out=left_out)


def _rank(cell: Regret) -> tuple[float, float]:
    return cell.share, cell.over_peer or 0.0


def _read(run: object) -> tuple[TuneSettings, Machine, dict[tuple[Group, int], dict[str, float]]]:
    """What a run is about, where it was made, and of each cell the arms' times; ValueError where it is no run."""
    if not isinstance(run, dict) or not {"table", "machine", "cells"} <= set(run):
        raise ValueError("no result of kda gate regret --json: it has no table, machine and cells")
    name = TABLE_NAME.fullmatch(str(run["table"]))
    if name is None:
        raise ValueError(f"table must be a gate table's name, got {run['table']!r}")
    *sizes, dtype = name.groups()
    machine = checked_machine(run["machine"], "machine")
    try:
        for cell in run["cells"]:
            whole("draft_tokens", cell["draft_tokens"], 1, MOST_DRAFT_TOKENS)
        lengths = tuple(sorted({cell["draft_tokens"] for cell in run["cells"]}))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"draft_tokens of a cell: {type(error).__name__} {error}") from None
    if not lengths:
        raise ValueError("cells must not be empty")
    if machine.sm < OLDEST_ARCH:
        raise ValueError(f"machine.sm must be {OLDEST_ARCH} or above, got {machine.sm}")
    settings = TuneSettings(
        KdaShape(*map(int, sizes)), short_dtype(dtype), gates=GATES, options=OPTIONS, draft_tokens=lengths
    )
    if (own := table_file(settings, machine, Path()).name) != run["table"]:
        raise ValueError(f"table must be that of machine.gpu, {own}, got {run['table']}")
    groups = {str(group): group for group in settings.groups()}
    cells: dict[tuple[Group, int], dict[str, float]] = {}
    for number, cell in enumerate(run["cells"]):
        group, batch, arms = (cell.get(key) for key in ("group", "batch", "arms"))
        where = f"cells[{number}]"
        if not isinstance(group, str) or group not in groups:
            raise ValueError(f"{where}.group must be one such as {next(iter(groups))!r}, got {group!r}")
        if groups[group].draft_tokens != cell["draft_tokens"]:
            raise ValueError(f"{where}.draft_tokens must be that of its group, {group}, got {cell['draft_tokens']}")
        if type(batch) is not int or batch < 1 or (groups[group], batch) in cells:
            raise ValueError(f"{where}.batch must be a number of requests, each once in a group, got {batch!r}")
        if not isinstance(arms, dict) or not all(type(us) in (int, float) and is_time(us) for us in arms.values()):
            raise ValueError(f"{where}.arms must be microseconds above 0 by arm")
        lanes = groups[group].lanes
        for arm in arms:
            if not ARM.fullmatch(arm) or (arm.startswith(f"{OURS} ") and arm.split()[1] not in lanes):
                raise ValueError(
                    f"{where}.arms must be named by owner, lane ({' or '.join(lanes)}) and what else, got {arm[:200]!r}"
                )
        if not any(arm.startswith(f"{OURS} {lanes[0]} ") for arm in arms):
            raise ValueError(f"{where}.arms has none of {OURS} {lanes[0]}")
        cells[groups[group], batch] = arms
    return settings, machine, cells
