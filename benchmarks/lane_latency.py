"""Latency of verify in the other lanes: those with snapshots, and the ring lanes in the chunked form."""

from __future__ import annotations

import math

from . import BATCH_SIZES, DRAFT_TOKENS, OTHER_LANES, Values
from .ring_latency import VerifySuite


class LaneLatency(VerifySuite):
    """Microseconds per layer, as in `benchmarks.ring_latency.RingLatency`."""

    params = (list(OTHER_LANES), list(DRAFT_TOKENS), list(BATCH_SIZES))
    param_names = ("lane", "T", "B")
    unit = "us per layer"
    version = "1"

    def track_verify(self, cells: Values, lane: str, draft_tokens: int, batch: int) -> float:
        """Median of the cell, NaN where it was not measured."""
        return cells.get((lane, draft_tokens, batch), math.nan)
