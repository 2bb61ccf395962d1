"""A report of the history for people, for programs, and for an issue or a pull request's comment."""

from __future__ import annotations

import datetime
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from kda_tooling.history.regressions import IMPROVEMENT, LOST, REGRESSION, STATUSES, UNJUDGED, Finding, Report
from kda_tooling.terminal import plain, printable

SHOWN = 200
"""Rows of a printed or Markdown table; JSON has all."""

LISTED = 6
"""Cells that are named where many are lost alike."""


def shown(value: float | None) -> str:
    """A figure with four digits; a dash for none."""
    return "-" if value is None else f"{value:.4g}"


def ratio(finding: Finding) -> str:
    """After over before; what grew from nothing has none."""
    return "from 0" if finding.ratio is None else f"{finding.ratio:.3f}"


def commits(finding: Finding) -> str:
    """The range that holds the change."""
    first, last = (commit[:12] for commit in finding.commits)
    return first if first == last else f"{first}..{last}"


def as_data(report: Report) -> dict[str, Any]:
    """For JSON: every cell, and whatever was noticed."""
    history = report.history
    return {
        "exit_code": report.exit_code, "order": history.order,
        "machines": {
            machine: {
                "newest": runs[-1].commit, "commits": len({run.commit for run in runs}), "runs": len(runs),
                "newest_date": _date(runs[-1].date), "age": history.age(runs[-1].commit),
            }
            for machine, runs in history.machines().items()
        },
        "counts": {status: len(report.of(status)) for status in STATUSES},
        "problems": [{"file": str(one.path), "message": printable(one.message)} for one in history.problems],
        "notes": report.notes,
        "cells": [one.to_dict() for status in STATUSES for one in report.of(status)],
    }  # fmt: skip


def _date(milliseconds: float) -> str | None:
    try:
        return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None


def summary(report: Report) -> str:
    """The counts in a line."""
    counts = ", ".join(f"{status} {len(report.of(status))}" for status in STATUSES)
    order = "the git log" if report.history.order == "git" else "the results' dates: not all commits are in the log"
    return f"cells: {counts}; commits ordered by {order}"


def show(report: Report, console: Console) -> None:
    """Print the regressions and the lost cells as tables, the rest in lines."""
    for problem in report.history.problems:
        console.print(f"[yellow]unusable[/yellow] {plain(problem)}", highlight=False, soft_wrap=True)
    for status in (REGRESSION, IMPROVEMENT):
        found = report.of(status)
        if not found:
            continue
        grid = Grid(title=f"{status}s", title_justify="left")
        for column in ("benchmark", "cell", "machine", "before", "after", "ratio", "threshold", "commits"):
            grid.add_column(column, overflow="fold")
        for one in found[:SHOWN]:
            limit = 2 - (one.threshold or 1) if status == IMPROVEMENT else one.threshold
            figures = _with_unit(one.before, one), _with_unit(one.after, one), ratio(one), shown(limit)
            grid.add_row(*map(plain, (one.name.benchmark, one.cell, one.machine, *figures, commits(one))))
        console.print(grid)
        _rest(len(found), console)
    for colour, status in (("red", LOST), ("dim", UNJUDGED)):
        for text, cells in _grouped(report.of(status)).items():
            listed = "; ".join(cells[:LISTED]) + f" and {len(cells) - LISTED} more" * (len(cells) > LISTED)
            line = f"{text}: {len(cells)} cells" + f" ({listed})" * (status == LOST)
            console.print(f"[{colour}]{status}[/{colour}] {plain(line)}", highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(plain(note), highlight=False, style="dim", soft_wrap=True)
    console.print(plain(summary(report)), highlight=False, soft_wrap=True)


def _grouped(findings: list[Finding]) -> dict[str, list[str]]:
    """Machine, benchmark and what is said -> the cells."""
    found: dict[str, list[str]] = {}
    for one in findings:
        found.setdefault(f"{one.machine}: {one.name.benchmark} {one.said}", []).append(one.cell)
    return dict(sorted(found.items()))


def _with_unit(value: float | None, finding: Finding) -> str:
    return f"{shown(value)} {finding.unit}".strip()


def _rest(found: int, console: Console) -> None:
    if found > SHOWN:
        console.print(f"and {found - SHOWN} more: --json has them all")


def _cell(text: str) -> str:
    """Text in a cell of a Markdown table: neither ends the cell nor is any markup, mention or link."""
    return "`" + " ".join(printable(text).replace("`", "'").replace("|", "\\|").split()) + "`" if text else ""


def markdown(report: Report) -> str:
    """The report for an issue or a comment: regressions and lost cells, and the counts."""
    lines = [f"**Performance history: {len(report.of(REGRESSION))} regressions, {len(report.of(LOST))} lost cells**"]
    found = report.of(REGRESSION)
    if found:
        lines += ["", "| benchmark | cell | machine | before | after | ratio | threshold | commits |",
                  "|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for one in found[:SHOWN]:
            texts = (one.name.benchmark, one.cell, one.machine, _with_unit(one.before, one), _with_unit(one.after, one),
                     ratio(one), shown(one.threshold), commits(one))  # fmt: skip
            lines.append(f"| {' | '.join(map(_cell, texts))} |")
    lost = _grouped(report.of(LOST))
    if lost:
        lines += ["", "| lost | cells | the first |", "|---|---|---|"]
        lines += [
            f"| {_cell(text)} | {len(cells)} | {_cell('; '.join(cells[:LISTED]))} |"
            for text, cells in list(lost.items())[:SHOWN]
        ]
    if max(len(found), len(lost)) > SHOWN:
        lines += ["", f"The first {SHOWN} of each are shown; `kda regressions --json -` has them all."]
    if report.history.problems:
        lines += ["", "Files that could not be used:", ""]
        lines += [f"- {_cell(str(problem))}" for problem in report.history.problems[:SHOWN]]
    return "\n".join([*lines, "", summary(report)]) + "\n"
