"""Slots come and go: what a new owner finds, what is refused, copies, exports and imports."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from kda_backend import MODES, PoolExhausted, SlotAllocator, SlotState, StatePool
from kda_kernels import KdaShape, LayerParams

SHAPE = KdaShape(1, 1, 64, 64)
LAYERS, T = 2, 2
NAN = float("nan")


def make_pool(mode: str = "ring", device: str = "cpu", **sizes: Any) -> StatePool:
    given = {"num_layers": LAYERS, "num_slots": 4, "max_batch": 2, "draft_tokens": T} | sizes
    return StatePool(SHAPE, mode=mode, device=device, **given)


def filled(mode: str = "ring", device: str = "cpu") -> StatePool:
    pool = make_pool(mode, device)
    generator = torch.Generator().manual_seed(5)
    for tensor in (pool.conv_state, pool.ssm_state):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


def states(pool: StatePool) -> list[torch.Tensor]:
    return [pool.conv_state.clone(), pool.ssm_state.clone()]


def same(pool: StatePool, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(states(pool), expected, strict=True))


def run_round(pool: StatePool, slots: list[int], accept: list[int], lane: str, seed: int = 7) -> list[torch.Tensor]:
    """One round of random inputs, the same ones whenever seed and sizes are; the outputs of each layer."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(pool.device, dtype)

    pool.begin(torch.tensor(slots, device=pool.device), T)
    outputs = []
    for layer in range(LAYERS):
        params = LayerParams(
            normal(SHAPE.conv_dim, 4), None, normal(1, dtype=torch.float32), normal(64, dtype=torch.float32), -5.0
        )
        inputs = [normal(len(slots) * T, width) for width in (SHAPE.conv_dim, 64, 1)]
        outputs.append(pool.verify(layer, *inputs, params, lane=lane))
    pool.commit(torch.tensor(accept, device=pool.device))
    return outputs


class TestAllocator:
    def test_every_slot_once_then_none(self) -> None:
        slots = SlotAllocator(3)
        assert slots.allocate(2) + slots.allocate() == [0, 1, 2]
        assert slots.free_slots == 0
        with pytest.raises(PoolExhausted, match=r"asked for 1 slot\(s\), 0 of 3 are free"):
            slots.allocate()
        slots.free([1])
        assert not slots.is_allocated(1)
        assert slots.allocate() == [1]

    def test_more_than_are_free_takes_none(self) -> None:
        slots = SlotAllocator(3)
        slots.allocate()
        with pytest.raises(PoolExhausted, match=r"asked for 3 slot\(s\), 2 of 3 are free"):
            slots.allocate(3)
        assert slots.free_slots == 2
        assert sorted(slots.allocate(2)) == [1, 2]

    @pytest.mark.parametrize(
        ("slots", "error", "message"),
        [
            (3, TypeError, "slots must be slot numbers in a list or the like, got int"),
            ([0, 2], ValueError, r"slots must name allocated slots, got \[2\], which are free: freed twice\?"),
            ([0, 0], ValueError, r"slots must name each slot once, got \[0, 0\]"),
            ([0, 3], ValueError, r"slots must be within 0\.\.2, got 3"),
            ([0, -1], ValueError, r"slots must be within 0\.\.2, got -1"),
            ([0, True], TypeError, r"slots must be an int, got bool"),
            ([0, 1.0], TypeError, r"slots must be an int, got float"),
        ],
    )
    def test_what_cannot_be_freed_frees_none(self, slots: Any, error: type[Exception], message: str) -> None:
        allocator = SlotAllocator(3)
        assert allocator.allocate(2) == [0, 1]
        with pytest.raises(error, match=message):
            allocator.free(slots)
        assert allocator.free_slots == 1
        allocator.free([0, 1])
        with pytest.raises(ValueError, match="freed twice"):
            allocator.free([0])

    @pytest.mark.parametrize("n", [0, -1, True, 1.5, None])
    def test_sizes(self, n: Any) -> None:
        with pytest.raises((TypeError, ValueError), match="n must be"):
            SlotAllocator(2).allocate(n)
        with pytest.raises((TypeError, ValueError), match="num_slots must be"):
            SlotAllocator(n)


