"""Results of a sweep as data: what is written to JSON, tabulated, plotted and replayed by asv."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from kda_kernels import KdaShape
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.settings import KINDS, SweepSettings

SCHEMA = 1
SETTINGS = frozenset(field.name for field in fields(SweepSettings))
"""What a result states of the settings: all of them."""

SHAPE = frozenset(field.name for field in fields(KdaShape))


@dataclass(frozen=True)
class ArmResult:
    """One arm in one cell.

    Args:
        name, owner, lane, mode: as `kda_tooling.bench.arms.Arm`; ``lane`` is the mode where only commits were timed.
        median_us: microseconds per layer, median over passes.
        spread: largest distance of a pass from the median, as a share of it.
        passes_us: every pass.
        floor_us: byte floor of this arm's mode.
    """

    name: str
    owner: str
    lane: str
    mode: str
    median_us: float
    spread: float
    passes_us: list[float]
    floor_us: float

    @property
    def over_floor(self) -> float:
        """Latency over the byte floor."""
        return self.median_us / self.floor_us


@dataclass(frozen=True)
class Cell:
    """All arms at one draft length and batch size, timed in one interleaved run.

    Args:
        kind: "verify", "round" (verify on every layer and one all-layer commit) or "commit".
        draft_tokens, batch: T and B.
        accept: accept length of the commit; 0 for verify alone.
        layers: argument sets rotated through.
        rotated_bytes: bytes of state and inputs in one rotation.
        cold: whether they exceed three times the L2.
        arms: results.
        skipped: name of a peer's arm -> why it was not measured.
    """

    kind: str
    draft_tokens: int
    batch: int
    accept: int
    layers: int
    rotated_bytes: int
    cold: bool
    arms: list[ArmResult]
    skipped: dict[str, str]

    @property
    def title(self) -> str:
        """What the cell measured, in words."""
        what = self.kind if self.kind == "verify" else f"{self.kind}, accept {self.accept}"
        return f"{what}, T = {self.draft_tokens}"

    @property
    def ring_floor_us(self) -> float | None:
        """The byte floor of ring lanes, or None where none was measured."""
        return next((arm.floor_us for arm in self.arms if arm.mode == "ring"), None)

    def best(self, owner: str, mode: str | None = None, lane: str | None = None) -> ArmResult | None:
        """The fastest arm of ``owner`` (in ``mode`` or ``lane``), or None."""
        found = [
            arm for arm in self.arms if arm.owner == owner and mode in (None, arm.mode) and lane in (None, arm.lane)
        ]
        return min(found, key=lambda arm: arm.median_us, default=None)


@dataclass(frozen=True)
class SweepResult:
    """A sweep: the machine, the settings as given, the peers' versions, and the cells."""

    machine: Machine
    settings: dict[str, Any]
    peers: dict[str, str]
    cells: list[Cell]

    def groups(self) -> dict[str, list[Cell]]:
        """Title -> the cells that share it: one table or panel each, in the order of measurement."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.title, []).append(cell)
        return found

    def to_json(self) -> str:
        """The result as JSON text, one line per arm, so that a diff of two runs can be read."""
        head = {"schema": SCHEMA, "machine": asdict(self.machine), "settings": self.settings, "peers": self.peers}
        cells = []
        for cell in self.cells:
            data = asdict(cell)
            arms = ",\n".join(f"   {json.dumps(arm, allow_nan=False)}" for arm in data.pop("arms"))
            cells.append(f'  {json.dumps(data, allow_nan=False)[:-1]}, "arms": [\n{arms}\n  ]}}')
        return json.dumps(head, indent=1, allow_nan=False)[:-2] + ',\n "cells": [\n' + ",\n".join(cells) + "\n ]\n}"


def _from_dict(cls: type, data: Any, where: str) -> Any:
    """An instance of ``cls`` from its JSON object, which must have exactly its fields, each of its type."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
    hints = get_type_hints(cls)
    if set(data) != set(hints):
        raise ValueError(f"{where}: expected the keys {sorted(hints)}, got {sorted(data)}")
    for name, value in data.items():
        kind = get_origin(hints[name]) or hints[name]
        allowed = (int, float) if kind is float else (kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{where}: {name} must be {kind.__name__}, got {value!r}")
    return cls(**data)


def _arm(data: Any, where: str) -> ArmResult:
    arm = _from_dict(ArmResult, data, where)
    where = f"{where}: {arm.name}"
    if not (math.isfinite(arm.median_us) and arm.median_us > 0 and math.isfinite(arm.floor_us) and arm.floor_us > 0):
        raise ValueError(f"{where}: median_us and floor_us must be above 0, got {arm.median_us} and {arm.floor_us}")
    if not arm.passes_us or not all(isinstance(us, int | float) for us in arm.passes_us):
        raise ValueError(f"{where}: passes_us must be one number per pass, got {arm.passes_us!r}")
    return arm


def _cell(data: Any, where: str) -> Cell:
    if isinstance(data, dict) and isinstance(data.get("arms"), list):
        data = {**data, "arms": [_arm(arm, f"{where}: arm {i}") for i, arm in enumerate(data["arms"])]}
    cell = _from_dict(Cell, data, where)
    if cell.kind not in KINDS:
        raise ValueError(f"{where}: kind must be one of {', '.join(KINDS)}, got {cell.kind!r}")
    if not cell.arms:
        raise ValueError(f"{where}: no arm was measured")
    return cell


def parse_results(text: str, where: str) -> SweepResult:
    """Read a sweep from JSON text; ``where`` names its source in errors.

    Raises:
        ValueError: the text is not a sweep of this schema; the message says what is wrong.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError(f"{where} is not a sweep of schema {SCHEMA}: write one with kda sweep --json")
    if set(data) != {f.name for f in fields(SweepResult)}:
        raise ValueError(f"{where}: expected machine, settings, peers and cells, got {sorted(data)}")
    if not isinstance(data["cells"], list) or not data["cells"]:
        raise ValueError(f"{where}: no cell was measured")
    if not isinstance(data["settings"], dict) or set(data["settings"]) != SETTINGS:
        raise ValueError(f"{where}: settings must have the keys {sorted(SETTINGS)}")
    shape = data["settings"]["shape"]
    if not isinstance(shape, dict) or set(shape) != SHAPE:
        raise ValueError(f"{where}: settings: shape must have the keys {sorted(SHAPE)}")
    if not isinstance(data["peers"], dict):
        raise ValueError(f"{where}: peers must be an object, name to version")
    return SweepResult(
        machine=_from_dict(Machine, data["machine"], f"{where}: machine"),
        settings=data["settings"],
        peers=data["peers"],
        cells=[_cell(cell, f"{where}: cell {i}") for i, cell in enumerate(data["cells"])],
    )


def load_results(path: Path) -> SweepResult:
    """Read a sweep's JSON file.

    Raises:
        ValueError: the file is not a sweep of this schema; the message says what is wrong.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return parse_results(text, str(path))
