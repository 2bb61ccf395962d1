"""Results of a sweep as data: what is written to JSON, tabulated, plotted and replayed by asv."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from kda_backend.gate.cells import MOST_TUNED_TOKENS
from kda_kernels import KdaShape
from kda_tooling.bench.fields import check_number, check_text, check_type, checked_fields
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.settings import KINDS, MAX_BATCH, SweepSettings
from kda_tooling.files import file_text

SCHEMA = 1
OPTIONAL_SETTINGS = frozenset({"forms", "indices_ready", "fold_on_verify", "compact_window"})
SETTINGS = frozenset(field.name for field in fields(SweepSettings)) - OPTIONAL_SETTINGS
"""What a result states of the settings: all of them, but the optional ones only where they are not the default."""

SHAPE = frozenset(field.name for field in fields(KdaShape))
MODES = ("ring", "snapshots")
LEAST_US, MOST_US = 1e-6, 1e9
"""Latencies that are read back: what no kernel takes would stretch an axis until it cannot be drawn."""

MOST_COUNT = 1 << 62
MOST_BYTES_PER_SECOND = 1e18


@dataclass(frozen=True)
class ArmResult:
    """One arm in one cell.

    Args:
        name, owner, mode: as `kda_tooling.bench.arms.Arm`.
        lane: the arm's ``column``: its lane, followed by " chunked" in that form, by " fold-on-verify" where it does
            that and by " compact" where it writes no windows; the mode where only commits were timed.
        median_us: microseconds per layer, median over passes.
        spread: largest distance of a pass from the median, as a share of it.
        passes_us: every pass.
        floor_us: byte floor of this arm's mode and of what else it does.
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
    def form(self) -> str:
        """The form of the outputs, one of `kda_kernels.FORMS`."""
        return "chunked" if " chunked" in self.lane else "recurrent"

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

    def best(
        self, owner: str, mode: str | None = None, lane: str | None = None, form: str | None = None
    ) -> ArmResult | None:
        """The fastest arm of ``owner`` (in ``mode``, ``lane`` or ``form``), or None."""
        found = [
            arm
            for arm in self.arms
            if arm.owner == owner and mode in (None, arm.mode) and lane in (None, arm.lane) and form in (None, arm.form)
        ]
        return min(found, key=lambda arm: arm.median_us, default=None)


@dataclass(frozen=True)
class SweepResult:
    """A sweep: the machine, the settings as given, the peers' versions, and the cells."""

    machine: Machine
    settings: dict[str, Any]
    peers: dict[str, str]
    cells: list[Cell]

    @property
    def subject(self) -> str:
        """GPU, shape, dtype and L2 state: what sweeps must share for their times to stand side by side."""
        shape, state = self.settings["shape"], "L2-hot" if self.settings["hot"] else "L2-cold"
        return (
            f"{self.machine.gpu}: H = {shape['num_heads']}, HV = {shape['num_v_heads']}, K = {shape['head_k_dim']}, "
            f"V = {shape['head_v_dim']}, {self.settings['dtype']}, {state}"
        )

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


def checked_machine(data: Any, where: str) -> Machine:
    """The machine that a result names. Raises ValueError where a value is of another type or out of range."""
    machine = Machine(**checked_fields(Machine, data, where))
    check_number("sm", machine.sm, 0, 10_000, where)
    check_number("l2_bytes", machine.l2_bytes, 0, MOST_COUNT, where)
    check_number("copy_bytes_per_second", machine.copy_bytes_per_second, 1.0, MOST_BYTES_PER_SECOND, where)
    return machine


def _arm(data: Any, where: str) -> ArmResult:
    arm = ArmResult(**checked_fields(ArmResult, data, where))
    where = f"{where}: {arm.name}"
    if arm.mode not in MODES:
        raise ValueError(f"{where}: mode must be one of {', '.join(MODES)}, got {arm.mode!r}")
    check_number("median_us", arm.median_us, LEAST_US, MOST_US, where)
    check_number("floor_us", arm.floor_us, LEAST_US, MOST_US, where)
    check_number("spread", arm.spread, 0.0, 1e6, where)
    if not arm.passes_us:
        raise ValueError(f"{where}: passes_us must be one number per pass, got {arm.passes_us!r}")
    for us in arm.passes_us:
        check_number("passes_us", us, LEAST_US, MOST_US, where)
    return arm


