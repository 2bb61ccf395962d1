"""Rounds of fold on verify beside rounds that fold at commit: same inputs, same slots, states of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kda_kernels import (
    LayerState,
    PendingFold,
    Ring,
    advance,
    flush,
    fold,
    new_error_counts,
    scatter_conv,
    verify_unfused,
)
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.commits import with_layers

NAN = float("nan")


def two_banks(case: Case, slots: int, device: str) -> Ring:
    """A ring of two banks that holds NaN."""
    ring = Ring.allocate(case.shape, slots=2 * slots, length=case.L, dtype=case.dtype, device=device)
    for tensor in vars(ring).values():
        tensor.fill_(NAN)
    return ring


def layered(pending: PendingFold) -> PendingFold:
    """A group of one layer with the leading [layers] dimension."""
    return PendingFold(pending.parity, pending.pending, pending.epoch, pending.folded[None])


class Rounds:
    """Both sides of one layer. ``ours`` folds on verify, ``plain`` at commit."""

    def __init__(self, case: Case, device: str, op: Callable[..., torch.Tensor] = verify_unfused) -> None:
        self.case, self.device, self.op = case, device, op
        self.plain = make_problem(case, device)
        self.ours = self.plain.fork()
        self.slots = self.plain.slots
        self.ring = two_banks(case, case.B + case.spare_slots, device)
        self.pending = PendingFold.allocate(case.shape, slots=case.B + case.spare_slots, device=device)
        self.errors = new_error_counts(device)
        self.generator = torch.Generator(device).manual_seed(case.seed)

    def draw(self) -> None:
        """Other inputs than those of the round before, the same on both sides."""
        for name in ("mixed_qkv", "a", "b"):
            tensor = getattr(self.plain, name)
            tensor.copy_(torch.randn(tensor.shape, generator=self.generator, device=self.device))

    def arguments(self, side: Problem, **overrides: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        if side is self.ours:
            overrides = {"record": self.ring, "pending": self.pending, "errors": self.errors, **overrides}
        state = LayerState(side["conv_state"], side["ssm_state"], side["conv_window"])
        return side.arguments("ring", **{"state": state, "mixed_qkv": self.plain.mixed_qkv, "a": self.plain.a,
                                         "b": self.plain.b, "slots": self.slots, **overrides})  # fmt: skip

    def verify(self, **overrides: Any) -> None:
        """Verify on both sides; outputs and windows must be equal. ``overrides`` are of our side's call."""
        changes = {name: value for name, value in overrides.items() if name in ("form", "starts")}
        for side, given in ((self.plain, changes), (self.ours, overrides)):
            positional, keywords = self.arguments(side, **given)
            self.op(*positional, **keywords)
        for name in ("out", "conv_window"):
            assert_same_bits(self.ours.whole(name), self.plain.whole(name), name)

    def commit(
        self, accept_lens: Sequence[int], op: Callable[..., None] = advance, starts: torch.Tensor | None = None,
        **track: Any,
    ) -> None:  # fmt: skip
        accepts = torch.tensor(accept_lens, dtype=torch.int32, device=self.device)
        common: dict[str, Any] = dict(slots=self.slots, accept_lens=accepts, draft_tokens=self.case.T, starts=starts)
        for side in (self.plain, self.ours):
            scatter_conv(side["conv_state"][None], side["conv_window"][None], **common, **track)
        fold(self.plain["ssm_state"][None], with_layers(self.plain.ring), shape=self.case.shape, **common, **track)
        op(self.pending, **common, ring_length=self.case.L, errors=self.errors, **track)
        if track:
            self.flush(**track)

    def flush(self, op: Callable[..., None] = flush, **options: Any) -> None:
        op(
            self.ours["ssm_state"][None], with_layers(self.ring), layered(self.pending), shape=self.case.shape,
            **{"slots": self.slots, "errors": self.errors, **options},
        )  # fmt: skip

    def assert_same_states(self) -> None:
        """Both sides hold the same committed state, canaries and other slots included."""
        for name in ("conv_state", "ssm_state"):
            assert_same_bits(self.ours.whole(name), self.plain.whole(name), name)

    def round(self, accept_lens: Sequence[int], **overrides: Any) -> None:
        self.draw()
        self.verify(**overrides)
        self.commit(accept_lens)
