"""The memory plan is what a pool takes, to the byte, and its requests are what fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install hypothesis (dependency group `test`)"
)

from hypothesis import given, settings
from hypothesis import strategies as st

from kda_backend import MODES, StatePool, memory_plan
from kda_kernels import KdaShape

KIMI = KdaShape(32, 32, 128, 128)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        yield from (t for field in fields(value) for t in tensors(getattr(value, field.name)))
    elif isinstance(value, (list, tuple)):
        yield from (t for item in value for t in tensors(item))


def held_bytes(pool: StatePool) -> int:
    storages = (t.untyped_storage() for value in vars(pool).values() for t in tensors(value))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


shapes = st.builds(
    lambda h, group, k, v: KdaShape(h, h * group, k, v),
    st.integers(1, 4), st.integers(1, 3), st.sampled_from([64, 128]), st.sampled_from([64, 128]),
)  # fmt: skip


@st.composite
def sizes(draw: st.DrawFn, largest: int = 4) -> dict[str, Any]:
    mode = draw(st.sampled_from(MODES))
    drafts = draw(st.integers(1, largest))
    ring: dict[str, Any] = {}
    if mode == "ring":
        ring = {
            "ring_length": draw(st.none() | st.integers(drafts, drafts + 3)), "fold_on_verify": draw(st.booleans())
        }  # fmt: skip
    return {
        "shape": draw(shapes), "mode": mode, "draft_tokens": drafts, **ring,
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16])), "compact_window": draw(st.booleans()),
        **{name: draw(st.integers(1, largest)) for name in ("num_layers", "num_slots", "max_batch")},
    }  # fmt: skip


@given(sizes())
@settings(max_examples=60)
def test_a_plan_is_what_the_pool_takes(given_sizes: dict[str, Any]) -> None:
    pool = StatePool(given_sizes["shape"], device="meta", **{k: v for k, v in given_sizes.items() if k != "shape"})
    plan = memory_plan(**given_sizes)
    assert pool.plan == plan
    assert pool.num_bytes == plan.total_bytes
    assert pool.scratch_bytes == plan.scratch_bytes
    per_slot = sum(t[:, 0].nbytes for t in (pool.conv_state, pool.ssm_state))
    assert plan.state_bytes_per_slot == per_slot
    assert plan.window_bytes_per_row == (0 if pool.conv_window is None else pool.conv_window[:, 0].nbytes)
    assert plan.kept_input_bytes == (0 if pool.state.kept_inputs is None else pool.state.kept_inputs.nbytes)
    assert (pool.conv_window is None) == pool.compact_window == given_sizes["compact_window"]
    if pool.ring is not None:
        assert plan.ring_bytes_per_slot == pool.ring.num_bytes // pool.num_slots
    if pool.pending is not None:
        assert plan.pending_bytes_per_slot * pool.num_slots == pool.pending.num_bytes
    if pool.snapshots is not None:
        assert plan.snapshot_bytes_per_row == pool.snapshots.states[:, 0].nbytes


@pytest.mark.parametrize("compact_window", [False, True])
@pytest.mark.parametrize(("mode", "fold_on_verify"), [("ring", False), ("ring", True), ("snapshots", False)])
@pytest.mark.parametrize("shape", [KdaShape(1, 1, 64, 64), KdaShape(2, 6, 128, 64), KdaShape(3, 3, 64, 128)], ids=str)
def test_a_plan_counts_every_byte_that_is_allocated(
    shape: KdaShape, mode: str, fold_on_verify: bool, compact_window: bool
) -> None:
    chosen: dict[str, Any] = {
        "num_layers": 2, "num_slots": 5, "max_batch": 3, "draft_tokens": 4, "mode": mode,
        "fold_on_verify": fold_on_verify, "compact_window": compact_window,
    }  # fmt: skip
    pool = StatePool(shape, **chosen)
    assert pool.num_bytes == held_bytes(pool) == memory_plan(shape, dtype=torch.bfloat16, **chosen).total_bytes


@given(sizes(largest=64), st.integers(1, 1 << 40), st.integers(0, 10))
def test_the_requests_that_fit_are_the_most_that_do(given_sizes: dict[str, Any], budget: int, spare: int) -> None:
    requests = memory_plan(**given_sizes).max_requests(budget, spare_slots=spare)

    def taken(n: int) -> int:
        return memory_plan(**given_sizes | {"num_slots": n + spare, "max_batch": n}).total_bytes

    assert requests == 0 or taken(requests) <= budget
    assert taken(requests + 1) > budget


def test_figures_that_can_be_done_by_hand() -> None:
    plan = memory_plan(KIMI, 20, "ring", torch.bfloat16, 1, 1, 4)
    state, conv = 32 * 128 * 128 * 4, 3 * 3 * 32 * 128 * 2
    assert plan.state_bytes_per_slot == 20 * (state + conv)
    assert plan.ring_bytes_per_slot == 20 * 4 * 32 * (128 * 2 + 128 * 2 + 128 * 4 + 4)
    assert plan.bytes_per_row == 20 * 4 * conv + 4 * 3 * 32 * 128 * 2
    snapshots = memory_plan(KIMI, 20, "snapshots", torch.bfloat16, 1, 1, 4)
    assert snapshots.bytes_per_slot == plan.state_bytes_per_slot
    assert snapshots.snapshot_bytes_per_row == 20 * 4 * state


@pytest.mark.parametrize(
    ("budget", "error"), [(0, ValueError), (-1, ValueError), (1.5e9, TypeError), (True, TypeError)]
)
def test_budgets_are_bytes(budget: Any, error: type[Exception]) -> None:
    plan = memory_plan(KIMI, 1, "ring", torch.bfloat16, 1, 1, 1)
    with pytest.raises(error, match="budget_bytes must be"):
        plan.max_requests(budget)
    with pytest.raises(ValueError, match="spare_slots must be at least 0"):
        plan.max_requests(1, spare_slots=-1)
    assert plan.max_requests(1) == 0
