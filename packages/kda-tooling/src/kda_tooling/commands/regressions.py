"""`kda regressions`: is the newest commit slower than those before it? From asv's result files."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kda_tooling.commands.options import check_distinct, check_output_file, refuse

if TYPE_CHECKING:
    from kda_tooling.history.regressions import Report

RESULTS = Path("benchmarks/results")

Results = Annotated[Path, typer.Option(help="asv's results folder.", exists=True, file_okay=False)]
Baseline = Annotated[
    int, typer.Option(min=4, max=1000, help="Commits before the newest ones that these are compared with, at most.")
]
Repo = Annotated[
    Path | None,
    typer.Option(
        help="Repository whose log orders the commits; default: the one of --results.", exists=True, file_okay=False
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        epilog="Examples: [bold]kda regressions[/bold], [bold]kda regressions --results results --baseline 30 --json "
        "report.json --markdown comment.md[/bold]"
    )(regressions)


def read_report(results: Path, baseline: int, repo: Path | None) -> Report:
    """The history judged. Raises ``typer.BadParameter`` (exit 2) where there is none, or asv is missing."""
    from kda_tooling.history.reading import AsvMissing, read_history
    from kda_tooling.history.regressions import find_regressions

    try:
        history = read_history(results, repo)
    except AsvMissing as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise refuse("--results", str(error)) from None
    if not history.runs:
        said = "; ".join(map(str, history.problems[:5])) or "no result file at all"
        raise refuse("--results", f"{results} has no result that can be used: {said}.")
    return find_regressions(history, baseline)


def is_stdout(file: Path | None) -> bool:
    """Whether an output option names standard output."""
    return str(file) == "-"


def console_for(*files: Path | None) -> Console:
    """Where people read: beside data on standard output, that is standard error."""
    stderr = any(map(is_stdout, files))
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=200)


def check_outputs(files: dict[str, Path | None]) -> None:
    """Refuse output files that cannot be written, and two that are one. Raises ``typer.BadParameter``."""
    if sum(map(is_stdout, files.values())) > 1:
        raise refuse(list(files)[-1], "standard output ('-') is taken by another option.")
    check_distinct({option: None if is_stdout(file) else file for option, file in files.items()})
    for option, file in files.items():
        if file is not None and not is_stdout(file):
            check_output_file(option, file)


def write_output(file: Path | None, text: str) -> None:
    """Write ``text`` to a file, to standard output, or nowhere."""
    if is_stdout(file):
        typer.echo(text, nl=False)
    elif file is not None:
        file.write_text(text, encoding="utf-8")


def regressions(
    results: Results = RESULTS,
    baseline: Baseline = 20,
    repo: Repo = None,
    json: Annotated[Path | None, typer.Option(help="Write every cell here as JSON ('-': standard output).")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the report for an issue or a comment here ('-': standard output).")
    ] = None,
) -> None:
    """Compare every cell's newest values with its history: exit 1 with a regression or a lost cell, else 0.

    Exit 2: nothing could be read; or, without a regression, some file could not. docs/regressions.md says how noise
    is known and what the thresholds are.
    """
    from kda_tooling.history import pages

    check_outputs({"--json": json, "--markdown": markdown})
    report = read_report(results, baseline, repo)
    write_output(json, json_format.dumps(pages.as_data(report), allow_nan=False, indent=1) + "\n")
    write_output(markdown, pages.markdown(report))
    pages.show(report, console_for(json, markdown))
    if report.exit_code:
        raise typer.Exit(report.exit_code)
