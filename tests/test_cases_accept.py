"""Accept and commit: accept 0 and out of range, rings shorter than the drafts, slot 0, rounds, both state modes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_backend import LANES, StatePool, lane_mode
from kda_kernels import (
    ErrorKind,
    KdaShape,
    Snapshots,
    fold,
    fold_reference,
    host_checks,
    new_error_counts,
    scatter_conv,
    scatter_conv_reference,
    scatter_snapshots,
    scatter_snapshots_reference,
    verify_unfused,
)
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.commits import expected_states, fold_problem, verified, with_layers
from tests.support.grids import GPU_CASES, params
from tests.support.marks import interpreter_only
from tests.support.memory import record_accesses
from tests.support.ops import RING, WITH_REFERENCE, Verify
from tests.support.streams import Decoder, Streams, plain_decode

THREE = Case(B=3, T=2, H=1, HV=2, K=64, spare_slots=3)


def commit_all(
    problem: Problem, accept_lens: torch.Tensor, *, reference: bool = False, **options: Any
) -> dict[str, Problem]:
    """Every commit op of ours on forks of a verified problem: by fold and by snapshot scatter, windows with both."""
    ops = (
        (fold_reference, scatter_snapshots_reference, scatter_conv_reference)
        if reference
        else (fold, scatter_snapshots, scatter_conv)
    )
    common: dict[str, Any] = dict(slots=problem.slots, accept_lens=accept_lens, draft_tokens=problem.case.T, **options)
    outcomes = {"fold": problem.fork(), "scatter": problem.fork()}
    ops[0](outcomes["fold"]["ssm_state"][None], with_layers(problem.ring), shape=problem.shape, **common)
    ops[1](outcomes["scatter"]["ssm_state"][None], Snapshots(problem["snapshots"][None]), **common)
    for outcome in outcomes.values():
        ops[2](outcome["conv_state"][None], problem["conv_window"][None], **common)
    return outcomes


def expected_windows(problem: Problem, accept_lens: list[int]) -> torch.Tensor:
    windows = problem.buffers["conv_state"].clone()
    for row in problem.live():
        if accept_lens[row] > 0:
            windows.view[int(problem.slots[row])] = problem["conv_window"][row, accept_lens[row] - 1]
    return windows.whole


@pytest.mark.parametrize("case", params([THREE], [Case(B=3, T=3, H=4, HV=8, K=128, spare_slots=3)]))
def test_A1_accept_zero_leaves_everything_of_that_slot(case: Case, device: str) -> None:
    """Row 0 accepts nothing (and asks for tracking, in vain), row 1 one token, row 2 all."""
    problem = verified(case, device)
    lengths = [0, 1, case.T]
    free = sorted(set(range(problem["ssm_state"].shape[0])) - set(problem.slots.tolist()))
    outcomes = commit_all(
        problem, torch.tensor(lengths, dtype=torch.int32, device=device),
        track_slots=torch.tensor([free[0], -1, -1], dtype=torch.int32, device=device),
        track_steps=torch.zeros(3, dtype=torch.int32, device=device),
    )  # fmt: skip
    for how, outcome in outcomes.items():
        assert_same_bits(outcome.whole("ssm_state"), expected_states(problem, lengths).whole, f"state by {how}")
        assert_same_bits(outcome.whole("conv_state"), expected_windows(problem, lengths), f"conv state by {how}")


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize(
    "case",
    params(
        [Case(B=2, T=3, H=1, HV=2, K=64, length=L) for L in (1, 2)],
        [Case(B=4, T=8, H=4, HV=8, K=128, length=5)],
    ),
)
def test_A2_records_past_a_short_ring_are_dropped(case: Case, op: Verify, device: str) -> None:
    """The kept records equal those of a long ring; every other ring byte, neighbours' and canaries, stays."""
    problem = make_problem(case, device)
    long = make_problem(Case(**{**case.__dict__, "length": case.T}), device)
    for name in ("conv_state", "ssm_state"):
        long[name].copy_(problem[name])
    long = long.fork(mixed_qkv=problem.mixed_qkv, a=problem.a, b=problem.b, slots=problem.slots, params=problem.params)
    outcome, complete = problem.run(op), long.run(op)
    assert_same_bits(outcome["out"], complete["out"], "output")
    for name in RING:
        expected = problem.buffers[name].clone()
        for slot in problem.slots.tolist():
            expected.view[slot] = complete[name][slot, :, : case.L]
        assert_same_bits(outcome.whole(name), expected.whole, name)


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize("accept", [3, 100, -1, 2**31 - 1, -(2**31), 2**32 + 1])
@pytest.mark.parametrize("case", params([THREE], [Case(B=3, T=3, H=4, HV=8, K=128, spare_slots=3)]))
def test_A2_accept_out_of_range_is_left_untouched_and_counted(
    case: Case, accept: int, reference: bool, device: str
) -> None:
    problem = verified(case, device)
    accept = case.T + 1 if accept == 3 else accept
    lengths = torch.tensor([1, accept, case.T], dtype=torch.int64, device=device)
    errors = new_error_counts(device)
    with host_checks(False):
        outcomes = commit_all(problem, lengths, errors=errors, reference=reference)
    valid = [1, 0, case.T]
    if reference:  # sums over K in another order: compare with itself, the bad row left out
        expected = commit_all(problem, torch.tensor(valid, device=device), reference=True)
        states = {how: expected[how].whole("ssm_state") for how in outcomes}
    else:
        states = dict.fromkeys(outcomes, expected_states(problem, valid).whole)
    for how, outcome in outcomes.items():
        assert_same_bits(outcome.whole("ssm_state"), states[how], f"state by {how}")
        assert_same_bits(outcome.whole("conv_state"), expected_windows(problem, valid), f"conv state by {how}")
    # fold, snapshot scatter and two window scatters met it
    assert errors.tolist() == [4 if kind is ErrorKind.ACCEPT else 0 for kind in ErrorKind]


