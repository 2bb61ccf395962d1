"""Questions to the dispatch gate, as its tests ask them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kda_backend import Target
from kda_backend.gate import Decision, decide
from tests.support.tables import H200, SHAPE

SM90 = Target("cuda", 90)
H100 = "NVIDIA H100 80GB HBM3"


def ask(packaged: Path, *, environ: dict[str, str] | None = None, **changes: Any) -> Decision:
    """What the gate decides for a lone request of `SHAPE` on an H200, by the tables in ``packaged``."""
    given: dict[str, Any] = dict(
        shape=SHAPE, mode="ring", batch=1, draft_tokens=4, device_name=H200, target=SM90, tables=str(packaged),
        environ=environ or {},
    )  # fmt: skip
    return decide(**given | changes)
