"""Malformed arguments of any kind: an op refuses by name and touches nothing, or is right."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install hypothesis (dependency group `test`)"
)

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kda_kernels import (
    LaunchConfig,
    fold,
    fold_reason,
    fold_reference,
    new_error_counts,
    scatter_conv,
    scatter_conv_reference,
    verify_fused,
    verify_reason,
    verify_reference,
    verify_unfused,
)
from tests.support.bits import as_bits, assert_same_bits
from tests.support.cases import Case, make_problem
from tests.support.malformed import Arguments, broken_arguments, grouped
from tests.support.marks import interpreter_only
from tests.support.ops import RING

CASE = Case(B=2, T=2, H=1, HV=2, K=64, lower_bound=-5.0)
EXAMPLES = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

# Every argument's name in a message; one of them must be in every refusal.
NAMES = (
    "mixed_qkv", "a", "b", "shape", "conv_weight", "conv_bias", "A_log", "dt_bias", "lower_bound", "scale", "params",
    "conv_state", "ssm_state", "conv_window", "raw_v", "raw_k", "g", "beta", "states", "ring", "record", "slots",
    "rows", "draft_tokens", "errors", "out", "workspace", "config", "accept_lens", "track_slots", "track_steps", "pdl",
)  # fmt: skip
# These define sizes, dtypes or the device that others are compared with, so that another one may be blamed.
DEFINING = ("mixed_qkv", "shape", "slots", "draft_tokens", "ssm_state", "state.ssm_state", "conv_state", "ring.beta",
            "ring.raw_v", "params.conv_weight", "conv_window")  # fmt: skip


def tensors(arguments: Arguments) -> dict[str, torch.Tensor]:
    return {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.device.type == "cpu"}


def copied(arguments: Arguments) -> Arguments:
    """Arguments whose tensors are their own memory, strides kept."""

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return x
        storage = x.new_empty(0).set_(
            x.untyped_storage().clone(), 0, (x.untyped_storage().nbytes() // x.itemsize,), (1,)
        )
        return torch.as_strided(storage, x.size(), x.stride(), x.storage_offset())

    return Arguments({name: copy(x) for name, x in arguments.items()})


def words(message: str) -> set[str]:
    return set(re.findall(r"\w+", message))


def refused_well(error: Exception, names: tuple[str, ...], given_: Arguments, before: Arguments) -> None:
    """The message names what was broken (or something that it defines), and nothing was written."""
    found = words(str(error))
    members = {name.rpartition(".")[2] for name in names}
    if not set(names) & set(DEFINING):
        assert found & members, f"{error!r} names none of {names}"
    assert found & set(NAMES) or "device" in found, f"{error!r} names no argument"
    for name, x in tensors(given_).items():
        old = before[name]
        assert torch.equal(as_bits(x), as_bits(old)), f"{name} was written by a call that was refused"


def attempt(op: Callable[..., Any], arguments: Arguments) -> Exception | None:
    """None if the call was accepted, else the refusal; any other exception is a failure of the op."""
    try:
        op(**grouped(arguments))
    except (ValueError, TypeError) as error:
        return error
    return None


def same_values(one: Any, two: Any) -> bool:
    """Equal as numbers and in shape, whatever the dtype and strides."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.shape == two.shape and torch.equal(one.double().nan_to_num(), two.double().nan_to_num())
    return type(one) is type(two) and one == two


def right_when_accepted(
    call: Callable[..., Any], given_: Arguments, before: Arguments, base: Arguments, result: Callable[[], Arguments]
) -> None:
    """What a call that was accepted did must be what it does with packed copies of the same arguments.

    Where the broken arguments also hold the values of the unbroken call, ``result()`` (its arguments afterwards) must
    come out: this catches an accepted dtype that is misread in both.
    """
    packed = Arguments(
        {name: x.clone(memory_format=torch.contiguous_format) if name in tensors(before) else x
         for name, x in before.items()}
    )  # fmt: skip
    call(**grouped(packed))
    for name, x in tensors(given_).items():
        assert_same_bits(x, packed[name], f"{name}, beside packed copies of the arguments")
    if all(same_values(before[name], base[name]) for name in before):
        for name, x in tensors(result()).items():
            assert_same_bits(given_[name], x.to(given_[name].dtype), f"{name}, beside the unbroken call")


def verify_arguments() -> Arguments:
    problem = make_problem(CASE, "cpu")
    p, s, r = problem.params, problem.state, problem.ring
    return Arguments({
        "mixed_qkv": problem.mixed_qkv, "a": problem.a, "b": problem.b, "shape": problem.shape,
        "params.conv_weight": p.conv_weight, "params.conv_bias": p.conv_bias, "params.A_log": p.A_log,
        "params.dt_bias": p.dt_bias, "params.lower_bound": p.lower_bound, "params.scale": None,
        "state.conv_state": s.conv_state, "state.ssm_state": s.ssm_state, "state.conv_window": s.conv_window,
        "ring.raw_v": r.raw_v, "ring.raw_k": r.raw_k, "ring.g": r.g, "ring.beta": r.beta,
        "slots": problem.slots, "rows": torch.tensor([1, 0], dtype=torch.int32), "draft_tokens": CASE.T,
        "config": LaunchConfig(), "errors": new_error_counts("cpu"), "out": problem["out"],
        "workspace": torch.zeros_like(problem.mixed_qkv),
    })  # fmt: skip


