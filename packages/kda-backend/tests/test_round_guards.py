"""What the pool refuses around a round: bad batches, inputs changed in place, free slots, slots under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kda_backend import SlotState, StatePool
from kda_backend.kept import own_version
from kda_kernels import KdaShape, LayerParams

SHAPE = KdaShape(1, 1, 64, 64)
LAYERS, T = 2, 2
PARAMS = LayerParams(
    torch.ones(SHAPE.conv_dim, 4).bfloat16(), None, torch.zeros(1), torch.zeros(64), lower_bound=-5.0
)  # fmt: skip


def make_pool(mode: str = "ring", **options: Any) -> StatePool:
    return StatePool(SHAPE, num_layers=LAYERS, num_slots=6, max_batch=3, draft_tokens=T, mode=mode, **options)


def inputs(rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, n, generator=generator).bfloat16() for n in (SHAPE.conv_dim, 64, 1))


def verify(pool: StatePool, rows: int) -> list[torch.Tensor]:
    """Every layer of the open round; each one's mixed_qkv."""
    given = [inputs(rows) for _ in range(LAYERS)]
    for layer, one in enumerate(given):
        pool.verify(layer, *one, PARAMS, lane="reference")
    return [one[0] for one in given]


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD: dict[str, tuple[str, torch.Tensor, dict[str, torch.Tensor], str]] = {
    "slot": ("ring", ints(0, 6), {}, r"slots must be within -1\.\.5, got 6"),
    "slots on another device": ("ring", ints(0, 1).to("meta"), {}, "slots must be on cpu"),
    "slots not packed": ("ring", torch.zeros(4, dtype=torch.int32)[::2], {}, "slots must be packed"),
    "starts fall": ("ring", ints(0, 1), {"starts": ints(0, 2, 1)}, "starts must give each request 0..2 tokens, got -1"),
    "starts too many": ("ring", ints(0, 1), {"starts": ints(0, 99, 99)}, "starts must give each request"),
    "starts shape": ("ring", ints(0, 1), {"starts": ints(0, 2)}, r"starts must have shape \[3\]"),
    "starts dtype": ("ring", ints(0, 1), {"starts": torch.zeros(3)}, "starts must be int32 or int64"),
    "starts device": ("ring", ints(0, 1), {"starts": ints(0, 1, 2).to("meta")}, "starts must be on cpu"),
    "parents": ("snapshots", ints(0), {"parents": ints([-1, 1])}, "parents must name an earlier step"),
    "parents shape": ("snapshots", ints(0), {"parents": ints(-1, 0)}, r"parents must have shape \[1, 2\]"),
    "parents dtype": ("snapshots", ints(0), {"parents": torch.zeros(1, 2)}, "parents must be int32 or int64"),
}


@pytest.mark.parametrize("what", BAD)
def test_begin_refuses_a_bad_batch_and_the_open_round_stays(what: str) -> None:
    mode, slots, options, message = BAD[what]
    pool = make_pool(mode)
    pool.begin(ints(2), T)
    verify(pool, T)
    with pytest.raises(ValueError, match=message):
        pool.begin(slots, T, **options)
    pool.commit(ints(1))
    with pytest.raises(ValueError, match=message):
        pool.begin(slots, T, **options)
    pool.load_slot(2, pool.conv_state[:, 0], pool.ssm_state[:, 0])  # no round was opened


class TestIndicesInOneBuffer:
    @pytest.mark.parametrize("inference", [False, True])
    def test_the_round_s_may_not_change_and_a_neighbour_may(self, inference: bool) -> None:
        """Slots and accept lengths are views of one buffer, the lengths written once they are known."""
        with torch.inference_mode(inference):
            pool, buffer = make_pool(), torch.zeros(2, 3, dtype=torch.int32)
            buffer[0] = ints(0, 1, 2)
            pool.begin(buffer[0], T)
            verify(pool, 3 * T)
            buffer[1].copy_(ints(1, 2, 0))
            buffer[0, 1] = 4
            with pytest.raises(RuntimeError, match="slots were changed in place since begin"):
                pool.commit(buffer[1])
            buffer[0, 1] = 1  # as it was
            pool.commit(buffer[1])

    def test_a_count_of_changes_is_believed_only_if_it_is_the_tensor_s_own(self) -> None:
        whole = torch.zeros(4)
        assert own_version(whole) == own_version(whole.view(2, 2)) == whole._version
        assert own_version(whole[:2]) is None
        with torch.inference_mode():
            assert own_version(torch.zeros(4)) is None


