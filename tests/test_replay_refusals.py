"""A bad call is refused after a good one just as before it, whatever argument is the bad one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels import KdaShape, LaunchConfig, _torch_fast, verify_fused, verify_unfused
from tests.support.marks import interpreter_only
from tests.support.replays import CONFIG, Layer, Recorded, recorded_launches, taken

pytestmark = interpreter_only

OPS = [verify_fused, verify_unfused]


@pytest.fixture(params=["torch's guards", "no guards"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    if request.param == "no guards":
        monkeypatch.setattr(_torch_fast, "GUARDS", None)
    with recorded_launches() as launches:
        yield launches


def overlapping(call: dict[str, Any], name: str, other: torch.Tensor) -> torch.Tensor:
    """``call[name]``, moved to the memory of ``other``."""
    like = call[name]
    return other.view(-1).view(torch.bfloat16)[: like.numel()].view(like.shape)


BAD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mixed_qkv has too few rows": lambda c: {"mixed_qkv": c["mixed_qkv"][:-1]},
    "mixed_qkv has other columns": lambda c: {"mixed_qkv": c["mixed_qkv"].view(12, -1)},
    "mixed_qkv has a gap between elements": lambda c: {"mixed_qkv": torch.randn(6, 512).bfloat16()[:, ::2]},
    "mixed_qkv is fp16": lambda c: {"mixed_qkv": c["mixed_qkv"].half()},
    "mixed_qkv is fp32": lambda c: {"mixed_qkv": c["mixed_qkv"].float()},
    "mixed_qkv is on another device": lambda c: {"mixed_qkv": c["mixed_qkv"].to("meta")},
    "mixed_qkv is no tensor": lambda c: {"mixed_qkv": c["mixed_qkv"].tolist()},
    "mixed_qkv is None": lambda c: {"mixed_qkv": None},
    "mixed_qkv is an array": lambda c: {"mixed_qkv": c["mixed_qkv"].float().numpy()},
    "a is longer": lambda c: {"a": torch.randn(7, 128).bfloat16()},
    "a is fp16": lambda c: {"a": c["a"].half()},
    "a has a gap between elements": lambda c: {"a": torch.randn(6, 256).bfloat16()[:, ::2]},
    "a is on another device": lambda c: {"a": c["a"].to("meta")},
    "a is mixed_qkv's memory": lambda c: {"a": overlapping(c, "a", c["mixed_qkv"])},
    "b is narrower": lambda c: {"b": c["b"][:, :1]},
    "b is fp32": lambda c: {"b": c["b"].float()},
    "b is a's memory": lambda c: {"b": overlapping(c, "b", c["a"])},
    "b is the ring's memory": lambda c: {"b": overlapping(c, "b", c["record"].raw_v)},
    "slots are int16": lambda c: {"slots": c["slots"].short()},
    "slots are 2-D": lambda c: {"slots": c["slots"][None]},
    "slots are fewer": lambda c: {"slots": c["slots"][:1]},
    "slots have a gap": lambda c: {"slots": torch.arange(4, dtype=torch.int32)[::2]},
    "slots are on another device": lambda c: {"slots": c["slots"].to("meta")},
    "slots are a list": lambda c: {"slots": [0, 1]},
    "rows are fewer": lambda c: {"rows": c["rows"][:1]},
    "rows are floats": lambda c: {"rows": c["rows"].float()},
    "rows are a list": lambda c: {"rows": [0, 1]},
    "errors are too few": lambda c: {"errors": c["errors"][:1]},
    "errors are int64": lambda c: {"errors": c["errors"].long()},
    "errors are on another device": lambda c: {"errors": c["errors"].to("meta")},
    "out is 2-D": lambda c: {"out": c["out"].view(6, 128)},
    "out is fp32": lambda c: {"out": c["out"].float()},
    "out is not packed": lambda c: {"out": torch.empty(6, 2, 128).bfloat16()[:, :, :64]},
    "out is on another device": lambda c: {"out": c["out"].to("meta")},
    "out is mixed_qkv's memory": lambda c: {"out": overlapping(c, "out", c["mixed_qkv"])},
    "out is a's memory": lambda c: {"out": overlapping(c, "out", c["a"])},
    "out is the workspace's memory": lambda c: {"out": overlapping(c, "out", c["workspace"])},
    "out is the state's memory": lambda c: {"out": overlapping(c, "out", c["state"].ssm_state)},
    "out is the window's memory": lambda c: {"out": overlapping(c, "out", c["state"].conv_window)},
    "out is within the ring": lambda c: {"out": overlapping(c, "out", c["record"].g.view(-1)[8:])},
    "workspace is mixed_qkv": lambda c: {"workspace": c["mixed_qkv"]},
    "workspace is conv_state's memory": lambda c: {"workspace": overlapping(c, "workspace", c["state"].conv_state)},
    "workspace has too few rows": lambda c: {"workspace": c["workspace"][:-1]},
    "workspace is fp16": lambda c: {"workspace": c["workspace"].half()},
    "draft_tokens do not fit": lambda c: {"draft_tokens": 2},
    "draft_tokens are 0": lambda c: {"draft_tokens": 0},
    "draft_tokens are a float": lambda c: {"draft_tokens": 3.0},
    "draft_tokens are None": lambda c: {"draft_tokens": None},
    "indices_ready is an int": lambda c: {"indices_ready": 0},
    "form is unknown": lambda c: {"form": "folded"},
    "form is a list": lambda c: {"form": ["recurrent"]},
    "config is a dict": lambda c: {"config": {"block_v": 32}},
    "config is for another device": lambda c: {"config": LaunchConfig(32, 2, rows_per_thread=1)},
    "config wants what the device lacks": lambda c: {"config": replace(CONFIG, pdl=True)},
    "shape has other heads": lambda c: {"shape": KdaShape(2, 2, 64, 64)},
    "shape is a tuple": lambda c: {"shape": (1, 2, 64, 64)},
    "params are None": lambda c: {"params": None},
    "params have another class": lambda c: {"params": c["state"]},
    "params have a positive bound": lambda c: {"params": replace(c["params"], lower_bound=1.0)},
    "params have a short A_log": lambda c: {"params": replace(c["params"], A_log=c["params"].A_log[:1])},
    "state is None": lambda c: {"state": None},
    "state has another class": lambda c: {"state": c["params"]},
    "state has fewer slots": lambda c: {"state": replace(c["state"], ssm_state=c["state"].ssm_state[:-1])},
    "state has fewer steps": lambda c: {"state": replace(c["state"], conv_window=c["state"].conv_window[:, :2])},
    "record is a tensor": lambda c: {"record": c["record"].g},
    "record has other beta": lambda c: {"record": replace(c["record"], beta=c["record"].beta[:, :, :2])},
}  # fmt: skip


def verdict(op: Callable[..., torch.Tensor], call: dict[str, Any]) -> tuple[type, str]:
    with pytest.raises((ValueError, TypeError)) as refusal:
        op(**call)
    return refusal.type, str(refusal.value)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_after_a_good_one_as_before_it(
    log: list[Recorded], op: Callable[..., torch.Tensor], name: str
) -> None:
    layer = Layer()
    good = layer.full()
    bad = good | BAD[name](good)
    cold = verdict(op, bad)
    assert not taken(log)
    op(**good)
    op(**good)
    assert [one.replayed for one in taken(log)][-1]
    assert verdict(op, bad) == cold
    assert not taken(log)
    op(**good)
    assert all(one.replayed for one in taken(log)), "a refusal makes nobody forget"


def within(kept: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor like ``like``, aligned as it, that begins 16 bytes into the memory of ``kept``."""
    memory = torch.tensor([], dtype=like.dtype).set_(kept.untyped_storage())
    return memory[8 : 8 + like.numel()].view(like.shape)


