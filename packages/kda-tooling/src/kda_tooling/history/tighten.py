"""Closing cells of a gate table that the history overrules, and reopening those that win again."""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

from kda_backend.gate import Cell, CellKey, Closed, Table, dump_table, judged
from kda_backend.gate.cells import LEAST_PASSES, is_time
from kda_backend.lanes import lanes_of
from kda_tooling.history.gate_cells import gate_place, of_machine
from kda_tooling.history.reading import CellName, History, Run
from kda_tooling.history.regressions import REGRESSION, Report

RUNS_IN_A_ROW = 3
"""Newest runs that all lose by the margin: enough without a regression, which an old or a slow change is not."""

MOST_STATED = 10
"""Commits that a closed cell states, the newest."""


AROUND = ", at B = {} and {}"
"""Behind a closed cell's history, where that measures not the cell but those below and above it."""

Measured = tuple[CellName, float]
"""A lane's cell of the history and its microseconds."""


class Point(NamedTuple):
    """Both lanes of a cell in one run: commit, its place in the history, microseconds."""

    commit: str
    position: int
    unfused_us: float
    fused_us: float

    def loses(self, margin: float) -> bool:
        """Whether fused takes more than unfused plus the margin."""
        return self.fused_us > (1 + margin) * self.unfused_us

    def wins(self, margin: float) -> bool:
        """Whether fused wins by the margin; the rule of `kda_backend.gate.Cell.supported`."""
        return self.fused_us < self.unfused_us and self.fused_us <= (1 - margin) * self.unfused_us


@dataclass(frozen=True)
class Evidence:
    """What the history has of one gate cell.

    Args:
        points: runs that measured both lanes, oldest first, one per commit.
        source: where they are from, in words.
        regressed: newest values that the detector compared, where it found the fused lane slower; 0 where not.
    """

    points: list[Point]
    source: str
    regressed: int