@interpreter_only
@pytest.mark.parametrize("accept", [3, -1, 2**31 - 1])
def test_A2_accept_out_of_range_is_refused_where_the_host_sees_it(accept: int) -> None:
    problem = verified(THREE, "cpu")
    before = problem.fork()
    lengths = torch.tensor([1, accept, 2])
    for op in (fold, fold_reference):
        with pytest.raises(ValueError, match=rf"accept_lens.*0\.\.2.*{accept}"):
            fold_problem(problem, lengths, op)
    for scatter in (scatter_conv, scatter_conv_reference):
        with pytest.raises(ValueError, match=rf"accept_lens.*0\.\.2.*{accept}"):
            scatter(
                problem["conv_state"][None], problem["conv_window"][None], slots=problem.slots, accept_lens=lengths,
                draft_tokens=2,
            )  # fmt: skip
    for name in problem.buffers:
        assert_same_bits(problem.whole(name), before.whole(name), name)


def test_A2_accept_beyond_the_ring_is_refused_and_never_read(device: str) -> None:
    """L = 2, T = 3: accept 3 would read the next head's records."""
    problem = make_problem(Case(B=2, T=3, H=1, HV=2, K=64, length=2), device).run(verify_unfused)
    lengths = torch.tensor([2, 3], device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match="accept_lens"):
            fold_problem(problem, lengths)
    errors = new_error_counts(device)
    with host_checks(False):
        outcome = fold_problem(problem, lengths, errors=errors)
    valid = fold_problem(problem, torch.tensor([2, 0], device=device))
    assert_same_bits(outcome.whole("ssm_state"), valid.whole("ssm_state"), "state")
    assert errors.tolist()[ErrorKind.ACCEPT] == 1


@interpreter_only
def test_A2_fold_reads_only_the_accepted_records_of_its_slot() -> None:
    problem = verified(THREE, "cpu")
    lengths = [1, 100, 2]
    own = problem.fork()
    with host_checks(False), record_accesses() as accesses:
        fold(
            own["ssm_state"][None], with_layers(own.ring), shape=own.shape, slots=own.slots,
            accept_lens=torch.tensor(lengths), draft_tokens=2,
        )  # fmt: skip
    for name in RING:
        counts = accesses.loaded(own[name])
        for row, length in enumerate([1, 0, 2]):
            slot = int(own.slots[row])
            assert (counts[slot, :, :length] > 0).all(), name
            counts[slot, :, :length] = 0
        assert not counts.any(), f"{name}: records outside the accepted prefixes were read"


