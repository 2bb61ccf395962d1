"""Validity predicates of fold and the scatters; see `kda_kernels.checks`."""

from __future__ import annotations

from typing import cast

import torch

from kda_kernels._launch import device_reason, pdl_reason
from kda_kernels.batch_checks import accept_reason, parents_reason, starts_reason
from kda_kernels.buffers import Ring
from kda_kernels.checking import (
    INDEX_DTYPES,
    disjoint_reason,
    dtype_name,
    errors_reason,
    index_reason,
    pitch_reason,
    tensor_reason,
    typed,
)
from kda_kernels.checks import config_reason, ring_reason
from kda_kernels.shapes import ACTIVATION_DTYPES, KdaShape, LaunchConfig

SCATTER_DTYPES = (*ACTIVATION_DTYPES, torch.float32)


def commit_index_reason(
    slots: torch.Tensor, accept_lens: torch.Tensor | None, draft_tokens: int, num_slots: int, limit: int,
    device: torch.device, track_slots: torch.Tensor | None, track_steps: torch.Tensor | None,
    starts: torch.Tensor | None, last_steps: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Why indices of a commit are refused, or None; arguments as those of fold and the scatters."""
    typed("slots", slots, torch.Tensor)
    typed("draft_tokens", draft_tokens, int)
    if draft_tokens < 1:
        return f"draft_tokens must be at least 1, got {draft_tokens}"
    if slots.ndim != 1:
        return f"slots must have shape [B], got {list(slots.shape)}"
    batch = slots.shape[0]
    if accept_lens is not None and last_steps is not None:
        return "accept_lens and last_steps must not be given together: the one counts the tokens that end at the other"
    if accept_lens is None and last_steps is not None:
        name, ends, offset = "last_steps", last_steps, 1
    else:
        name, ends, offset = "accept_lens", cast(torch.Tensor, accept_lens), 0
    reason = (
        index_reason("slots", slots, batch, device, -1, num_slots - 1, unique=True)
        or index_reason(name, ends, batch, device, -offset, limit - offset)
        or (None if starts is None else starts_reason(starts, batch, draft_tokens, None, device))
        or (None if starts is None else accept_reason(name, ends, starts, offset))
    )
    if reason is None and (track_slots is None) != (track_steps is None):
        reason = "track_slots and track_steps must be given together, got only one of them"
    if reason is None and track_slots is not None and track_steps is not None:
        reason = (
            index_reason("track_slots", track_slots, batch, device, -1, num_slots - 1, unique=True)
            or disjoint_reason("track_slots", track_slots, "slots", slots)
            # Any step is allowed: one that is not in the accepted prefix is not written.
            or tensor_reason("track_steps", track_steps, (batch,), INDEX_DTYPES, device, packed=1)
        )
    return reason


def state_and_ring_reason(
    ssm_state: torch.Tensor, ring: Ring, shape: KdaShape, banks: int, needs_kernels: bool
) -> str | None:
    """Why a state of all layers is none of ``shape``, or ``ring`` no ring of so many banks that goes with it."""
    device = ssm_state.device
    reason = (device_reason(device) if needs_kernels else None) or tensor_reason(
        "ssm_state",
        ssm_state,
        (None, None, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim),
        (torch.float32,),
        device,
        packed=3,
    )
    if reason := reason or pitch_reason("ssm_state", ssm_state, 2):
        return reason
    raw_dtype = ring.raw_v.dtype if isinstance(ring.raw_v, torch.Tensor) else torch.bfloat16
    if raw_dtype not in ACTIVATION_DTYPES:
        return f"ring.raw_v must be bfloat16 or float16, got {dtype_name(raw_dtype)}"
    layers, slots = ssm_state.shape[:2]
    return ring_reason(ring, shape, raw_dtype, device, (layers, banks * slots))


def fold_reason(
    ssm_state: torch.Tensor,
    ring: Ring,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
    errors: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    needs_kernels: bool = True,
) -> str | None:
    """Why a fold of these arguments is refused, or None. Arguments as `kda_kernels.fold`."""
    typed("ssm_state", ssm_state, torch.Tensor)
    typed("ring", ring, Ring)
    typed("shape", shape, KdaShape)
    typed("draft_tokens", draft_tokens, int)
    if config is not None:
        typed("config", config, LaunchConfig)
    device = ssm_state.device
    return (
        state_and_ring_reason(ssm_state, ring, shape, 1, needs_kernels)
        or commit_index_reason(
            slots,
            accept_lens,
            draft_tokens,
            ssm_state.shape[1],
            min(draft_tokens, ring.length),
            device,
            track_slots,
            track_steps,
            starts,
        )
        or errors_reason(errors, device)
        or (config_reason(config, device) if config is not None and needs_kernels else None)
    )


def scatter_reason(
    dst: torch.Tensor,
    src: torch.Tensor,
    *,
    names: tuple[str, str] = ("dst", "src"),
    slots: torch.Tensor,
    accept_lens: torch.Tensor | None = None,
    draft_tokens: int,
    rows: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    pdl: bool | None = None,
    last_steps: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    needs_kernels: bool = True,
) -> str | None:
    """Why copying ``src[layer, row, accept - 1]`` to ``dst[layer, slot]`` is refused, or None.

    ``names`` are the caller's names of ``dst`` and ``src`` for the reason. ``dst``: [layers, slots, *entry];
    ``src``: [layers, rows, steps, *entry] of the same dtype. Other arguments as `kda_kernels.scatter_conv`.
    """
    typed(names[0], dst, torch.Tensor)
    typed(names[1], src, torch.Tensor)
    device, entry = dst.device, tuple(dst.shape[2:])
    if pdl is not None:
        typed("pdl", pdl, bool)
    if dst.dtype not in SCATTER_DTYPES:
        return f"{names[0]} must be {' or '.join(map(dtype_name, SCATTER_DTYPES))}, got {dtype_name(dst.dtype)}"
    if dst.ndim < 3:
        return f"{names[0]} must have shape [layers, slots, ...], got {list(dst.shape)}"
    reason = (
        (device_reason(device) if needs_kernels else None)
        or tensor_reason(names[0], dst, (None, None, *entry), (dst.dtype,), device, packed=len(entry))
        or tensor_reason(names[1], src, (dst.shape[0], None, None, *entry), (dst.dtype,), device, packed=len(entry) + 1)
    )
    if reason := reason or pitch_reason(names[0], dst, 2):
        return reason
    reason = commit_index_reason(
        slots, accept_lens, draft_tokens, dst.shape[1], draft_tokens, device, track_slots, track_steps, starts,
        last_steps,
    )  # fmt: skip
    if reason is None and parents is not None:
        if last_steps is None:
            return "parents must be None with accept_lens, which count the tokens of a chain: give last_steps"
        reason = parents_reason(parents, starts, slots, draft_tokens, device)
    if reason:
        return reason
    if src.shape[2] < draft_tokens:
        return f"{names[1]} must hold at least draft_tokens={draft_tokens} steps, got shape {list(src.shape)}"
    if rows is None and src.shape[1] < slots.shape[0]:
        return f"{names[1]} must have a row for each of the {slots.shape[0]} batch positions, got {src.shape[1]} rows"
    return (
        (None if rows is None else index_reason("rows", rows, slots.shape[0], device, 0, src.shape[1] - 1, unique=True))
        or errors_reason(errors, device)
        or (pdl_reason(pdl, device, "pdl") if needs_kernels else None)
    )