class TestKeptInputs:
    @pytest.mark.parametrize("layer", range(LAYERS))
    @pytest.mark.parametrize("mode", ["ring", "snapshots"])
    def test_a_change_in_place_is_refused_by_layer_before_anything_is_written(self, mode: str, layer: int) -> None:
        pool = make_pool(mode, compact_window=True)
        pool.begin(ints(0, 1), T)
        kept = verify(pool, 2 * T)
        before = pool.conv_state.clone(), pool.ssm_state.clone()
        kept[layer].mul_(2)
        with pytest.raises(RuntimeError, match=rf"mixed_qkv of layer {layer} was changed in place since verify"):
            pool.commit(ints(1, 1))
        assert torch.equal(pool.conv_state, before[0])
        assert torch.equal(pool.ssm_state, before[1])
        pool.verify(layer, *inputs(2 * T), PARAMS, lane="reference")  # the round is still open
        pool.commit(ints(1, 1))

    def test_writes_beside_a_view_are_none(self) -> None:
        pool = make_pool(compact_window=True)
        pool.begin(ints(0), T)
        for layer in range(LAYERS):
            merged = torch.zeros(T, SHAPE.conv_dim + 8, dtype=torch.bfloat16)
            pool.verify(layer, merged[:, : SHAPE.conv_dim], *inputs(T)[1:], PARAMS, lane="reference")
            merged[:, SHAPE.conv_dim :] = 1
        pool.commit(ints(1))

    def test_without_compact_windows_the_inputs_are_the_engine_s_again(self) -> None:
        pool = make_pool()
        pool.begin(ints(0), T)
        for mixed_qkv in verify(pool, T):
            mixed_qkv.zero_()
        pool.commit(ints(1))


def state_of(pool: StatePool, slot: int = 0) -> SlotState:
    return SlotState(pool.conv_state[:, slot].clone(), pool.ssm_state[:, slot].clone())


USES: dict[str, Callable[[StatePool, int], object]] = {
    "copy from": lambda pool, slot: pool.copy_slot(slot, 0),
    "copy to": lambda pool, slot: pool.copy_slot(0, slot),
    "export": lambda pool, slot: pool.export_slot(slot),
    "load": lambda pool, slot: pool.load_slot(slot, pool.conv_state[:, 0], pool.ssm_state[:, 0]),
    "import": lambda pool, slot: pool.import_slot(slot, state_of(pool)),
}


OTHERS: dict[str, Callable[[StatePool, int], object]] = {
    "begin": lambda pool, slot: pool.begin(ints(0, slot), T),
    "flush": lambda pool, slot: pool.flush([0, slot]),
    "flush a tensor": lambda pool, slot: pool.flush(ints(0, -1, slot)),
}


class TestFreeSlots:
    @pytest.mark.parametrize("folding", [False, True])
    @pytest.mark.parametrize("use", [*USES, *OTHERS])
    def test_are_refused_once_slots_are_allocated(self, use: str, folding: bool) -> None:
        pool, call = make_pool(fold_on_verify=folding), (USES | OTHERS)[use]
        call(pool, 5)  # whoever numbers slots himself may
        pool.abandon()
        assert pool.allocate(2) == [0, 1]
        pool.ssm_state.normal_()
        before = pool.ssm_state.clone()
        for slot in (2, 5):
            with pytest.raises(ValueError, match=rf"must name allocated slots, got \[{slot}\], which are free"):
                call(pool, slot)
        pool.free([1])
        with pytest.raises(ValueError, match=r"must name allocated slots, got \[1\]"):
            call(pool, 1)
        assert torch.equal(pool.ssm_state, before)
        assert pool.free_slots == 5
        pool.begin(ints(0, -1), T)

    def test_are_not_tracked_into(self) -> None:
        pool = make_pool()
        pool.allocate(2)
        pool.begin(ints(0), T)
        verify(pool, T)
        with pytest.raises(ValueError, match=r"track_slots must name allocated slots, got \[4\]"):
            pool.commit(ints(1), track_slots=ints(4), track_steps=ints(0))
        pool.commit(ints(1), track_slots=ints(1), track_steps=ints(0))


