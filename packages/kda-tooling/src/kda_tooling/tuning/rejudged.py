"""What a table's choices would have cost in a stored run of `kda gate regret`; no GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kda_backend.gate import load_table
from kda_backend.gate.cells import GATES, OPTIONS
from kda_kernels import KdaShape
from kda_tooling.bench.arms import OURS, config_name
from kda_tooling.bench.machine import Machine
from kda_tooling.dtypes import short_dtype
from kda_tooling.tuning.compiling import arm_of
from kda_tooling.tuning.regret import Regret, RegretResult, decision_at, regret_of
from kda_tooling.tuning.run import table_file
from kda_tooling.tuning.settings import Group, TuneSettings

TABLE_NAME = re.compile(r"H=(\d+),HV=(\d+),K=(\d+),V=(\d+),device_name=.+,dtype=(\w+)\.json")


def rejudge(run: Mapping[str, Any], folder: Path) -> RegretResult:
    """The cells of a run, decided by the table that ``folder`` has now, with the times of that run.

    A cell in which the run did not time what the table chooses is left out, and named.

    Args:
        run: what ``kda gate regret --json`` wrote.
        folder: of the table.

    Raises:
        TableError: there is no such table, or it cannot be read.
        ValueError: ``run`` is no such result, or has no cell that can be judged.
    """
    try:
        settings, machine, cells = _read(run)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"no result of kda gate regret --json: {type(error).__name__}: {error}") from None
    path = table_file(settings, machine, folder)
    load_table(path)
    judged: list[Regret] = []
    left_out = []
    for group, batch, us in cells:
        decision = decision_at(settings, group, batch, machine, folder)
        chosen = arm_of(settings, group, decision.lane, decision.launch).name
        lanes = {name: name.split()[1] for name in us if name.startswith(f"{OURS} ")}
        if chosen in lanes:
            judged.append(regret_of(group, batch, decision, chosen, lanes, us))
        else:
            left_out.append(f"{group}, B={batch} ({decision.lane} {config_name(decision.launch)})")
    if not judged:
        raise ValueError("the run timed nothing of what the table chooses")
    return RegretResult(machine, path.name, judged, float(run["seconds"]), left_out)


def _read(run: Mapping[str, Any]) -> tuple[TuneSettings, Machine, list[tuple[Group, int, dict[str, float]]]]:
    """What a run is about, where it was made, and of each cell the group, B and the arms' times."""
    name = TABLE_NAME.fullmatch(run["table"])
    if name is None:
        raise ValueError(f"table is {run['table']!r}")
    *sizes, dtype = name.groups()
    lengths = tuple(sorted({int(cell["draft_tokens"]) for cell in run["cells"]}))
    settings = TuneSettings(
        KdaShape(*map(int, sizes)), short_dtype(dtype), gates=GATES, options=OPTIONS, draft_tokens=lengths
    )
    groups = {str(group): group for group in settings.groups()}
    cells = [
        (groups[cell["group"]], int(cell["batch"]), {arm: float(us) for arm, us in cell["arms"].items()})
        for cell in run["cells"]
    ]
    return settings, Machine(**run["machine"]), cells
