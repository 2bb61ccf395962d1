"""`kda compile-report`: a budget that cannot be used is refused before anything is compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton
from typer.testing import CliRunner

from kda_tooling.cli import app
from kda_tooling.compiling import report as report_module

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
SMALL = ["compile-report", "--target", "sm90", "--kernel", "fold"]


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command says, without frame; it must exit with 2 and compile nothing."""

    def must_not_run(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(report_module, "compile_all", must_not_run)
    result = runner.invoke(app, [*SMALL, *arguments])
    assert result.exit_code == 2, (result.output, result.exception)
    return " ".join(result.output.replace("│", " ").split())


def budget_text(limits: object) -> bytes:
    return json.dumps({"triton": triton.__version__, "limits": limits}).encode()


@pytest.mark.parametrize("flag", ["--check", "--write-budget"])
@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"5", b"{}", b"[" * 100_000, budget_text([]), budget_text({"sm90": 5}),
        budget_text({"sm90": {"fold": ["x"]}}), budget_text({"sm90": {"fold": {"K128-T4": None}}}),
        budget_text({"sm90": {"fold": {"K128-T4": {"spills": "0"}}}}),
        budget_text({"sm90": {"fold": {"K128-T4": {"spills": True}}}}),
    ],
    ids=lambda content: content[:80].decode(errors="replace"),
)  # fmt: skip
def test_a_malformed_budget(flag: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = tmp_path / "budget.json"
    budget.write_bytes(content)
    assert "cannot be read" in refused([flag, "--budget", str(budget)], monkeypatch)
    assert budget.read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "--budget", "DIR"], "'--budget'"),
        (["--write-budget", "--budget", "DIR"], "is a folder"),
        (["--write-budget", "--budget", "DIR/file/budget.json"], "is not a folder"),
        (["--write-budget", "--budget", "DIR/x.json", "--json", "DIR/x.json"], "is also the file of --budget"),
        (["--new", "--budget", "DIR/x.json", "--json", "DIR/x.json"], "is also the file of --budget"),
        (["--json", "DIR/missing/x.json"], "is missing"),
    ],
)
def test_files_that_cannot_be_used(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert message in refused([argument.replace("DIR", str(tmp_path)) for argument in arguments], monkeypatch)
