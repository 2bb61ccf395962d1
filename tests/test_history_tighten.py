"""Properties of `tighten` and `loosen` over invented tables and histories; and what asv's own page says of one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hypothesis import event, given, settings
from hypothesis import strategies as st

from kda_backend.gate import Cell, CellKey, Table, load_table, write_table
from kda_backend.lanes import lanes_of
from kda_tooling.history.reading import CellName, Described, History, Run, Value
from kda_tooling.history.regressions import Report, find_regressions
from kda_tooling.history.tighten import RUNS_IN_A_ROW, Revision, evidence, loosen, tighten
from tests.support.histories import GPU, LATENCY, Repository
from tests.support.tables import CLOSED, a_cell, a_table
from tests.test_history_loop import PLANTED, figures

TODAY = "2026-11-30"
STEPS, BATCHES = ("4", "8"), ("1", "2", "16")
LANES = ("unfused+ring", "fused+ring")
PLACES = [(t, b) for t in STEPS for b in BATCHES]
CELLS = frozenset((lane, t, b) for lane in LANES for t in STEPS for b in BATCHES)
DESCRIBED = {LATENCY: Described("1", "us per layer", ("lane", "T", "B"), CELLS)}
COMMITS = [f"{number:02x}".ljust(40, "0") for number in range(1, 13)]

RATIOS = st.sampled_from([0.5, 0.85, 0.97, 0.99, 1.01, 1.03, 1.3, None, math.nan])
STREAKS = st.lists(st.tuples(RATIOS, st.integers(1, 5)), min_size=1, max_size=4)
"""(fused over unfused, for how many commits)."""


def run_of(commit: str, ratios: dict[tuple[str, str], float | None], gpu: str, triton: str) -> Run:
    """Unfused takes 10 us; fused that times the ratio."""
    run = Run("m", gpu, (("triton", triton),), commit, float(int(commit[:2], 16)))
    for (t, b), ratio in ratios.items():
        fused = None if ratio is None else 10 * ratio
        for lane, us in zip(LANES, (10.0, fused), strict=True):
            run.values[CellName(LATENCY, (lane, t, b))] = Value(us, "1")
    return run


@st.composite
def reports(draw: st.DrawFn) -> Report:
    count = draw(st.integers(1, len(COMMITS)))
    measured = draw(st.sets(st.sampled_from(PLACES), min_size=3))
    levels = {place: [ratio for ratio, length in draw(STREAKS) for _ in range(length)] for place in sorted(measured)}
    runs = [
        run_of(commit, {place: levels[place][number % len(levels[place])] for place in levels},
               draw(st.sampled_from([GPU] * 9 + ["else"])), draw(st.sampled_from(["3.6"] * 9 + ["3.7"])))
        for number, commit in enumerate(COMMITS[:count])
    ]  # fmt: skip
    return find_regressions(History(runs, DESCRIBED, [], "git"))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    made = []
    for t, b in sorted(draw(st.sets(st.sampled_from(PLACES), min_size=3))):
        state = draw(st.sampled_from(["fused", "closed", "fused", "closed", "unfused"]))
        cell = a_cell(draft_tokens=int(t), batch=int(b), fused=state != "unfused")
        if state == "closed":
            commits = (draw(st.sampled_from(COMMITS[:4]))[:12],)
            closed = replace(CLOSED, commits=commits, unfused_us=(1.0,), fused_us=(2.0,))
            cell = replace(cell, lane="unfused+ring", closed=closed)
        made.append(cell)
    return a_table(*made, a_cell(mode="snapshots"), a_cell(form="chunked"))


def same_but_for_the_verdict(before: Cell, after: Cell) -> bool:
    return replace(before, lane=after.lane, closed=after.closed) == after


def sides_of(key: CellKey, known: Iterable[CellKey]) -> tuple[CellKey, CellKey]:
    """The nearest cells of ``known`` that are alike but for a smaller, and for a larger, batch."""
    alike = [one for one in known if replace(one, batch=1) == replace(key, batch=1)]
    below = max((one for one in alike if one.batch < key.batch), key=lambda one: one.batch)
    return below, min((one for one in alike if one.batch > key.batch), key=lambda one: one.batch)


def check(revision: Revision, report: Report) -> None:
    """What holds of every revision."""
    before, after = revision.before, revision.after
    assert replace(before, cells=after.cells) == after
    changed = {one.key: one for one in revision.changed}
    assert [one.key for one in revision.changes] == sorted(one.key for one in revision.changes)
    known = evidence(before, report)
    mine = [run for run in report.history.runs if run.gpu == GPU]
    for old, new in zip(before.cells, after.cells, strict=True):
        assert same_but_for_the_verdict(old, new)
        assert (old != new) == (old.key in changed)
        if old != new and old.key in known:
            assert known[old.key].points[-1].commit == mine[-1].commit
        elif old != new:
            below, above = (after.by_key[key] for key in sides_of(old.key, known))
            assert (new.closed is not None) == (below.closed is not None and above.closed is not None)
            assert changed[old.key].points == ()
    like_the_newest = {run.commit for run in mine if run.versions == mine[-1].versions}
    assert all(point.commit in like_the_newest for one in revision.changes for point in one.points)
    assert not after.doubts
    assert bool(revision.diff("x")) == bool(changed)
    assert sum(line.startswith("+ ") for line in revision.diff("x").splitlines()) == len(changed)


@settings(max_examples=250, deadline=None)
@given(tables(), reports())
def test_tighten_closes_what_loses_and_nothing_else(table: Table, report: Report) -> None:
    revision = tighten(table, report, TODAY)
    event(f"closed {min(len(revision.changed), 2)}")
    check(revision, report)
    unfused, fused = lanes_of("ring")
    for one in revision.changed:
        cell = revision.after.by_key[one.key]
        assert (one.action, table.verdict(table.by_key[one.key]), revision.after.verdict(cell)) == (
            "closed",
            fused,
            unfused,
        )
        assert all(point.fused_us > (1 + table.margin) * point.unfused_us for point in one.points)
    for key, known in evidence(table, report).items():
        lost = [point.loses(table.margin) for point in known.points[-RUNS_IN_A_ROW:]]
        newest = [run for run in report.history.runs if run.gpu == GPU][-1].commit
        if len(lost) == RUNS_IN_A_ROW and all(lost) and known.points[-1].commit == newest:
            assert revision.after.verdict(revision.after.by_key[key]) == unfused
    again = tighten(revision.after, report, "2027-01-01")
    assert not again.changed
    assert again.after == revision.after
    reopened = {one.key for one in loosen(revision.after, report).changed}
    assert not reopened & {one.key for one in revision.changed}, "what closes does not open by the same history"


@settings(max_examples=250, deadline=None)
@given(tables(), reports())
def test_loosen_opens_what_wins_twice_and_nothing_else(table: Table, report: Report) -> None:
    revision = loosen(table, report)
    event(f"reopened {min(len(revision.changed), 2)}")
    check(revision, report)
    for one in revision.changed:
        closed = table.by_key[one.key].closed
        assert closed is not None
        assert one.action == "reopened"
        if one.points:
            assert len({point.commit for point in one.points}) == 2
            assert all(point.fused_us <= (1 - table.margin) * point.unfused_us for point in one.points)
            assert all(point.commit[:12] > closed.commits[-1] for point in one.points)
        else:
            assert closed.history.startswith("asv")
            assert ", at B = " in closed.history
        assert revision.after.verdict(revision.after.by_key[one.key]) == "fused+ring"
    assert not loosen(revision.after, report).changed
    closed_again = {one.key for one in tighten(revision.after, report, TODAY).changed}
    assert not closed_again & {one.key for one in revision.changed}, "what opens does not close by the same history"


def history_of(*ratios: dict[str, float]) -> Report:
    """One commit after another, T = 4: batch -> fused over unfused."""
    runs = [
        run_of(commit, {("4", b): ratio for b, ratio in one.items()}, GPU, "3.6")
        for commit, one in zip(COMMITS, ratios, strict=False)
    ]
    return find_regressions(History(runs, DESCRIBED, [], "git"))


def test_sizes_between_those_of_the_history_go_with_them() -> None:
    """The history has B = 1, 2 and 16, the table 8 and 32 too: past the last size nothing is said."""
    table = a_table(*(a_cell(draft_tokens=4, batch=b) for b in (1, 2, 8, 16, 32)), a_cell(draft_tokens=8, batch=8))
    lost: dict[str, float] = {"1": 0.8, "2": 1.2, "16": 1.2}
    closed = tighten(table, history_of(lost, lost, lost), TODAY)
    assert [(one.key.batch, one.action) for one in closed.changes] == [(2, "closed"), (8, "closed"), (16, "closed")]
    assert closed.changes[1].why == "not measured itself, and B = 2 and 16 around it are closed"
    between = closed.after.by_key[replace(table.cells[0].key, batch=8)]
    assert between.closed is not None
    assert between.closed.history.endswith(", at B = 2 and 16")
    one_side = {"1": 0.8, "2": 0.8, "16": 1.2}
    assert [one.key.batch for one in tighten(table, history_of(one_side, one_side, one_side), TODAY).changes] == [16]

    still = history_of(lost, lost, lost, lost | {"2": 0.8}, lost | {"2": 1.0})
    assert loosen(closed.after, still).changed == []
    for size in ("2", "16"):
        won = lost | {size: 0.8}
        opened = loosen(closed.after, history_of(lost, lost, lost, won, won))
        why = f"B = {size} is open again"
        assert [(one.key.batch, one.why) for one in opened.changed if not one.points] == [(8, why)]
        assert {one.key.batch for one in opened.changed} == {int(size), 8}
    by_hand = replace(between, closed=replace(between.closed, history="asv"))
    own = replace(closed.after, cells=tuple(by_hand if c == between else c for c in closed.after.cells))
    assert {one.key.batch for one in loosen(own, history_of(lost, lost, lost, won, won)).changed} == {16}


@settings(max_examples=25, deadline=None)
@given(tables(), reports())
def test_what_is_written_is_read_back(table: Table, report: Report) -> None:
    after = tighten(table, report, TODAY).after
    with tempfile.TemporaryDirectory() as folder:
        assert load_table(write_table(after, Path(folder))) == after


def test_asv_s_own_page_shows_the_same_cells(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repository")
    repository.describe()
    repository.history(8, figures(range(5, 9)))
    config = {
        "version": 1, "project": "invented", "repo": str(repository.folder), "branches": ["main"], "dvcs": "git",
        "environment_type": "existing", "results_dir": str(repository.results), "env_dir": str(tmp_path / "env"),
        "html_dir": str(tmp_path / "html"),
    }  # fmt: skip
    (tmp_path / "asv.conf.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "asv", "publish", "--config", str(tmp_path / "asv.conf.json")]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    shown = json.loads((tmp_path / "html" / "regressions.json").read_text())["regressions"]
    assert {one[0] for one in shown} == {f"{LATENCY}('fused+ring', {t}, {b})" for t, b in PLANTED}
    assert {one[6][0][1] for one in shown} == {5}, "the number of the commit"
