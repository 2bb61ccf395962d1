"""What a call costs the host outside CUDA graphs."""

from __future__ import annotations

import math

from . import CALLS, TURNS, Values
from .source import TIMEOUT, values_of


class HostTime:
    """Microseconds of the host from a call to its return, B = 1, T = 4: a first call, and one that equals it."""

    params = (list(CALLS), list(TURNS))
    param_names = ("call", "turn")
    unit = "us per call"
    version = "1"

    def setup_cache(self) -> Values:
        """(call, turn) -> us."""
        return values_of("host-time")

    setup_cache.timeout = TIMEOUT  # type: ignore[attr-defined]

    def track_host(self, cells: Values, call: str, turn: str) -> float:
        """Median over bursts of calls, NaN where it was not measured."""
        return cells.get((call, turn), math.nan)
