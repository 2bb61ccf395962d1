"""Ragged batches: each request has the bits of a chain of its own, and rows that belong to nobody are zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kda_kernels import (
    ErrorKind,
    LaunchConfig,
    Snapshots,
    fold,
    fold_reference,
    host_checks,
    new_error_counts,
    scatter_conv,
    scatter_conv_reference,
    scatter_snapshots,
    scatter_snapshots_reference,
    verify_fused,
    verify_reason,
    verify_reference,
    verify_unfused,
)
from tests.support.batches import BUFFERS, MODES, chains, offsets, place, poison_unowned, ragged_problem, record_of
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem
from tests.support.commits import expected_states, fold_problem
from tests.support.grids import params
from tests.support.marks import interpreter_only
from tests.support.memory import record_accesses, reversed_programs
from tests.support.ops import RING, Verify

OPS = [pytest.param(verify_unfused, id="unfused"), pytest.param(verify_reference, id="reference")]

SMALL = (
    Case(B=4, T=3, H=1, HV=2, K=64),
    Case(B=4, T=4, H=2, HV=4, K=64, dtype=torch.float16, weight_dtype=torch.float32, lower_bound=-5.0, pitch=8),
    Case(B=4, T=4, H=1, HV=2, K=64, V=128, lower_bound=-5.0, bias=False, length=2),
)
LARGE = (
    Case(B=9, T=8, H=8, HV=8, K=128, lower_bound=-5.0),
    Case(B=70, T=4, H=1, HV=16, K=128),
    Case(B=33, T=6, H=4, HV=8, K=128, dtype=torch.float16, weight_dtype=torch.float32),
)
CASE = SMALL[0]


def mixed_lengths(case: Case) -> list[int]:
    """0, 1, T and what lies between, in a mixed order."""
    return [(case.T, 0, 1, *range(2, case.T))[i % (case.T + 1)] for i in range(case.B)]


def verify_ragged(problem: Problem, op: Verify, mode: str, starts: torch.Tensor, **options: Any) -> Problem:
    return problem.run(op, record_of(mode), starts=starts, **MODES[mode], **options)


def assert_same_buffers(outcome: Problem, expected: Problem) -> None:
    for name in BUFFERS:
        assert_same_bits(outcome.whole(name), expected.whole(name), name)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", params(SMALL, LARGE))
def test_each_request_has_the_bits_of_a_chain_of_its_own(case: Case, mode: str, op: Verify, device: str) -> None:
    """Lengths 0, 1 and T among others, a padded request, leftover rows; NaN where no request has rows."""
    device = place(op, device)
    lengths = mixed_lengths(case)
    starts = offsets(lengths, device)
    problem = ragged_problem(case, device, min(case.B * case.T, int(starts[-1]) + 5), padded=(3,))
    usable = [i for i in range(case.B) if i != 3]
    poison_unowned(problem, starts.tolist(), usable)
    errors = new_error_counts(device)
    outcome = verify_ragged(problem, op, mode, starts, errors=errors)
    assert_same_buffers(outcome, chains(problem, op, mode, starts.tolist(), usable))
    assert not errors.any()


@interpreter_only
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", params(SMALL[:1]))
def test_the_order_of_programs_decides_nothing(case: Case, mode: str) -> None:
    """In the usual order a later program would mend what an earlier one wrote into its rows."""
    starts = offsets([1, 3, 0, 2], "cpu")
    problem = ragged_problem(case, "cpu", 8)
    with reversed_programs():
        outcome = verify_ragged(problem, verify_unfused, mode, starts)
    assert_same_buffers(outcome, chains(problem, verify_unfused, mode, starts.tolist(), [0, 1, 2, 3]))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", MODES)
def test_D5_lengths_4_1_3_and_two_leftover_rows(mode: str, op: Verify, device: str) -> None:
    case, lengths = Case(B=3, T=4, H=1, HV=2, K=64), [4, 1, 3]
    problem = ragged_problem(case, device, 10)
    outcome = verify_ragged(problem, op, mode, offsets(lengths, device))
    assert outcome["out"][:8].isfinite().all()
    assert_same_bits(outcome["out"][8:], torch.zeros_like(outcome["out"][8:]), "leftover output rows")
    for i, length in enumerate(lengths):
        slot = int(problem.slots[i])
        for name in RING:
            assert_same_bits(
                outcome[name][slot, :, length:], problem[name][slot, :, length:], f"{name} past request {i}"
            )
        for name in ("conv_window", "snapshots"):
            assert_same_bits(outcome[name][i, length:], problem[name][i, length:], f"{name} past request {i}")


@interpreter_only
@pytest.mark.parametrize("mode", MODES)
def test_leftover_rows_are_not_read(mode: str) -> None:
    problem = ragged_problem(CASE, "cpu", 12, padded=(0,))
    starts = offsets([3, 2, 0, 1], "cpu")
    with record_accesses() as found:
        verify_ragged(problem, verify_unfused, mode, starts)
    for name in ("mixed_qkv", "a", "b"):
        loaded = found.loaded(getattr(problem, name))
        assert loaded[3:6].all(), f"{name} of live requests is read"
        assert not loaded[:3].any(), f"{name} of the padded request is read"
        assert not loaded[6:].any(), f"{name} of leftover rows is read"


@pytest.mark.parametrize("op", OPS)
def test_offsets_as_int64_and_as_a_slice(op: Verify, device: str) -> None:
    device = place(op, device)
    problem = ragged_problem(CASE, device, 9)
    expected = verify_ragged(problem, op, "ring", offsets([2, 0, 3, 1], device))
    for dtype in (torch.int32, torch.int64):
        longer = torch.cat([torch.tensor([99], device=device), offsets([2, 0, 3, 1, 1], device)]).to(dtype)
        assert_same_buffers(verify_ragged(problem, op, "ring", longer[1:-1]), expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("batch", [0, 2])
def test_a_batch_without_tokens_is_zero_throughout(batch: int, op: Verify, device: str) -> None:
    problem = ragged_problem(CASE, device, 5)
    problem.slots = problem.slots[:batch]
    poison_unowned(problem, [0] * (batch + 1), [])
    outcome = verify_ragged(problem, op, "snapshots", offsets([0] * batch, device))
    assert_same_buffers(outcome, chains(problem, op, "snapshots", [0] * (batch + 1), []))


WRONG = [  # starts, rows, usable requests; draft_tokens is 3
    pytest.param([0, 3, 8, 10], 10, [0, 2], id="too-long"),
    pytest.param([3, 6, 0, 3], 8, [0, 2], id="negative"),
    pytest.param([0, 3, 6, 9], 8, [0, 1], id="past-the-end"),
    pytest.param([-2, 1, 4, 6], 8, [1, 2], id="before-the-beginning"),
    pytest.param([0, 3, 2**31 - 1, 6], 9, [0], id="far-outside"),
    pytest.param([0, 12, 4, 7], 9, [2], id="over-a-neighbour"),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("starts", "num_tokens", "usable"), WRONG)
def test_wrong_ranges_are_counted_and_neighbours_untouched(
    starts: list[int], num_tokens: int, usable: list[int], mode: str, op: Verify, device: str
) -> None:
    device = place(op, device)
    problem = ragged_problem(Case(B=4, T=3, H=1, HV=2, K=64), device, num_tokens)
    problem.slots = problem.slots[:3]
    poison_unowned(problem, starts, usable)
    errors = new_error_counts(device)
    with host_checks(False):
        outcome = verify_ragged(problem, op, mode, torch.tensor(starts, device=device), errors=errors)
    assert_same_buffers(outcome, chains(problem, op, mode, starts, usable))
    assert errors.tolist() == [(3 - len(usable)) * int(kind is ErrorKind.LENGTH) for kind in ErrorKind]


@interpreter_only
@pytest.mark.parametrize(("starts", "num_tokens", "usable"), WRONG)
def test_wrong_ranges_are_refused_on_the_host(starts: list[int], num_tokens: int, usable: list[int]) -> None:
    problem = ragged_problem(Case(B=4, T=3, H=1, HV=2, K=64), "cpu", num_tokens)
    problem.slots = problem.slots[:3]
    for op in (verify_unfused, verify_reference):
        with pytest.raises(ValueError, match=r"^starts must (be within 0\.\.|give each request 0\.\.3 tokens)"):
            verify_ragged(problem, op, "ring", torch.tensor(starts))


REFUSED: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], str]] = {
    "one-offset-short": (lambda s: dict(starts=s[:-1]), r"starts must have shape \[5\], got \[4\]"),
    "float": (lambda s: dict(starts=s.float()), "starts must be int32 or int64, got float32"),
    "strided": (lambda s: dict(starts=torch.stack([s, s], 1)[:, 0]), "starts must be packed"),
    "gluon": (lambda s: dict(starts=s, config=LaunchConfig(32, 4, rows_per_thread=2)), "rows_per_thread=None"),
    "out-of-a-chain": (lambda s: dict(starts=s, out=torch.empty(0)), r"out must have shape \[9, 2, 64\]"),
    "not-a-tensor": (lambda s: dict(starts=s.tolist()), "starts must be a Tensor, got list"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_malformed_offsets_are_refused(what: str, device: str) -> None:
    change, message = REFUSED[what]
    problem = ragged_problem(CASE, device, 9)
    with pytest.raises((ValueError, TypeError), match=message):
        problem.run(verify_unfused, "ring", **change(offsets([2, 0, 3, 1], device)))


def test_the_fused_lane_refuses_and_names_the_one_that_answers(device: str) -> None:
    problem = ragged_problem(CASE, device, 9)
    positional, keywords = problem.arguments("ring", starts=offsets([2, 0, 3, 1], device))
    reason = verify_reason(*positional, **keywords, fused=True)
    assert reason is not None
    assert reason.startswith("starts must be None in the fused lane")
    assert reason.endswith("call verify_unfused")
    assert verify_reason(*positional, **keywords) is None
    with pytest.raises(ValueError, match=r"^starts must be None in the fused lane"):
        verify_fused(*positional, **keywords)


FOLDS = [pytest.param(fold, id="kernel"), pytest.param(fold_reference, id="reference")]


def committed(case: Case, lengths: list[int], device: str) -> tuple[Problem, torch.Tensor]:
    """A ragged batch verified in both state modes, and its offsets."""
    starts = offsets(lengths, device)
    problem = ragged_problem(case, device, int(starts[-1]))
    outcome = verify_ragged(problem, verify_unfused, "ring", starts)
    outcome.buffers["snapshots"] = verify_ragged(problem, verify_unfused, "snapshots", starts).buffers["snapshots"]
    return outcome, starts


@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("case", params(SMALL[:2], LARGE[:2]))
def test_fold_takes_accept_lengths_up_to_each_request(case: Case, op: Any, device: str) -> None:
    """Records past a request's length are of an older round: one that is asked for leaves the slot alone."""
    lengths = mixed_lengths(case)
    problem, starts = committed(case, lengths, device)
    accepts = [min(length + i % 2, case.T) for i, length in enumerate(lengths)]
    too_long = [accept > length for accept, length in zip(accepts, lengths, strict=True)]
    assert any(too_long)
    errors = new_error_counts(device)
    with host_checks(False):
        folded = fold_problem(problem, torch.tensor(accepts, device=device), op, starts=starts, errors=errors)
    kept = [0 if wrong else accept for wrong, accept in zip(too_long, accepts, strict=True)]
    if op is fold:
        assert_same_bits(folded.whole("ssm_state"), expected_states(problem, kept).whole, "states")
    else:
        for i, accept in enumerate(kept):
            slot = int(problem.slots[i])
            assert torch.equal(folded["ssm_state"][slot], problem["ssm_state"][slot]) == (accept == 0)
    assert errors.tolist() == [sum(too_long) * int(kind is ErrorKind.ACCEPT) for kind in ErrorKind]


