"""Which cell of which gate table a cell of the history is: the one place that knows both names.

A benchmark states lane, T and B; what it does not state is what the suite is about, `DEFAULTS`. A parameter of one of
the names below overrides its default, so that a benchmark may be added with, say, ``form`` or ``H`` of its own.
``tests/test_history_gate_cells.py`` holds names and defaults to those of ``benchmarks/``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kda_backend.gate import OPTIONS, CellKey, Table
from kda_backend.lanes import LANES, lane_mode
from kda_kernels import KdaShape
from kda_tooling.history.reading import CellName
from kda_tooling.names import long_dtype

VERIFY_BENCHMARKS = ("ring_latency.RingLatency.track_verify", "lane_latency.LaneLatency.track_verify")
"""asv's names of what times a verify per lane, us per layer: it decides cells of option "plain".

Cells of pool options go by rounds with that option, which the suite does not have: it says nothing of them.
"""

DEFAULTS: Mapping[str, str] = {
    "H": "8", "HV": "8", "K": "128", "V": "128", "dtype": "bfloat16", "gate": "safe", "form": "recurrent",
    "option": OPTIONS[0],
}  # fmt: skip
NEEDED = ("lane", "T", "B")


class GatePlace(NamedTuple):
    """A lane of a gate cell, and what its table is for."""

    shape: KdaShape
    dtype: str
    key: CellKey
    lane: str


def machine_name(gpu: str) -> str:
    """A GPU's name as asv's machine name, which is a folder's: histories are per GPU model."""
    return re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_")


def of_machine(table: Table, machine: str, gpu: str | None) -> bool:
    """Whether a run on asv's ``machine``, whose device calls itself ``gpu`` if that is known, is on the table's."""
    return gpu == table.device_name if gpu is not None else machine == machine_name(table.device_name)


def gate_place(name: CellName, param_names: tuple[str, ...]) -> GatePlace | None:
    """Where a history's cell belongs, or None: no latency of a lane, or of what no gate cell is for."""
    if name.benchmark not in VERIFY_BENCHMARKS or len(param_names) != len(name.params):
        return None
    given = dict(zip(param_names, name.params, strict=True))
    if any(one not in given for one in NEEDED):
        return None
    lane, *words = given["lane"].split()  # a sweep's column: the lane, "chunked", then words of pool options
    if lane not in LANES or set(words) - {"chunked"}:
        return None
    said = dict(DEFAULTS)
    if words:
        said["form"] = "chunked"
    said |= {one: given[one] for one in DEFAULTS if one in given}
    try:
        shape = KdaShape(*(int(said[one]) for one in ("H", "HV", "K", "V")))
        key = CellKey(said["gate"], said["form"], lane_mode(lane), said["option"], int(given["T"]), int(given["B"]))
    except (TypeError, ValueError):
        return None
    if key.option != OPTIONS[0]:
        return None
    return GatePlace(shape, long_dtype(said["dtype"]), key, lane)
