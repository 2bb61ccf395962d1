"""Fold on verify against the field's faults: slots that are none, empty batches, index tensors, far and odd pitches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kda_kernels import (
    ErrorKind,
    LaunchConfig,
    Ring,
    advance,
    advance_reference,
    flush,
    flush_reference,
    fold,
    host_checks,
    scatter_conv,
    verify_fused,
    verify_reference,
    verify_unfused,
)
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Guarded
from tests.support.commits import with_layers
from tests.support.marks import interpreter_only
from tests.support.memory import record_accesses
from tests.support.ops import KERNELS, RING, Verify
from tests.support.pending import Rounds, layered
from tests.support.sparse import vast_pool

SMALL = Case(B=2, T=3, H=1, HV=2, K=64)
SLOTS = SMALL.B + SMALL.spare_slots
PENDING = ("parity", "pending", "epoch", "folded")


def everything(rounds: Rounds) -> dict[str, torch.Tensor]:
    """Copies of all that fold on verify writes."""
    held = {name: getattr(rounds.ring, name) for name in RING} | {
        name: getattr(rounds.pending, name) for name in PENDING
    }
    whole = {name: rounds.ours.whole(name) for name in ("ssm_state", "conv_state")}
    return {name: tensor.clone() for name, tensor in (held | whole).items()}


def assert_untouched(rounds: Rounds, before: dict[str, torch.Tensor], *but: str) -> None:
    for name, tensor in everything(rounds).items():
        if name not in but:
            assert_same_bits(tensor, before[name], name)


@pytest.fixture
def rounds(device: str) -> Rounds:
    """With something pending in both live slots."""
    rounds = Rounds(SMALL, device)
    rounds.round([3, 2])
    return rounds


OPS = [
    (verify_unfused, advance, flush),
    (verify_fused, advance, flush),
    pytest.param((verify_reference, advance_reference, flush_reference), marks=interpreter_only),
]


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops[0].__name__)
@pytest.mark.parametrize("bad", [SLOTS, 2 * SLOTS - 1, 2**31 - 1, -2])
def test_P2_a_slot_of_the_second_bank_is_outside_the_pool(
    rounds: Rounds, ops: tuple[Callable[..., Any], ...], bad: int
) -> None:
    """The ring has twice the pool's slots; a slot number past the pool's reaches none of them."""
    verify, advancing, flushing = ops
    before = everything(rounds)
    rounds.slots = torch.tensor([bad, -1], dtype=torch.int32, device=rounds.device)
    positional, keywords = rounds.arguments(rounds.ours)
    if rounds.device == "cpu":
        with pytest.raises(ValueError, match=rf"slots must be within -1\.\.{SLOTS - 1}, got {bad}"):
            verify(*positional, **keywords)
    with host_checks(False):
        verify(*positional, **keywords)
        accepts = torch.tensor([2, 2], device=rounds.device)
        advancing(
            rounds.pending, slots=rounds.slots, accept_lens=accepts, draft_tokens=3, ring_length=SMALL.L,
            errors=rounds.errors,
        )  # fmt: skip
        rounds.flush(flushing)
    assert_untouched(rounds, before)
    assert not rounds.ours["out"].any()
    assert rounds.errors.tolist() == [3 * (kind == ErrorKind.SLOT) for kind in ErrorKind]


@interpreter_only
@pytest.mark.parametrize("op", KERNELS)
def test_O1_every_element_has_one_writer(op: Verify) -> None:
    """Tiles of a head share no flag, and no program reads what another one writes."""
    rounds = Rounds(replace(SMALL, H=1, HV=4, padded=(1,)), "cpu", op)
    rounds.round([3, 0])
    live, parity = int(rounds.slots[0]), 1
    positional, keywords = rounds.arguments(rounds.ours, config=LaunchConfig(block_v=8))
    with record_accesses() as accesses:
        op(*positional, **keywords)
    for name, tensor in (("ssm_state", rounds.ours["ssm_state"]), ("folded", rounds.pending.folded)):
        expected = np.zeros(tuple(tensor.shape), dtype=int)
        expected[live] = 1
        assert np.array_equal(accesses.stored(tensor), expected), name
    for name in RING:
        expected = np.zeros(tuple(getattr(rounds.ring, name).shape), dtype=int)
        expected[live + parity * SLOTS, :, : SMALL.T] = 1
        assert np.array_equal(accesses.stored(getattr(rounds.ring, name)), expected), name
    for name in PENDING[:3]:
        assert not accesses.stored(getattr(rounds.pending, name)).any(), name
    with record_accesses() as accesses:
        rounds.flush()
    assert not accesses.stored(rounds.ours["ssm_state"]).any(), "nothing is replayed twice"


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
def test_O1_bits_do_not_depend_on_how_many_blocks_run_at_once(op: Verify, device: str) -> None:
    """More programs than fit on a GPU at once, whose heads share records of k: a race would differ sooner or later."""
    rounds = Rounds(Case(B=48, T=6, H=1, HV=16, K=128), device, op)
    for number in range(30):
        rounds.round([(number + row) % 7 for row in range(48)])
    rounds.flush()
    rounds.assert_same_states()


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("op", KERNELS)
def test_P3_empty_and_padded_batches(rounds: Rounds, op: Verify, batch: int) -> None:
    before = everything(rounds)
    rounds.slots = torch.full((batch,), -1, dtype=torch.int32, device=rounds.device)
    tokens = batch * SMALL.T
    inputs = {name: getattr(rounds.plain, name)[:tokens] for name in ("mixed_qkv", "a", "b")}
    positional, keywords = rounds.arguments(rounds.ours, **inputs, out=None)
    assert not op(*positional, **keywords).any()
    empty = torch.zeros(batch, dtype=torch.int64, device=rounds.device)
    advance(rounds.pending, slots=rounds.slots, accept_lens=empty, draft_tokens=3, ring_length=SMALL.L)
    rounds.flush()
    assert_untouched(rounds, before)
    assert not rounds.errors.any()


@interpreter_only
def test_a_slot_may_be_named_once(rounds: Rounds) -> None:
    """Two rows would each replay what is pending."""
    before = everything(rounds)
    rounds.slots = torch.tensor([1, 1], dtype=torch.int32)
    for op in (verify_unfused, verify_fused, verify_reference):
        positional, keywords = rounds.arguments(rounds.ours)
        with pytest.raises(ValueError, match="slots must name each of its values once"):
            op(*positional, **keywords)
    for recorded in (advance, advance_reference):
        with pytest.raises(ValueError, match="slots must name each of its values once"):
            recorded(rounds.pending, slots=rounds.slots, accept_lens=rounds.slots, draft_tokens=3, ring_length=SMALL.L)
    for bring in (flush, flush_reference):
        with pytest.raises(ValueError, match="slots must name each of its values once"):
            rounds.flush(bring)
    for track in ([1, 1], [2, -1]):
        rounds.slots = torch.tensor([2, 0], dtype=torch.int32)
        tracking = {"track_slots": torch.tensor(track), "track_steps": torch.tensor([0, 0])}
        with pytest.raises(ValueError, match="track_slots must name"):
            rounds.flush(**tracking)
        with pytest.raises(ValueError, match="track_slots must name"):
            advance(
                rounds.pending, slots=rounds.slots, accept_lens=rounds.slots, draft_tokens=3, ring_length=SMALL.L,
                **tracking,
            )  # fmt: skip
    assert_untouched(rounds, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_S4_index_tensors_of_every_kind(rounds: Rounds, dtype: torch.dtype) -> None:
    """Of either type, and slices that begin anywhere."""
    live = rounds.slots.tolist()
    held = torch.tensor([7, 7, 7, *live], device=rounds.device).to(dtype)
    rounds.slots = held[3:]
    rounds.draw()
    rounds.verify()
    accepts = torch.tensor([9, 1, 3], device=rounds.device).to(dtype)[1:]
    common: dict[str, Any] = {"slots": rounds.slots, "accept_lens": accepts, "draft_tokens": 3}
    for side in (rounds.plain, rounds.ours):
        scatter_conv(side["conv_state"][None], side["conv_window"][None], **common)
    fold(rounds.plain["ssm_state"][None], with_layers(rounds.plain.ring), shape=SMALL.shape, **common)
    advance(rounds.pending, ring_length=SMALL.L, **common)
    rounds.flush()
    rounds.assert_same_states()


@interpreter_only
@pytest.mark.parametrize("name", ["slots", "accept_lens", "track_slots", "track_steps", "errors"])
def test_S4_index_tensors_that_are_refused(rounds: Rounds, name: str) -> None:
    before = everything(rounds)
    given = {
        "slots": rounds.slots, "accept_lens": torch.ones(2, dtype=torch.int32),
        "track_slots": torch.full((2,), -1), "track_steps": torch.zeros(2, dtype=torch.int32), "errors": rounds.errors,
    }  # fmt: skip
    own = given[name]
    for wrong in (own.float(), own.to("meta"), own.repeat(2)[::2], own[:1]):
        if name == "slots" and len(wrong) == 1:
            break  # B is theirs: all others have the wrong length then
        changed = given | {name: wrong}
        with pytest.raises(ValueError, match=f"{name} must"):
            advance(rounds.pending, draft_tokens=3, ring_length=SMALL.L, **changed)
        if name != "accept_lens":
            with pytest.raises(ValueError, match=f"{name} must"):
                rounds.flush(**{key: value for key, value in changed.items() if key != "accept_lens"})
    assert_untouched(rounds, before)


def malformed(tensor: torch.Tensor) -> dict[str, Any]:
    """``tensor`` with one property changed."""
    wider = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    return {
        "ndim": tensor[None], "shape": tensor[..., 1:], "slots": tensor[1:], "dtype": tensor.double(),
        "device": tensor.to("meta"), "strides": wider[..., ::2],
    }  # fmt: skip


@interpreter_only
@pytest.mark.parametrize("name", [*PENDING, *RING])
def test_L5_a_malformed_group_is_refused_by_name(rounds: Rounds, name: str) -> None:
    before = everything(rounds)
    group = rounds.pending if name in PENDING else rounds.ring
    for what, wrong in malformed(getattr(group, name)).items():
        changed = replace(group, **{name: wrong})
        ring, pending = (rounds.ring, changed) if name in PENDING else (changed, rounds.pending)
        blamed = rf"pending\.{name} " if name in PENDING else rf"ring\.{name} "
        if (name, what) == ("beta", "shape"):
            blamed = r"ring\.raw_v "  # L is beta's last dimension
        for op in (verify_unfused, verify_fused, verify_reference):
            positional, keywords = rounds.arguments(rounds.ours, record=ring, pending=pending)
            with pytest.raises(ValueError, match=blamed):
                op(*positional, **keywords)
        for op in (flush, flush_reference):
            with pytest.raises(ValueError, match=blamed):
                op(
                    rounds.ours["ssm_state"][None], with_layers(ring), layered(pending), shape=SMALL.shape,
                    slots=rounds.slots,
                )  # fmt: skip
        if name in PENDING[:3] and what in ("ndim", "dtype", "strides"):  # number and device of the slots are parity's
            for op in (advance, advance_reference):
                with pytest.raises(ValueError, match=blamed):
                    op(pending, slots=rounds.slots, accept_lens=rounds.slots * 0, draft_tokens=3, ring_length=SMALL.L)
    assert_untouched(rounds, before)


@pytest.mark.parametrize("pitch", [1, 8, 13])
@pytest.mark.parametrize("op", KERNELS)
def test_L4_odd_pitches(op: Verify, pitch: int, device: str) -> None:
    """Of state, both banks and flags; what lies between the slots stays."""
    rounds = Rounds(replace(SMALL, pitch=pitch), device, op)
    guards = {}
    for group in (rounds.ring, rounds.pending):
        for name in RING if group is rounds.ring else ("folded",):
            packed = getattr(group, name)
            guards[name] = Guarded.garbage(tuple(packed.shape), packed.dtype, device, 5, pitch)
            guards[name].view.copy_(packed)
    rounds.ring = Ring(**{name: guards[name].view for name in RING})
    rounds.pending = replace(rounds.pending, folded=guards["folded"].view)
    between = {name: guard.clone() for name, guard in guards.items()}
    for lengths in ([3, 1], [1, 3], [2, 1]):
        rounds.round(lengths)
    rounds.verify()
    rounds.flush()  # sees by its flags that verify has replayed all
    rounds.assert_same_states()
    for name, guard in guards.items():
        between[name].view.copy_(guard.view)
        assert_same_bits(guard.whole, between[name].whole, f"{name}, between its slots")


@pytest.mark.xdist_group("vast")
@pytest.mark.parametrize("name", [*RING, "folded"])
def test_S1_offsets_past_two_to_the_31(name: str, device: str) -> None:
    """Of the second bank, which lies behind the first, and of a layer of `flush`."""
    rounds = Rounds(replace(SMALL, T=2, length=2), device, verify_fused)
    group = rounds.pending if name == "folded" else rounds.ring
    packed = getattr(group, name)
    pitch = -(-(2**31) // (packed.shape[0] // 2 if name in RING else 1))
    far = vast_pool(tuple(packed.shape), pitch + (-pitch) % 64, packed.dtype, device)
    changed = replace(group, **{name: far})
    if name in RING:
        rounds.ring = changed
    else:
        rounds.pending = changed
    for lengths in ([2, 1], [1, 2], [2, 2]):
        rounds.round(lengths)
    rounds.flush()
    rounds.assert_same_states()
    assert far[1 if name == "folded" else SLOTS :].any(), "something lies past 2^31"
