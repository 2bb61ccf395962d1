"""`kda sweep` as a command: what it refuses, and that what it measures is exactly what was asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kda_backend
from kda_kernels import KdaShape
from kda_tooling.bench.results import SweepResult, load_results
from kda_tooling.bench.settings import DEFAULT_SHAPE, SweepSettings
from kda_tooling.cli import app
from kda_tooling.commands import options
from kda_tooling.commands import sweep as command

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def words(output: str) -> str:
    """The output as one line, without the frame of an error."""
    return " ".join(output.replace("│", " ").split())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, sweep_factory: Callable[..., SweepResult]) -> list[SweepSettings]:
    """Settings that reached the measurement, which is replaced: a GPU is neither asked for nor needed."""
    reached: list[SweepSettings] = []

    def measure(settings: SweepSettings) -> SweepResult:
        reached.append(settings)
        return sweep_factory(settings)

    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(command, "_measure", measure)
    return reached


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-sizes 0", "--batch-sizes must be within 1..4096; got 0"),
        ("--batch-sizes 4 -4 8", "got -4"),
        ("--batch-sizes=-1", "got -1"),
        ("--batch-sizes 4 5000", "got 5000"),
        ("--batch-sizes four", "'--batch-sizes': Input should be a valid integer"),
        ("--batch-sizes 1,4", "'--batch-sizes': Input should be a valid integer"),
        ("--batch-sizes 1.5", "'--batch-sizes': Input should be a valid integer"),
        ("--batch-sizes", "requires an argument"),
        ("--batch-sizes --hot", "--batch-sizes"),
        ("--batch-sizes=1 4", "unexpected extra argument"),
        ("--draft-tokens 0", "--draft-tokens must be within 1..64; got 0"),
        ("--draft-tokens 4 -2", "got -2"),
        ("--draft-tokens 65", "got 65"),
        ("--modes sideways", "--modes must name lanes of unfused, unfused+ring, fused, fused+ring; got sideways"),
        ("--modes fused Fused+ring", "got Fused+ring"),
        ("--modes fused,unfused", "got fused,unfused"),
        ("--heads 0", "--heads must be at least 1, got 0"),
        ("--heads -8", "--heads must be at least 1"),
        ("--heads 8 16", "unexpected extra argument"),
        ("--heads 8 --hv-heads 4", "--hv-heads must be a multiple of --heads"),
        ("--hv-heads 0", "--hv-heads must be at least 1"),
        ("--head-k-dim 96", "--head-k-dim must be one of (64, 128), got 96"),
        ("--head-v-dim 256", "--head-v-dim must be one of (64, 128), got 256"),
        ("--lower-bound 0", "--lower-bound must be finite and below 0"),
        ("--lower-bound 5", "got 5.0"),
        ("--lower-bound nan", "got nan"),
        ("--lower-bound -inf", "got -inf"),
        ("--lower-bound safe", "'safe' is neither a number nor 'none'"),
        ("--dtype fp32", "'fp32' is no activation type; allowed are bf16 and fp16"),
        ("--round --commit", "--round"),
        ("--accept 3", "give --round or --commit"),
        ("--round --accept 0", "--accept must be within 1..4"),
        ("--round --accept 5", "--accept must be within 1..4"),
        ("--commit --draft-tokens 8 2 --accept 3", "--accept must be within 1..2 (the smallest draft length)"),
        ("--sweep-bv --modes unfused", "--modes names none"),
        ("--sweep-bv --commit", "--sweep-bv varies the verify kernels"),
        ("--passes 0", "--passes must be odd"),
        ("--passes 4", "--passes must be odd"),
        ("--passes 1003", "within 3..1001"),
        ("--seed -1", "--seed must be at least 0"),
        ("--peer sglang", "--peer must be NAME=FOLDER"),
        ("--peer =TMP", "--peer must be NAME=FOLDER"),
        ("--peer sglang=TMP/missing", "of an existing folder"),
        ("--peer sgland=TMP", "peer must be one of sglang; got 'sgland'"),
        ("--peer sglang=TMP sglang=TMP", "must name each peer once"),
        ("--peer sglang=TMP", "holds no sglang/kernels folder"),
        ("--heads 1000000000", "1024"),
        ("--hv-heads 1032", "1024"),
        ("--json TMP/x.png --plot TMP/x.png", "is also the file of --json"),
        ("--json TMP/a/../x.svg --plot TMP/x.svg", "is missing"),
        ("--json TMP/missing/out.json", "the folder"),
        ("--json TMP", "is a folder"),
        ("--plot TMP/missing/out.png", "the folder"),
        ("--plot TMP/out.jpeg", "must end in .png, .svg or .pdf"),
        ("--plot TMP/out", "must end in .png, .svg or .pdf"),
        ("--batch-size 4", "No such option: --batch-size"),
        ("--nonsense", "No such option: --nonsense"),
        ("--hot=3", "does not take a value"),
        ("extra", "unexpected extra argument"),
    ],
)
def test_wrong_arguments_exit_with_2_before_anything_runs(
    arguments: str, message: str, tmp_path: Path, asked: list[SweepSettings]
) -> None:
    result = runner.invoke(app, ["sweep", *arguments.replace("TMP", str(tmp_path)).split()])
    assert result.exit_code == 2, result.output
    assert message in words(result.output)
    assert not asked
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("--batch-sizes 1 4 16", {"batch_sizes": (1, 4, 16)}),
        ("--batch-sizes 16 --hot --batch-sizes 4 1", {"batch_sizes": (1, 4, 16), "hot": True}),
        ("--batch-sizes=3", {"batch_sizes": (3,)}),
        ("--batch-sizes=3 --batch-sizes=5", {"batch_sizes": (3, 5)}),
        ("--batch-sizes 8 8 2", {"batch_sizes": (2, 8)}),
        ("--draft-tokens 8 4 --batch-sizes 2", {"draft_tokens": (4, 8), "batch_sizes": (2,)}),
        ("--modes fused+ring unfused+ring", {"lanes": ("fused+ring", "unfused+ring")}),
        ("--lanes fused+ring --modes fused", {"lanes": ("fused+ring", "fused")}),
        ("--lanes fused unfused", {"lanes": ("fused", "unfused")}),
        ("--modes fused --modes fused", {"lanes": ("fused",)}),
        ("--heads 4 --hv-heads 16 --head-k-dim 64", {"shape": KdaShape(4, 16, 64, 128)}),
        ("--heads 16", {"shape": KdaShape(16, 16, 128, 128)}),
        ("--lower-bound -2.5", {"lower_bound": -2.5}),
        ("--lower-bound=-2.5", {"lower_bound": -2.5}),
        ("--lower-bound none", {"lower_bound": None}),
        ("--lower-bound standard", {"lower_bound": None}),
        ("--dtype fp16 --no-bias", {"dtype": "fp16", "bias": False}),
        ("--round", {"kind": "round"}),
        ("--round --accept 4", {"kind": "round", "accept": 4}),
        ("--commit --accept 1", {"kind": "commit", "accept": 1}),
        ("--sweep-bv", {"sweep_configs": True}),
        ("--hot --cold", {"hot": False}),
        ("--passes 3 --seed 7", {"passes": 3, "seed": 7}),
        ("--heads 8 --heads 4", {"shape": KdaShape(4, 4, 128, 128)}),
    ],
)
def test_what_is_asked_is_what_is_measured(
    arguments: str, expected: dict[str, object], asked: list[SweepSettings]
) -> None:
    result = runner.invoke(app, ["sweep", *arguments.split()])
    assert result.exit_code == 0, result.output
    assert asked == [SweepSettings(**expected)]  # type: ignore[arg-type]


def test_the_lanes_of_the_command_are_the_backends() -> None:
    assert options.LANES == kda_backend.LANES
    assert SweepSettings().shape == DEFAULT_SHAPE


def test_results_go_where_they_were_asked_to(tmp_path: Path, asked: list[SweepSettings]) -> None:
    json, picture = tmp_path / "out.json", tmp_path / "out.PNG"
    result = runner.invoke(app, ["sweep", "--batch-sizes", "1", "4", "--json", str(json), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert [cell.batch for cell in load_results(json).cells] == [1, 4]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "verify, T = 4" in result.stdout


def test_json_on_standard_output_is_all_that_is_there(asked: list[SweepSettings], tmp_path: Path) -> None:
    result = runner.invoke(app, ["sweep", "--json", "-"])
    (tmp_path / "out.json").write_text(result.stdout)
    assert len(load_results(tmp_path / "out.json").cells) == 4
    assert "verify, T = 4" in result.stderr


@pytest.mark.parametrize("interpreted", [True, False], ids=["interpreter", "no GPU"])
def test_without_a_gpu_the_error_says_what_to_use_instead(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = runner.invoke(app, ["sweep"])
    assert result.exit_code == 2
    assert ("TRITON_INTERPRET is set" if interpreted else "needs a CUDA device") in words(result.output)
    assert "kda demo" in result.output
    assert "nox -s compile" in words(result.output)


def test_wrong_arguments_are_named_even_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--batch-sizes must be" in words(runner.invoke(app, ["sweep", "--batch-sizes", "0"]).output)


@pytest.mark.parametrize("name", ["sweep", "report", "doctor"])
def test_help_has_an_example(name: str) -> None:
    result = runner.invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert f"kda {name}" in result.output
