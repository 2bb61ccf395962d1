"""Results of a sweep as data: what is written to JSON, tabulated, plotted and replayed by asv."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kda_tooling.bench.machine import Machine

SCHEMA = 1
KINDS = ("verify", "round", "commit")


@dataclass(frozen=True)
class ArmResult:
    """One arm in one cell.

    Args:
        name, owner, lane, mode: as `kda_tooling.bench.arms.Arm`.
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
        skipped: arm name -> why it was not measured.
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

    def best(self, owner: str, mode: str | None = None, lane: str | None = None) -> ArmResult | None:
        """The fastest arm of ``owner`` (in ``mode`` or ``lane``), or None."""
        found = [
            arm
            for arm in self.arms
            if arm.owner == owner and mode in (None, arm.mode) and lane in (None, arm.lane)
        ]
        return min(found, key=lambda arm: arm.median_us, default=None)


@dataclass(frozen=True)
class SweepResult:
    """A sweep: the machine, the settings as given, the peers' versions, and the cells."""

    machine: Machine
    settings: dict[str, Any]
    peers: dict[str, str]
    cells: list[Cell]

    def to_json(self) -> str:
        """The result as JSON text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)


def _from_dict(cls: type, data: dict[str, Any], where: str) -> Any:
    names = {f.name for f in fields(cls)}
    if set(data) != names:
        raise ValueError(f"{where}: expected the keys {sorted(names)}, got {sorted(data)}")
    return cls(**data)


def load_results(path: Path) -> SweepResult:
    """Read a sweep's JSON.

    Raises:
        ValueError: the file is not a sweep of this schema; the message says what is wrong.
        OSError: the file cannot be read.
    """
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path} is not a sweep of schema {SCHEMA}: write one with kda sweep --json")
    machine = _from_dict(Machine, data["machine"], f"{path}: machine")
    cells = []
    for i, cell in enumerate(data["cells"]):
        arms = [_from_dict(ArmResult, arm, f"{path}: cell {i}") for arm in cell["arms"]]
        cells.append(_from_dict(Cell, {**cell, "arms": arms}, f"{path}: cell {i}"))
    return SweepResult(machine, data["settings"], data["peers"], cells)
