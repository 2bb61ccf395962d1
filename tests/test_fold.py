"""Folding any accepted prefix of the ring gives the snapshot of that step bit for bit; scatters copy it exactly."""

from __future__ import annotations

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
)
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem
from tests.support.commits import expected_states, fold_problem, verified
from tests.support.grids import GPU_CASES, INTERPRETER_CASES, config_id, every_config, params
from tests.support.ops import RING

LARGE = torch.iinfo(torch.int32).max


@pytest.mark.parametrize("case", params(INTERPRETER_CASES[:4], GPU_CASES[::2]))
def test_fold_of_every_prefix_is_that_snapshot(case: Case, device: str) -> None:
    problem = verified(case, device)
    for accept in range(case.T + 1):
        # Rows accept different lengths; row i of round `accept` takes accept + i, cyclically, so 0..T all occur.
        lengths = [(accept + i) % (case.T + 1) for i in range(case.B)]
        outcome = fold_problem(problem, torch.tensor(lengths, dtype=torch.int32, device=device))
        assert_same_bits(outcome.whole("ssm_state"), expected_states(problem, lengths).whole, f"accept {lengths}")
        for name in RING:
            assert_same_bits(outcome.whole(name), problem.whole(name), f"{name} after fold")


FOLD_CASE = Case(B=1, T=3, H=1, HV=2, K=64)
CONFIGS = [LaunchConfig(block_v=8), LaunchConfig(block_v=32, num_warps=1)]
EXTREMES = [LaunchConfig(block_v=v, num_warps=w) for v, w in ((8, 8), (64, 1), (64, 8))]
GPU_FOLD_CASE = Case(B=2, T=3, H=2, HV=4, K=128)


@pytest.mark.parametrize(
    ("case", "config"),
    [pytest.param(FOLD_CASE, config, id=config_id(config)) for config in CONFIGS]
    + [pytest.param(GPU_FOLD_CASE, c, id="K128-" + config_id(c), marks=pytest.mark.gpu) for c in every_config(128)]
    + [pytest.param(FOLD_CASE, c, id="K64-" + config_id(c), marks=pytest.mark.gpu) for c in EXTREMES],
)
def test_every_configuration_folds_to_the_same_bits(case: Case, config: LaunchConfig, device: str) -> None:
    problem = verified(case, device)
    lengths = [case.T] * case.B
    outcome = fold_problem(problem, torch.tensor(lengths, device=device), config=config)
    assert_same_bits(outcome.whole("ssm_state"), expected_states(problem, lengths).whole, "ssm_state")


@pytest.mark.parametrize("case", params(INTERPRETER_CASES[:2], GPU_CASES[::14]))
def test_scatters_copy_the_accepted_step(case: Case, device: str) -> None:
    """Snapshot and window scatter, by row, into live slots only; also with ``rows`` a permutation."""
    problem = verified(case, device)
    lengths = [(1 + i) % (case.T + 1) for i in range(case.B)]
    accept_lens = torch.tensor(lengths, device=device)
    for reverse in (False, True):
        rows = torch.arange(case.B - 1, -1, -1, device=device) if reverse else None
        outcome = problem.fork()
        common: dict[str, Any] = dict(slots=problem.slots, accept_lens=accept_lens, draft_tokens=case.T, rows=rows)
        scatter_snapshots(outcome["ssm_state"][None], Snapshots(outcome["snapshots"][None]), **common)
        scatter_conv(outcome["conv_state"][None], outcome["conv_window"][None], **common)
        states, windows = problem.buffers["ssm_state"].clone(), problem.buffers["conv_state"].clone()
        for i in problem.live():
            row, slot = case.B - 1 - i if reverse else i, int(problem.slots[i])
            if lengths[i] > 0:
                states.view[slot] = problem["snapshots"][row, lengths[i] - 1]
                windows.view[slot] = problem["conv_window"][row, lengths[i] - 1]
        assert_same_bits(outcome.whole("ssm_state"), states.whole, "ssm_state")
        assert_same_bits(outcome.whole("conv_state"), windows.whole, "conv_state")
        for name in ("snapshots", "conv_window"):
            assert_same_bits(outcome.whole(name), problem.whole(name), name)


