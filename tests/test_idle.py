"""A busy GPU is not measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import idle, store


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What an invented nvidia-smi answers to each query; a free GPU at first."""
    answers = {"gpu": "0, 0, 432", "compute-apps": ""}
    program = tmp_path / "nvidia-smi"

    def run(command: list[str], **given: object) -> subprocess.CompletedProcess[str]:
        what = command[1].removeprefix("--query-").partition("=")[0]
        asked.append(command)
        return subprocess.CompletedProcess(command, int(answers.get("code", 0)), answers[what] + "\n", "")

    asked: list[list[str]] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(idle.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(idle.subprocess, "run", run)
    monkeypatch.setattr(idle, "INTERVAL", 0.0)
    return answers


def test_a_free_gpu_is_taken(smi: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    idle.main()
    assert capsys.readouterr().out == "the GPU is free\n"


@pytest.mark.parametrize(
    ("query", "answer", "reason"),
    [
        ("compute-apps", "4711, python", "process 4711 (python) is on the GPU"),
        ("gpu", "0, 37, 432", "GPU 0 is 37 % busy"),
        ("gpu", "0, 0, 432\n1, 0, 70000", "GPU 1 has 70000 MiB in use"),
    ],
)
def test_a_busy_gpu_is_refused(
    query: str, answer: str, reason: str, smi: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    smi[query] = answer
    with pytest.raises(SystemExit) as stopped:
        idle.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.count(reason) == 1


def test_what_cannot_be_told_is_no_yes(
    smi: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smi["code"] = "9"
    with pytest.raises(SystemExit) as stopped:
        idle.main()
    assert stopped.value.code == 2
    assert "nvidia-smi failed with exit code 9" in capsys.readouterr().err
    monkeypatch.setattr(idle.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        idle.main()
    assert "no nvidia-smi" in capsys.readouterr().err


def test_fields_that_a_gpu_lacks_say_nothing(smi: dict[str, str]) -> None:
    smi["gpu"] = "0, [N/A], [N/A]"
    assert idle.reasons() == []


def test_nothing_is_measured_on_a_busy_gpu(smi: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_run(*args: object) -> None:
        raise AssertionError("something was measured")

    smi["compute-apps"] = "4711, python"
    monkeypatch.setattr(store, "measure_here", must_not_run)
    with pytest.raises(SystemExit, match="the GPU is busy: process 4711"):
        store.main(["--commit", "HEAD"])