class TestSlotsUnderWay:
    @pytest.mark.parametrize("folding", [False, True])
    @pytest.mark.parametrize("use", USES)
    def test_only_the_slots_of_a_round_on_the_cpu_are_refused(self, use: str, folding: bool) -> None:
        """What is done to the others meanwhile changes nothing that the round commits."""
        pool, plain = make_pool(fold_on_verify=folding), make_pool(fold_on_verify=folding)
        generator = torch.Generator().manual_seed(3)
        start = torch.randn(pool.ssm_state.shape, generator=generator)
        for one in (pool, plain):
            one.ssm_state.copy_(start)
            for accept in (ints(2, 1), ints(1, 2)):
                one.begin(ints(3, 4), T)
                one.verify(0, *inputs(2 * T), PARAMS, lane="reference")
                if one is pool:
                    for slot in (3, 4):
                        with pytest.raises(RuntimeError, match="needs the round to be over"):
                            USES[use](pool, slot)
                    USES[use](pool, 5)
                one.verify(1, *inputs(2 * T), PARAMS, lane="reference")
                one.commit(accept)
            one.flush()
        for slot in (1, 2, 3, 4):
            assert torch.equal(pool.ssm_state[:, slot], plain.ssm_state[:, slot])
            assert torch.equal(pool.conv_state[:, slot], plain.conv_state[:, slot])

    @pytest.mark.parametrize("use", [*USES, "allocate"])
    def test_every_slot_is_refused_where_the_round_s_are_on_a_device(self, use: str, device: str) -> None:
        if device == "cpu":
            device = "meta"  # whose values the host does not see either
        pool = make_pool(device=device)
        pool.begin(ints(3, 4).to(device), T)
        with pytest.raises(RuntimeError, match="needs the round to be over: commit it, or abandon"):
            pool.allocate() if use == "allocate" else USES[use](pool, 5)
        pool.abandon()
        assert pool.allocate() == [0]


class TestReplayedRound:
    @pytest.mark.parametrize("use", [*USES, "allocate", "begin", "replayed_round"])
    def test_refuses_what_an_open_round_does(self, use: str) -> None:
        pool = make_pool()
        others: dict[str, Callable[[StatePool, int], object]] = {
            "allocate": lambda pool, _: pool.allocate(),
            "begin": lambda pool, slot: pool.begin(ints(slot), T),
            "replayed_round": lambda pool, _: pool.replayed_round().__enter__(),
        }
        call = (USES | others)[use]
        before = state_of(pool, 5)
        with pool.replayed_round():
            with pytest.raises(RuntimeError, match="needs the replayed round to be over: leave"):
                call(pool, 5)
            pool.flush()
        assert torch.equal(pool.ssm_state[:, 5], before.ssm_state)
        call(pool, 5)

    def test_is_over_after_a_failure_and_waits_for_an_open_round(self) -> None:
        pool = make_pool()
        with pytest.raises(KeyError), pool.replayed_round():
            raise KeyError
        pool.begin(ints(0), T)
        with pytest.raises(RuntimeError, match="replayed_round needs the round to be over"):
            pool.replayed_round().__enter__()
        pool.abandon()
        with pool.replayed_round():
            pass


@pytest.mark.parametrize("folding", [False, True])
@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ([6], ValueError, r"slots must be within 0\.\.5, got 6"),
        ([-1], ValueError, r"slots must be within 0\.\.5, got -1"),
        ([1, 1], ValueError, "slots must name each slot once"),
        ("a", TypeError, "slots must be an int, got str"),
        (5, TypeError, "slots must be slot numbers in a list or the like, got int"),
        (torch.tensor([0.0]), ValueError, "slots must be a 1-D int32 or int64 tensor"),
        (torch.tensor(0), ValueError, "slots must be a 1-D int32 or int64 tensor"),
        (torch.tensor([6]), ValueError, r"slots must be within -1\.\.5, got 6"),
        (torch.tensor([1, 1]), ValueError, "slots must name each of its values once"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), ValueError, "slots must be on cpu"),
    ],
)  # fmt: skip
def test_flush_refuses_with_and_without_fold_on_verify(
    slots: Any, error: type[Exception], message: str, folding: bool
) -> None:
    pool = make_pool(fold_on_verify=folding)
    with pytest.raises(error, match=message):
        pool.flush(slots)
    for good in (None, [], [0, 5], ints(-1, 3, -1)):
        pool.flush(good)