def test_scatters_equal_their_references(device: str) -> None:
    """Copies are exact, so here the torch reference must agree in every bit, tracking included."""
    problem = verified(Case(B=3, T=2, H=1, HV=1, K=64, padded=(1,), spare_slots=3), device)
    free = sorted(set(range(6)) - set(problem.slots.tolist()))
    common: dict[str, Any] = dict(
        slots=problem.slots, accept_lens=torch.tensor([2, 1, 1], device=device), draft_tokens=2,
        track_slots=torch.tensor([free[0], -1, free[1]], device=device),
        track_steps=torch.tensor([0, 0, 1], device=device),
    )  # fmt: skip
    ours, reference = problem.fork(), problem.fork()
    scatter_snapshots(ours["ssm_state"][None], Snapshots(ours["snapshots"][None]), **common)
    scatter_conv(ours["conv_state"][None], ours["conv_window"][None], **common)
    scatter_snapshots_reference(reference["ssm_state"][None], Snapshots(reference["snapshots"][None]), **common)
    scatter_conv_reference(reference["conv_state"][None], reference["conv_window"][None], **common)
    for name in ("ssm_state", "conv_state"):
        assert_same_bits(ours.whole(name), reference.whole(name), name)
        assert not torch.equal(ours.whole(name).nan_to_num(), problem.whole(name).nan_to_num())


