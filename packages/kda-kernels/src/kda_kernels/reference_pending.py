"""Plain-torch reference of fold on verify's commit; its verify is `verify_reference`'s."""

from __future__ import annotations

import torch

from kda_kernels import flush_checks
from kda_kernels.buffers import PendingFold, Ring
from kda_kernels.checking import refuse
from kda_kernels.reference import commits, replay_pending, usable_pending, usable_slot
from kda_kernels.shapes import KdaShape


@torch.no_grad()
def flush_reference(
    ssm_state: torch.Tensor,
    ring: Ring,
    pending: PendingFold,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> None:
    """`kda_kernels.flush` in plain torch."""
    reason = flush_checks.flush_reason(
        ssm_state, ring, pending, shape=shape, slots=slots, track_slots=track_slots, track_steps=track_steps,
        errors=errors, needs_kernels=False,
    )  # fmt: skip
    refuse(reason)
    num_slots = ssm_state.shape[1]
    tracks = [-1] * len(slots) if track_slots is None else track_slots.tolist()
    steps = [-1] * len(slots) if track_steps is None else track_steps.tolist()
    for slot, track, step in zip(slots.tolist(), tracks, steps, strict=True):
        if not usable_slot(slot, num_slots, errors) or not usable_pending(pending, slot, ring.length, errors):
            continue
        tracked = track if 0 <= track < num_slots and step >= 0 else -1
        for layer in range(ssm_state.shape[0]):
            replay_pending(ssm_state[layer], ring.layer(layer), pending.layer(layer), slot, tracked, step)


@torch.no_grad()
def advance_reference(
    pending: PendingFold,
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    ring_length: int,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """`kda_kernels.advance` in plain torch."""
    reason = flush_checks.advance_reason(
        pending, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens, ring_length=ring_length,
        track_slots=track_slots, track_steps=track_steps, errors=errors, starts=starts, needs_kernels=False,
    )  # fmt: skip
    refuse(reason)
    num_slots, limit = pending.parity.shape[0], min(draft_tokens, ring_length)
    for _, slot, accept, track, _ in commits(
        slots, accept_lens, num_slots, limit, errors, track_slots, track_steps, starts, draft_tokens
    ):
        if not usable_pending(pending, slot, ring_length, errors):
            continue
        pending.parity[slot] ^= 1
        pending.pending[slot] = accept
        pending.epoch[slot] += 1
        if track >= 0:
            pending.pending[track] = 0
