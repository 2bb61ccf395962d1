"""`kda tune` on the CPU with made-up times, as its tests run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kda_backend.gate import Table
from kda_kernels import KdaShape, LaunchConfig
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.timing import Timing
from kda_tooling.tuning import compiling, measure, run
from kda_tooling.tuning.candidates import Figures
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
REAL_CHECK, REAL_ROUNDS, REAL_WRITTEN = measure.check, measure.two_rounds, measure.check_written


class Clock:
    """Stands in for graphs and their measurement: ``us`` gives the time of an arm, by its name, at its measurement."""

    def __init__(self, us: Callable[[str, int], float]) -> None:
        self.us = us
        self.runs: list[list[str]] = []

    def __call__(self, graphs: dict[str, Any], calls: int, *, passes: int) -> dict[str, Timing]:
        self.runs.append(list(graphs))
        return {name: Timing((self.us(name, len(self.runs)),) * passes) for name in graphs}


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., run.TuneResult]:
    """Tunes `SMALL` into the test's folder, on the CPU, with the times that it is given."""
    measure_group = measure.measure_group
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(1))
    monkeypatch.setattr(compiling, "candidates", lambda *_: CONFIGS)
    monkeypatch.setattr(compiling, "compile_one", lambda settings, group, lane, config, _: [(config, Figures(64, 0))])
    monkeypatch.setattr(measure, "check", lambda *_: None)
    monkeypatch.setattr(measure, "two_rounds", lambda *_: {})
    monkeypatch.setattr(measure, "check_written", lambda *_: None)
    monkeypatch.setattr(measure, "capture", lambda calls: calls)
    monkeypatch.setattr(run, "measure_group", lambda *args, **rest: measure_group(*args, device="cpu", **rest))
    monkeypatch.setattr(run, "device_memory", lambda: 1 << 40)

    def tune(
        us: Callable[[str, int], float], settings: TuneSettings = SMALL, machine: Machine = MACHINE, **options: Any
    ) -> run.TuneResult:
        monkeypatch.setattr(measure, "measure_interleaved", Clock(us))
        monkeypatch.setattr(run, "describe_machine", lambda: machine)
        return run.run_tune(settings, tmp_path, **options)

    return tune


def usual(name: str, number: int) -> float:
    """Fused 8 us with tiles of 32, 9 with others, unfused 10 and 11."""
    return (8.0 if "fused" in name and "unfused" not in name else 10.0) + ("bv32" not in name)


def verdicts(table: Table) -> list[str]:
    return [table.verdict(cell) for cell in table.cells]
