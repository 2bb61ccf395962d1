"""Fold on verify: the bits of rounds that fold at commit, each record replayed once, and what is refused or counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kda_kernels import (
    ErrorKind,
    LaunchConfig,
    PendingFold,
    advance_reference,
    flush_reference,
    host_checks,
    new_error_counts,
    verify_fused,
    verify_reference,
    verify_unfused,
)
from tests.support.bits import assert_same_bits
from tests.support.cases import Case
from tests.support.grids import GPU_CASES, INTERPRETER_CASES, config_id, every_config, params
from tests.support.marks import interpreter_only
from tests.support.ops import KERNELS, RING
from tests.support.pending import Rounds

SMALL = Case(B=2, T=3, H=1, HV=2, K=64)
GLUON = [
    LaunchConfig(16, 4, rows_per_thread=1, state_first=True),
    LaunchConfig(32, 4, rows_per_thread=2, state_first=True, prefetch=True),
    LaunchConfig(64, 4, rows_per_thread=4),
    LaunchConfig(64, 8, rows_per_thread=2, max_registers=128),
    LaunchConfig(64, 4, rows_per_thread=4, token_blocks=True),
]


def accepted(case: Case, first: int) -> list[int]:
    """Prefixes that differ from row to row, 0 and T among them over the rounds."""
    return [(first + i) % (min(case.T, case.L) + 1) for i in range(case.B)]


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("case", params(INTERPRETER_CASES, GPU_CASES[::3]))
def test_rounds_equal_those_that_fold_at_commit(case: Case, op: Callable[..., torch.Tensor], device: str) -> None:
    rounds = Rounds(case, device, op)
    for first in range(case.T + 1, 0, -1):
        rounds.round(accepted(case, first))
    rounds.flush()
    rounds.assert_same_states()
    assert not rounds.errors.any()


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
@pytest.mark.parametrize("op", KERNELS)
def test_both_forms(op: Callable[..., torch.Tensor], form: str, device: str) -> None:
    rounds = Rounds(SMALL, device, op)
    for lengths in ([3, 1], [0, 2], [2, 3]):
        rounds.round(lengths, form=form)
    rounds.flush()
    rounds.assert_same_states()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["recurrent", "chunked"])
@pytest.mark.parametrize("config", GLUON, ids=config_id)
@pytest.mark.parametrize("case", [Case(B=3, T=4, H=2, HV=4, K=128, padded=(1,)), *GPU_CASES[1::7]], ids=lambda c: c.id)
def test_gluon_configurations(case: Case, config: LaunchConfig, form: str, device: str) -> None:
    for op in (verify_fused, verify_unfused):
        rounds = Rounds(case, device, op)
        for first in range(case.T + 1, 0, -1):
            ready = config.prefetch
            rounds.round(accepted(case, first), config=config, form=form, indices_ready=ready)
        rounds.flush()
        rounds.assert_same_states()


@pytest.mark.gpu
@pytest.mark.parametrize("config", every_config(128), ids=config_id)
def test_every_configuration(config: LaunchConfig, device: str) -> None:
    rounds = Rounds(Case(B=2, T=4, H=2, HV=4, K=128), device, verify_fused)
    for lengths in ([4, 2], [1, 3]):
        rounds.round(lengths, config=config)
    rounds.draw()
    rounds.verify(config=config)
    rounds.assert_same_states()


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param([8, 64, 16], id="tiles grow and shrink"),
        pytest.param([64, 8, 8], id="tiles shrink"),
    ],
)
def test_a_repeated_verify_gives_the_same_and_replays_nothing_twice(blocks: list[int], device: str) -> None:
    rounds = Rounds(SMALL, device)
    rounds.round([3, 2])
    rounds.draw()
    for block_v in blocks:  # whichever tile brought rows up to date, another one sees it
        rounds.verify(config=LaunchConfig(block_v, 1))
        rounds.assert_same_states()
    rounds.flush()
    rounds.assert_same_states()
    rounds.commit([1, 3])
    rounds.flush()
    rounds.flush()
    rounds.draw()
    rounds.verify()
    rounds.assert_same_states()


def test_ragged_rounds(device: str) -> None:
    """A request without tokens has nothing folded; accept lengths end at each request's own."""
    rounds = Rounds(Case(B=3, T=3, H=1, HV=2, K=64), device)
    rounds.round([3, 1, 2])
    for offsets, lengths in (([0, 2, 2, 5], [1, 0, 3]), ([1, 4, 6, 7], [2, 2, 1]), ([0, 3, 6, 9], [3, 0, 2])):
        starts = torch.tensor(offsets, dtype=torch.int32, device=device)
        rounds.draw()
        rounds.verify(starts=starts)
        if device == "cpu" and offsets[-1] < 9:
            with pytest.raises(ValueError, match="accept_lens must be at most"):
                rounds.commit([3, 3, 3], starts=starts)
        rounds.commit(lengths, starts=starts)
    rounds.flush()
    rounds.assert_same_states()
    assert not rounds.errors.any()


