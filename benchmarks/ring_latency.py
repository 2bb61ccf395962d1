"""Latency of verify in each ring lane."""

from __future__ import annotations

import math

from . import BATCH_SIZES, DRAFT_TOKENS, LANES, Cells
from .source import SweepBenchmark


class RingLatency(SweepBenchmark):
    """Microseconds per layer, L2-cold, of a lane's fastest launch configuration; asv's "lower is better" holds."""

    params = (list(LANES), list(DRAFT_TOKENS), list(BATCH_SIZES))
    param_names = ("lane", "T", "B")
    unit = "us per layer"
    version = "1"  # raise when the way of measuring changes: older values are then no longer compared

    def track_verify(self, cells: Cells, lane: str, draft_tokens: int, batch: int) -> float:
        """Median of the cell, NaN where it was not measured."""
        return cells.get((lane, draft_tokens, batch), math.nan)
