"""`kda host-time`: what is timed, that both ways of launching are, and what happens without a GPU."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kda_kernels import KdaShape, _launch
from kda_kernels.interpreter import is_interpreted
from kda_tooling.bench import host_time as module
from kda_tooling.bench.host_time import HostTime, measure, processor
from kda_tooling.cli import app
from kda_tooling.commands import host_time as command

runner = CliRunner()


def words(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


@pytest.mark.skipif(not is_interpreted(), reason="measures on CPU tensors, whose kernels are compiled here")
def test_every_op_is_timed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, seen = _launch.LAUNCHER, []

    def watched(kernel: Any, *launch: Any) -> Any:
        seen.append(kernel.__name__)
        return launcher(kernel, *launch)

    monkeypatch.setattr(module, "LAYERS", 2)
    monkeypatch.setattr(module, "BURST", 1)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(_launch, "LAUNCHER", watched)
    times = measure(KdaShape(1, 1, 64, 64), batch=1, draft_tokens=1, calls=1, device="cpu")
    assert _launch.LAUNCHER is watched
    assert set(seen) == {"verify_kernel", "conv_kernel", "fold_kernel", "scatter_kernel"}
    assert [one.op for one in times][:2] == ["verify_fused, ring", "verify_fused, snapshots"]
    decisions = [one.op for one in times if "gate decision" in one.op]
    assert decisions == ["(a remembered gate decision)", "(a remembered gate decision, record given)"]
    assert [one.op for one in times][-3:] == [
        "pool, unfused+ring: begin, 2 x verify, commit", "pool, ring: commit of 2 layers",
        "pool, snapshots: commit of 2 layers",
    ]  # fmt: skip
    assert all(one.checked > 0 and one.replayed > 0 for one in times)
    assert processor()


@pytest.mark.parametrize("with_before", [False, True])
def test_what_a_call_needs_before_it_is_not_timed(with_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0], []

    def work(name: str, microseconds: int) -> None:
        order.append(name)
        clock[0] += 1000 * microseconds

    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: clock[0])
    before = partial(work, "before", 100) if with_before else None
    took = module._time([partial(work, "one", 3), partial(work, "other", 5)], 2 * module.BURST, before)
    monkeypatch.undo()
    assert took == 4
    assert [name for name in order if name != "before"] == ["one", "other"] * module.BURST
    if with_before:
        assert order[::2] == ["before"] * (2 * module.BURST)


@pytest.mark.parametrize("interpreted", [True, False], ids=["interpreter", "no GPU"])
def test_without_a_gpu_it_says_why_not(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = runner.invoke(app, ["host-time"])
    assert result.exit_code == 2
    assert ("unset it" if interpreted else "torch sees none here") in words(result.output)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--calls", "0"], "greater than or equal to 1"),
    (["--calls", "1000001"], "less than or equal to 1000000"),
    (["--batch-size", "4097"], "less than or equal to 4096"),
    (["--draft-tokens", "65"], "less than or equal to 64"),
    (["--heads", "1025"], "less than or equal to 1024"),
    (["--heads", "3", "--hv-heads", "4"], "--hv-heads must be a multiple of --heads"),
    (["--json", "/no/such/folder/x.json"], "folder /no/such/folder is missing"),
])  # fmt: skip
def test_wrong_arguments_exit_with_2(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # arguments are looked at first
    result = runner.invoke(app, ["host-time", *arguments])
    assert result.exit_code == 2
    assert message in words(result.output)


def test_what_the_gpu_cannot_hold_names_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*given: object, **sizes: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(module, "measure", measured)
    result = runner.invoke(app, ["host-time", "--batch-size", "4096"])
    assert result.exit_code == 2
    assert "--batch-size 4096, --draft-tokens 4 and --heads 8 do not fit this GPU" in words(result.output)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["file", "-"])
def test_replayed_calls_cost_the_host_less(where: str, tmp_path: Path) -> None:
    path = tmp_path / "host-time.json"
    arguments = ["host-time", "--calls", "200", "--json", str(path) if where == "file" else "-"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout if where == "-" else path.read_text())
    times = [HostTime(**one) for one in data["us_per_call"]]
    assert all(one.replayed < one.checked for one in times if not one.op.startswith("("))