def test_accept_zero_leaves_what_is_pending(device: str) -> None:
    rounds = Rounds(SMALL, device)
    rounds.round([2, 3])
    for _ in range(2):
        rounds.round([0, 0])
    assert rounds.pending.pending[rounds.slots.long()].tolist() == [2, 3]
    rounds.round([0, 1])
    rounds.flush()
    rounds.assert_same_states()


def test_a_verify_writes_one_bank_and_reads_the_other(device: str) -> None:
    rounds = Rounds(SMALL, device)
    slots = SMALL.B + SMALL.spare_slots
    live = rounds.slots.long()
    for parity, lengths in ((0, [3, 1]), (1, [2, 2]), (0, [1, 1])):
        before = {name: getattr(rounds.ring, name).clone() for name in RING}
        rounds.draw()
        rounds.verify()
        for name in RING:
            now, plain = getattr(rounds.ring, name), getattr(rounds.plain.ring, name)
            written, other = live + parity * slots, live + (1 - parity) * slots
            assert_same_bits(now[written][:, :, : SMALL.T], plain[live][:, :, : SMALL.T], f"{name}, bank {parity}")
            assert_same_bits(now[other], before[name][other], f"{name}, the other bank")
        rounds.commit(lengths)


def test_decoding_one_token_at_a_time(device: str) -> None:
    rounds = Rounds(Case(B=2, T=1, H=1, HV=2, K=64, padded=(0,)), device)
    for _ in range(4):
        rounds.round([1, 1])
    rounds.flush()
    rounds.assert_same_states()


def test_a_slot_is_reset_by_its_count(device: str) -> None:
    rounds = Rounds(SMALL, device)
    rounds.round([3, 3])
    slot = int(rounds.slots[0])
    for side in (rounds.plain, rounds.ours):
        side["ssm_state"][slot] = 0.5
        side["conv_state"][slot] = 0.5
    rounds.pending.pending[slot] = 0
    rounds.round([2, 1])
    rounds.flush()
    rounds.assert_same_states()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_tracking_slots_get_the_state_after_a_step(step: int, device: str) -> None:
    rounds = Rounds(SMALL, device)
    rounds.round([3, 3])
    spare = sorted(set(range(4)) - set(rounds.slots.tolist()))
    rounds.pending.pending[spare[0]] = 2  # of a former owner
    rounds.draw()
    rounds.verify()
    rounds.commit(
        [2, 3], track_slots=torch.tensor(spare, device=device), track_steps=torch.tensor([step, step], device=device)
    )
    rounds.assert_same_states()
    rounds.round([1, 2])
    rounds.slots = torch.tensor([spare[1], int(rounds.slots[1])], device=device)
    rounds.round([3, 1])
    rounds.flush()
    rounds.flush(slots=torch.arange(4, device=device))
    rounds.assert_same_states()