class TestTracking:
    """A6: a second slot receives the state after a chosen step of the accepted prefix."""

    CASES = params([Case(B=3, T=3, H=1, HV=2, K=64, spare_slots=3, padded=(2,))], [GPU_CASES[6]])

    @staticmethod
    def targets(problem: Problem) -> list[int]:
        """Free slots, one for each batch position."""
        used = set(problem.slots.tolist())
        return [slot for slot in range(problem["ssm_state"].shape[0]) if slot not in used][: problem.case.B]

    @pytest.mark.parametrize("case", CASES)
    def test_A6_arrays_absent_or_all_minus_one_write_nothing_else(self, case: Case, device: str) -> None:
        problem = verified(case, device)
        accept = torch.full((case.B,), case.T, device=device)
        absent = fold_problem(problem, accept)
        none = torch.full((case.B,), -1, device=device)
        for steps in (none, torch.zeros_like(none)):
            outcome = fold_problem(problem, accept, track_slots=none, track_steps=steps)
            assert_same_bits(outcome.whole("ssm_state"), absent.whole("ssm_state"), "ssm_state")

    @pytest.mark.parametrize("case", CASES)
    def test_A6_mixed_steps(self, case: Case, device: str) -> None:
        """Row 0 tracks step 0, row 1 its last step, the padded row asks too and gets nothing."""
        problem = verified(case, device)
        T, targets = case.T, self.targets(problem)
        tracked = [targets[i % len(targets)] if i < 2 else -1 for i in range(case.B)]
        tracked[2] = targets[-1]  # the padded row of both cases
        steps, lengths = [0, T - 1, *[0] * (case.B - 2)], [T] * case.B
        outcome = fold_problem(
            problem, torch.tensor(lengths, device=device),
            track_slots=torch.tensor(tracked, dtype=torch.int32, device=device),
            track_steps=torch.tensor(steps, dtype=torch.int32, device=device),
        )  # fmt: skip
        expected = expected_states(problem, lengths)
        for row in (0, 1):
            expected.view[tracked[row]] = problem["snapshots"][row, steps[row]]
        assert_same_bits(outcome.whole("ssm_state"), expected.whole, "ssm_state")

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("step", [1, 2, -1, LARGE, 2**32], ids=str)
    def test_A6_step_outside_the_accepted_prefix_is_not_written(self, case: Case, step: int, device: str) -> None:
        problem = verified(case, device)
        target = self.targets(problem)[0]
        accept = torch.ones(case.B, dtype=torch.int64, device=device)
        outcome = fold_problem(
            problem, accept,
            track_slots=torch.full((case.B,), target, device=device).where(problem.slots == problem.slots[0], -1),
            track_steps=torch.full((case.B,), step, dtype=torch.int64, device=device),
        )  # fmt: skip
        assert_same_bits(outcome.whole("ssm_state"), expected_states(problem, [1] * case.B).whole, "ssm_state")

    def test_A6_conv_and_snapshot_scatters_track_too(self, device: str) -> None:
        problem = verified(Case(B=2, T=2, H=1, HV=1, K=64, spare_slots=2), device)
        targets = self.targets(problem)
        outcome = problem.fork()
        common: dict[str, Any] = dict(
            slots=problem.slots, accept_lens=torch.tensor([2, 1], device=device), draft_tokens=2,
            track_slots=torch.tensor(targets, device=device), track_steps=torch.tensor([0, 1], device=device),
        )  # fmt: skip
        scatter_snapshots(outcome["ssm_state"][None], Snapshots(outcome["snapshots"][None]), **common)
        scatter_conv(outcome["conv_state"][None], outcome["conv_window"][None], **common)
        for state, source in (("ssm_state", "snapshots"), ("conv_state", "conv_window")):
            expected = problem.buffers[state].clone()
            for row, accept in enumerate((2, 1)):
                expected.view[int(problem.slots[row])] = problem[source][row, accept - 1]
            expected.view[targets[0]] = problem[source][0, 0]  # row 1 asked for step 1 with 1 accepted: not written
            assert_same_bits(outcome.whole(state), expected.whole, state)

    @pytest.mark.parametrize("bad", [4, -2, 2**31 - 1, 2**32])
    def test_A6_slot_outside_the_pool_leaves_out_the_copy_and_is_counted(self, bad: int, device: str) -> None:
        """The request itself commits; only its tracking copy has nowhere to go."""
        problem = verified(Case(B=2, T=2, H=1, HV=1, K=64), device)
        accept = torch.tensor([2, 1], device=device)
        tracking: dict[str, Any] = dict(
            track_slots=torch.tensor([bad, -1], device=device), track_steps=torch.zeros_like(accept)
        )
        if device == "cpu":
            with pytest.raises(ValueError, match=r"track_slots.*-1\.\.3"):
                fold_problem(problem, accept, **tracking)
        for op in (fold, fold_reference):
            errors = new_error_counts(device)
            with host_checks(False):
                outcome = fold_problem(problem, accept, op, errors=errors, **tracking)
            untracked = fold_problem(problem, accept, op)
            assert_same_bits(outcome.whole("ssm_state"), untracked.whole("ssm_state"), "ssm_state")
            assert errors.tolist() == [int(kind is ErrorKind.TRACK_SLOT) for kind in ErrorKind]

    def test_A6_one_of_the_two_arrays_is_refused(self, device: str) -> None:
        problem = verified(Case(B=1, T=1, H=1, HV=1, K=64), device)
        accept = torch.ones(1, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match="track_steps"):
            fold_problem(problem, accept, track_slots=accept)


@pytest.mark.parametrize("case", params(INTERPRETER_CASES[:2], GPU_CASES[4:7:2]))
def test_fold_reference_is_close(case: Case, device: str) -> None:
    """The torch fold sums in another order: equal to a few fp32 ulps of the state's magnitude, not to the bit."""
    problem = verified(case, device)
    accept = torch.full((case.B,), case.T, device=device)
    ours, reference = fold_problem(problem, accept), fold_problem(problem, accept, fold_reference)
    for row in problem.live():
        slot = int(problem.slots[row])
        # Two runs of T steps, each with K-term sums of relative error (K/8 + 8) * 2^-24 (tests/support/bounds.py).
        tolerance = 4 * case.T * (case.K / 8 + 8) * 2.0**-24 * float(ours["ssm_state"][slot].abs().max())
        torch.testing.assert_close(ours["ssm_state"][slot], reference["ssm_state"][slot], rtol=0, atol=tolerance)
