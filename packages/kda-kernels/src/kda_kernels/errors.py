"""Faults that only the device can see: counted there, read by the host when it likes."""

from __future__ import annotations

from enum import IntEnum

import torch


class ErrorKind(IntEnum):
    """Index into the error-count tensor. A counted row was treated as padded: nothing read or written through it."""

    SLOT = 0
    """A slot below -1 or not in the pool."""
    ROW = 1
    """A window or snapshot row outside its buffer."""
    ACCEPT = 2
    """An accept length below 0, or above the draft tokens, the ring length or the request's own length."""
    TRACK_SLOT = 3
    """A tracking slot below -1 or not in the pool; only the tracking copy is left out."""
    LENGTH = 4
    """A range of tokens in ``starts`` that is negative, longer than the draft tokens, or outside the batch."""
    PARENT = 5
    """A request in whose ``parents`` a token comes before its parent, or is its own."""


def new_error_counts(device: torch.device | str) -> torch.Tensor:
    """Zeroed int32 [len(ErrorKind)] counters to pass as ``errors``."""
    return torch.zeros(len(ErrorKind), dtype=torch.int32, device=device)


def describe_errors(counts: torch.Tensor) -> str | None:
    """A sentence naming every non-zero count, or None. Copies ``counts`` to the host, which waits for the device."""
    found = [f"{kind.name.lower()}: {n}" for kind, n in zip(ErrorKind, counts.tolist(), strict=True) if n]
    return "rows treated as padded because of out-of-range values (" + ", ".join(found) + ")" if found else None