@interpreter_only
@pytest.mark.parametrize(("name", "value"), [("pending", -1), ("pending", 5), ("parity", 2), ("parity", -1)])
@pytest.mark.parametrize("op", [verify_fused, verify_unfused, verify_reference])
def test_wrong_bookkeeping_is_padding_and_counted(op: Callable[..., Any], name: str, value: int, device: str) -> None:
    rounds = Rounds(SMALL, device, op)
    before = rounds.ours.fork()
    getattr(rounds.pending, name)[int(rounds.slots[0])] = value
    banks = {name: getattr(rounds.ring, name).clone() for name in RING}
    kept = [getattr(rounds.pending, name).clone() for name in ("parity", "pending", "epoch")]
    for side in (rounds.plain, rounds.ours):
        positional, keywords = rounds.arguments(side)
        op(*positional, **keywords)
    assert rounds.errors.tolist() == [int(kind == ErrorKind.ACCEPT) for kind in ErrorKind]
    assert not rounds.ours["out"][: SMALL.T].any()
    assert rounds.ours["out"][SMALL.T :].any()
    slots = SMALL.B + SMALL.spare_slots
    bad = int(rounds.slots[0])
    for ring_name in RING:
        for slot in (bad, bad + slots):
            assert_same_bits(getattr(rounds.ring, ring_name)[slot], banks[ring_name][slot], ring_name)
    rounds.errors.zero_()
    reference = op is verify_reference
    rounds.flush(flush_reference) if reference else rounds.flush()
    assert rounds.errors[ErrorKind.ACCEPT] == 1
    assert_same_bits(rounds.ours["ssm_state"][bad], before["ssm_state"][bad], "state of the bad slot")
    rounds.errors.zero_()
    rounds.commit([2, 0], *((advance_reference,) if reference else ()))
    assert rounds.errors[ErrorKind.ACCEPT] == 1
    for tensor, old in zip(vars(rounds.pending).values(), kept, strict=False):
        assert_same_bits(tensor, old, "bookkeeping")


@interpreter_only
@pytest.mark.parametrize("accept", [-1, 4])
def test_advance_refuses_or_counts_accept_lengths_that_cannot_be(accept: int, device: str) -> None:
    rounds = Rounds(SMALL, device)
    rounds.draw()
    rounds.verify()
    with pytest.raises(ValueError, match=rf"accept_lens must be within 0\.\.3, got {accept}"):
        rounds.commit([accept, 1])
    with host_checks(False):
        rounds.commit([accept, 1])
    assert rounds.errors[ErrorKind.ACCEPT] == 1
    assert rounds.pending.pending[rounds.slots.long()].tolist() == [0, 1]
    rounds.flush()
    rounds.assert_same_states()


def test_the_reference_agrees(device: str) -> None:
    rounds = Rounds(SMALL, device, verify_reference)
    for lengths in ([3, 1], [0, 2], [2, 3]):
        rounds.draw()
        for side in (rounds.plain, rounds.ours):
            positional, keywords = rounds.arguments(side)
            verify_reference(*positional, **keywords)
        rounds.commit(lengths, advance_reference)
    rounds.flush(flush_reference)
    live = rounds.slots.long()
    torch.testing.assert_close(rounds.ours["ssm_state"][live], rounds.plain["ssm_state"][live], rtol=1e-4, atol=1e-5)
    assert not rounds.errors.any()


def test_what_is_refused(device: str) -> None:
    rounds = Rounds(SMALL, device)
    shape, slots = SMALL.shape, SMALL.B + SMALL.spare_slots

    def refuses(match: str, **changes: Any) -> None:
        positional, keywords = rounds.arguments(rounds.ours, **changes)
        with pytest.raises(ValueError, match=match):
            verify_unfused(*positional, **keywords)

    refuses("pending must be None with Snapshots", record=rounds.plain.snapshots)
    refuses(r"ring.raw_v must have shape \[8, 2, 4, 64\]", record=rounds.plain.ring)
    refuses(r"pending.parity must have shape \[4\]", pending=PendingFold.allocate(shape, slots=5, device=device))
    wide = PendingFold(*(tensor.long() for tensor in vars(rounds.pending).values()))
    refuses("pending.parity must be int32", pending=wide)
    shared = rounds.pending
    refuses(
        "must not share memory",
        pending=PendingFold(shared.parity, shared.parity, shared.epoch, shared.folded),
    )
    positional, keywords = rounds.arguments(rounds.ours, pending=3)
    with pytest.raises(TypeError, match="pending must be a PendingFold"):
        verify_fused(*positional, **keywords)
    with pytest.raises(ValueError, match="draft_tokens must be at least 1"):
        advance_reference(
            shared, slots=rounds.slots, accept_lens=rounds.slots, draft_tokens=0, ring_length=3,
            errors=new_error_counts(device),
        )  # fmt: skip
    assert slots == shared.parity.shape[0]
