"""`kda tune`: what the command refuses, compares with another table and prints. Times are made up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kda_backend.gate import write_table
from kda_kernels import KdaShape
from kda_tooling.bench.settings import DEFAULT_SHAPE
from kda_tooling.cli import app
from kda_tooling.commands import tune as command_module
from kda_tooling.tuning import capturing, run
from kda_tooling.tuning.settings import DEFAULT_BATCH_SIZES, TuneSettings, usual_batch_sizes
from tests.support.tables import H200_MULTIPROCESSORS
from tests.support.tuning import (
    MACHINE,
    SMALL,
    SMALL_COMMAND,
    usual,
)

pytestmark = pytest.mark.usefixtures("h200_multiprocessors")


@pytest.mark.parametrize("command", [["tune"], ["gate", "regret"], ["gate", "explain"]], ids=" ".join)
def test_a_terminal_of_80_columns_cuts_no_word_of_the_help(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "…" not in result.output


def test_changes_are_of_verdicts_and_of_what_was_measured(tuned: Callable[..., Any]) -> None:
    before = tuned(usual).table
    after = tuned(lambda name, number: usual(name, number) + (9 if "kda fused" in name and number in (2, 7) else 0))
    assert run.changes(after, before) == [
        "safe gate, recurrent, ring, plain, T=2, B=1: unfused+ring, the table says fused+ring"
    ]
    missing = dataclasses.replace(before, cells=before.cells[:2])
    assert run.changes(after, missing)[1:] == [
        "safe gate, recurrent, ring, plain, T=2, B=3: fused+ring, not in the table"
    ]


def test_a_table_says_how_to_make_it_again_and_not_where_it_lay(tuned: Callable[..., Any]) -> None:
    seen: list[TuneSettings] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_module, "require_gpu", lambda *_: None)
        patch.setattr(command_module, "_measure", lambda settings, *_: (seen.append(settings), 1 / 0))
        CliRunner().invoke(app, ["tune"])
        CliRunner().invoke(app, ["tune", "--batch-sizes", *map(str, DEFAULT_BATCH_SIZES)])
    fitting = dataclasses.replace(TuneSettings(), batch_sizes=usual_batch_sizes(DEFAULT_SHAPE, H200_MULTIPROCESSORS))
    assert seen == [fitting, TuneSettings()], "the command's defaults are the settings', and the sizes the GPU's"
    assert " 30 32 33 40 " in fitting.command
    assert TuneSettings().command == "kda tune --batch-sizes " + " ".join(map(str, DEFAULT_BATCH_SIZES))
    command = tuned(usual, dataclasses.replace(SMALL, gates=("standard",), margin=0.05)).table.provenance.command
    assert command == (
        "kda tune --heads 1 --hv-heads 2 --head-k-dim 64 --head-v-dim 64 --draft-tokens 2 --batch-sizes 1 2 3 "
        "--form recurrent --mode ring --gate standard --margin 0.05 --finalists 2"
    )
    again = CliRunner().invoke(app, command.split()[1:], env={"COLUMNS": "250"})
    assert "no such option" not in again.output.lower()
    assert "tuning" in again.output, "only the GPU is missing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3", "--hv-heads", "4"], "--hv-heads"),
        (["--form", "quick"], "--form must name some of recurrent, chunked; got quick"),
        (["--mode", "rings"], "--mode must name some of"),
        (["--option", "fold"], "--option must name some of plain"),
        (["--gate", "open"], "--gate must name some of safe, standard"),
        (["--form", "chunked", "--mode", "snapshots"], "leave nothing to measure"),
        (["--margin", "0.5"], "--margin must be a share"),
        (["--passes", "1"], "--passes must be within 2.."),
        (["--finalists", "0"], "--finalists must be within 1.."),
        (["--seed", "-1"], "--seed must be at least 0 and below 2**63"),
        (["--seed", str((1 << 63) - 1)], "--seed must be at least 0 and below 2**63"),
        (["--batch-sizes", "0"], "--batch-sizes must be within 1.."),
        (["--draft-tokens", "65"], "--draft-tokens must be within 1.."),
        (["--dtype", "fp8"], "fp8"),
        (["--resume", "--fresh"], "give one of them"),
        (["--check", "missing.json"], "missing.json"),
    ],
)
def test_wrong_arguments_are_refused_by_name_before_anything_runs(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "250"})
    assert result.exit_code == 2
    assert message in result.output


def test_the_command_prints_what_came_of_it(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kda_tooling.commands import tune as command

    before = tuned(usual)
    kept = tmp_path / "kept"
    kept.mkdir()
    before.path.rename(kept / before.path.name)
    slower = tuned(lambda name, number: usual(name, number) + (9 if "kda fused" in name else 0))
    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(command, "_measure", lambda *_: slower)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: MACHINE.gpu)
    arguments = [*SMALL_COMMAND, "--into", str(tmp_path), "--check", str(kept / before.path.name), "--json", "-"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
    assert result.exit_code == 1
    summary = json.loads(result.stdout)
    assert summary["lanes"] == {"unfused+ring": 3}
    assert len(summary["changes"]) == 3
    assert "cells measured: 3 (unfused+ring 3)" in result.stderr
    assert summary["configurations"] == []
    monkeypatch.setattr(command, "_measure", lambda *_: before)
    same = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
    assert same.exit_code == 0
    in_place = CliRunner().invoke(app, [*arguments[:-3], str(slower.path)], env={"COLUMNS": "250"})
    assert in_place.exit_code == 2
    assert "is in --into, where this run writes" in in_place.output


@pytest.mark.parametrize(
    ("hv", "fitting"),
    [
        (2, [33, 66, 132, 198]), (4, [33, 66, 99, 132]), (8, [33, 49, 66]), (12, [11, 22, 33, 44]), (16, [33]),
        (24, [11, 22]), (32, []), (264, []),
    ],
)  # fmt: skip
def test_the_usual_sizes_have_those_that_just_fill_the_sms(hv: int, fitting: list[int]) -> None:
    """One request more than these is another wave of programs of the whole head's, or half of its, value channels."""
    sizes = usual_batch_sizes(KdaShape(hv, hv), H200_MULTIPROCESSORS)
    assert list(sizes) == sorted({*DEFAULT_BATCH_SIZES, *fitting})
    for size in fitting:
        waves = [
            [-(-batch * hv * tiles // H200_MULTIPROCESSORS) for batch in (size, size + 1)] for tiles in (1, 2)
        ]  # fmt: skip
        assert any(here < one_more for here, one_more in waves)


def test_another_configuration_is_told_and_is_no_change(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = tuned(usual)
    after = tuned(lambda name, number: usual(name, number) - 2 * ("kda fused+ring bv64" in name), fresh=True)
    assert run.changes(after, before.table) == []
    assert run.other_configs(after, before.table) == [
        f"safe gate, recurrent, ring, plain, T=2, B={b}, fused+ring: bv64.w4, the table says bv32.w1" for b in (1, 2, 3)
    ]
    kept = tmp_path / "kept"
    kept.mkdir()
    path = write_table(before.table, kept)
    monkeypatch.setattr(command_module, "require_gpu", lambda *_: None)
    monkeypatch.setattr(command_module, "_measure", lambda *_: after)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: MACHINE.gpu)
    arguments = [*SMALL_COMMAND, "--into", str(tmp_path), "--check", str(path), "--json", "-"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["configurations"]) == 3
    assert "other configuration: safe gate" in result.stderr


def test_a_resumed_run_is_compared_whole(tuned: Callable[..., Any]) -> None:
    fast = tuned(usual).table
    slow = tuned(lambda name, number: usual(name, number) + 9 * ("kda fused" in name), fresh=True)
    resumed = tuned(usual, resume=True)
    assert resumed.measured == []
    assert run.changes(resumed, fast) == run.changes(slow, fast)
    assert len(run.changes(resumed, fast)) == 3


def test_a_table_of_something_else_is_not_compared_with(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = tuned(usual)
    kept = tmp_path / "kept"
    kept.mkdir()
    for changed, before_the_gpu in (
        ({"shape": KdaShape(2, 2, 64, 64)}, True), ({"dtype": "float16"}, True), ({"device_name": "Other"}, False),
    ):  # fmt: skip
        other = dataclasses.replace(result.table, **changed)
        with pytest.raises(ValueError, match=r"the table is H=.*this run is about H=1,HV=2"):
            run.changes(result, other)
        arguments = [*SMALL_COMMAND, "--into", str(tmp_path), "--check", str(write_table(other, kept))]
        with monkeypatch.context() as patch:
            if not before_the_gpu:
                patch.setattr(command_module, "require_gpu", lambda *_: None)
                patch.setattr("torch.cuda.get_device_name", lambda: MACHINE.gpu)
            refused = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
        assert refused.exit_code == 2
        assert "this run is about H=1,HV=2" in refused.output


@pytest.mark.parametrize(
    "error",
    [capturing.ContextLostError("the GPU is\nunusable"), BrokenProcessPool("died"), OSError(28, "disk full")],
    ids=repr,
)
def test_a_run_that_ends_early_exits_with_2_and_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_tune(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(command_module, "require_gpu", lambda *_: None)
    monkeypatch.setattr(run, "run_tune", run_tune)
    result = CliRunner().invoke(app, [*SMALL_COMMAND, "--into", str(tmp_path / "new")], env={"COLUMNS": "250"})
    assert result.exit_code == 2
    assert f"tuning ended early, {type(error).__name__}: {' '.join(str(error).split())}" in result.output
    assert "Traceback" not in result.output
