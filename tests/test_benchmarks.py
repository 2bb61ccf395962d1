"""The asv suites: values from the commands' JSON, refusals, what is measured where. All of asv runs in bench_smoke."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks import asv_runs, records, source
from benchmarks.commit_latency import CommitLatency
from benchmarks.compile_signals import CompiledKernel, Variants
from benchmarks.gate_regret import GateRegret
from benchmarks.host_calls import HostTime
from benchmarks.lane_latency import LaneLatency
from benchmarks.ratios import FusedOverUnfused
from benchmarks.ring_bytes import RingBytes
from benchmarks.ring_latency import RingLatency, VerifySuite
from benchmarks.round_latency import RoundLatency
from kda_kernels import KdaShape
from kda_tooling.bench import host_time
from kda_tooling.problem import random_problems
from tests.support.history_files import EXAMPLE, FILES, ROOT, text_of

SUITES = (
    RingLatency, FusedOverUnfused, LaneLatency, RoundLatency, CommitLatency, GateRegret, HostTime, RingBytes,
    CompiledKernel, Variants,
)  # fmt: skip


def tracks(suite: type) -> list[str]:
    return [name for name in vars(suite) if name.startswith("track_")]


@pytest.fixture
def example() -> dict[str, Any]:
    return json.loads(EXAMPLE.read_text())


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> benchmarks.Values:
    monkeypatch.setenv(benchmarks.SOURCE, str(EXAMPLE))
    return RingLatency().setup_cache()


def test_latencies_are_the_sweeps_medians(replayed: benchmarks.Values, example: dict[str, Any]) -> None:
    medians = {
        (arm["lane"], cell["draft_tokens"], cell["batch"]): arm["median_us"]
        for cell in example["cells"] for arm in cell["arms"] if arm["owner"] == "kda"
    }  # fmt: skip
    assert medians
    assert replayed == medians
    for suite in (RingLatency(), LaneLatency()):
        for cell in itertools.product(*suite.params):
            value, expected = suite.track_verify(replayed, *cell), medians.get(cell, math.nan)
            assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_the_ratio_is_fused_over_unfused_of_one_cell(replayed: benchmarks.Values) -> None:
    track = FusedOverUnfused().track_ring
    assert track(replayed, 4, 1) == replayed["fused+ring", 4, 1] / replayed["unfused+ring", 4, 1]
    assert math.isnan(track(replayed, 8, 1))
    assert math.isnan(track({("fused+ring", 4, 1): 1.0}, 4, 1))


def test_a_lanes_fastest_arm_stands_for_it(example: dict[str, Any]) -> None:
    arms = example["cells"][0]["arms"]
    fused = next(arm for arm in arms if arm["name"] == "kda fused+ring")
    arms.append(fused | {"name": "kda fused+ring bv8.w1", "median_us": 1.5})
    assert records.record_of(json.dumps(example), "here").values["fused+ring", 4, 1] == 1.5


@pytest.mark.parametrize(
    ("suite", "track", "cell", "expected"),
    [
        (RoundLatency, "round", ("fused+ring", 4, 1), 3.0 * (1 + 1 / 32)),
        (CommitLatency, "commit", ("snapshots", 4, 64), 0.9),
        (GateRegret, "regret", ("recurrent", "ring", 4, 1), 1.0),
        (GateRegret, "regret", ("chunked", "ring", 4, 64), 1.02),
        (HostTime, "host", ("fold", "first"), 104.0),
        (HostTime, "host", ("fold", "again"), 14.0),
        (RingBytes, "head_step", (128,), 128 * 2 * 2 + 128 * 4 + 4),
        (CompiledKernel, "instructions", ("sm90 fused ring-K128-T4",), 1000),
        (CompiledKernel, "spills", ("sm90 fused ring-K128-T4",), 0),
        (Variants, "compiled", ("sm90",), 2),
    ],
)
def test_each_suite_finds_its_file_in_the_folder(
    suite: type, track: str, cell: tuple[Any, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(benchmarks.SOURCE, str(FILES))
    cells = suite().setup_cache()
    assert getattr(suite(), f"track_{track}")(cells, *cell) == pytest.approx(expected)
    assert cell in itertools.product(*suite.params)


def test_a_file_of_another_kind_fills_no_cell_of_a_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(benchmarks.SOURCE, str(FILES / "round.json"))
    assert RingLatency().setup_cache() == {}
    assert RoundLatency().setup_cache()


def test_several_files_of_one_kind_are_one_measurement_with_medians(example: dict[str, Any]) -> None:
    def times(factor: float) -> records.Record:
        changed = json.loads(json.dumps(example))
        for cell in changed["cells"]:
            for arm in cell["arms"]:
                arm["median_us"] *= factor
        return records.record_of(json.dumps(changed), "here")

    key = ("fused+ring", 4, 1)
    one = times(1.0).values[key]
    assert records.combined([times(1.0), times(3.0), times(1.1)])[key] == pytest.approx(1.1 * one)


@pytest.mark.parametrize("suite", SUITES)
def test_what_asv_needs_to_know(suite: Any) -> None:
    assert len(suite.params) == len(suite.param_names)
    assert suite.version == "1"
    assert tracks(suite)
    for track in tracks(suite):
        assert getattr(getattr(suite, track), "unit", getattr(suite, "unit", None))
    assert suite.setup_cache.timeout >= 600


def test_every_suite_is_run_and_stored() -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    here = {suite.__module__.partition(".")[2] for suite in SUITES}
    assert here == {module for modules in asv_runs.SUITES.values() for module in modules}
    tools = {"__init__", "asv_runs", "dashboard", "forge", "idle", "nightly", "records", "source", "spread", "store"}
    assert files - here == tools
    assert set(asv_runs.SUITES) == set(records.KINDS)
    assert {path.stem for path in FILES.glob("*.json")} == set(records.KINDS)


def test_one_sweep_serves_all_suites_of_verify() -> None:
    for suite in (RingLatency, FusedOverUnfused, LaneLatency):
        assert suite.setup_cache is VerifySuite.setup_cache


def test_the_compiled_kernels_are_those_that_the_report_compiles() -> None:
    from kda_tooling.compiling.specs import SPECS

    compiled = {f"{target} {label} {spec.name}" for target, specs in SPECS.items() for spec in specs
                for label in spec.labels}  # fmt: skip
    assert set(CompiledKernel.params[0]) == compiled
    assert set(Variants.params[0]) == set(SPECS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hot": True}, "hot is True"),
        ({"dtype": "fp16"}, "dtype is 'fp16'"),
        ({"lower_bound": None}, "lower_bound is None"),
        ({"bias": False}, "bias is False"),
        ({"indices_ready": True}, "indices_ready is True"),
        ({"shape": {"num_heads": 16, "num_v_heads": 16, "head_k_dim": 128, "head_v_dim": 128}}, "shape is"),
    ],
)
def test_a_sweep_of_something_else_is_refused(change: dict[str, Any], message: str, example: dict[str, Any]) -> None:
    example["settings"] |= change
    with pytest.raises(ValueError, match=f"here: {message}.*the history is about"):
        records.record_of(json.dumps(example), "here")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("regret", {"table": "H=16,HV=16,K=128,V=128,device_name=X,dtype=bfloat16.json"}, "the table is 'H=16"),
        ("host-time", {"batch_size": 2}, "batch_size is 2"),
        ("host-time", {"us_per_call": [{"op": "fold", "checked": None, "replayed": 1.0}]}, "fold: checked must be"),
        ("host-time", {"us_per_call": [{"op": "fold", "checked": math.nan, "replayed": 1.0}]}, "checked must be with"),
        ("host-time", {"us_per_call": 1}, "broken file of kind host-time"),
        ("memory", {"modes": {}}, "broken file of kind memory"),
        ("memory", {"layers": 0}, "layers must be at least 1, got 0"),
        ("memory", {"ring_length": math.nan}, "ring_length must be"),
        ("compile", {"kernels": [{"target": "sm90"}]}, "broken file of kind compile"),
        ("compile", {"kernels": []}, "no cell"),
        ("regret", {"machine": {}}, "machine: expected the keys"),
    ],
)
def test_broken_files_are_refused_by_name(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        records.record_of(text_of(kind, **changes), "that.json")
    assert "that.json" in str(raised.value)


def test_a_part_of_the_kernels_says_nothing_of_their_number() -> None:
    values = records.record_of(text_of("compile", whole=False), "here").values
    assert ("sm90", "variants") not in values
    assert ("sm90 fold K128-T4", "registers") in values


def test_a_sweep_without_a_cell_of_the_suite_is_refused(example: dict[str, Any]) -> None:
    for cell in example["cells"]:
        cell["draft_tokens"] = 5
    with pytest.raises(ValueError, match="no cell of T in"):
        records.record_of(json.dumps(example), "here")


def test_rounds_of_another_accept_length_are_left_out() -> None:
    data = json.loads(text_of("round"))
    data["cells"][0]["accept"] = 2
    values = records.record_of(json.dumps(data), "here").values
    assert {batch for _, _, batch in values} == {64}


def test_a_missing_or_broken_file_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(benchmarks.SOURCE, str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError):
        RingLatency().setup_cache()
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a file that the history takes"):
        RingLatency().setup_cache()
    (tmp_path / "none.json").write_text("{")
    with pytest.raises(ValueError, match=r"none\.json is not JSON"):
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
    monkeypatch.setattr(source, "measure", lambda kind, folder: [EXAMPLE])
    assert RingLatency().setup_cache()["fused+ring", 4, 1] > 0


def test_what_needs_no_gpu_is_measured_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(benchmarks.SOURCE, raising=False)
    monkeypatch.setattr(source, "gpu_usable", lambda: False)
    assert set(source.measurable()) == {"memory", "compile"}
    assert RingBytes().setup_cache() == {(64,): 64 * 2 * 2 + 64 * 4 + 4, (128,): 128 * 2 * 2 + 128 * 4 + 4}


def test_the_measuring_commands_cover_the_suites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from kda_tooling.bench.settings import SweepSettings
    from kda_tooling.cli import app
    from kda_tooling.commands import regret, sweep
    from kda_tooling.tuning.settings import TuneSettings

    reached: list[Any] = []

    def stop(settings: Any, *rest: object) -> None:
        reached.append(settings)
        raise SystemExit(0)

    monkeypatch.setattr(sweep, "require_gpu", lambda *_: None)
    monkeypatch.setattr(sweep, "_measure", stop)
    monkeypatch.setattr(regret, "require_gpu", lambda *_: None)
    monkeypatch.setattr(regret, "_measure", stop)
    grid = [(t, b) for t in benchmarks.DRAFT_TOKENS for b in benchmarks.BATCH_SIZES]
    lanes: dict[str, set[str]] = {kind: set() for kind in records.SWEEPS}
    for kind in (*records.SWEEPS, "regret"):
        for command in source.commands(kind):
            CliRunner().invoke(app, [*command, str(tmp_path / "out.json")])
    assert len(reached) == 5
    for settings in reached:
        if isinstance(settings, SweepSettings):
            assert settings.cells() == grid
            described = {name: getattr(settings, name) for name in benchmarks.SETTINGS}
            described["shape"] = vars(described["shape"])
            assert described == benchmarks.SETTINGS
            assert not any(getattr(settings, name) for name in benchmarks.UNSET)
            assert settings.kind == "verify" or settings.accept == benchmarks.ACCEPT
            chunked = {f"{lane} chunked" for lane in settings.lanes if "chunked" in settings.forms}
            lanes[settings.kind] |= {*settings.lanes, *chunked}
        else:
            assert isinstance(settings, TuneSettings)
            assert {(g.draft_tokens, b) for g in settings.groups() for b in settings.batch_sizes} == set(grid)
            assert {str(group) for group in settings.groups()} == {
                f"{form} {mode} T={t}" for form, mode in (("recurrent", "ring"), ("recurrent", "snapshots"),
                ("chunked", "ring")) for t in benchmarks.DRAFT_TOKENS
            }  # fmt: skip
    assert lanes["verify"] == {*benchmarks.LANES, *benchmarks.OTHER_LANES}
    assert lanes["round"] == set(benchmarks.ROUND_LANES)
    assert lanes["commit"] == {"fused", "fused+ring"}


def test_the_calls_are_those_that_host_time_makes() -> None:
    problems = random_problems(
        KdaShape(1, 1, 64, 64), layers=host_time.LAYERS, batch=1, draft_tokens=1, dtype=torch.bfloat16, device="cpu",
        snapshots=True,
    )  # fmt: skip
    known = set(host_time._calls(problems)) | set(host_time._commits(problems))
    assert set(benchmarks.CALLS) <= known
    stored = json.loads((ROOT / "docs" / "host-time.json").read_text())["us_per_call"]
    assert {one["op"] for one in stored} <= known


def test_the_suites_import_without_torch() -> None:
    """asv starts a process per benchmark and parameter; torch would take most of its time."""
    modules = ", ".join(f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py"))
    code = (
        f"import sys, {modules};"
        "sys.exit(any(m.split('.')[0] in ('torch', 'triton', 'kda_tooling') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_asv_configuration() -> None:
    config = json.loads((ROOT / "asv.conf.json").read_text())
    assert (ROOT / config["benchmark_dir"] / "__init__.py").is_file()
    assert config["results_dir"] == "benchmarks/results"
    assert config["env_dir"].startswith(".asv/")
    assert config["html_dir"].startswith(".asv/")
    assert config["launch_method"] == "forkserver", "a process of its own per cell takes four times as long"


def test_measuring_into_files_goes_on_where_one_kind_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def measure(kind: str, folder: Path) -> None:
        if kind == "round":
            raise subprocess.CalledProcessError(2, ["kda"])
        (folder / f"{kind}.json").touch()

    monkeypatch.setattr(source, "measure", measure)
    with pytest.raises(SystemExit) as stopped:
        source.main([str(tmp_path / "new"), "round", "commit"])
    assert stopped.value.code == 1
    assert "not measured: round" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["commit.json"]
    monkeypatch.setattr(source, "measurable", lambda: iter(["memory"]))
    with pytest.raises(SystemExit) as done:
        source.main([str(tmp_path / "new")])
    assert done.value.code == 0
    assert (tmp_path / "new" / "memory.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"), [(["FILE"], "cannot be made"), (["new", "verifi"], "KIND must be of verify, ")]
)
def test_a_folder_or_kind_that_cannot_be_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "FILE").touch()
    with pytest.raises(SystemExit) as stopped:
        source.main([str(tmp_path / arguments[0]), *arguments[1:]])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
