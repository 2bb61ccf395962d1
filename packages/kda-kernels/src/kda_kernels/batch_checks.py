"""Validity predicates of ragged and tree batches; see `kda_kernels.checks`."""

from __future__ import annotations

from itertools import pairwise

import torch

from kda_kernels.buffers import Ring, Snapshots
from kda_kernels.checking import INDEX_DTYPES, host_values, index_reason, tensor_reason
from kda_kernels.shapes import LaunchConfig

INT64_MAX = torch.iinfo(torch.int64).max


def starts_reason(
    starts: torch.Tensor, batch: int, draft_tokens: int, num_tokens: int | None, device: torch.device
) -> str | None:
    """Why ``starts`` are no token offsets of ``batch`` requests within ``num_tokens`` rows (None: any), or None."""
    most = INT64_MAX if num_tokens is None else num_tokens
    if reason := index_reason("starts", starts, batch + 1, device, 0, most):
        return reason
    for i, (start, end) in enumerate(pairwise(host_values(starts) or [])):
        if not 0 <= end - start <= draft_tokens:
            return f"starts must give each request 0..{draft_tokens} tokens, got {end - start} for request {i}"
    return None


def parents_reason(
    parents: torch.Tensor, starts: torch.Tensor | None, slots: torch.Tensor, draft_tokens: int, device: torch.device
) -> str | None:
    """Why ``parents`` are not those of ``slots``' trees, or None. Entries of padding, or past a request, are anything.

    Slots and starts are valid.
    """
    batch = slots.shape[0]
    if reason := tensor_reason("parents", parents, (batch, draft_tokens), INDEX_DTYPES, device, packed=2):
        return reason
    values = host_values(parents.view(-1)) or []
    offsets = None if starts is None else host_values(starts)
    for i, slot in enumerate(host_values(slots) or []):
        length = draft_tokens if offsets is None else offsets[i + 1] - offsets[i]
        for t, parent in enumerate(values[i * draft_tokens : i * draft_tokens + length]):
            if slot >= 0 and not -1 <= parent < t:
                return (
                    f"parents must name an earlier step, or -1 for the committed state: step {t} of request {i} "
                    f"allows -1..{t - 1}, got {parent}"
                )
    return None


def lane_reason(
    starts: torch.Tensor | None, parents: torch.Tensor | None, record: Ring | Snapshots, form: str,
    config: LaunchConfig | None, fused: bool,
) -> str | None:  # fmt: skip
    """Why a verify cannot take the kind of batch, whatever its values, or None."""
    if starts is None and parents is None:
        return None
    name = "starts" if starts is not None else "parents"
    if fused:
        kind = "trees" if parents is not None else "requests of different lengths"
        return f"{name} must be None in the fused lane, which takes no {kind}: call verify_unfused"
    if parents is not None and isinstance(record, Ring):
        return (
            "parents must be None with a Ring: a ring replays a chain, the accepted path of a tree is not its first "
            "records; use Snapshots"
        )
    if parents is not None and form == "chunked":
        return "parents must be None with form='chunked', whose tokens all follow each other: use form='recurrent'"
    if config is not None and config.rows_per_thread is not None:
        return (
            f"config.rows_per_thread={config.rows_per_thread} names a kernel for chains of one length, which takes no "
            f"{name}: use rows_per_thread=None"
        )
    return None


def accept_reason(name: str, ends: torch.Tensor, starts: torch.Tensor, offset: int) -> str | None:
    """Why an accepted prefix ``ends + offset`` is longer than its request, or None. Both are valid by themselves."""
    ranges = pairwise(host_values(starts) or [])
    for i, (end, (first, following)) in enumerate(zip(host_values(ends) or [], ranges, strict=False)):
        length = following - first
        if end + offset > length:
            return f"{name} must be at most {length - offset} for request {i} of {length} tokens, got {end}"
    return None
