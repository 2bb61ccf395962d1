"""Latency of a whole round: verify on every layer, then one commit for all of them."""

from __future__ import annotations

import math

from . import BATCH_SIZES, DRAFT_TOKENS, ROUND_LANES, Values
from .source import TIMEOUT, values_of


class RoundLatency:
    """Microseconds per layer of a round that accepts 3 tokens, L2-cold."""

    params = (list(ROUND_LANES), list(DRAFT_TOKENS), list(BATCH_SIZES))
    param_names = ("lane", "T", "B")
    unit = "us per layer"
    version = "1"

    def setup_cache(self) -> Values:
        """(lane, T, B) -> us per layer."""
        return values_of("round")

    setup_cache.timeout = TIMEOUT  # type: ignore[attr-defined]

    def track_round(self, cells: Values, lane: str, draft_tokens: int, batch: int) -> float:
        """Median of the cell, NaN where it was not measured."""
        return cells.get((lane, draft_tokens, batch), math.nan)
