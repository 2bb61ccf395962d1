"""Validity predicates of `flush` and `advance`, the commit of fold on verify; see `kda_kernels.checks`."""

from __future__ import annotations

import torch

from kda_kernels._launch import device_reason
from kda_kernels.batch_checks import accept_reason, starts_reason
from kda_kernels.buffers import PendingFold, Ring
from kda_kernels.checking import disjoint_reason, errors_reason, index_reason, tensor_reason, typed
from kda_kernels.commit_checks import state_and_ring_reason
from kda_kernels.pending_checks import BANKS, pending_reason
from kda_kernels.shapes import KdaShape


def _track_reason(
    track_slots: torch.Tensor | None, track_steps: torch.Tensor | None, slots: torch.Tensor, num_slots: int
) -> str | None:
    if (track_slots is None) != (track_steps is None):
        return "track_slots and track_steps must be given together, got only one of them"
    if track_slots is None or track_steps is None:
        return None
    batch, low, high = slots.shape[0], torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return (
        index_reason("track_slots", track_slots, batch, slots.device, -1, num_slots - 1, unique=True)
        or disjoint_reason("track_slots", track_slots, "slots", slots)
        # Any step is allowed: one that is not in the accepted prefix is not written.
        or index_reason("track_steps", track_steps, batch, slots.device, low, high)
    )


def flush_reason(
    ssm_state: torch.Tensor,
    ring: Ring,
    pending: PendingFold,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    needs_kernels: bool = True,
) -> str | None:
    """Why a flush of these arguments is refused, or None. Arguments as `kda_kernels.flush`."""
    typed("ssm_state", ssm_state, torch.Tensor)
    typed("ring", ring, Ring)
    typed("shape", shape, KdaShape)
    typed("pending", pending, PendingFold)
    typed("slots", slots, torch.Tensor)
    reason = state_and_ring_reason(ssm_state, ring, shape, BANKS, needs_kernels)
    if reason:
        return reason
    device, (layers, num_slots) = ssm_state.device, ssm_state.shape[:2]
    if slots.ndim != 1:
        return f"slots must have shape [B], got {list(slots.shape)}"
    return (
        pending_reason(pending, shape, device, (layers, num_slots))
        or index_reason("slots", slots, slots.shape[0], device, -1, num_slots - 1, unique=True)
        or _track_reason(track_slots, track_steps, slots, num_slots)
        or errors_reason(errors, device)
    )


def advance_reason(
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
    needs_kernels: bool = True,
) -> str | None:
    """Why an advance of these arguments is refused, or None. Arguments as `kda_kernels.advance`."""
    typed("pending", pending, PendingFold)
    typed("slots", slots, torch.Tensor)
    for size, value in (("draft_tokens", draft_tokens), ("ring_length", ring_length)):
        typed(size, value, int)
        if value < 1:
            return f"{size} must be at least 1, got {value}"
    typed("pending.parity", pending.parity, torch.Tensor)
    device = pending.parity.device
    if reason := device_reason(device) if needs_kernels else None:
        return reason
    if pending.parity.ndim != 1:
        return f"pending.parity must have shape [slots], got {list(pending.parity.shape)}"
    if slots.ndim != 1:
        return f"slots must have shape [B], got {list(slots.shape)}"
    num_slots, batch = pending.parity.shape[0], slots.shape[0]
    for name in ("parity", "pending", "epoch"):
        reason = tensor_reason(f"pending.{name}", getattr(pending, name), (num_slots,), (torch.int32,), device, 1)
        if reason:
            return reason
    return (
        index_reason("slots", slots, batch, device, -1, num_slots - 1, unique=True)
        or index_reason("accept_lens", accept_lens, batch, device, 0, min(draft_tokens, ring_length))
        or (None if starts is None else starts_reason(starts, batch, draft_tokens, None, device))
        or (None if starts is None else accept_reason("accept_lens", accept_lens, starts, 0))
        or _track_reason(track_slots, track_steps, slots, num_slots)
        or errors_reason(errors, device)
    )