@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "out", "workspace"])
@pytest.mark.parametrize("op", OPS)
def test_memory_that_verify_writes_its_inputs_to_is_refused_after_a_good_call_as_before_it(
    log: list[Recorded], op: Callable[..., torch.Tensor], name: str
) -> None:
    layer = Layer(compact=True)
    room = torch.zeros(10_000, dtype=torch.int64)
    layer.state = replace(layer.state, kept_inputs=room[1:4])
    good = layer.full()
    bad = good | {name: within(room, good[name])}
    cold = verdict(op, bad)
    assert "state.kept_inputs" in cold[1]
    op(**good)
    op(**good)
    assert [one.replayed for one in taken(log)][-1]
    assert verdict(op, bad) == cold
    assert not taken(log)


@pytest.mark.parametrize("change", ["grown", "shrunk", "retyped", "replaced"])
def test_kept_inputs_changed_in_place_are_refused(log: list[Recorded], change: str) -> None:
    refusals = []
    for warm in (False, True):
        layer = Layer(compact=True)
        call = layer.full(rows=None)
        for _ in range(2 * warm):
            verify_fused(**call)
        kept = layer.state.kept_inputs
        if change == "replaced":
            kept.set_(torch.zeros(7, dtype=torch.int64))
        elif change == "retyped":
            kept.data = kept.double()
        else:
            kept.resize_(6 if change == "grown" else 1)
        log.clear()
        refusals.append(verdict(verify_fused, call))
        assert not log
    assert refusals[0] == refusals[1]


