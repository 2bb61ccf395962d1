"""Latency of the commit alone, from rings and from snapshots."""

from __future__ import annotations

import math

from . import BATCH_SIZES, DRAFT_TOKENS, MODES, Values
from .source import TIMEOUT, values_of


class CommitLatency:
    """Microseconds per layer of the all-layer commit of 3 tokens, L2-cold."""

    params = (list(MODES), list(DRAFT_TOKENS), list(BATCH_SIZES))
    param_names = ("mode", "T", "B")
    unit = "us per layer"
    version = "1"

    def setup_cache(self) -> Values:
        """(mode, T, B) -> us per layer."""
        return values_of("commit")

    setup_cache.timeout = TIMEOUT  # type: ignore[attr-defined]

    def track_commit(self, cells: Values, mode: str, draft_tokens: int, batch: int) -> float:
        """Median of the cell, NaN where it was not measured."""
        return cells.get((mode, draft_tokens, batch), math.nan)
