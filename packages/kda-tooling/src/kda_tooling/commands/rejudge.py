"""`kda gate rejudge`: what a table's choices would have cost in stored runs of `kda gate regret`."""

from __future__ import annotations

from json import JSONDecodeError, loads
from pathlib import Path
from typing import Annotated

import typer

from kda_tooling.commands.gate import gate
from kda_tooling.commands.options import refuse
from kda_tooling.commands.outputs import check_outputs, console_for, write_json
from kda_tooling.commands.regret import show, to_dict, too_slow


def register() -> None:
    """Add the command to ``kda gate``."""
    gate.command(
        epilog="Example: [bold]kda gate rejudge benchmarks/measured/regret/*.json --tables tables[/bold]",
    )(rejudge)


def rejudge(
    runs: Annotated[list[Path], typer.Argument(help="Files of kda gate regret --json.", show_default=False)],
    tables: Annotated[Path | None, typer.Option(help="Folder of the tables; default: the packaged ones.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every cell here ('-': standard output).")] = None,
) -> None:
    """Judge a table by runs that were made before it, without a GPU; exit with 1 where a choice is too slow.

    A cell counts where the run timed what the table chooses; the others are listed. Too slow is what it is for
    kda gate regret.
    """
    from kda_backend.gate import TableError
    from kda_backend.gate.folders import PACKAGED
    from kda_tooling.tuning.rejudged import rejudge as judge

    check_outputs({"--json": json}, {str(run): run for run in runs})
    results = []
    for run in runs:
        try:
            results.append(judge(loads(run.read_text(encoding="utf-8")), Path(PACKAGED) if tables is None else tables))
        except (OSError, UnicodeDecodeError, JSONDecodeError, ValueError) as error:
            raise refuse("RUNS", f"{run}: {error}.") from None
        except TableError as error:
            raise refuse("--tables", f"{error}.") from None
    verdicts = [too_slow(result) for result in results]
    write_json(json, [to_dict(*one) for one in zip(results, verdicts, strict=True)])
    for result, verdict in zip(results, verdicts, strict=True):
        show(result, verdict, console_for(json), "the run did not time what the table chooses there")
    if any(verdicts):
        raise typer.Exit(1)