def _cell(data: Any, where: str) -> Cell:
    given = checked_fields(Cell, data, where)
    if not isinstance(given["arms"], list) or not given["arms"]:
        raise ValueError(f"{where}: no arm was measured")
    arms = [_arm(arm, f"{where}: arm {i}") for i, arm in enumerate(given["arms"])]
    cell = Cell(**{**given, "arms": arms})
    if cell.kind not in KINDS:
        raise ValueError(f"{where}: kind must be one of {', '.join(KINDS)}, got {cell.kind!r}")
    check_number("draft_tokens", cell.draft_tokens, 1, MOST_TUNED_TOKENS, where)
    check_number("batch", cell.batch, 1, MAX_BATCH, where)
    check_number("accept", cell.accept, 0, cell.draft_tokens, where)
    check_number("layers", cell.layers, 1, MOST_COUNT, where)
    check_number("rotated_bytes", cell.rotated_bytes, 0, MOST_COUNT, where)
    for name, why in cell.skipped.items():
        check_text("skipped", name, where)
        check_text("skipped", why, f"{where}: {name}")
    return cell


def _settings(data: Any, where: str) -> dict[str, Any]:
    """The settings as stored, known to be those of a possible sweep."""
    if not isinstance(data, dict) or set(data) - OPTIONAL_SETTINGS != SETTINGS:
        raise ValueError(f"{where} must have the keys {sorted(SETTINGS)}")
    if not isinstance(data["shape"], dict) or set(data["shape"]) != SHAPE:
        raise ValueError(f"{where}: shape must have the keys {sorted(SHAPE)}")
    hints = get_type_hints(SweepSettings)
    for name, value in data.items():
        if name != "shape":
            check_type(name, value, hints[name], where)
    for name in data["peers"]:
        check_text("peers", name, where)
    try:
        # A result names its peers without their folders, which need not be here.
        lists = {name: tuple(data[name]) for name in ("lanes", "batch_sizes", "draft_tokens", "forms") if name in data}
        SweepSettings(**{**data, **lists, "shape": KdaShape(**data["shape"]), "peers": ()})
    except (ValueError, TypeError) as error:
        said = re.sub(r"--([a-z-]+)", lambda option: option[1].replace("-", "_"), str(error))
        raise ValueError(f"{where}: {said.replace('modes', 'lanes')}") from None
    return data


def parse_results(text: str, where: str) -> SweepResult:
    """Read a sweep from JSON text; ``where`` names its source in errors.

    Raises:
        ValueError: the text is not a sweep of this schema; the message names the field and what is wrong with it.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError(f"{where} is not a sweep of schema {SCHEMA}: write one with kda sweep --json")
    if set(data) != {f.name for f in fields(SweepResult)}:
        raise ValueError(f"{where}: expected machine, settings, peers and cells, got {sorted(data)}")
    if not isinstance(data["cells"], list) or not data["cells"]:
        raise ValueError(f"{where}: no cell was measured")
    settings = _settings(data["settings"], f"{where}: settings")
    if not isinstance(data["peers"], dict):
        raise ValueError(f"{where}: peers must be an object, name to version")
    for name, version in data["peers"].items():
        check_text("peers", name, where)
        check_type("peers", version, str, where)
        check_text("peers", version, f"{where}: {name}")
    return SweepResult(
        machine=checked_machine(data["machine"], f"{where}: machine"),
        settings=settings,
        peers=data["peers"],
        cells=[_cell(cell, f"{where}: cell {i}") for i, cell in enumerate(data["cells"])],
    )


def load_results(path: Path) -> SweepResult:
    """Read a sweep's JSON file.

    Raises:
        ValueError: the file is not a sweep of this schema; the message says what is wrong.
        OSError: the file cannot be read.
    """
    return parse_results(file_text(path), str(path))
