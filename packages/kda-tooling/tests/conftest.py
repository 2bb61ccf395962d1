"""A sweep's result for tests of tables, pictures and JSON: invented numbers of a real run's size and shape."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kda_backend import lane_mode
from kda_tooling.bench.floor import Traffic, commit_traffic, verify_traffic
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.results import ArmResult, Cell, SweepResult
from kda_tooling.bench.settings import SweepSettings
from kda_tooling.tuning import capturing, compiling, measure, run
from kda_tooling.tuning.candidates import Figures
from kda_tooling.tuning.settings import TuneSettings
from tests.support import tuning
from tests.support.tables import H200_MULTIPROCESSORS

COPY = 4.3e12
MACHINE = Machine(
    gpu="Example GPU", sm=90, l2_bytes=60 << 20, copy_bytes_per_second=COPY, driver="1.2", clocks="SM 1, memory 2",
    torch="2.11.0", triton="3.6.0", python="3.12.0", commit="0123456789ab", date="2026-01-31",
)  # fmt: skip

# (owner, lane, configuration) -> us per layer at T = 4 of a batch without bytes; a share of the floor is added
ANCHORS = {
    ("kda", "unfused", ""): 3.1, ("kda", "unfused+ring", ""): 2.9, ("kda", "fused", ""): 2.6,
    ("kda", "fused+ring", ""): 2.5, ("sglang", "unfused+ring", ""): 11.7, ("sglang", "fused+ring", " bv4"): 9.5,
    ("sglang", "fused+ring", " bv16"): 8.9,
}  # fmt: skip


@pytest.fixture
def h200_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SMs of an H200 on whatever machine, for batch sizes that depend on them."""
    properties = SimpleNamespace(multi_processor_count=H200_MULTIPROCESSORS)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: properties)


def make_sweep(settings: SweepSettings | None = None) -> SweepResult:
    """The result that a sweep with ``settings`` could have."""
    settings = settings or SweepSettings(batch_sizes=(1, 4, 16, 64, 256), draft_tokens=(4, 8), peers=())
    described = json.loads(json.dumps(dataclasses.asdict(settings)))
    described["peers"] = ["sglang"]
    cells = [_cell(settings, t, b) for t, b in settings.cells()]
    return SweepResult(MACHINE, described, {"sglang": "0.5.23"}, cells)


def _cell(settings: SweepSettings, t: int, b: int) -> Cell:
    arms = []
    for (owner, lane, suffix), least in ANCHORS.items():
        if owner == "kda" and lane not in settings.lanes:
            continue
        mode = lane_mode(lane)
        verify = verify_traffic(settings.shape, b, t, settings.torch_dtype, mode, settings.bias)
        commit = commit_traffic(settings.shape, b, settings.accept_for(t), settings.torch_dtype, mode)
        traffic: Traffic = {"verify": verify, "commit": commit, "round": verify + commit}[settings.kind]
        floor = traffic.microseconds(COPY)
        slope = {"kda": 1.1, "sglang": 2.6}[owner] * (2.0 if lane.startswith("fused") and owner == "sglang" else 1.0)
        us = least * (t / 4) ** 0.5 + slope * floor
        passes = [us * factor for factor in (1.0, 0.99, 1.01)]
        arms.append(ArmResult(f"{owner} {lane}{suffix}", owner, lane, mode, us, 0.01, passes, floor))
    accept = 0 if settings.kind == "verify" else settings.accept_for(t)
    return Cell(settings.kind, t, b, accept, 1 if settings.hot else 192, 200 << 20, not settings.hot, arms, {})


@pytest.fixture
def sweep_factory() -> Callable[..., SweepResult]:
    """`make_sweep`."""
    return make_sweep


@pytest.fixture
def example() -> SweepResult:
    """Verify at T = 4 and 8, five batch sizes, four lanes and a peer."""
    return make_sweep()


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., run.TuneResult]:
    """Tunes `tests.support.tuning.SMALL` into the test's folder, on the CPU, with the times that it is given."""
    measure_group = measure.measure_group
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(1))
    monkeypatch.setattr(compiling, "candidates", lambda *_: tuning.CONFIGS)
    monkeypatch.setattr(compiling, "compile_one", lambda settings, group, lane, config, _: [(config, Figures(64, 0))])
    monkeypatch.setattr(compiling, "compile_reference", lambda *_: None)
    monkeypatch.setattr(measure, "check", lambda *_: None)
    monkeypatch.setattr(measure, "two_rounds", lambda *_: {})
    monkeypatch.setattr(capturing, "BitsCheck", lambda *_: SimpleNamespace(run=lambda arm: None))
    monkeypatch.setattr(capturing, "run_once", lambda calls: None)
    monkeypatch.setattr(capturing, "record", lambda calls: calls)
    monkeypatch.setattr(run, "measure_group", lambda *args, **rest: measure_group(*args, device="cpu", **rest))
    monkeypatch.setattr(run, "device_memory", lambda: 1 << 40)
    monkeypatch.setattr(run, "gpu_turn", lambda _: nullcontext())

    def tune(
        us: Callable[[str, int], float],
        settings: TuneSettings = tuning.SMALL,
        machine: Machine = tuning.MACHINE,
        **options: Any,
    ) -> run.TuneResult:
        monkeypatch.setattr(capturing, "measure_interleaved", tuning.Clock(us))
        monkeypatch.setattr(run, "describe_machine", lambda: machine)
        return run.run_tune(settings, tmp_path, **({"processes": 1} | options))

    return tune