@dataclass(frozen=True)
class Change:
    """A cell of the table and what becomes of it.

    Args:
        key: of the cell.
        action: "closed", "reopened" or "left".
        why: in words.
        points: runs that decided; none where the cells around it did.
        judged: False where the newest run does not have the cell, so that nothing was decided.
    """

    key: CellKey
    action: str
    why: str
    points: tuple[Point, ...] = ()
    judged: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        key = self.key
        return {
            "gate": key.gate, "form": key.form, "mode": key.mode, "option": key.option, "T": key.draft_tokens,
            "B": key.batch, "action": self.action, "why": self.why, "judged": self.judged,
            "runs": [
                {"commit": one.commit, "unfused_us": one.unfused_us, "fused_us": one.fused_us} for one in self.points
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class Revision:
    """A table and what it becomes."""

    before: Table
    after: Table
    changes: list[Change]
    measured: int = 0
    """How many of the table's cells the history's newest run measured, or those around them."""

    @property
    def changed(self) -> list[Change]:
        """The changes that are some."""
        return [one for one in self.changes if one.action != "left"]

    def diff(self, name: str) -> str:
        """Unified diff of the table's file ``name``; empty where nothing changes."""
        before, after = (dump_table(table).splitlines(keepends=True) for table in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=0)) if self.changed else ""


def evidence(table: Table, report: Report) -> dict[CellKey, Evidence]:
    """Gate cell -> what the history has of it, for the cells of this table that it has anything of.

    Of the GPU's runs, those of the newest's versions: with another Triton or driver the kernels are others, and runs
    of both are neither a row of losses nor two passes.
    """
    history = report.history
    places = history.places()
    slower = {
        (one.machine, one.versions, one.name): one.window for one in report.findings if one.status == REGRESSION
    }  # fmt: skip
    found: dict[CellKey, Evidence] = {}
    runs = [run for run in history.runs if of_machine(table, run.machine, run.gpu)]
    for run in [run for run in runs if run.versions == runs[-1].versions]:
        for key, (unfused, (name, us)) in _lanes(table, history, run).items():
            regressed = slower.get((run.machine, run.versions, name), 0)
            one = found.setdefault(key, Evidence([], f"asv {run.machine} {name.benchmark}", regressed))
            point = Point(run.commit, places[run.commit], unfused[1], us)
            kept = [old for old in one.points if old.commit != run.commit]
            found[key] = replace(one, points=[*kept, point], regressed=regressed)
    return found


def _lanes(table: Table, history: History, run: Run) -> dict[CellKey, tuple[Measured, Measured]]:
    """Key -> (unfused, fused), each (name, us), of the table's cells that ``run`` measured in both lanes."""
    found: dict[CellKey, dict[str, Measured]] = {}
    for name, value in run.values.items():
        about = history.described.get(name.benchmark)
        place = None if about is None else gate_place(name, about.param_names)
        if place is None or about is None or (place.shape, place.dtype) != (table.shape, table.dtype):
            continue
        if place.key in table.by_key and value.version == about.version and is_time(value.value):
            found.setdefault(place.key, {})[place.lane] = (name, value.value)
    return {
        key: (lanes[lanes_of(key.mode)[0]], lanes[lanes_of(key.mode)[1]])
        for key, lanes in found.items()
        if len(lanes) == 2
    }


def tighten(table: Table, report: Report, today: str) -> Revision:
    """Close every cell that the table takes fused and the history shows to lose by the table's margin.

    It loses where its newest run does, and either the detector finds the fused lane slower and the runs it compared
    lose in the median, or the newest `RUNS_IN_A_ROW` runs all do. A batch size that the history does not measure is
    closed with the nearest ones below and above that it does.

    Args:
        table: to revise.
        report: the history and its findings.
        today: ISO date that closed cells state.
    """

    def close(cell: Cell, known: Evidence) -> tuple[Cell, Change] | str | None:
        if table.verdict(cell) != lanes_of(cell.key.mode)[1]:
            return None
        losing = _last_while(known.points, lambda point: point.loses(table.margin))
        if not losing:
            return None
        window = known.points[-known.regressed :] if known.regressed else []
        regressed = bool(window) and statistics.median(one.fused_us / one.unfused_us for one in window) > (
            1 + table.margin
        )
        if not regressed and len(losing) < RUNS_IN_A_ROW:
            return f"loses in its newest {len(losing)} runs, without a regression: {RUNS_IN_A_ROW} in a row close it"
        stated = losing[-MOST_STATED:]
        closed = Closed(
            known.source, tuple(one.commit[:12] for one in stated), tuple(one.unfused_us for one in stated),
            tuple(one.fused_us for one in stated), today,
        )  # fmt: skip
        cause = "the fused lane regressed" if regressed else f"the newest {len(losing)} runs all lose"
        why = f"{cause}: fused / unfused {_ratios(stated)}, more than {1 + table.margin:g}"
        return judged(cell.key, cell.lanes, table.margin, closed), Change(cell.key, "closed", why, tuple(stated))

    def close_between(cell: Cell, below: Cell, above: Cell) -> tuple[Cell, Change] | None:
        if table.verdict(cell) != lanes_of(cell.key.mode)[1] or below.closed is None or above.closed is None:
            return None
        sizes = below.key.batch, above.key.batch
        closed = replace(below.closed, history=below.closed.history + AROUND.format(*sizes), date=today)
        why = f"not measured itself, and B = {sizes[0]} and {sizes[1]} around it are closed"
        return judged(cell.key, cell.lanes, table.margin, closed), Change(cell.key, "closed", why)

    return _revised(table, report, close, close_between)


def loosen(table: Table, report: Report) -> Revision:
    """Reopen every closed cell whose newest two runs, both of commits after those that closed it, win by the margin.

    One that was closed with those around it is reopened with the first of them. Arguments as `tighten`.
    """
    places = report.history.places()

    def opened(cell: Cell, why: str, points: Iterable[Point] = ()) -> tuple[Cell, Change] | str:
        new = judged(cell.key, cell.lanes, table.margin)
        if new.lane != lanes_of(cell.key.mode)[1]:
            return "its own figures do not support the fused lane: kda tune measures it again"
        return new, Change(cell.key, "reopened", why, tuple(points))

    def reopen(cell: Cell, known: Evidence) -> tuple[Cell, Change] | str | None:
        if cell.closed is None:
            return None
        at = [place for commit, place in places.items() if commit.startswith(cell.closed.commits[-1])]
        if not at:
            return f"the history has no run of {cell.closed.commits[-1]}, the commit that closed it"
        later = [point for point in known.points if point.position > at[-1]]
        passes = _last_while(later, lambda point: point.wins(table.margin))[-LEAST_PASSES:]
        if len(passes) < LEAST_PASSES:
            return f"{len(passes)} of {LEAST_PASSES} runs in a row after {cell.closed.commits[-1]} win by the margin"
        return opened(cell, f"wins again: fused / unfused {_ratios(passes)}, at most {1 - table.margin:g}", passes)

    def reopen_between(cell: Cell, below: Cell, above: Cell) -> tuple[Cell, Change] | str | None:
        sizes = below.key.batch, above.key.batch
        if cell.closed is None or not cell.closed.history.endswith(AROUND.format(*sizes)):
            return None
        if below.closed is not None and above.closed is not None:
            return None
        open_again = [str(one.key.batch) for one in (below, above) if one.closed is None]
        return opened(cell, f"B = {' and '.join(open_again)} is open again")

    return _revised(table, report, reopen, reopen_between)


def _revised(
    table: Table,
    report: Report,
    rule: Callable[[Cell, Evidence], tuple[Cell, Change] | str | None],
    between: Callable[[Cell, Cell, Cell], tuple[Cell, Change] | str | None],
) -> Revision:
    """The table with ``rule`` on every cell of which the history's newest run of this GPU has both lanes.

    Then ``between`` on every cell that it has not, with the nearest below and above that it has.
    """
    known = evidence(table, report)
    places = report.history.places()
    newest = max(
        (places[run.commit] for run in report.history.runs if of_machine(table, run.machine, run.gpu)), default=-1
    )
    fresh = {key for key, about in known.items() if about.points[-1].position == newest}
    cells: dict[CellKey, Cell] = {}
    changes: dict[CellKey, Change] = {}
    for cell in table.cells:
        about = known.get(cell.key)
        outcome: tuple[Cell, Change] | str | None = None
        if about is not None and cell.key in fresh:
            outcome = rule(cell, about)
        elif about is not None and (stale := rule(cell, about)) is not None:
            said = stale if isinstance(stale, str) else stale[1].why
            outcome = f"not measured at the newest commit, so left as it is ({said})"
        _note(cell, outcome, cell.key in fresh, cells, changes)
    sides = {key: around for key in cells if (around := _around(key, known))}
    for key, (below, above) in sides.items():
        _note(cells[key], between(cells[key], cells[below], cells[above]), True, cells, changes)
    in_order = [changes[key] for key in cells if key in changes]
    return Revision(table, replace(table, cells=tuple(cells.values())), in_order, len(fresh) + len(sides))


def _note(
    cell: Cell,
    outcome: tuple[Cell, Change] | str | None,
    measured: bool,
    cells: dict[CellKey, Cell],
    changes: dict[CellKey, Change],
) -> None:
    """Enter what a rule made of ``cell``: another and the change, why it is left, or nothing."""
    cells[cell.key], change = outcome if isinstance(outcome, tuple) else (cell, None)
    if isinstance(outcome, str):
        change = Change(cell.key, "left", outcome, judged=measured)
    if change is not None:
        changes[cell.key] = change


def _around(key: CellKey, known: Iterable[CellKey]) -> tuple[CellKey, CellKey] | None:
    """The nearest ``known`` keys of smaller and of larger batches; None if ``key`` is known, or one side has none."""
    alike = sorted(other for other in known if replace(other, batch=key.batch) == key)
    below, above = ([one for one in alike if one < key], [one for one in alike if one > key])
    return (below[-1], above[0]) if below and above and key not in alike else None


def _last_while(points: list[Point], holds: Callable[[Point], bool]) -> list[Point]:
    """The longest run of points at the end that all hold, oldest first."""
    return list(takewhile(holds, reversed(points)))[::-1]


def _ratios(points: Iterable[Point]) -> str:
    return ", ".join(f"{one.fused_us / one.unfused_us:.3f} at {one.commit[:12]}" for one in points)
