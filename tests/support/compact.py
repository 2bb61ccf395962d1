"""Rounds without conv windows beside rounds with them: same inputs, same slots, states of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kda_kernels import LayerState, gather_conv, gather_conv_reference, new_error_counts, scatter_conv, verify_unfused
from kda_kernels.buffers import KEPT_INPUTS
from tests.support.cases import Case, Guarded, Problem, make_problem

WRITTEN = ("out", "snapshots", "raw_v", "raw_k", "g", "beta", "ssm_state")
"""What a verify of either kind leaves the same."""


def kept_inputs(device: str, seed: int = 3) -> Guarded:
    """What verify is to write, between canaries: [1, 3]."""
    return Guarded.garbage((1, KEPT_INPUTS), torch.int64, device, seed)


def with_pitch(x: torch.Tensor, extra: int, start: int = 0) -> torch.Tensor:
    """``x`` [N, D] as columns ``start`` to ``start + D`` of a wider tensor that holds NaN beside them."""
    wide = x.new_full((x.shape[0], x.shape[1] + extra), float("nan"))
    wide[:, start : start + x.shape[1]] = x
    return wide[:, start : start + x.shape[1]]


def compact(problem: Problem, kept: Guarded) -> LayerState:
    """The problem's state with ``kept`` in place of the windows."""
    return LayerState(problem["conv_state"], problem["ssm_state"], None, kept.view[0])


class Compact:
    """One layer, verified with windows (``plain``) and without (``ours``), on the same mixed_qkv."""

    def __init__(
        self, case: Case, device: str, op: Callable[..., torch.Tensor] = verify_unfused, mode: str = "ring",
        problem: Problem | None = None, **options: Any,
    ) -> None:  # fmt: skip
        problem = make_problem(case, device) if problem is None else problem
        self.case, self.device, self.problem, self.kept = case, device, problem, kept_inputs(device)
        self.options = options
        self.errors = {"plain": new_error_counts(device), "ours": new_error_counts(device)}
        self.plain = problem.run(op, mode, errors=self.errors["plain"], **options)
        self.ours = problem.fork()
        positional, keywords = self.ours.arguments(
            mode, state=compact(self.ours, self.kept), errors=self.errors["ours"], **options
        )
        op(*positional, **keywords)

    @property
    def noted(self) -> list[int]:
        """Address, row pitch and rows that verify noted."""
        return self.kept.view[0].tolist()

    def commit(self, accept_lens: torch.Tensor, reference: bool = False, **keywords: Any) -> tuple[Problem, Problem]:
        """Forks of both sides with the conv states that their commits leave."""
        if "starts" in self.options:
            keywords = {"starts": self.options["starts"], **keywords}
        common: dict[str, Any] = dict(
            {"slots": self.problem.slots, "accept_lens": accept_lens, "draft_tokens": self.case.T}, **keywords
        )
        plain, ours = self.plain.fork(), self.ours.fork()
        scatter_conv(plain["conv_state"][None], plain["conv_window"][None], errors=self.errors["plain"], **common)
        if reference:
            gather_conv_reference(
                ours["conv_state"][None], [self.problem.mixed_qkv], errors=self.errors["ours"], **common
            )
        else:
            gather_conv(ours["conv_state"][None], self.kept.view, errors=self.errors["ours"], **common)
        return plain, ours
