"""What a token's record in the ring takes."""

from __future__ import annotations

import math

from . import HEAD_DIMS, Values
from .source import TIMEOUT, values_of


class RingBytes:
    """Bytes of the ring per v head and step, 16-bit activations, H = HV: k, v, log-gate and beta."""

    params = (list(HEAD_DIMS),)
    param_names = ("K = V",)
    unit = "bytes"
    version = "1"

    def setup_cache(self) -> Values:
        """(K,) -> bytes."""
        return values_of("memory")

    setup_cache.timeout = TIMEOUT  # type: ignore[attr-defined]

    def track_head_step(self, cells: Values, head_dim: int) -> float:
        """The bytes, NaN where nobody said them."""
        return cells.get((head_dim,), math.nan)
