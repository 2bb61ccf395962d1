"""What the dispatch gate's decisions cost: the lane it chooses over the best one its table knows, of one run."""

from __future__ import annotations

import math

from . import BATCH_SIZES, DRAFT_TOKENS, FORMS, MODES, Values
from .source import TIMEOUT, values_of


class GateRegret:
    """Time of the chosen lane and configuration over the best: 1 where the gate chose it."""

    params = (list(FORMS), list(MODES), list(DRAFT_TOKENS), list(BATCH_SIZES))
    param_names = ("form", "mode", "T", "B")
    unit = "chosen / best"
    version = "1"

    def setup_cache(self) -> Values:
        """(form, mode, T, B) -> chosen over best."""
        return values_of("regret")

    setup_cache.timeout = TIMEOUT  # type: ignore[attr-defined]

    def track_regret(self, cells: Values, form: str, mode: str, draft_tokens: int, batch: int) -> float:
        """The ratio, NaN where it was not measured: the chunked form has no snapshots."""
        return cells.get((form, mode, draft_tokens, batch), math.nan)
