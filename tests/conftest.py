"""Fixtures of the repository's own tests; what every test shares (device, gpu mark) is in the conftest.py above."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def nox_sessions() -> dict[str, str]:
    """The sessions of the noxfile with their descriptions, as `nox --list` prints them."""
    listing = subprocess.run(
        [sys.executable, "-m", "nox", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return dict(re.findall(r"^[*-] (\w+)(?: -> (.+))?$", listing, flags=re.MULTILINE))
