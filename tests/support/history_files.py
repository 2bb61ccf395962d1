"""Invented files of the commands that the performance history takes, one per kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FILES = ROOT / "tests" / "data" / "history"
EXAMPLE = FILES / "verify.json"


def text_of(kind: str, **changes: Any) -> str:
    """The text of the file of a kind, with other values at its top."""
    return json.dumps(json.loads((FILES / f"{kind}.json").read_text()) | changes)
