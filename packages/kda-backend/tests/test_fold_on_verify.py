"""A pool that folds on verify beside one that folds at commit: the same states, whatever happens to a slot between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_backend import StatePool
from kda_kernels import KdaShape, LayerParams

SHAPE = KdaShape(1, 1, 64, 64)
LAYERS, SLOTS, T = 2, 4, 3


class Pools:
    """Both pools, given the same states, inputs and calls."""

    def __init__(self, device: str, lane: str = "unfused+ring", heads: int = 1) -> None:
        self.device, self.lane = device, lane
        self.generator = torch.Generator().manual_seed(9)
        sizes: dict[str, Any] = {
            "num_layers": LAYERS, "num_slots": SLOTS, "max_batch": 2, "draft_tokens": T, "mode": "ring",
            "device": device,
        }  # fmt: skip
        shape = KdaShape(1, heads, 64, 64)
        self.widths = shape.conv_dim, heads * 64, heads  # of mixed_qkv, a and b
        self.plain, self.ours = StatePool(shape, **sizes), StatePool(shape, fold_on_verify=True, **sizes)
        self.params = [
            LayerParams(
                self.normal(shape.conv_dim, 4), None, self.normal(heads, dtype=torch.float32),
                self.normal(heads * 64, dtype=torch.float32), lower_bound=-5.0,
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        for slot in range(SLOTS):
            state = self.normal(LAYERS, 3, shape.conv_dim), self.normal(LAYERS, heads, 64, 64, dtype=torch.float32)
            self.each("load_slot", slot, *state)

    def normal(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(self.device, dtype)

    def index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def each(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        return [getattr(pool, method)(*arguments, **options) for pool in (self.plain, self.ours)]

    def verify(
        self, slots: list[int], tokens: int = T, starts: list[int] | None = None, form: str = "recurrent"
    ) -> None:
        ragged = {} if starts is None else {"starts": self.index(starts)}
        self.each("begin", self.index(slots), tokens, **ragged)
        rows = len(slots) * tokens if starts is None else starts[-1]
        for layer in range(LAYERS):
            inputs = [self.normal(rows, width) for width in self.widths]
            plain, ours = self.each("verify", layer, *inputs, self.params[layer], lane=self.lane, form=form)
            assert torch.equal(plain, ours)

    def round(
        self, slots: list[int], accept: list[int], tokens: int = T, form: str = "recurrent",
        starts: list[int] | None = None, **track: list[int],
    ) -> None:  # fmt: skip
        self.verify(slots, tokens, starts, form)
        given = {name: self.index(values) for name, values in track.items()}
        self.each("commit", self.index(accept), **given)

    def assert_same(self) -> None:
        self.ours.flush()
        assert torch.equal(self.ours.ssm_state, self.plain.ssm_state)
        assert torch.equal(self.ours.conv_state, self.plain.conv_state)
        assert self.ours.error_summary() is None


@pytest.fixture
def pools(device: str) -> Pools:
    pools = Pools(device)
    pools.round([2, 0], [3, 1])
    assert not torch.equal(pools.ours.ssm_state, pools.plain.ssm_state), "something must be pending"
    return pools


@pytest.mark.parametrize("lane", ["unfused+ring", "fused+ring"])
def test_rounds_and_plain_decoding(lane: str, device: str) -> None:
    pools = Pools(device, lane, heads=2)
    pools.round([2, 0], [3, 1])
    pools.round([-1, 2], [2, 1])
    pools.round([0, 2], [1, 1], tokens=1)
    pools.round([0, 2], [1, 0], tokens=1)
    pools.round([2, 1], [2, 3])
    pools.assert_same()


@pytest.mark.parametrize("lane", ["unfused+ring", "reference"])
def test_ragged_rounds(pools: Pools, lane: str) -> None:
    """A request without tokens keeps what is pending in it."""
    if lane == "reference":
        pools = Pools(pools.device, lane)
        pools.round([2, 0], [3, 1])
    for starts, accept in (([0, 2, 5], [1, 3]), ([0, 0, 1], [0, 1]), ([0, 3, 5], [3, 0])):
        pools.verify([2, 0], starts=starts)
        pools.each("commit", pools.index(accept))
    pools.ours.flush()
    if lane == "reference":
        torch.testing.assert_close(pools.ours.ssm_state, pools.plain.ssm_state, rtol=1e-4, atol=1e-4)
    else:
        pools.assert_same()


def test_a_verify_that_was_abandoned_leaves_what_is_committed(pools: Pools) -> None:
    for _ in range(2):
        pools.verify([2, 1])
        pools.each("abandon")
    pools.round([2, 1], [1, 2])
    pools.assert_same()


def test_a_round_abandoned_between_layers(pools: Pools) -> None:
    pools.ours.begin(pools.index([2, 0]), T)
    inputs = [pools.normal(2 * T, width) for width in pools.widths]
    pools.ours.verify(1, *inputs, pools.params[1], lane="unfused+ring")
    pools.ours.abandon()
    pools.each("copy_slot", 2, 3)
    pools.assert_same()


def test_copies_and_exports_hold_what_is_pending(pools: Pools) -> None:
    pools.each("copy_slot", 2, 3)
    assert torch.equal(pools.ours.ssm_state[:, 3], pools.plain.ssm_state[:, 3])
    for plain, ours in zip(*(vars(state).values() for state in pools.each("export_slot", 0)), strict=True):
        assert torch.equal(plain, ours)
    pools.each("copy_slot", 0, 0)
    pools.round([3, 2], [2, 2])
    pools.assert_same()


def test_a_copy_over_a_slot_drops_what_was_pending_there(pools: Pools) -> None:
    pools.each("copy_slot", 0, 2)
    pools.round([2, 1], [1, 1])
    pools.assert_same()


def test_imports_and_loads_drop_what_was_pending(pools: Pools) -> None:
    (state, _) = pools.each("export_slot", 1)
    pools.each("import_slot", 2, state)
    pools.each("load_slot", 0, state.conv_state, state.ssm_state)
    pools.assert_same()
    pools.round([0, 2], [2, 1])
    pools.assert_same()


def test_a_new_owner_finds_zeros(device: str) -> None:
    pools = Pools(device)
    assert pools.each("allocate", 2) == [[0, 1], [0, 1]]
    pools.round([0, 1], [2, 3])
    pools.each("free", [1])
    assert pools.each("allocate") == [[1], [1]]
    pools.ours.flush()
    assert not pools.ours.ssm_state[:, 1].any()
    pools.round([1, 0], [3, 3])
    pools.assert_same()


@pytest.mark.parametrize("steps", [[0, 2], [2, 0], [1, -1]])
def test_tracking(pools: Pools, steps: list[int]) -> None:
    pools.round([3, 1], [2, 2])  # the slots that are then tracked have something pending
    pools.round([2, 0], [2, 3], track_slots=[3, 1], track_steps=steps)
    pools.round([1, 3], [2, 1])
    pools.round([2, 0], [2, 0], track_slots=[3, -1], track_steps=[1, 1])
    pools.assert_same()


@pytest.mark.parametrize("lane", ["unfused+ring", "reference"])
def test_a_request_without_tokens_is_not_tracked(pools: Pools, lane: str) -> None:
    """Its last round is still pending; a step in that one's accepted prefix is none of this one's."""
    pools.lane = lane
    pools.round([2, 0], [0, 2], starts=[0, 0, 3], track_slots=[3, 1], track_steps=[0, 1])
    pools.round([3, 1], [1, 2])
    if lane == "reference":
        pools.ours.flush()
        torch.testing.assert_close(pools.ours.ssm_state, pools.plain.ssm_state, rtol=1e-4, atol=1e-4)
    else:
        pools.assert_same()


def test_lanes_forms_and_draft_lengths_change_from_round_to_round(pools: Pools) -> None:
    rounds = (
        ("fused+ring", 2, "chunked", [2, 0], [1, 2]),
        ("unfused+ring", 1, "recurrent", [2, 0], [1, 1]),
        ("unfused+ring", 3, "chunked", [0, 3], [3, 0]),
        ("fused+ring", 1, "recurrent", [3, 2], [1, 0]),
        ("fused+ring", 3, "recurrent", [2, 3], [2, 3]),
        ("unfused+ring", 2, "recurrent", [3, 0], [0, 0]),
    )
    for pools.lane, tokens, form, slots, accept in rounds:
        pools.round(slots, accept, tokens, form)
    pools.assert_same()


def test_verifies_of_other_lanes_and_lengths_before_one_commit(pools: Pools) -> None:
    """The last round counts, and what is pending is folded by the first of them."""
    for pools.lane, tokens in (("fused+ring", 3), ("unfused+ring", 2), ("fused+ring", 1)):
        pools.verify([0, 2], tokens)
    pools.each("abandon")
    pools.verify([2, 0], 2)
    for pool in (pools.plain, pools.ours):
        pool.begin(pools.index([2, 0]), 1)
        with pytest.raises(RuntimeError, match=r"layers \[0, 1\] were not"):
            pool.commit(pools.index([1, 1]))
    pools.round([2, 0], [1, 3])
    pools.assert_same()


def test_a_flush_at_any_time_of_a_round(pools: Pools) -> None:
    """Between its layers, before its commit and after it."""
    pools.each("begin", pools.index([0, 2]), T)
    for layer in range(LAYERS):
        inputs = [pools.normal(2 * T, width) for width in pools.widths]
        plain, ours = pools.each("verify", layer, *inputs, pools.params[layer], lane="fused+ring")
        assert torch.equal(plain, ours)
        pools.ours.flush()
    pools.each("commit", pools.index([2, 3]))
    pools.assert_same()
    pools.round([2, 0], [3, 3])
    pools.assert_same()


@pytest.mark.parametrize("when", ["in the round", "after it"])
def test_a_freed_slot_full_of_nan_is_a_fresh_one_when_allocated_again(when: str, device: str) -> None:
    pools = Pools(device)
    assert pools.each("allocate", 2) == [[0, 1], [0, 1]]
    pools.round([0, 1], [2, 3])
    pools.verify([0, 1])
    if when == "in the round":
        pools.each("free", [1])
    pools.each("commit", pools.index([1, 3]))
    if when == "after it":
        pools.each("free", [1])
    for pool in (pools.plain, pools.ours):
        for tensor in (*vars(pool.record).values(), pool.ssm_state, pool.conv_state):
            for slot in range(1, tensor.shape[1], SLOTS):
                tensor[:, slot] = float("nan")
    assert pools.ours.pending.pending[1] == 3
    assert pools.each("allocate") == [[1], [1]]
    pools.round([1, 0], [3, 0])
    pools.ours.flush([1])
    assert torch.equal(pools.ours.ssm_state[:, 1], pools.plain.ssm_state[:, 1])
    assert not pools.ours.ssm_state[:, 1].isnan().any()


def test_flush_of_some_slots(pools: Pools) -> None:
    pools.ours.flush([2])
    assert torch.equal(pools.ours.ssm_state[:, 2], pools.plain.ssm_state[:, 2])
    assert not torch.equal(pools.ours.ssm_state[:, 0], pools.plain.ssm_state[:, 0])
    pools.ours.flush(pools.index([-1, 0]))
    assert torch.equal(pools.ours.ssm_state, pools.plain.ssm_state)
    pools.round([2, 0], [1, 1])
    pools.assert_same()


def test_a_refused_commit_leaves_the_round_open(pools: Pools) -> None:
    pools.verify([2, 0])
    before = [tensor.clone() for tensor in vars(pools.ours.pending).values()]
    if pools.device == "cpu":
        with pytest.raises(ValueError, match=r"accept_lens must be within 0\.\.3, got 4"):
            pools.ours.commit(pools.index([4, 1]))
    with pytest.raises(ValueError, match="track_slots and track_steps must be given together"):
        pools.ours.commit(pools.index([3, 1]), track_slots=pools.index([1, 3]))
    for tensor, old in zip(vars(pools.ours.pending).values(), before, strict=True):
        assert torch.equal(tensor, old)
    pools.each("commit", pools.index([3, 1]))
    pools.assert_same()


def test_the_reference_lane(device: str) -> None:
    pools = Pools(device, "reference")
    pools.round([2, 0], [3, 1])
    pools.round([2, 0], [0, 2])
    pools.round([2, 0], [2, 3], track_slots=[3, 1], track_steps=[1, 2])
    pools.ours.flush()
    torch.testing.assert_close(pools.ours.ssm_state, pools.plain.ssm_state, rtol=1e-4, atol=1e-4)
    assert pools.ours.error_summary() is None


def test_only_with_a_ring_and_only_if_asked_for() -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "num_slots": 2, "max_batch": 1, "draft_tokens": 2}
    assert StatePool(SHAPE, mode="ring", **sizes).pending is None
    with pytest.raises(ValueError, match="fold_on_verify goes with mode='ring'"):
        StatePool(SHAPE, mode="snapshots", fold_on_verify=True, **sizes)
    with pytest.raises(TypeError, match="fold_on_verify must be True or False, got int"):
        StatePool(SHAPE, mode="ring", fold_on_verify=1, **sizes)  # type: ignore[arg-type]
