"""A sweep on a real GPU, small enough to take seconds: graphs, clock, worker processes, files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kda_kernels import KdaShape
from kda_tooling.bench.results import load_results
from kda_tooling.bench.settings import SweepSettings
from kda_tooling.bench.sweep import run_sweep
from kda_tooling.bench.timing import capture, cuda_stopwatch

pytestmark = pytest.mark.gpu


SPIN, FASTEST = 300_000, 2.2e9
"""Cycles that a kernel waits, and more cycles per second than a data-centre GPU has."""


def test_the_clock_counts_the_device_s_work() -> None:
    once, four_times = (capture([lambda: torch.cuda._sleep(SPIN)], rounds=rounds) for rounds in (1, 4))
    # Other tests may share the GPU: kernels that only wait, which need nothing of it, and the least of many times.
    one, four = (min(cuda_stopwatch(graph, 3) for _ in range(40)) for graph in (once, four_times))
    assert one >= 3 * SPIN / FASTEST
    assert 3.5 < four / one < 4.5


def test_the_clock_does_not_count_the_launch() -> None:
    empty = torch.zeros(1, device="cuda")
    nothing = capture([lambda: empty.add_(1.0)])
    assert min(cuda_stopwatch(nothing, 1) for _ in range(200)) < 20e-6


@pytest.mark.parametrize("kind", ["verify", "round", "commit"])
@pytest.mark.parametrize("hot", [True, False], ids=["hot", "cold"])
def test_every_kind_is_measured(kind: str, hot: bool) -> None:
    settings = SweepSettings(
        shape=KdaShape(8, 8, 128, 128), batch_sizes=(16,), draft_tokens=(2,), passes=3, kind=kind, hot=hot
    )
    (cell,) = run_sweep(settings).cells
    assert cell.cold is not hot
    assert len(cell.arms) == (2 if kind == "commit" else 4)
    for arm in cell.arms:
        assert len(arm.passes_us) == 3
        # No bound on speed: other tests may share the GPU, with the copy that the floor is measured by too.
        assert arm.median_us > 0
        assert arm.floor_us > 0


def test_rounds_with_the_pool_s_options_are_measured() -> None:
    settings = SweepSettings(
        shape=KdaShape(8, 8, 128, 128), batch_sizes=(16,), draft_tokens=(4,), passes=3, kind="round",
        fold_on_verify=True, compact_window=True,
    )  # fmt: skip
    (cell,) = run_sweep(settings).cells
    lanes = [arm.lane for arm in cell.arms]
    assert len(set(lanes)) == len(lanes) == 2 * 2 + 2 * 4
    for arm in cell.arms:
        other = next((one for one in cell.arms if f"{one.lane} compact" == arm.lane), None)
        if other is not None:
            assert arm.floor_us < other.floor_us


def test_the_command_on_this_gpu(tmp_path: Path) -> None:
    json, picture = tmp_path / "sweep.json", tmp_path / "sweep.png"
    command = [sys.executable, "-m", "kda_tooling", "sweep", "--batch-sizes", "1", "8", "--passes", "3"]
    command += ["--modes", "fused+ring", "unfused+ring", "--json", str(json), "--plot", str(picture)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "verify, T = 4" in shown.stdout
    result = load_results(json)
    assert [(cell.batch, cell.cold) for cell in result.cells] == [(1, True), (8, True)]
    assert result.machine.copy_bytes_per_second > 1e11
    assert picture.stat().st_size > 10_000