@pytest.mark.parametrize("lane", LANES)
def test_A3_a_request_in_slot_0_advances(lane: str, device: str) -> None:
    """Slot 0 is an ordinary slot, through the pool and through every public op."""
    streams = Streams.make(Case(B=1, T=2, H=1, HV=1, K=64), layers=1, length=6, device=device)
    at_zero, elsewhere = Decoder(streams, [0], lane), Decoder(streams, [2], lane)
    for accept in (2, 1, 2):
        for ours, theirs in zip(at_zero.round(2, [accept]), elsewhere.round(2, [accept]), strict=True):
            assert_same_bits(ours, theirs, "output")
    for name in ("ssm_state", "conv_state"):
        ours, theirs = getattr(at_zero.pool, name), getattr(elsewhere.pool, name)
        assert_same_bits(ours[:, 0], theirs[:, 2], name)
        start = streams.ssm_state if name == "ssm_state" else streams.conv_state
        assert not torch.equal(ours[:, 0], start[0]), "slot 0 has not advanced"


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
def test_A3_slot_0_is_committed_by_every_op(reference: bool, device: str) -> None:
    problem = verified(Case(B=1, T=2, H=1, HV=1, K=64, spare_slots=2), device)
    old = int(problem.slots[0])
    for name in ("conv_state", "ssm_state", *RING):
        problem[name][0] = problem[name][old].clone()
    problem.slots = torch.zeros(1, dtype=torch.int32, device=device)
    for outcome in commit_all(problem, torch.tensor([2], device=device), reference=reference).values():
        for name in ("conv_state", "ssm_state"):
            assert not torch.equal(outcome[name][0], problem[name][0])


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("case", params([Case(B=1, T=4, H=1, HV=2, K=64)], [replace(GPU_CASES[5], B=2, padded=())]))
def test_A4_rounds_of_changing_length(case: Case, lane: str, device: str) -> None:
    """T=4 accept 3, T=1, T=4 accept 4, T=4 accept 1, over 3 layers: state, conv and next output as decoded plainly."""
    rounds = [(4, 3), (1, 1), (4, 4), (4, 1)]
    total = sum(accept for _, accept in rounds)
    streams = Streams.make(case, layers=3, length=total + 1, device=device)
    decoder, plain = Decoder(streams, [2, 1][: case.B], lane), Decoder(streams, [0, 3][: case.B], lane)
    for T, accept in rounds:
        decoder.round(T, [accept] * case.B)
    plain_decode(plain, [total] * case.B)
    for name in ("ssm_state", "conv_state"):
        ours, theirs = getattr(decoder.pool, name), getattr(plain.pool, name)
        assert_same_bits(ours[:, decoder.slots], theirs[:, plain.slots], name)
    for ours, theirs in zip(decoder.verify(1, [1] * case.B), plain.verify(1, [1] * case.B), strict=True):
        assert_same_bits(ours, theirs, "next output")


@pytest.mark.parametrize("lane", LANES)
def test_A5_each_mode_commits_without_the_other_ones_buffers(lane: str, device: str) -> None:
    streams = Streams.make(Case(B=2, T=2, H=1, HV=1, K=64), layers=2, length=4, device=device)
    decoder = Decoder(streams, [1, 0], lane)
    if lane_mode(lane) == "ring":
        assert decoder.pool.snapshots is None
        assert decoder.pool.ring is not None
    else:
        assert decoder.pool.ring is None
        assert decoder.pool.snapshots is not None
    before = decoder.pool.ssm_state[:, :2].clone()
    decoder.round(2, [1, 2])
    none = torch.full((2,), -1, dtype=torch.int32, device=device)
    decoder.verify(2, [2, 2])
    decoder.pool.commit(torch.tensor([2, 2], device=device), track_slots=none, track_steps=none)
    assert decoder.pool.ssm_state[:, :2].isfinite().all()
    assert not torch.equal(decoder.pool.ssm_state[:, :2], before)


def test_a_commit_needs_a_verified_round() -> None:
    """A record that was not written in this round is a stale one; the pool says which layers are missing."""
    pool = StatePool(KdaShape(1, 1, 64, 64), num_layers=2, num_slots=1, max_batch=1, draft_tokens=1, mode="ring")
    with pytest.raises(RuntimeError, match="begin"):
        pool.commit(torch.tensor([1]))
    pool.begin(torch.tensor([0]), 1)
    with pytest.raises(RuntimeError, match=r"layers \[0, 1\]"):
        pool.commit(torch.tensor([1]))
