"""`kda gate tighten` and `kda gate loosen`: the performance history closes cells of a gate table and reopens them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from kda_tooling.commands.gate import gate
from kda_tooling.commands.options import check_output_folder, refuse
from kda_tooling.commands.outputs import check_outputs, console_for, write_json
from kda_tooling.commands.regressions import RESULTS, Baseline, Repo, Results, read_report
from kda_tooling.terminal import plain, printable

if TYPE_CHECKING:
    from kda_backend.gate import Table
    from kda_tooling.history.regressions import Report
    from kda_tooling.history.tighten import Revision

File = Annotated[Path, typer.Argument(metavar="TABLE", help="A gate table's file.", exists=True, dir_okay=False)]
Apply = Annotated[bool, typer.Option("--apply", help="Write the table; else only the diff is printed.")]
Json = Annotated[Path | None, typer.Option(help="Write what changes and why here ('-': standard output).")]

EXAMPLE = "'H=8,HV=8,K=128,V=128,device_name=NVIDIA_H200,dtype=bfloat16.json'"


def register() -> None:
    """Add the commands to ``kda gate``."""
    for command in (tighten, loosen):
        name = command.__name__
        gate.command(
            epilog=f"Examples: [bold]kda gate {name} {EXAMPLE}[/bold] (prints the diff), [bold]kda gate {name} "
            f"{EXAMPLE} --apply --json -[/bold]"
        )(command)


def tighten(
    table: File,
    results: Results = RESULTS,
    baseline: Baseline = 20,
    repo: Repo = None,
    apply: Apply = False,
    json: Json = None,
) -> None:
    """Close fused cells that the history shows to lose by the table's margin: they become unfused.

    Exit 0: nothing to change; 1: the table changes (with --apply, has changed); 2: the table or the history cannot be
    used. Cells without evidence at the newest commit stay as they are.
    """
    from kda_tooling.history.tighten import tighten as tightened

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    before, report = _inputs(table, results, baseline, repo, apply, json)
    _finish(tightened(before, report, today), report, table, apply, json)


def loosen(
    table: File,
    results: Results = RESULTS,
    baseline: Baseline = 20,
    repo: Repo = None,
    apply: Apply = False,
    json: Json = None,
) -> None:
    """Reopen closed cells whose newest two runs, of two commits after those that closed them, win by the margin.

    Exit codes as kda gate tighten.
    """
    from kda_tooling.history.tighten import loosen as loosened

    before, report = _inputs(table, results, baseline, repo, apply, json)
    _finish(loosened(before, report), report, table, apply, json)


def _inputs(
    file: Path, results: Path, baseline: int, repo: Path | None, apply: bool, json: Path | None
) -> tuple[Table, Report]:
    """The table and the history. Raises ``typer.BadParameter`` where either cannot be used."""
    from kda_backend.gate import TableError, load_table

    check_outputs({"--json": json}, {"TABLE": file})
    if apply:  # the file is replaced whole, which takes a folder that can be written; a diff takes nothing
        check_output_folder("--apply", file.parent)
    try:
        table = load_table(file)
    except TableError as error:
        raise refuse("TABLE", str(error)) from None
    return table, read_report(results, baseline, repo)


def _finish(revision: Revision, report: Report, file: Path, apply: bool, json: Path | None) -> None:
    """Print the diff, write what is asked for, and exit as documented."""
    from kda_backend.gate import write_table

    applied = apply and bool(revision.changed)
    if applied:
        try:
            write_table(revision.after, file.parent)
        except OSError as error:
            raise refuse("--apply", f"{file} cannot be written: {error.strerror}") from None
    problems = report.history.problems
    data = {
        "table": str(file), "applied": applied, "measured": revision.measured,
        "changes": [one.to_dict() for one in revision.changes],
        "problems": [{"file": str(one.path), "message": printable(one.message)} for one in problems],
        "diff": revision.diff(file.name),
    }  # fmt: skip
    write_json(json, data)
    console = console_for(json)
    for problem in problems:
        Console(stderr=True).print(f"[yellow]unusable[/yellow] {plain(problem)}", highlight=False, soft_wrap=True)
    if revision.changed:
        if console.is_terminal:
            console.print(Syntax(printable(revision.diff(file.name)), "diff", word_wrap=True))
        else:
            console.print(plain(revision.diff(file.name)), highlight=False, soft_wrap=True)
    for one in revision.changes:
        colour = "dim" if one.action == "left" else "bold"
        console.print(f"[{colour}]{one.action}[/{colour}] {plain(one.key)}: {plain(one.why)}", highlight=False,
                      soft_wrap=True)  # fmt: skip
    count, cells = len(revision.changed), "cell" if len(revision.changed) == 1 else "cells"
    of = f"{revision.measured} of {len(revision.before.cells)} cells"
    end = (
        f"nothing to change; the history says something of {of}"
        if not count
        else f"{count} {cells}: " + ("written" if applied else "--apply writes them")
    )
    console.print(f"{plain(file)}: {end}", highlight=False, soft_wrap=True)
    if revision.changed:
        raise typer.Exit(1)
    if problems:
        raise typer.Exit(2)
