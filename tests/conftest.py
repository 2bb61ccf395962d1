"""Fixtures of the repository's own tests; what every test shares (device, gpu mark) is in the conftest.py above."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture
def fresh_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The dispatch gate as in a new process whose environment says nothing of it: tables unread, nothing warned of."""
    from kda_backend.gate import ENV
    from kda_backend.gate.decisions import forget_decisions
    from kda_backend.gate.env import process_settings
    from kda_backend.gate.folders import forget

    for variable in ENV:
        monkeypatch.delenv(variable.name, raising=False)
    forgets = (forget, forget_decisions, process_settings.cache_clear)
    for one in forgets:
        one()
    yield
    for one in forgets:
        one()


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    """An empty folder in the packaged tables' place."""
    folder = tmp_path / "packaged"
    folder.mkdir()
    return folder
