"""Latency of verify in each ring lane, and the base of every suite that `kda sweep` of verify fills."""

from __future__ import annotations

import math

from . import BATCH_SIZES, DRAFT_TOKENS, LANES, Values
from .source import TIMEOUT, values_of


class VerifySuite:
    """Base of the suites of verify: one `setup_cache` for all of them, so that a live sweep runs once."""

    def setup_cache(self) -> Values:
        """(lane, T, B) -> us per layer; asv hands it to each benchmark and runs this once."""
        return values_of("verify")

    setup_cache.timeout = TIMEOUT  # type: ignore[attr-defined]


class RingLatency(VerifySuite):
    """Microseconds per layer, L2-cold, of a lane's fastest launch configuration; asv's "lower is better" holds."""

    params = (list(LANES), list(DRAFT_TOKENS), list(BATCH_SIZES))
    param_names = ("lane", "T", "B")
    unit = "us per layer"
    version = "1"  # raise when the way of measuring changes: older values are then no longer compared

    def track_verify(self, cells: Values, lane: str, draft_tokens: int, batch: int) -> float:
        """Median of the cell, NaN where it was not measured."""
        return cells.get((lane, draft_tokens, batch), math.nan)
