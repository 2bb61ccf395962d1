"""The pool's promises: what it refuses and leaves as it was, its byte counts, the round's rules, the torch lane."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from kda_backend import LANES, MODES, REFERENCE_LANE, StatePool, lane_mode
from kda_kernels import ErrorKind, KdaShape, LayerParams, fold_reference, host_checks

SHAPE = KdaShape(num_heads=1, num_v_heads=2, head_k_dim=64, head_v_dim=64)
SIZES: dict[str, Any] = dict(num_layers=2, num_slots=4, max_batch=2, draft_tokens=3)
LAYERS, BATCH, STEPS = SIZES["num_layers"], SIZES["max_batch"], SIZES["draft_tokens"]
SLOTS = [2, 0]
DTYPE = torch.bfloat16


def make_pool(mode: str = "ring", device: str = "cpu", **changes: Any) -> StatePool:
    return StatePool(SHAPE, **{**SIZES, "mode": mode, "dtype": DTYPE, "device": device, **changes})


def counted(pool: StatePool) -> dict[ErrorKind, int]:
    return {kind: count for kind in ErrorKind if (count := int(pool.errors[kind]))}


class Engine:
    """A pool whose slots hold a random state, and the inputs of one round; the same ones for every lane."""

    def __init__(self, lane: str, device: str, mode: str | None = None, seed: int = 224) -> None:
        self.lane, self.device = lane, device
        self.pool = make_pool(mode or lane_mode(lane), device)
        # Of 400 seeds the one whose SiLU outputs stay furthest from bf16 rounding ties (a third of the worst fp32
        # error): lanes whose exp differs in the last bit still round alike, and what remains is fp32.
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device, dtype)

        tokens, gates = BATCH * STEPS, SHAPE.num_v_heads * SHAPE.head_k_dim
        self.params = [
            LayerParams(
                conv_weight=normal(SHAPE.conv_dim, 4, dtype=torch.float32), conv_bias=None,
                A_log=normal(SHAPE.num_v_heads, dtype=torch.float32), dt_bias=normal(gates, dtype=torch.float32),
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.inputs = [
            (normal(tokens, SHAPE.conv_dim), normal(tokens, gates), normal(tokens, SHAPE.num_v_heads))
            for _ in range(LAYERS)
        ]
        for slot in range(SIZES["num_slots"]):
            self.pool.load_slot(slot, normal(LAYERS, 3, SHAPE.conv_dim), normal(LAYERS, 2, 64, 64, dtype=torch.float32))

    def begin(self) -> None:
        self.pool.begin(torch.tensor(SLOTS, device=self.device), STEPS)

    def verify(self, layer: int, lane: str | None = None, **changes: Any) -> torch.Tensor:
        names = ("mixed_qkv", "a", "b")
        given = dict(zip(names, self.inputs[layer], strict=True)) | changes
        return self.pool.verify(layer, *(given[name] for name in names), self.params[layer], lane=lane or self.lane)

    def commit(self, accept_lens: list[int], **options: Any) -> None:
        self.pool.commit(torch.tensor(accept_lens, device=self.device), **options)

    def round(self, accept_lens: list[int]) -> list[torch.Tensor]:
        self.begin()
        outputs = [self.verify(layer) for layer in range(LAYERS)]
        self.commit(accept_lens)
        return outputs

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool.conv_state.clone(), self.pool.ssm_state.clone()

    def assert_states(self, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
        for actual, wanted in zip(self.states(), expected, strict=True):
            assert torch.equal(actual, wanted)


@pytest.fixture
def engine() -> Engine:
    """An engine on the CPU, whose index tensors the host can check."""
    return Engine(REFERENCE_LANE, "cpu", mode="ring")


class TestInit:
    @pytest.mark.parametrize("name", SIZES)
    def test_sizes_are_ints_of_at_least_one(self, name: str) -> None:
        for value in (0, -1):
            with pytest.raises(ValueError, match=rf"{name} must be at least 1, got {value}"):
                make_pool(**{name: value})
        for value in (True, 2.0, "2", None):
            with pytest.raises(TypeError, match=rf"{name} must be an int, got {type(value).__name__}"):
                make_pool(**{name: value})

    @pytest.mark.parametrize("mode", ["Ring", "snapshot", "fused+ring", None])
    def test_unknown_modes(self, mode: Any) -> None:
        with pytest.raises(
            ValueError, match=r"mode must be one of \('ring', 'snapshots'\), got " + re.escape(repr(mode))
        ):
            make_pool(mode)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, "bfloat16"])
    def test_other_dtypes(self, dtype: Any) -> None:
        with pytest.raises(ValueError, match=r"dtype must be torch\.bfloat16 or torch\.float16, got"):
            make_pool(dtype=dtype)

    def test_a_ring_shorter_than_the_drafts(self) -> None:
        with pytest.raises(ValueError, match=r"ring_length must be at least draft_tokens=3, got 2"):
            make_pool(ring_length=2)

    def test_a_ring_length_without_a_ring(self) -> None:
        with pytest.raises(ValueError, match=r"ring_length goes with mode='ring'"):
            make_pool("snapshots", ring_length=3)

    def test_a_pool_starts_at_zero_and_holds_the_scratch_of_its_mode_only(self) -> None:
        for mode in MODES:
            pool = make_pool(mode)
            assert (pool.ring is not None, pool.snapshots is not None) == (mode == "ring", mode == "snapshots")
            assert not pool.conv_state.any()
            assert not pool.ssm_state.any()
            assert pool.error_summary() is None


class TestBytes:
    def test_scratch_is_what_the_shape_says(self) -> None:
        ring, rows = make_pool(), SIZES["max_batch"] * STEPS * LAYERS
        assert ring.scratch_bytes == SHAPE.ring_bytes_per_token(DTYPE) * SIZES["num_slots"] * STEPS * LAYERS
        longer = make_pool(ring_length=7)
        assert longer.scratch_bytes == SHAPE.ring_bytes_per_token(DTYPE) * SIZES["num_slots"] * 7 * LAYERS
        assert make_pool("snapshots").scratch_bytes == SHAPE.snapshot_bytes_per_token() * rows

    @pytest.mark.parametrize("mode", MODES)
    def test_num_bytes_is_the_sum_of_everything_the_pool_holds(self, mode: str) -> None:
        def storages(value: Any) -> Iterator[torch.UntypedStorage]:
            if isinstance(value, torch.Tensor):
                yield value.untyped_storage()
            elif is_dataclass(value):
                yield from (s for field in fields(value) for s in storages(getattr(value, field.name)))
            elif isinstance(value, (list, tuple)):
                yield from (s for item in value for s in storages(item))

        pool = make_pool(mode)
        held = {s.data_ptr(): s.nbytes() for value in vars(pool).values() for s in storages(value)}
        assert len(held) >= 6
        assert pool.num_bytes == sum(held.values())


class TestLoadSlot:
    def test_a_slot_of_every_layer_and_no_other(self, engine: Engine) -> None:
        pool = engine.pool
        conv, ssm = engine.states()
        pool.load_slot(3, conv[:, 1], ssm[:, 1])
        conv[:, 3], ssm[:, 3] = conv[:, 1].clone(), ssm[:, 1].clone()
        engine.assert_states((conv, ssm))

    @pytest.mark.parametrize("slot", [-1, 4, 2**31])
    def test_slots_outside_the_pool(self, engine: Engine, slot: int) -> None:
        before = engine.states()
        with pytest.raises(ValueError, match=rf"slot must be within 0\.\.3, got {slot}"):
            engine.pool.load_slot(slot, before[0][:, 0] + 1, before[1][:, 0] + 1)
        engine.assert_states(before)

    @pytest.mark.parametrize("name", ["conv_state", "ssm_state"])
    def test_other_shapes_and_dtypes_are_refused_before_anything_is_written(self, engine: Engine, name: str) -> None:
        before = engine.states()
        good = dict(conv_state=before[0][:, 0] + 1, ssm_state=before[1][:, 0] + 1)
        x = good[name]
        for wrong in (x[:1], x[0], x[None], x[..., :-1], x.transpose(1, 2)[..., :1]):
            with pytest.raises(ValueError, match=rf"{name} must have shape .*, got"):
                engine.pool.load_slot(1, **{**good, name: wrong})
        for dtype in {torch.float16, torch.float32, torch.bfloat16, torch.float64} - {x.dtype}:
            with pytest.raises(ValueError, match=rf"{name} must be {x.dtype}, got {dtype}"):
                engine.pool.load_slot(1, **{**good, name: x.to(dtype)})
        engine.assert_states(before)


class TestBegin:
    @pytest.mark.parametrize(
        "slots", [[0, 1], torch.tensor(0), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2), None], ids=repr
    )
    def test_slots_that_are_no_index_vector(self, engine: Engine, slots: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=r"slots must be a (Tensor|1-D int32 or int64 tensor)"):
            engine.pool.begin(slots, 1)

    def test_a_batch_or_drafts_beyond_the_pool(self, engine: Engine) -> None:
        with pytest.raises(ValueError, match=r"slots must have at most max_batch=2 entries, got 3"):
            engine.pool.begin(torch.tensor([0, 1, 2]), 1)
        for drafts in (0, -1, 4):
            with pytest.raises(ValueError, match=rf"draft_tokens must be within 1\.\.3, got {drafts}"):
                engine.pool.begin(torch.tensor([0]), drafts)

    def test_a_refused_begin_leaves_the_open_round_open(self, engine: Engine) -> None:
        engine.begin()
        engine.verify(0)
        with pytest.raises(ValueError, match="draft_tokens"):
            engine.pool.begin(torch.tensor([0]), 99)
        engine.verify(1)
        engine.commit([1, 1])

    def test_a_new_round_forgets_what_the_last_one_verified(self, engine: Engine) -> None:
        engine.begin()
        for layer in range(LAYERS):
            engine.verify(layer)
        engine.begin()
        engine.verify(1)
        with pytest.raises(RuntimeError, match=r"layers \[0\] were not"):
            engine.commit([1, 1])


class TestVerify:
    def test_a_round_must_be_open(self, engine: Engine) -> None:
        with pytest.raises(RuntimeError, match=r"call begin\(slots, draft_tokens\) first"):
            engine.verify(0)
        engine.round([1, 1])
        with pytest.raises(RuntimeError, match="begin"):
            engine.verify(0)

    def test_layers_outside_the_pool(self, engine: Engine) -> None:
        engine.begin()
        for layer in (-1, LAYERS):
            with pytest.raises(ValueError, match=rf"layer must be within 0\.\.1, got {layer}"):
                engine.pool.verify(layer, *engine.inputs[0], engine.params[0], lane=REFERENCE_LANE)

    @pytest.mark.parametrize("mode", MODES)
    def test_lanes_of_the_other_mode_and_unknown_ones(self, mode: str) -> None:
        engine = Engine(REFERENCE_LANE, "cpu", mode=mode)
        engine.begin()
        for lane in (lane for lane in LANES if lane_mode(lane) != mode):
            with pytest.raises(ValueError, match=rf"lane must be one of \[.*\] in a pool of mode '{mode}', got"):
                engine.verify(0, lane)
        with pytest.raises(ValueError, match=r"lane must be one of .*, got 'fast'"):
            engine.verify(0, "fast")

    def test_verify_writes_no_state(self, engine: Engine) -> None:
        before = engine.states()
        engine.begin()
        engine.verify(0)
        engine.assert_states(before)

    def test_a_refused_verify_does_not_count_as_verified(self, engine: Engine) -> None:
        engine.begin()
        engine.verify(0)
        with pytest.raises(ValueError, match="mixed_qkv"):
            engine.verify(1, mixed_qkv=engine.inputs[1][0][:-1])
        with pytest.raises(RuntimeError, match=r"layers \[1\] were not"):
            engine.commit([1, 1])
        engine.verify(1)
        engine.commit([1, 1])


class TestCommit:
    def test_every_layer_must_be_verified(self, engine: Engine) -> None:
        with pytest.raises(RuntimeError, match="begin"):
            engine.commit([1, 1])
        before = engine.states()
        engine.begin()
        with pytest.raises(RuntimeError, match=r"layers \[0, 1\] were not"):
            engine.commit([1, 1])
        engine.verify(1)
        with pytest.raises(RuntimeError, match=r"layers \[0\] were not"):
            engine.commit([1, 1])
        engine.assert_states(before)

    @pytest.mark.parametrize("lane", ["unfused+ring", "fused", REFERENCE_LANE])
    def test_what_the_kernels_refuse_leaves_pool_and_round_as_they_were(self, lane: str, device: str) -> None:
        if device == "cuda":
            pytest.skip("index values on a GPU are not checked by the host")
        engine = Engine(lane, device, mode="ring" if lane == REFERENCE_LANE else None)
        before = engine.states()
        engine.begin()
        for layer in range(LAYERS):
            engine.verify(layer)
        refusals: list[tuple[str, list[int], dict[str, Any]]] = [
            ("accept_lens", [1, STEPS + 1], {}),
            ("accept_lens", [-1, 1], {}),
            ("accept_lens", [1], {}),
            ("track_slots", [1, 1], dict(track_slots=torch.tensor([4, -1]), track_steps=torch.tensor([0, 0]))),
            ("track_steps", [1, 1], dict(track_slots=torch.tensor([3, -1]))),
            ("track_steps", [1, 1], dict(track_slots=torch.tensor([3, -1]), track_steps=torch.tensor([0]))),
        ]
        for name, accept_lens, options in refusals:
            with pytest.raises(ValueError, match=name):
                engine.commit(accept_lens, **options)
            engine.assert_states(before)
        engine.commit([2, 1])  # the round is still open
        straight = Engine(lane, device, mode=engine.pool.mode)
        straight.round([2, 1])
        engine.assert_states(straight.states())
        with pytest.raises(RuntimeError, match="begin"):
            engine.commit([1, 1])

    @pytest.mark.parametrize("mode", MODES)
    def test_a_fault_met_on_the_device_is_counted_once_however_many_layers(self, mode: str) -> None:
        engine = Engine(REFERENCE_LANE, "cpu", mode=mode)
        with host_checks(False):
            engine.round([99, 1])
            assert counted(engine.pool) == {ErrorKind.ACCEPT: 1}
            engine.pool.begin(torch.tensor([2, 99]), STEPS)
            for layer in range(LAYERS):
                engine.verify(layer)
            assert counted(engine.pool) == {ErrorKind.SLOT: 1, ErrorKind.ACCEPT: 1}, (
                "one layer of verify counts the slot"
            )
            engine.commit([1, 1])
        assert counted(engine.pool) == {ErrorKind.SLOT: 2, ErrorKind.ACCEPT: 1}, "one launch of commit counts the slot"
        assert "slot: 2" in str(engine.pool.error_summary())

    def test_a_reference_round_is_committed_by_the_reference(self) -> None:
        """Not by kernels, which may not run where this lane is used; the two fold to other bits."""
        engine = Engine(REFERENCE_LANE, "cpu", mode="ring")
        engine.begin()
        for layer in range(LAYERS):
            engine.verify(layer)
        state, ring = engine.pool.ssm_state.clone(), engine.pool.ring
        assert ring is not None
        common: dict[str, Any] = dict(shape=SHAPE, slots=torch.tensor(SLOTS), draft_tokens=STEPS)
        fold_reference(state, ring, accept_lens=torch.tensor([3, 2]), **common)
        engine.commit([3, 2])
        assert torch.equal(engine.pool.ssm_state, state)


@pytest.mark.parametrize("mode", MODES)
def test_the_reference_lane_runs_a_whole_round(mode: str, device: str) -> None:
    """Two rounds, partly and wholly accepted: states and outputs of the kernels' lanes within fp32 rounding."""
    reference = Engine(REFERENCE_LANE, device, mode=mode)
    rounds = ([2, 3], [STEPS, 1])
    outputs = [reference.round(accept_lens) for accept_lens in rounds]
    for lane in (lane for lane in LANES if lane_mode(lane) == mode):
        engine = Engine(lane, device)
        start = engine.states()
        for accept_lens, expected in zip(rounds, outputs, strict=True):
            for actual, wanted in zip(engine.round(accept_lens), expected, strict=True):
                # fp32 sums in another order, then one bf16 rounding: neighbouring values at most
                torch.testing.assert_close(actual, wanted, rtol=2**-7, atol=1e-5)
        assert torch.equal(engine.pool.conv_state, reference.pool.conv_state)
        # 6 steps, each with two K-term sums of relative error (K/8 + 8) * 2^-24 in both lanes
        largest = float(reference.pool.ssm_state.abs().max())
        bound = 2 * 2 * 2 * STEPS * (SHAPE.head_k_dim / 8 + 8) * 2.0**-24 * largest
        torch.testing.assert_close(engine.pool.ssm_state, reference.pool.ssm_state, rtol=0, atol=bound)
        for slot in SLOTS:
            assert not torch.equal(engine.pool.ssm_state[:, slot], start[1][:, slot])
