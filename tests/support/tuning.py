"""`kda tune` on the CPU with made-up times, as its tests run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kda_backend.gate import Table
from kda_kernels import KdaShape, LaunchConfig
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.timing import Timing
from kda_tooling.tuning import capturing, measure
from kda_tooling.tuning.settings import TuneSettings

SHAPE = KdaShape(1, 2, 64, 64)
MACHINE = Machine(
    gpu="Some GPU", sm=90, l2_bytes=1, copy_bytes_per_second=1e12, driver="1", clocks="", torch="2", triton="3",
    python="3", commit="abc", date="2026-01-01",
)  # fmt: skip
SMALL = TuneSettings(
    shape=SHAPE, draft_tokens=(2,), batch_sizes=(1, 2, 3), forms=("recurrent",), modes=("ring",), finalists=2
)
CONFIGS = [LaunchConfig(16, 1), LaunchConfig(32, 1), LaunchConfig(64, 4)]
SMALL_COMMAND = [*SMALL.command.split()[1:]]
ONE_HEAD = dataclasses.replace(SMALL, shape=KdaShape(1, 1, 64, 64))
REAL_CHECK, REAL_ROUNDS, REAL_BITS = measure.check, measure.two_rounds, capturing.BitsCheck


class Clock:
    """Stands in for graphs and their measurement: ``us`` gives the time of an arm, by its name, at its measurement."""

    def __init__(self, us: Callable[[str, int], float]) -> None:
        self.us = us
        self.runs: list[list[str]] = []

    def __call__(self, graphs: dict[str, Any], calls: int, *, passes: int, **_: Any) -> dict[str, Timing]:
        self.runs.append(list(graphs))
        return {name: Timing((self.us(name, len(self.runs)),) * passes) for name in graphs}


def usual(name: str, number: int) -> float:
    """Fused 8 us with tiles of 32, 9 with others, unfused 10 and 11."""
    return (8.0 if "fused" in name and "unfused" not in name else 10.0) + ("bv32" not in name)


def verdicts(table: Table) -> list[str]:
    return [table.verdict(cell) for cell in table.cells]
