"""The gate's environment variables: one table of them, and the only place that reads them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

from kda_backend.lanes import LANES, REFERENCE_LANE

LANE, TABLES, GATE = "KDA_LANE", "KDA_GATE_TABLES", "KDA_GATE"
FORCEABLE = (*LANES, REFERENCE_LANE)
ON, OFF = "on", "off"


class Variable(NamedTuple):
    """An environment variable: its values, and what it does."""

    name: str
    values: str
    meaning: str


ENV = (
    Variable(
        LANE, " | ".join(FORCEABLE),
        "forces the lane of every verify; one that a verify cannot take is an error that says why",
    ),
    Variable(TABLES, "a folder", "tables of one's own, looked in before the packaged ones"),
    Variable(GATE, f"{ON} | {OFF}", f"{OFF}: no table is looked at, the conservative rule decides"),
)  # fmt: skip


class Settings(NamedTuple):
    """What the environment says.

    Args:
        lane: the lane that is forced, or None.
        folder: the user's folder of tables, or None.
        off: whether tables are left alone.
    """

    lane: str | None = None
    folder: str | None = None
    off: bool = False


def settings_of(environ: Mapping[str, str]) -> Settings:
    """What ``environ`` says; an empty value is as good as none.

    Raises:
        ValueError: a value is not one of those in `ENV`.
    """
    return _parsed(environ.get(LANE, ""), environ.get(GATE, ""), environ.get(TABLES, ""))


@functools.lru_cache(maxsize=64)
def _parsed(lane: str, gate: str, tables: str) -> Settings:
    lane, gate = lane.strip().lower(), gate.strip().lower()
    if lane not in ("", *FORCEABLE):
        raise ValueError(f"{LANE} must be one of {FORCEABLE}, got {lane!r}: correct or unset it")
    if gate not in ("", ON, OFF):
        raise ValueError(f"{GATE} must be {ON!r} or {OFF!r}, got {gate!r}: correct or unset it")
    return Settings(lane or None, tables or None, gate == OFF)


@functools.cache
def process_settings() -> Settings:
    """What this process's environment said when it was first asked.

    Raises:
        ValueError: as `settings_of`.
    """
    return settings_of(os.environ)