def scatter_both(problem: Problem, reference: bool, **keywords: Any) -> Problem:
    """Both scatters on a fork of a verified problem; the fork."""
    outcome = problem.fork()
    keywords.update(slots=problem.slots, draft_tokens=problem.case.T)
    conv, states = (
        (scatter_conv_reference, scatter_snapshots_reference) if reference else (scatter_conv, scatter_snapshots)
    )
    conv(outcome["conv_state"][None], outcome["conv_window"][None], **keywords)
    states(outcome["ssm_state"][None], Snapshots(outcome["snapshots"][None]), **keywords)
    return outcome


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize("by", ["accept_lens", "last_steps"])
def test_scatters_take_accept_lengths_up_to_each_request(by: str, reference: bool, device: str) -> None:
    problem, starts = committed(CASE, [3, 0, 1, 2], device)
    ends = torch.tensor([2, 1, 1, 3], device=device) - int(by == "last_steps")
    errors = new_error_counts(device)
    with host_checks(False):
        outcome = scatter_both(problem, reference, **{by: ends}, starts=starts, errors=errors)
    expected = problem.fork()
    for i, step in ((0, 1), (2, 0)):
        slot = int(problem.slots[i])
        expected["conv_state"][slot] = problem["conv_window"][i, step]
        expected["ssm_state"][slot] = problem["snapshots"][i, step]
    assert_same_buffers(outcome, expected)
    assert errors.tolist() == [4 * int(kind is ErrorKind.ACCEPT) for kind in ErrorKind]  # 2 requests, 2 scatters


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
def test_commits_of_wrong_lengths_are_counted(reference: bool, device: str) -> None:
    """One request of 4 tokens where 3 are allowed, one of -4."""
    problem, _ = committed(CASE, [3, 2, 1, 1], device)
    starts = torch.tensor([0, 3, 7, 3, 4], device=device)
    accepts = torch.tensor([1, 1, 0, 1], device=device)
    errors = new_error_counts(device)
    with host_checks(False):
        scattered = scatter_both(problem, reference, accept_lens=accepts, starts=starts, errors=errors)
        folded = fold_problem(problem, accepts, fold_reference if reference else fold, starts=starts, errors=errors)
    for i in (1, 2):
        slot = int(problem.slots[i])
        for outcome in (scattered, folded):
            for name in ("conv_state", "ssm_state"):
                assert_same_bits(outcome[name][slot], problem[name][slot], name)
    assert errors.tolist() == [6 * int(kind is ErrorKind.LENGTH) for kind in ErrorKind]  # 2 requests, 3 commits


@interpreter_only
def test_accept_lengths_past_a_request_are_refused_on_the_host() -> None:
    problem, starts = committed(CASE, [3, 0, 1, 2], "cpu")
    accepts = torch.tensor([2, 0, 2, 1])
    for op in (fold, fold_reference):
        with pytest.raises(ValueError, match="accept_lens must be at most 1 for request 2 of 1 tokens, got 2"):
            fold_problem(problem, accepts, op, starts=starts)
    for reference in (False, True):
        with pytest.raises(ValueError, match="accept_lens must be at most 1 for request 2 of 1 tokens, got 2"):
            scatter_both(problem, reference, accept_lens=accepts, starts=starts)
        with pytest.raises(ValueError, match="last_steps must be at most 0 for request 2 of 1 tokens, got 1"):
            scatter_both(problem, reference, last_steps=accepts - 1, starts=starts)
