"""Validity predicates of pending folds, as verify and flush take them; see `kda_kernels.checks`."""

from __future__ import annotations

import torch

from kda_kernels.buffers import FOLDED_ROWS, PendingFold, Ring, Snapshots
from kda_kernels.checking import pitch_reason, tensor_reason
from kda_kernels.shapes import KdaShape

BANKS = 2
"""Ring slots for each slot of the state."""


def pending_record_reason(record: Ring | Snapshots) -> str | None:
    """Why fold on verify cannot take the record, or None."""
    if not isinstance(record, Ring):
        return "pending must be None with Snapshots: what is pending are records of a Ring"
    return None


def pending_reason(
    pending: PendingFold, shape: KdaShape, device: torch.device, lead: tuple[int | None, ...]
) -> str | None:
    """Why ``pending`` is not one of ``shape``, ``folded`` with leading dimensions ``lead``, or None.

    Its values are the ops' own: no host check looks at them.
    """
    for name in ("parity", "pending", "epoch"):
        reason = tensor_reason(f"pending.{name}", getattr(pending, name), (lead[-1],), (torch.int32,), device, packed=1)
        if reason:
            return reason
    wanted = (*lead, shape.num_v_heads, shape.head_v_dim // FOLDED_ROWS)
    return tensor_reason("pending.folded", pending.folded, wanted, (torch.int32,), device, packed=2) or pitch_reason(
        "pending.folded", pending.folded, len(lead)
    )