class TestAllocate:
    @pytest.mark.parametrize("lane", ["unfused", "unfused+ring", "fused", "fused+ring"])
    def test_a_slot_full_of_nan_serves_its_next_owner_as_a_fresh_pool_does(self, lane: str, device: str) -> None:
        mode = "ring" if lane.endswith("ring") else "snapshots"
        used, fresh = make_pool(mode, device), make_pool(mode, device)
        slots = used.allocate(4)
        record = used.ring or used.snapshots
        assert record is not None
        for tensor in (used.conv_state, used.ssm_state, used.conv_window, *vars(record).values()):
            tensor.fill_(NAN)
        used.free(slots[1:3])
        again = used.allocate(2)
        assert sorted(again) == slots[1:3]
        fresh.allocate(4)
        for seed, accept in ((1, [2, 1]), (2, [1, 2])):
            outputs = [run_round(pool, again, accept, lane, seed) for pool in (used, fresh)]
            for a, b in zip(*outputs, strict=True):
                assert torch.equal(a, b)
        for slot in again:
            for tensor in ("conv_state", "ssm_state"):
                assert torch.equal(getattr(used, tensor)[:, slot], getattr(fresh, tensor)[:, slot])
        for slot in (slots[0], slots[3]):
            assert used.ssm_state[:, slot].isnan().all(), "another owner's slot stays as it was"

    def test_one_too_many_says_how_many_are_free_and_changes_nothing(self) -> None:
        pool = filled()
        assert pool.free_slots == 4
        pool.allocate(3)
        before = states(pool)
        with pytest.raises(PoolExhausted, match=r"asked for 2 slot\(s\), 1 of 4 are free: queue the request"):
            pool.allocate(2)
        assert (pool.free_slots, same(pool, before)) == (1, True)
        assert pool.allocate() == [3]

    def test_a_slot_of_the_open_round_has_no_new_owner_before_it_is_over(self) -> None:
        pool = filled()
        slots = pool.allocate(2)
        pool.begin(torch.tensor(slots), T)
        pool.free([slots[1]])
        assert pool.allocate() == [2]
        with pytest.raises(
            PoolExhausted, match=r"asked for 2 slot\(s\), 1 of 4 are free and 1 more once the open round"
        ):
            pool.allocate(2)
        assert pool.allocate() == [3]
        pool.abandon()
        assert pool.allocate() == [slots[1]]

    def test_a_reset_that_fails_gives_the_slots_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = filled()
        monkeypatch.setattr(pool, "state", None)
        with pytest.raises(AttributeError):
            pool.allocate()
        assert pool.free_slots == 4

    def test_engines_that_number_slots_themselves_need_not_allocate(self) -> None:
        pool = filled()
        run_round(pool, [3, 1], [1, 2], "reference")
        pool.copy_slot(3, 0)
        pool.import_slot(2, pool.export_slot(0))
        assert pool.free_slots == 4


@pytest.mark.parametrize("mode", MODES)
class TestCopy:
    def test_all_layers_and_nothing_else(self, mode: str) -> None:
        pool = filled(mode)
        expected = states(pool)
        pool.copy_slot(1, 3)
        for tensor in expected:
            tensor[:, 3] = tensor[:, 1]
        assert same(pool, expected)
        pool.copy_slot(2, 2)
        assert same(pool, expected)

    def test_refused_while_drafts_are_not_committed(self, mode: str) -> None:
        pool = filled(mode)
        pool.begin(torch.tensor([0, 1]), T)
        before = states(pool)
        for src, dst in ((0, 3), (3, 0), (0, 1)):
            with pytest.raises(RuntimeError, match="copy_slot needs the round to be over"):
                pool.copy_slot(src, dst)
        assert same(pool, before)
        pool.abandon()
        pool.copy_slot(0, 3)

    def test_old_records_of_the_destination_are_never_replayed(self, mode: str) -> None:
        lane = "reference"
        pool, plain = filled(mode), filled(mode)
        run_round(pool, [0, 1], [0, 0], lane, seed=1)  # slot 0 holds records that no commit used
        for one in (pool, plain):
            one.copy_slot(2, 0)
            run_round(one, [0, 1], [1, 2], lane, seed=2)
        assert same(pool, states(plain))

    @pytest.mark.parametrize("slot", [-1, 4, True, 1.0, "1"])
    def test_slots_of_the_pool_only(self, mode: str, slot: Any) -> None:
        pool = filled(mode)
        before = states(pool)
        for given, name in (((slot, 0), "src"), ((0, slot), "dst")):
            with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
                pool.copy_slot(*given)
        with pytest.raises((TypeError, ValueError), match="slot must be"):
            pool.export_slot(slot)
        with pytest.raises((TypeError, ValueError), match="slot must be"):
            pool.import_slot(slot, pool.export_slot(0))
        assert same(pool, before)


def test_numpys_integers_are_slots_and_sizes() -> None:
    number = np.int64
    sizes = {"num_layers": LAYERS, "num_slots": 4, "max_batch": 2, "draft_tokens": T, "ring_length": T}
    pool = StatePool(SHAPE, mode="ring", **{name: number(size) for name, size in sizes.items()})
    assert type(pool.num_slots) is int
    assert type(pool.num_bytes) is int
    expected = filled()
    for own, other in ((pool.conv_state, expected.conv_state), (pool.ssm_state, expected.ssm_state)):
        own.copy_(other)
    for one, kind in ((pool, number), (expected, int)):
        one.copy_slot(kind(2), kind(0))
        one.import_slot(kind(3), one.export_slot(kind(0)))
        run_round(one, [kind(3), 1], [1, 2], "reference")
    assert same(pool, states(expected))
    slots = pool.allocate(np.int32(2))
    pool.begin(torch.tensor([slots[0]]), number(1))
    pool.free(np.array(slots))
    assert type(pool._current_round().draft_tokens) is int
    for value in (torch.tensor(1), np.bool_(True), np.float64(1), np.array([1, 2])):
        with pytest.raises(TypeError, match=f"n must be an int, got {type(value).__name__}"):
            SlotAllocator(4).allocate(value)


