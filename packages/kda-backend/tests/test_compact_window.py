"""A pool with compact windows beside one that writes them: the same states, and inputs that are held until commit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from kda_backend import LANES, REFERENCE_LANE, StatePool, commit_layers, lane_mode
from kda_kernels import KdaShape, LayerParams

SHAPE = KdaShape(num_heads=1, num_v_heads=2, head_k_dim=64, head_v_dim=64)
LAYERS, SLOTS, T = 2, 5, 3
WIDTHS = (SHAPE.conv_dim, 2 * 64, 2)
CASES = [
    *((lane, lane_mode(lane), False) for lane in LANES),
    *((lane, "ring", True) for lane in LANES if lane_mode(lane) == "ring"),
    *((REFERENCE_LANE, mode, False) for mode in ("ring", "snapshots")),
    (REFERENCE_LANE, "ring", True),
]
"""Lane, mode and fold on verify."""


class Pools:
    """Both pools, given the same states, inputs and calls."""

    def __init__(self, device: str, lane: str | None = "fused+ring", mode: str = "ring", folding: bool = False) -> None:
        self.device, self.lane = device, lane
        self.generator = torch.Generator().manual_seed(9)
        sizes: dict[str, Any] = {
            "num_layers": LAYERS, "num_slots": SLOTS, "max_batch": 3, "draft_tokens": T, "mode": mode,
            "device": device, "fold_on_verify": folding,
        }  # fmt: skip
        self.plain, self.ours = StatePool(SHAPE, **sizes), StatePool(SHAPE, compact_window=True, **sizes)
        self.params = [
            LayerParams(
                self.normal(SHAPE.conv_dim, 4), None, self.normal(2, dtype=torch.float32),
                self.normal(2 * 64, dtype=torch.float32), lower_bound=-5.0,
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        for slot in range(SLOTS):
            state = self.normal(LAYERS, 3, SHAPE.conv_dim), self.normal(LAYERS, 2, 64, 64, dtype=torch.float32)
            self.each("load_slot", slot, *state)

    def normal(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(self.device, dtype)

    def index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def each(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        return [getattr(pool, method)(*arguments, **options) for pool in (self.plain, self.ours)]

    def inputs(self, rows: int) -> list[torch.Tensor]:
        """mixed_qkv, a and b as an engine has them: views of one projection."""
        return list(self.normal(rows, sum(WIDTHS)).split(WIDTHS, 1))

    def verify(self, slots: list[int], tokens: int = T, starts: list[int] | None = None) -> None:
        ragged = {} if starts is None else {"starts": self.index(starts)}
        self.each("begin", self.index(slots), tokens, **ragged)
        rows = len(slots) * tokens if starts is None else starts[-1] + 1
        for layer in range(LAYERS):
            inputs = self.inputs(rows)
            plain = self.plain.verify(layer, *inputs, self.params[layer], lane=self.lane)
            copies = [x.clone() for x in inputs] if layer else inputs
            ours = self.ours.verify(layer, *copies, self.params[layer], lane=self.lane)
            assert torch.equal(plain, ours)

    def round(self, slots: list[int], accept: list[int], tokens: int = T, **given: list[int]) -> None:
        self.verify(slots, tokens, given.pop("starts", None))
        self.each("commit", self.index(accept), **{name: self.index(values) for name, values in given.items()})

    def assert_same(self) -> None:
        self.each("flush")
        for name in ("ssm_state", "conv_state", "errors"):
            assert torch.equal(getattr(self.ours, name), getattr(self.plain, name)), name
        assert self.ours.error_summary() is None


@pytest.mark.parametrize(("lane", "mode", "folding"), CASES)
def test_rounds(lane: str, mode: str, folding: bool, device: str) -> None:
    """Accept lengths from 0 to T, padding, tracking, plain decoding."""
    pools = Pools(device, lane, mode, folding)
    pools.round([2, 0, 1], [3, 1, 0])
    pools.round([-1, 2], [2, 1])
    pools.round([4, 2, -1], [3, 2, 0], track_slots=[3, -1, 1], track_steps=[0, 1, 1])
    pools.round([0, 3], [1, 1], tokens=1)
    pools.verify([0, 1])
    pools.each("abandon")
    pools.round([0, 1], [2, 3], tokens=3)
    pools.assert_same()


@pytest.mark.parametrize(
    ("lane", "mode", "folding"),
    [("unfused", "snapshots", False), ("unfused+ring", "ring", False), ("unfused+ring", "ring", True),
     (REFERENCE_LANE, "ring", False)],
)  # fmt: skip
def test_ragged_rounds(lane: str, mode: str, folding: bool, device: str) -> None:
    pools = Pools(device, lane, mode, folding)
    for starts, accept in (([0, 2, 5], [1, 3]), ([0, 0, 1], [0, 1]), ([0, 3, 5], [3, 0])):
        pools.round([2, 0], accept, starts=starts)
    pools.round([2, -1, 4], [1, 0, 2], starts=[0, 1, 2, 4], track_slots=[-1, 0, 1], track_steps=[0, 0, 0])
    pools.assert_same()


@pytest.mark.parametrize("mode", ["ring", "snapshots"])
def test_layers_in_lanes_of_their_own_and_twice(mode: str, device: str) -> None:
    pools = Pools(device, None, mode)
    lanes = [lane for lane in LANES if lane_mode(lane) == mode]
    pools.each("begin", pools.index([1, 3]), T)
    for layer, lane in ((0, lanes[0]), (1, lanes[1]), (0, lanes[1])):
        inputs = pools.inputs(2 * T)
        pools.each("verify", layer, *inputs, pools.params[layer], lane=lane)
        del inputs
        pools.normal(4 * T, SHAPE.conv_dim)
    pools.each("commit", pools.index([3, 2]))
    pools.assert_same()


def test_inference_mode(device: str) -> None:
    with torch.inference_mode():
        pools = Pools(device)
        pools.round([2, 0], [3, 1])
        pools.assert_same()
    pools.round([2, 0], [1, 2])
    pools.assert_same()


@pytest.mark.parametrize("end", ["commit", "abandon", "begin"])
def test_inputs_are_held_until_the_round_is_over_and_no_longer(end: str, device: str) -> None:
    pool = Pools(device).ours
    pools = Pools(device)
    pool.begin(pools.index([1]), T)
    held = []
    for layer in range(LAYERS):
        inputs = [pools.normal(T, width) for width in WIDTHS]
        pool.verify(layer, *inputs, pools.params[layer], lane="fused+ring")
        held.append(weakref.ref(inputs[0]))
        del inputs
    gc.collect()
    assert all(one() is not None for one in held)
    arguments = {"commit": (pools.index([2]),), "abandon": (), "begin": (pools.index([0]), T)}[end]
    getattr(pool, end)(*arguments)
    gc.collect()
    assert all(one() is None for one in held)


class TestRefusals:
    def test_one_buffer_for_all_layers(self, device: str) -> None:
        """By name and before anything is launched or noted; a verify of the same layer again may have it."""
        pools = Pools(device)
        pool, room = pools.ours, pools.normal(4 * T, SHAPE.conv_dim)
        buffer, ab = room[: 2 * T], [pools.normal(2 * T, width) for width in WIDTHS[1:]]
        for lane in ("fused+ring", "unfused+ring", REFERENCE_LANE):
            pool.begin(pools.index([1, 2]), T)
            pool.verify(0, buffer, *ab, pools.params[0], lane=lane)
            pool.verify(0, buffer, *ab, pools.params[0], lane=lane)
            noted = pool.state.kept_inputs.clone()
            for shared in (buffer, room[2 * T - 1 : 4 * T - 1]):
                with pytest.raises(
                    ValueError,
                    match=r"mixed_qkv of layer 1 must not share memory with mixed_qkv of layer 0.*reuses one",
                ):
                    pool.verify(1, shared, *ab, pools.params[1], lane=lane)
            assert torch.equal(pool.state.kept_inputs, noted)
            with pytest.raises(RuntimeError, match=r"layers \[1\] were not"):
                pool.commit(pools.index([1, 1]))
            pool.verify(1, room[2 * T :], *ab, pools.params[1], lane=lane)
            pool.commit(pools.index([1, 1]))
            pool.begin(pools.index([1, 2]), T)
            pool.verify(1, buffer, *ab, pools.params[1], lane=lane)  # of a new round
            pool.abandon()

    def test_an_output_over_another_layer_s_inputs(self, device: str) -> None:
        pools = Pools(device)
        pool, inputs = pools.ours, [[pools.normal(T, width) for width in WIDTHS] for _ in range(LAYERS)]
        pool.begin(pools.index([1]), T)
        pool.verify(0, *inputs[0], pools.params[0], lane="fused+ring")
        before = inputs[0][0].clone()
        out = inputs[0][0].view(-1)[: T * 2 * 64].view(T, 2, 64)
        with pytest.raises(ValueError, match="out of layer 1 must not share memory with mixed_qkv of layer 0"):
            pool.verify(1, *inputs[1], pools.params[1], lane="fused+ring", out=out)
        assert torch.equal(inputs[0][0], before)

    def test_a_refused_verify_leaves_the_kept_inputs(self, device: str) -> None:
        pools = Pools(device)
        pools.each("begin", pools.index([1, 3]), T)
        for layer in range(LAYERS):
            inputs = pools.inputs(2 * T)
            pools.each("verify", layer, *inputs, pools.params[layer], lane="fused+ring")
        wrong = pools.normal(2 * T + 1, SHAPE.conv_dim)
        for pool in (pools.plain, pools.ours):
            with pytest.raises(ValueError, match="mixed_qkv must have shape"):
                pool.verify(0, wrong, *inputs[1:], pools.params[0], lane="fused+ring")
            with pytest.raises(TypeError, match="mixed_qkv must be a Tensor"):
                pool.verify(0, [1.0], *inputs[1:], pools.params[0], lane="fused+ring")
        pools.each("commit", pools.index([3, 2]))
        pools.assert_same()

    def test_a_refused_commit_leaves_the_round(self, device: str) -> None:
        pools = Pools(device)
        pools.verify([1, 3])
        for pool in (pools.plain, pools.ours):
            with pytest.raises(ValueError, match="accept_lens must"):
                pool.commit(pools.index([1]))
        pools.each("commit", pools.index([3, 2]))
        pools.assert_same()

    def test_trees(self, device: str) -> None:
        pool = Pools(device, None, "snapshots").ours
        parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32, device=device)
        with pytest.raises(
            ValueError, match="parents must be None in a pool with compact_window: a tree's conv windows"
        ):
            pool.begin(torch.zeros(1, dtype=torch.int32, device=device), T, parents=parents)

    def test_commit_layers_of_trees_or_without_inputs(self, device: str) -> None:
        pool = Pools(device, None, "snapshots").ours
        steps = torch.zeros(1, dtype=torch.int32, device=device)
        common: dict[str, Any] = {"shape": SHAPE, "slots": steps, "draft_tokens": T}
        with pytest.raises(ValueError, match="last_steps must be None where the state has kept inputs"):
            commit_layers(pool.state, pool.record, accept_lens=None, last_steps=steps, **common)
        with pytest.raises(TypeError, match="mixed_qkv must be given to the reference"):
            commit_layers(pool.state, pool.record, accept_lens=steps + 1, reference=True, **common)

    @pytest.mark.parametrize("option", [1, None, "yes"])
    def test_no_bool(self, option: Any) -> None:
        with pytest.raises(TypeError, match="compact_window must be True or False"):
            StatePool(SHAPE, num_layers=1, num_slots=1, max_batch=1, draft_tokens=1, mode="ring", compact_window=option)


def test_a_slot_that_a_round_does_not_name_keeps_its_bits(device: str) -> None:
    """Poison everywhere but in the round's slots, before and after."""
    pools = Pools(device)
    for slot in (0, 4):
        pools.each(
            "load_slot", slot, torch.full_like(pools.ours.conv_state[:, slot], float("nan")),
            torch.full_like(pools.ours.ssm_state[:, slot], float("nan")),
        )  # fmt: skip
    pools.round([2, -1, 1], [3, 2, 1])
    for slot in (0, 4):
        assert pools.ours.conv_state[:, slot].isnan().all()
    assert not pools.ours.conv_state[:, [1, 2, 3]].isnan().any()
    for slot in (0, 4):
        pools.each(
            "load_slot", slot, *(torch.zeros_like(t[:, 0]) for t in (pools.ours.conv_state, pools.ours.ssm_state))
        )
    pools.assert_same()
