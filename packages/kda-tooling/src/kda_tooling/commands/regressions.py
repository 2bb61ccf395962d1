"""`kda regressions`: is the newest commit slower than those before it? From asv's result files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kda_tooling.commands.options import refuse
from kda_tooling.commands.outputs import check_outputs, console_for, write_json, write_output

if TYPE_CHECKING:
    from kda_tooling.history.regressions import Report

RESULTS = Path("benchmarks/results")

Results = Annotated[Path, typer.Option(help="asv's results folder.", exists=True, file_okay=False)]
Baseline = Annotated[
    int, typer.Option(min=4, max=1000, help="Commits before the newest ones that these are compared with, at most.")
]
MaxAge = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="COMMITS",
        help="Measured commits by which a GPU's newest may be older than the history's; beyond it its cells are lost.",
        show_default="any number, with a note",
    ),
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


def read_report(results: Path, baseline: int, repo: Path | None, max_age: int | None = None) -> Report:
    """The history judged. Raises ``typer.BadParameter`` (exit 2) where there is none, or asv is missing."""
    from kda_tooling.history.reading import AsvMissing, is_repository, read_history
    from kda_tooling.history.regressions import find_regressions

    if repo is not None and not is_repository(repo):
        raise refuse("--repo", f"{repo} is no git repository: give a checkout that has the measured commits.")
    try:
        history = read_history(results, repo)
    except AsvMissing as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise refuse("--results", str(error)) from None
    if not history.runs:
        said = "; ".join(map(str, history.problems[:5])) or "no result file at all"
        raise refuse("--results", f"{results} has no result that can be used: {said}.")
    return find_regressions(history, baseline, max_age)


def regressions(
    results: Results = RESULTS,
    baseline: Baseline = 20,
    repo: Repo = None,
    max_age: MaxAge = None,
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
    report = read_report(results, baseline, repo, max_age)
    write_json(json, pages.as_data(report))
    write_output(markdown, pages.markdown(report))
    pages.show(report, console_for(json, markdown))
    if report.exit_code:
        raise typer.Exit(report.exit_code)