class TestExport:
    @pytest.mark.parametrize("mode", MODES)
    def test_to_a_pool_of_other_slots_and_mode(self, mode: str, device: str) -> None:
        pool, other = filled(mode, device), make_pool("ring", num_slots=2)
        state = pool.export_slot(3)
        assert state.num_bytes == pool.plan.state_bytes_per_slot
        other.import_slot(1, state)
        assert torch.equal(other.ssm_state[:, 1], pool.ssm_state[:, 3].cpu())
        assert torch.equal(other.conv_state[:, 1], pool.conv_state[:, 3].cpu())
        assert not other.ssm_state[:, 0].any()

    def test_an_export_is_a_copy(self) -> None:
        pool = filled()
        state = pool.export_slot(1)
        before = state.ssm_state.clone()
        pool.ssm_state.zero_()
        assert torch.equal(state.ssm_state, before)

    def test_not_in_an_open_round(self) -> None:
        pool = filled()
        state = pool.export_slot(0)
        pool.begin(torch.tensor([0]), T)
        with pytest.raises(RuntimeError, match="export_slot needs the round to be over"):
            pool.export_slot(0)
        with pytest.raises(RuntimeError, match="load_slot needs the round to be over"):
            pool.import_slot(0, state)

    @pytest.mark.parametrize(
        ("shape", "changes", "message"),
        [
            (SHAPE, {"num_layers": 3}, r"conv_state must have shape \[2, 3, 192\], got \[3, 3, 192\]"),
            (KdaShape(1, 2, 64, 64), {}, r"conv_state must have shape \[2, 3, 192\], got \[2, 3, 256\]"),
            (SHAPE, {"dtype": torch.float16}, r"conv_state must be torch.bfloat16, got torch.float16"),
        ],
        ids=["layers", "heads", "dtype"],
    )
    def test_states_of_another_model_are_refused(self, shape: KdaShape, changes: dict[str, Any], message: str) -> None:
        sizes = {"num_layers": LAYERS, "num_slots": 2, "max_batch": 1, "draft_tokens": T, "mode": "ring"} | changes
        foreign = StatePool(shape, **sizes).export_slot(0)
        pool = filled()
        before = states(pool)
        with pytest.raises(ValueError, match=message):
            pool.import_slot(0, foreign)
        assert same(pool, before)

    def test_recurrent_states_in_other_precision_are_refused(self) -> None:
        pool = filled()
        state = pool.export_slot(0)
        with pytest.raises(ValueError, match=r"ssm_state must be torch.float32, got torch.bfloat16"):
            pool.import_slot(1, dataclasses.replace(state, ssm_state=state.ssm_state.bfloat16()))
        with pytest.raises(TypeError, match="state must be a SlotState, got tuple"):
            pool.import_slot(1, (state.conv_state, state.ssm_state))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="ssm_state must be a Tensor, got NoneType"):
            pool.import_slot(1, SlotState(state.conv_state, None))  # type: ignore[arg-type]


class TestInferenceMode:
    @pytest.mark.parametrize(("built", "used"), [(True, True), (False, True), (True, False)])
    @pytest.mark.parametrize("mode", MODES)
    def test_a_pool_can_be_built_and_used_in_it(self, mode: str, built: bool, used: bool) -> None:
        plain = filled(mode)
        slots = plain.allocate(4)[:2]
        run_round(plain, slots, [2, 1], "reference")
        with torch.inference_mode(built):
            pool = filled(mode)
        with torch.inference_mode(used):
            pool.allocate(4)
            run_round(pool, slots, [2, 1], "reference")
            pool.copy_slot(0, 2)
            pool.import_slot(3, pool.export_slot(1))
        plain.copy_slot(0, 2)
        plain.copy_slot(1, 3)
        assert same(pool, states(plain))
        pool.load_slot(0, pool.conv_state[:, 1], pool.ssm_state[:, 1])
        pool.free([0, 1, 2, 3])
        assert pool.allocate(4)

    def test_slots_changed_in_place_are_noticed_there_too(self) -> None:
        pool = filled()
        with torch.inference_mode():
            slots = torch.tensor([0, 1])
            assert slots.is_inference()
            pool.begin(slots, T)
            pool._current_round().verified.update(range(LAYERS))
            slots[1] = 2
            with pytest.raises(RuntimeError, match="slots were changed in place"):
                pool.commit(torch.tensor([0, 0]))
