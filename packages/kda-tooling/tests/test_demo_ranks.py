"""`kda demo` under torchrun: two ranks share the heads, and the tokens are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kda_tooling.cli import app
from kda_tooling.commands import demo as command
from kda_tooling.commands.options import device_of_rank
from kda_tooling.demo import report as demo_report
from kda_tooling.demo import run as demo_run
from kda_tooling.ranks import VARIABLES, Ranks, connected, started_ranks

SMALL = ["--bytes", "5", "--prompts", "1", "--prompt-bytes", "48", "--draft-tokens", "3", "--json", "-"]
STARTED = dict(zip(VARIABLES, ("1", "2", "1", "localhost", "1"), strict=True))


def demo_over(ranks: int, device: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "kda_tooling", "demo", "--device", device, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def check(report: dict[str, Any], lanes: list[str]) -> None:
    assert report["ranks"] == 2
    assert report["identical"] == dict.fromkeys(lanes, True)
    assert report["state_identical"] == dict.fromkeys(lanes, True)
    for run in report["lanes"].values():
        assert run["faults"] is None
        assert run["rounds"] < report["plain"]["rounds"], "nothing was drafted and accepted: this shows little"


def test_two_ranks_decode_what_one_process_does(device: str) -> None:
    if device == "cuda":
        pytest.skip("here kernels are compiled; the test below is for GPUs")
    lanes = ["fused+ring", "unfused"]
    done = demo_over(2, "cpu", *SMALL, "--lanes", ",".join(lanes))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one document: rank 1 prints nothing
    check(report, lanes)
    alone = CliRunner().invoke(app, ["demo", "--device", "cpu", *SMALL, "--lanes", lanes[0], "--processes", "1"])
    assert alone.exit_code == 0, alone.output
    single = json.loads(alone.stdout)
    assert single["ranks"] == 1
    assert [p["continuation"] for p in report["prompts"]] == [p["continuation"] for p in single["prompts"]]
    # A rank's pool holds one of the two heads.
    assert 2 * report["lanes"][lanes[0]]["scratch_bytes"] == single["lanes"][lanes[0]]["scratch_bytes"]


@pytest.mark.gpu
def test_two_gpus_decode_what_one_does() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    lanes = ["fused+ring", "unfused+ring", "fused", "unfused"]
    arguments = ["--json", "-", "--bytes", "48", "--lanes", ",".join(lanes)]
    done = demo_over(2, "cuda", *arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check(report, lanes)
    alone = CliRunner().invoke(app, ["demo", "--device", "cuda", *arguments])
    assert alone.exit_code == 0, alone.output
    continuations = [[p["continuation"] for p in r["prompts"]] for r in (report, json.loads(alone.stdout))]
    assert continuations[0] == continuations[1]


@pytest.fixture
def interpreted(device: str) -> None:
    """Triton decides when it is first imported: a process that compiles cannot be asked for the CPU."""
    if device == "cuda":
        pytest.skip("kernels are compiled in this process; --device cpu is not to be had")


def refusal(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *arguments: str) -> tuple[int, str]:
    for name, value in (STARTED | variables).items():
        monkeypatch.setenv(name, value)
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["demo", "--device", "cpu", *arguments])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.usefixtures("interpreted")
def test_a_world_that_does_not_divide_the_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = refusal(monkeypatch, {"WORLD_SIZE": "3", "RANK": "0"}, *SMALL)
    assert code == 2
    assert "2 value heads cannot be split evenly over 3 ranks; allowed world sizes are [1, 2]." in output
    assert refusal(monkeypatch, {"WORLD_SIZE": "3", "RANK": "1"}, *SMALL) == (2, ""), "one rank says it"


@pytest.mark.usefixtures("interpreted")
def test_one_rank_writes_the_report_and_only_it_needs_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "connected", lambda ranks, device: nullcontext())
    monkeypatch.setattr(demo_report, "run_with_progress", lambda *_: {"ranks": 2})
    monkeypatch.setattr(demo_report, "show", lambda report, console: console.print("shown"))
    monkeypatch.setattr(demo_run, "passed", lambda report: True)
    path = tmp_path / "report.json"
    assert refusal(monkeypatch, {"RANK": "1"}, "--json", str(path)) == (0, "")
    assert refusal(monkeypatch, {"RANK": "1"}, "--json", str(tmp_path / "missing" / "report.json")) == (0, "")
    assert refusal(monkeypatch, {"RANK": "1"}, "--json", "-") == (0, "")
    assert not list(tmp_path.iterdir())
    code, output = refusal(monkeypatch, {"RANK": "0"}, "--json", str(tmp_path / "missing" / "report.json"))
    assert code == 2
    assert "missing is missing" in output
    assert refusal(monkeypatch, {"RANK": "0"}, "--json", str(path)) == (0, "shown")
    assert json.loads(path.read_text()) == {"ranks": 2}


def test_what_torchrun_sets_must_be_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = refusal(monkeypatch, {"RANK": "first"}, *SMALL)
    assert code == 2
    assert "RANK must be a whole number, got 'first'" in output


def test_processes_and_ranks_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = refusal(monkeypatch, {}, *SMALL, "--processes", "2")
    assert code == 2
    assert "under torchrun every rank is one process" in output


def test_ranks_are_read_from_what_torchrun_sets() -> None:
    assert started_ranks(STARTED) == Ranks(1, 2, 1)
    assert not Ranks(1, 2, 1).reports
    assert started_ranks({name: value for name, value in STARTED.items() if name != "MASTER_ADDR"}) is None
    assert started_ranks(STARTED | {"WORLD_SIZE": "1", "RANK": "0"}) is None
    with pytest.raises(ValueError, match="RANK must be below WORLD_SIZE=2, got 2"):
        started_ranks(STARTED | {"RANK": "2"})
    with connected(None, "cpu"):
        assert not torch.distributed.is_initialized()


def test_each_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of_rank("cuda", Ranks(5, 8, 1)) == "cuda:1"
    assert device_of_rank("cuda:3", None) == "cuda:3"
    assert device_of_rank("cpu", Ranks(1, 2, 1)) == "cpu"
    with pytest.raises(typer.BadParameter, match="every rank has a GPU of its own"):
        device_of_rank("cuda:0", Ranks(1, 2, 1))
    with pytest.raises(typer.BadParameter, match="rank 2 wants cuda:2, but torch sees 2 GPUs"):
        device_of_rank("cuda", Ranks(2, 3, 2))
