"""Fused against unfused in the same interleaved run: drift of the machine cancels out."""

from __future__ import annotations

import math

from . import BATCH_SIZES, DRAFT_TOKENS, Values
from .ring_latency import VerifySuite


class FusedOverUnfused(VerifySuite):
    """Latency of fused+ring over that of unfused+ring: below 1 fused wins, and a fall is an improvement."""

    params = (list(DRAFT_TOKENS), list(BATCH_SIZES))
    param_names = ("T", "B")
    unit = "ratio"
    version = "1"  # raise when the way of measuring changes: older values are then no longer compared

    def track_ring(self, cells: Values, draft_tokens: int, batch: int) -> float:
        """The ratio, NaN where a lane was not measured."""
        fused = cells.get(("fused+ring", draft_tokens, batch), math.nan)
        return fused / cells.get(("unfused+ring", draft_tokens, batch), math.nan)