def as_verify(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` with its record under the name of its class, as in the flat arguments."""

    def call(ring: Any, **arguments: Any) -> Any:
        return op(record=ring, **arguments)

    return call


VERIFY = verify_arguments()
CASE_SLOTS = VERIFY["slots"].tolist()
FREE = next(slot for slot in range(4) if slot not in CASE_SLOTS)


@functools.cache
def verified(op: Callable[..., Any]) -> Arguments:
    """The arguments after the op with nothing broken."""
    arguments = copied(VERIFY)
    as_verify(op)(**grouped(arguments))
    return arguments


@interpreter_only
@EXAMPLES
@given(op=st.sampled_from((verify_fused, verify_reference, verify_unfused)), broken=broken_arguments(VERIFY))
def test_verify_refuses_or_is_right(op: Callable[..., Any], broken: tuple[tuple[str, ...], Arguments]) -> None:
    names, arguments = broken
    arguments = copied(arguments)
    before = copied(arguments)
    error = attempt(as_verify(op), arguments)
    try:
        needs_kernels = op is not verify_reference
        reason = as_verify(verify_reason)(**grouped(before), needs_kernels=needs_kernels)
    except TypeError as refusal:
        reason = str(refusal)
    assert (error is None) == (reason is None), f"op: {error!r}, predicate: {reason!r}"
    if error is not None:
        assert str(error) == reason
        refused_well(error, names, arguments, before)
        return
    right_when_accepted(as_verify(op), arguments, before, VERIFY, lambda: verified(op))


def fold_arguments() -> Arguments:
    layers = {name: verified(verify_reference)[f"ring.{name}"][None] for name in RING}
    return Arguments({
        "ssm_state": VERIFY["state.ssm_state"][None],
        **{f"ring.{name}": x for name, x in layers.items()},
        "shape": VERIFY["shape"], "slots": VERIFY["slots"], "accept_lens": torch.tensor([2, 1], dtype=torch.int32),
        "draft_tokens": CASE.T, "track_slots": torch.tensor([-1, FREE], dtype=torch.int32),
        "track_steps": torch.tensor([0, 0], dtype=torch.int32), "config": LaunchConfig(),
        "errors": new_error_counts("cpu"),
    })  # fmt: skip


FOLD = fold_arguments()


@functools.cache
def folded(op: Callable[..., Any]) -> Arguments:
    """The arguments after a fold with nothing broken."""
    arguments = copied(FOLD)
    op(**grouped(arguments))
    return arguments


@interpreter_only
@EXAMPLES
@given(op=st.sampled_from((fold, fold_reference)), broken=broken_arguments(FOLD))
def test_fold_refuses_or_is_right(op: Callable[..., Any], broken: tuple[tuple[str, ...], Arguments]) -> None:
    names, arguments = broken
    arguments = copied(arguments)
    before = copied(arguments)
    error = attempt(op, arguments)
    try:
        reason = fold_reason(**grouped(before), needs_kernels=op is fold)
    except TypeError as refusal:
        reason = str(refusal)
    assert (error is None) == (reason is None), f"op: {error!r}, predicate: {reason!r}"
    if error is not None:
        assert str(error) == reason
        refused_well(error, names, arguments, before)
        return
    right_when_accepted(op, arguments, before, FOLD, lambda: folded(op))


def scatter_arguments() -> Arguments:
    return Arguments({
        "conv_state": VERIFY["state.conv_state"][None],
        "conv_window": verified(verify_reference)["state.conv_window"][None],
        "slots": VERIFY["slots"], "accept_lens": torch.tensor([2, 1], dtype=torch.int32), "draft_tokens": CASE.T,
        "rows": torch.tensor([1, 0], dtype=torch.int32), "track_slots": torch.tensor([-1, FREE], dtype=torch.int32),
        "track_steps": torch.tensor([0, 0], dtype=torch.int32), "errors": new_error_counts("cpu"), "pdl": None,
    })  # fmt: skip


SCATTER = scatter_arguments()


@interpreter_only
@EXAMPLES
@given(op=st.sampled_from((scatter_conv, scatter_conv_reference)), broken=broken_arguments(SCATTER))
def test_scatter_refuses_or_is_right(op: Callable[..., Any], broken: tuple[tuple[str, ...], Arguments]) -> None:
    names, arguments = broken
    arguments = copied(arguments)
    before = copied(arguments)
    error = attempt(op, arguments)
    if error is not None:
        refused_well(error, names, arguments, before)
        return
    # What was accepted is a copy by definition: done here by hand on the arguments as they were given.
    expected = before["conv_state"].clone()
    batch = range(len(CASE_SLOTS))
    rows = batch if arguments["rows"] is None else arguments["rows"].tolist()
    tracks = [-1] * 2 if arguments["track_slots"] is None else arguments["track_slots"].tolist()
    steps = [-1] * 2 if arguments["track_steps"] is None else arguments["track_steps"].tolist()
    for i, slot, accept in zip(batch, arguments["slots"].tolist(), arguments["accept_lens"].tolist(), strict=True):
        if accept > int(arguments["draft_tokens"]):
            continue
        expected[:, slot] = before["conv_window"][:, rows[i], accept - 1]
        if tracks[i] >= 0 and 0 <= steps[i] < accept:
            expected[:, tracks[i]] = before["conv_window"][:, rows[i], steps[i]]
    assert_same_bits(arguments["conv_state"], expected, "conv_state")
