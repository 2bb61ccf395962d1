"""The asv suite: values from a sweep's JSON, refusals, and how a sweep is stored. asv itself runs in `bench_smoke`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks import source, store
from benchmarks.ratios import FusedOverUnfused
from benchmarks.ring_latency import RingLatency
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.results import load_results

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "tests" / "data" / "invented_sweep.json"
SUITE = (RingLatency, FusedOverUnfused)


@pytest.fixture
def example() -> dict[str, Any]:
    return json.loads(EXAMPLE.read_text())


@pytest.fixture
def machine() -> Machine:
    return load_results(EXAMPLE).machine


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> benchmarks.Cells:
    monkeypatch.setenv(benchmarks.SOURCE, str(EXAMPLE))
    return RingLatency().setup_cache()


def test_latencies_are_the_sweeps_medians(replayed: benchmarks.Cells, example: dict[str, Any]) -> None:
    medians = {
        (arm["lane"], cell["draft_tokens"], cell["batch"]): arm["median_us"]
        for cell in example["cells"] for arm in cell["arms"] if arm["owner"] == "kda"
    }  # fmt: skip
    assert medians
    assert replayed == medians
    track = RingLatency().track_verify
    for lane in benchmarks.LANES:
        for t in benchmarks.DRAFT_TOKENS:
            for b in benchmarks.BATCH_SIZES:
                value, expected = track(replayed, lane, t, b), medians.get((lane, t, b), math.nan)
                assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_the_ratio_is_fused_over_unfused_of_one_cell(replayed: benchmarks.Cells) -> None:
    track = FusedOverUnfused().track_ring
    assert track(replayed, 4, 1) == replayed["fused+ring", 4, 1] / replayed["unfused+ring", 4, 1]
    assert math.isnan(track(replayed, 8, 1))
    assert math.isnan(track({("fused+ring", 4, 1): 1.0}, 4, 1))


def test_a_lanes_fastest_arm_stands_for_it(example: dict[str, Any]) -> None:
    arms = example["cells"][0]["arms"]
    fused = next(arm for arm in arms if arm["name"] == "kda fused+ring")
    arms.append(fused | {"name": "kda fused+ring bv8.w1", "median_us": 1.5})
    assert source.cells_of(json.dumps(example), "here")["fused+ring", 4, 1] == 1.5


@pytest.mark.parametrize("suite", SUITE)
def test_what_asv_needs_to_know(suite: type[source.SweepBenchmark]) -> None:
    assert len(suite.params) == len(suite.param_names)  # type: ignore[attr-defined]
    assert suite.version == "1"  # type: ignore[attr-defined]
    assert suite.unit  # type: ignore[attr-defined]
    assert suite.setup_cache is source.SweepBenchmark.setup_cache, "one sweep serves all benchmarks"
    assert suite.setup_cache.timeout >= 600  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "round"}, "kind is 'round'"),
        ({"hot": True}, "hot is True"),
        ({"dtype": "fp16"}, "dtype is 'fp16'"),
        ({"lower_bound": None}, "lower_bound is None"),
        ({"bias": False}, "bias is False"),
        ({"shape": {"num_heads": 16, "num_v_heads": 16, "head_k_dim": 128, "head_v_dim": 128}}, "shape is"),
    ],
)
def test_a_sweep_of_something_else_is_refused(change: dict[str, Any], message: str, example: dict[str, Any]) -> None:
    example["settings"] |= change
    with pytest.raises(ValueError, match=f"here: {message}.*the history is about"):
        source.cells_of(json.dumps(example), "here")


def test_a_sweep_without_a_cell_of_the_suite_is_refused(example: dict[str, Any]) -> None:
    for cell in example["cells"]:
        cell["draft_tokens"] = 5
    with pytest.raises(ValueError, match="no cell of T in"):
        source.cells_of(json.dumps(example), "here")


def test_a_missing_or_broken_file_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(benchmarks.SOURCE, str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError):
        RingLatency().setup_cache()
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a sweep"):
        RingLatency().setup_cache()


def test_without_gpu_and_file_every_cell_is_skipped_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(benchmarks.SOURCE, raising=False)
    monkeypatch.setattr(source, "gpu_usable", lambda: False)
    cells = FusedOverUnfused().setup_cache()
    assert math.isnan(RingLatency().track_verify(cells, "fused+ring", 4, 1))
    assert "KDA_SWEEP_JSON is not set: every cell is skipped" in capsys.readouterr().err


def test_with_a_gpu_the_sweep_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(benchmarks.SOURCE, raising=False)
    monkeypatch.setattr(source, "gpu_usable", lambda: True)
    monkeypatch.setattr(source, "measure", EXAMPLE.read_text)
    assert RingLatency().setup_cache()["fused+ring", 4, 1] > 0


def test_the_measuring_command_covers_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from kda_tooling.bench.settings import SweepSettings
    from kda_tooling.cli import app
    from kda_tooling.commands import sweep

    reached: list[SweepSettings] = []

    def stop(settings: SweepSettings) -> None:
        reached.append(settings)
        raise SystemExit(0)

    monkeypatch.setattr(sweep, "_require_gpu", lambda: None)
    monkeypatch.setattr(sweep, "_measure", stop)
    CliRunner().invoke(app, source.sweep_arguments())
    (settings,) = reached
    assert settings.cells() == [(t, b) for t in benchmarks.DRAFT_TOKENS for b in benchmarks.BATCH_SIZES]
    assert settings.lanes == benchmarks.LANES
    described = {name: getattr(settings, name) for name in benchmarks.SETTINGS}
    described["shape"] = vars(described["shape"])
    assert described == benchmarks.SETTINGS


def test_the_suite_imports_without_torch() -> None:
    """asv starts a process per benchmark and parameter; torch would take most of its time."""
    code = (
        "import sys, benchmarks.ratios, benchmarks.ring_latency, benchmarks.store;"
        "sys.exit(any(m.split('.')[0] in ('torch', 'triton', 'kda_tooling') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_asv_configuration() -> None:
    config = json.loads((ROOT / "asv.conf.json").read_text())
    assert (ROOT / config["benchmark_dir"] / "__init__.py").is_file()
    assert config["results_dir"] == "benchmarks/results"
    assert config["env_dir"].startswith(".asv/")
    assert config["html_dir"].startswith(".asv/")


def test_histories_are_per_gpu_model() -> None:
    assert store.machine_name("NVIDIA H200") == "NVIDIA_H200"
    assert store.machine_name("Some GPU/2 (80GB)") == "Some_GPU_2_80GB"


@pytest.mark.parametrize("commit", ["unknown", "0123456789ab+changes"])
def test_a_sweep_of_an_uncommitted_tree_is_not_stored(commit: str, machine: Machine) -> None:
    import dataclasses

    with pytest.raises(ValueError, match="measure a committed tree"):
        store.commit_of(dataclasses.replace(machine, commit=commit), None)


def test_the_commit_must_exist(machine: Machine) -> None:
    with pytest.raises(ValueError, match="is no commit of this repository"):
        store.commit_of(machine, "0" * 40)


def test_what_is_stored_names_the_measuring_machine_and_no_path(machine: Machine) -> None:
    written = {
        "env_name": "existing-py_home_someone_bin_python", "python": "3.11", "durations": {"<build>": 1.0},
        "params": {"machine": "NVIDIA_H200", "python": "3.11"}, "results": {"a": [1]}, "commit_hash": "ab" * 20,
    }  # fmt: skip
    data = store.normalised(written, machine)
    assert "someone" not in json.dumps(data)
    assert data["params"] == {"machine": "NVIDIA_H200", "python": "any"}
    assert (data["results"], data["commit_hash"]) == ({"a": [1]}, "ab" * 20)
    assert data["measured"]["gpu"] == machine.gpu


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run"], "--dry-run needs --json"),
        ([], "no GPU here"),
        (["--nonsense"], "unrecognized arguments"),
        (["--json", "none.json"], "none.json"),
        (["--json", str(EXAMPLE)], "measure a committed tree"),
    ],
)
def test_wrong_calls_store_nothing(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def must_not_run(*args: object) -> None:
        raise AssertionError("asv was run")

    monkeypatch.setattr(store, "gpu_usable", lambda: False)
    monkeypatch.setattr(store, "run_asv", must_not_run)
    with pytest.raises(SystemExit) as stopped:
        store.main(arguments)
    assert stopped.value.code not in (0, None)
    assert message in capsys.readouterr().err + str(stopped.value.code)


def test_a_benchmark_that_raises_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise subprocess.CalledProcessError(2, ["python", "-m", "asv", "run"])

    monkeypatch.setattr(store, "run_asv", failing)
    with pytest.raises(SystemExit, match="asv failed with exit code 2"):
        store.main(["--json", str(EXAMPLE), "--dry-run"])
