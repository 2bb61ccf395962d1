"""Replayed calls on a GPU: the bits of ordinary ones, on the stream and device of the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from kda_kernels import (
    LaunchConfig,
    Snapshots,
    _commit_call,
    _replay,
    fold,
    new_error_counts,
    scatter_conv,
    scatter_snapshots,
    verify,
    verify_fused,
    verify_unfused,
)
from tests.support.bits import as_bits
from tests.support.cases import Case, make_problem
from tests.support.commits import with_layers

pytestmark = pytest.mark.gpu

CASE = Case(B=3, T=4, H=2, HV=4, K=128, padded=(1,))
CONFIGS = {
    "default": None,
    "portable": LaunchConfig(),
    "gluon": LaunchConfig(block_v=32, num_warps=4, rows_per_thread=2),
}
WRITTEN = ("conv_window", "snapshots", "raw_v", "raw_k", "g", "beta", "out")


@contextmanager
def only_replays() -> Iterator[None]:
    """Fail where a call is launched in the ordinary way."""
    forbidden = AssertionError("not replayed")
    with (
        mock.patch.object(verify, "launch", side_effect=forbidden),
        mock.patch.object(_commit_call, "launch", side_effect=forbidden),
    ):
        yield


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    _replay.forget()


class Calls:
    """Verifies on the groups of one problem, so that they are the same objects in every call."""

    def __init__(self, mode: str, **options: Any) -> None:
        self.problem = make_problem(CASE, "cuda")
        positional, self.keywords = self.problem.arguments(mode, errors=new_error_counts("cuda"), **options)
        self.inputs = dict(zip(("mixed_qkv", "a", "b"), positional, strict=True))

    def run(self, op: Callable[..., torch.Tensor], **changes: Any) -> dict[str, torch.Tensor]:
        """Call ``op`` on poisoned buffers: everything that it wrote, and the output."""
        for name in WRITTEN:
            as_bits(self.problem[name]).fill_(-1)
        out = op(**self.inputs | self.keywords | changes)
        return {name: self.problem.whole(name).clone() for name in WRITTEN} | {"result": out.clone()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        assert torch.equal(as_bits(tensor), as_bits(other[name])), name


@pytest.mark.parametrize("op", [verify_fused, verify_unfused])
@pytest.mark.parametrize("mode", ["ring", "snapshots"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("out", ["given", "allocated"])
def test_a_replayed_verify_has_the_bits_of_an_ordinary_one(
    op: Callable[..., torch.Tensor], mode: str, config: str, out: str
) -> None:
    calls = Calls(mode, config=CONFIGS[config])
    if out == "allocated":
        calls.keywords["out"] = None
    other = {name: torch.roll(tensor, CASE.T, 0) for name, tensor in calls.inputs.items()}
    changes = other | {"slots": torch.roll(calls.keywords["slots"], 1)}
    first = calls.run(op)
    with only_replays():
        again = calls.run(op)
        replayed = calls.run(op, **changes)
    same(first, again)
    _replay.forget()
    ordinary = calls.run(op, **changes)
    same(replayed, ordinary)
    assert not torch.equal(as_bits(first["result"]), as_bits(ordinary["result"]))


@pytest.mark.parametrize("op", [verify_fused, verify_unfused])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b"])
def test_a_misaligned_view_after_an_aligned_one(op: Callable[..., torch.Tensor], config: str, name: str) -> None:
    calls = Calls("ring", config=CONFIGS[config])
    aligned = calls.inputs[name]
    whole = torch.empty(aligned.numel() + 1, dtype=aligned.dtype, device="cuda")
    misaligned = whole[1:].view(aligned.shape).copy_(aligned)
    assert misaligned.data_ptr() % 16
    expected = calls.run(op)
    for _ in range(2):
        same(calls.run(op, **{name: misaligned}), expected)
        same(calls.run(op), expected)


@pytest.mark.parametrize("kind", ["starts", "parents"])
def test_a_replayed_ragged_batch_or_tree_has_the_bits_of_an_ordinary_one(kind: str) -> None:
    calls = Calls("snapshots")
    given = {
        "starts": ([0, 4, 6, 9], [0, 1, 5, 8]),
        "parents": ([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 0, 0]], [[-1, 0, 1, 1], [-1, 0, 0, 2], [-1, -1, 0, 1]]),
    }[kind]
    one, other = ({kind: torch.tensor(values, dtype=torch.int32, device="cuda")} for values in given)
    first = calls.run(verify_unfused, **one)
    with only_replays():
        same(calls.run(verify_unfused, **one), first)
        replayed = calls.run(verify_unfused, **other)
    _replay.forget()
    ordinary = calls.run(verify_unfused, **other)
    same(replayed, ordinary)
    assert not torch.equal(as_bits(first["result"]), as_bits(ordinary["result"]))


@pytest.mark.parametrize("config", CONFIGS)
def test_replayed_commits_have_the_bits_of_ordinary_ones(config: str) -> None:
    problem = make_problem(CASE, "cuda")
    for mode in ("ring", "snapshots"):
        positional, keywords = problem.arguments(mode)
        verify_fused(*positional, **keywords)
    ssm_state, conv_state, window = (problem[name][None] for name in ("ssm_state", "conv_state", "conv_window"))
    ring, snapshots, chosen = with_layers(problem.ring), Snapshots(problem["snapshots"][None]), CONFIGS[config]
    ops: list[Callable[..., None]] = [
        lambda **rows: fold(ssm_state, ring, shape=problem.shape, config=chosen, **rows),
        lambda **rows: scatter_conv(conv_state, window, **rows),
        lambda **rows: scatter_snapshots(ssm_state, snapshots, **rows),
    ]
    before = [problem.whole(name).clone() for name in ("ssm_state", "conv_state")]

    def outcome(op: Callable[..., None], accept: int) -> list[torch.Tensor]:
        for name, old in zip(("ssm_state", "conv_state"), before, strict=True):
            problem.whole(name).copy_(old)
        op(
            slots=problem.slots.clone(), accept_lens=torch.full_like(problem.slots, accept), draft_tokens=CASE.T,
            errors=new_error_counts("cuda"),
        )  # fmt: skip
        return [problem.whole(name).clone() for name in ("ssm_state", "conv_state")]

    for op in ops:
        outcome(op, 1)
        with only_replays():
            replayed = outcome(op, 3)
        _replay.forget()
        ordinary = outcome(op, 3)
        assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(replayed, ordinary, strict=True))
        assert any(not torch.equal(as_bits(a), as_bits(b)) for a, b in zip(before, ordinary, strict=True))


@pytest.mark.parametrize("op", [verify_fused, verify_unfused])
def test_a_replay_is_on_the_current_stream(op: Callable[..., torch.Tensor]) -> None:
    calls = Calls("ring")
    workspace = torch.empty_like(calls.inputs["mixed_qkv"])
    expected = calls.run(op, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with only_replays(), torch.cuda.graph(graph):  # captures one stream's launches
        op(**calls.inputs | calls.keywords, workspace=workspace)
    as_bits(calls.problem["out"]).fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(as_bits(calls.problem["out"]), as_bits(expected["result"]))


@pytest.mark.parametrize("op", [verify_fused, verify_unfused])
def test_a_replay_is_on_the_device_of_its_tensors(op: Callable[..., torch.Tensor]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = []
    for current, device in ((0, "cuda:0"), (1, "cuda:1")):
        with torch.cuda.device(current):
            problem = make_problem(CASE, device)
            positional, keywords = problem.arguments("ring")
            expected = op(*positional, **keywords).clone()
        with only_replays(), torch.cuda.device(1 - current):
            as_bits(problem["out"]).fill_(-1)
            op(*positional, **keywords)
            assert torch.cuda.current_device() == 1 - current
        torch.cuda.synchronize(device)
        assert torch.equal(as_bits(problem["out"]), as_bits(expected))
        results.append(expected.cpu())
    assert torch.equal(as_bits(results[0]), as_bits(results[1]))
