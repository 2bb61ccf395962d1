"""Committing a `Problem`: verified once in both state modes, folded, and the states that must come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kda_kernels import Ring, fold, verify_fused, verify_unfused
from tests.support.cases import Case, Guarded, Problem, make_problem


def with_layers(ring: Ring) -> Ring:
    """A ring of one layer with the leading [layers] dimension."""
    return Ring(ring.raw_v[None], ring.raw_k[None], ring.g[None], ring.beta[None])


def fold_problem(
    problem: Problem, accept_lens: torch.Tensor, op: Callable[..., None] = fold, **options: Any
) -> Problem:
    """``op`` on a fork of a verified problem's state and ring; the fork."""
    outcome = problem.fork()
    op(
        outcome["ssm_state"][None], with_layers(outcome.ring), shape=outcome.shape, slots=outcome.slots,
        accept_lens=accept_lens, draft_tokens=outcome.case.T, **options,
    )  # fmt: skip
    return outcome


def verified(case: Case, device: str) -> Problem:
    """A problem whose ring and snapshots both hold the same verify."""
    problem = make_problem(case, device)
    ring, snapshots = problem.run(verify_unfused, "ring"), problem.run(verify_fused, "snapshots")
    ring.buffers["snapshots"] = snapshots.buffers["snapshots"]
    return ring


def expected_states(problem: Problem, accept_lens: list[int]) -> Guarded:
    """The state buffer with each live slot replaced by the snapshot of its last accepted step."""
    state = problem.buffers["ssm_state"].clone()
    for row in problem.live():
        if accept_lens[row] > 0:
            state.view[int(problem.slots[row])] = problem["snapshots"][row, accept_lens[row] - 1]
    return state
