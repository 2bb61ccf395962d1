"""Where a command's data goes, and which files are refused before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kda_tooling.cli import app
from kda_tooling.commands.outputs import check_outputs, console_for, ended_early, write_json, write_output


def test_a_file_that_is_only_read_need_not_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, report = tmp_path / "table.json", tmp_path / "report.json"
    table.write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != table)
    check_outputs({"--json": report}, {"TABLE": table})
    with pytest.raises(typer.BadParameter, match=r"table\.json cannot be written"):
        check_outputs({"--json": table})


def test_two_uses_of_one_file_or_of_standard_output_are_refused(tmp_path: Path) -> None:
    one, dash = tmp_path / "one.json", Path("-")
    with pytest.raises(typer.BadParameter, match="also the file of TABLE"):
        check_outputs({"--json": one}, {"TABLE": one})
    with pytest.raises(typer.BadParameter, match="also the file of --json"):
        check_outputs({"--json": one, "--plot": tmp_path / "." / "one.json"})
    with pytest.raises(typer.BadParameter, match="standard output"):
        check_outputs({"--json": dash, "--markdown": dash})
    check_outputs({"--json": dash, "--markdown": one, "--plot": None})


def test_data_goes_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.json"
    write_json(path, {"us": 1.5})
    assert path.read_text() == '{\n "us": 1.5\n}\n'
    write_output(Path("-"), "text\n")
    write_output(None, "nothing")
    assert capsys.readouterr().out == "text\n"
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"us": float("nan")})
    assert path.read_text() == '{\n "us": 1.5\n}\n'


def test_people_read_on_standard_error_beside_data() -> None:
    assert console_for(None, Path("-")).stderr
    assert not console_for(None, Path("a.json")).stderr
    assert console_for().width >= 200


def test_a_file_called_like_an_option_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--json --plot a.png`` gives ``--json`` the file ``--plot``."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.BadParameter, match=r"--plot looks like an option; give \./--plot"):
        check_outputs({"--json": Path("--plot")})
    check_outputs({"--json": Path("-"), "--plot": tmp_path / "--plot"})


@pytest.mark.parametrize("error", [RuntimeError("out of\nmemory"), OSError(28, "No space left on device")])
def test_what_ends_early_is_refused_in_one_line(error: Exception) -> None:
    said = f"measuring ended early, {type(error).__name__}: "
    with pytest.raises(typer.BadParameter, match=said) as refusal, ended_early("measuring"):
        raise error
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("error", [typer.Exit(1), typer.Abort(), ValueError("wrong"), typer.BadParameter("wrong")])
def test_verdicts_and_refusals_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, ended_early("measuring"):
        raise error
    assert raised.value is error


def test_a_refusal_holds_no_control_characters() -> None:
    said = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", "--json", "/no \x1b[2J such/folder.json"])
    assert said.exit_code == 2
    assert "/no \N{REPLACEMENT CHARACTER}[2J such is missing" in said.output
    assert "\x1b[2J" not in said.output


def test_help_wraps_at_the_terminal_s_width_alone() -> None:
    said = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["gate", "rejudge", "--help"]).output
    assert "the others are listed. All runs of a table are taken together, a cell of several once, by the worst" in said


@pytest.mark.parametrize("arguments", [[], ["--json", "-"]])
def test_a_reader_who_leaves_is_no_verdict(arguments: list[str]) -> None:
    """Exit code 2, not 1, where what is printed is cut off (``| head -1``)."""
    command = [sys.executable, "-m", "kda_tooling", "gate", "show", "--device-name", "NVIDIA H200", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
        running.wait()
    assert running.returncode == 2


needs_full_disk = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="/dev/full, a disk without space, is Linux's"
)


@needs_full_disk
def test_a_full_disk_is_refused_by_name() -> None:
    with pytest.raises(typer.BadParameter, match="/dev/full cannot be written: No space left"):
        write_json(Path("/dev/full"), {"a": 1})


@needs_full_disk
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["gate", "show", "--device-name", "NVIDIA H200"]])
def test_standard_output_on_a_full_disk_ends_in_one_line(arguments: list[str]) -> None:
    """Exit code 2: of some commands 1 is a verdict."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kda_tooling", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    said = "output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)