def test_true_is_no_number_of_draft_tokens_after_one(log: list[Recorded]) -> None:
    layer = Layer()
    one = layer.call(tokens=1)
    verify_fused(**one)
    with pytest.raises(TypeError, match="draft_tokens must be a int, got bool"):
        verify_fused(**one | {"draft_tokens": True})


HELD = [
    "params.conv_weight", "params.conv_bias", "params.A_log", "params.dt_bias", "state.conv_state", "state.ssm_state",
    "state.conv_window", "record.raw_v", "record.raw_k", "record.g", "record.beta",
]  # fmt: skip


def grown(tensor: torch.Tensor) -> None:
    tensor.resize_(2 * tensor.shape[0], *[size + 16 for size in tensor.shape[1:]])


def shrunk(tensor: torch.Tensor) -> None:
    tensor.resize_(1, *tensor.shape[1:])


def retyped(tensor: torch.Tensor) -> None:
    tensor.data = tensor.double()


def replaced(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros(7, dtype=tensor.dtype))


@pytest.mark.parametrize("member", HELD)
@pytest.mark.parametrize("change", [grown, shrunk, retyped, replaced])
def test_a_group_s_tensor_changed_in_place_is_refused(
    log: list[Recorded], member: str, change: Callable[[torch.Tensor], None]
) -> None:
    refusals = []
    for warm in (False, True):
        layer = Layer()
        call = layer.full(rows=None)
        if warm:
            verify_fused(**call)
            verify_fused(**call)
        group, _, name = member.partition(".")
        change(getattr(getattr(layer, group), name))
        log.clear()
        refusals.append(verdict(verify_fused, call))
        assert not log
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize("member", HELD)
def test_a_group_s_tensor_laid_out_anew_in_its_memory_is_refused(member: str) -> None:
    """By torch's guards alone: neither address nor number of elements change."""
    with recorded_launches() as log:
        layer = Layer()
        call = layer.full(rows=None)
        verify_fused(**call)
        verify_fused(**call)
        group, _, name = member.partition(".")
        tensor = getattr(getattr(layer, group), name)
        tensor.resize_(1, *tensor.shape)
        log.clear()
        with pytest.raises(ValueError, match=name):
            verify_fused(**call)
        assert not log
