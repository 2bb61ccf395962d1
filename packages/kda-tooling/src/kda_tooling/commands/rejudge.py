"""`kda gate rejudge`: what a table's choices would have cost in stored runs of `kda gate regret`."""

from __future__ import annotations

from dataclasses import asdict
from json import JSONDecodeError, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

from kda_tooling.commands.gate import gate
from kda_tooling.commands.options import refuse
from kda_tooling.commands.outputs import check_outputs, console_for, write_json
from kda_tooling.commands.regret import MOST, USUAL, show, to_dict, too_slow
from kda_tooling.files import file_text
from kda_tooling.terminal import plain

if TYPE_CHECKING:
    from kda_tooling.tuning.regret import RegretResult


def register() -> None:
    """Add the command to ``kda gate``."""
    gate.command(
        epilog="Example: [bold]kda gate rejudge benchmarks/measured/regret/h200-h8.json --tables tables[/bold]",
    )(rejudge)


def rejudge(
    runs: Annotated[list[Path], typer.Argument(help="Files of kda gate regret --json.", show_default=False)],
    tables: Annotated[
        Path | None,
        typer.Option(help="Folder of the tables; default: the packaged ones.", exists=True, file_okay=False),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every cell here ('-': standard output).")] = None,
) -> None:
    """Judge tables by runs that were made before, without a GPU; exit with 1 where a choice is too slow.

    A cell of a run counts where the run timed what the table chooses; the others are listed. All runs of a table are
    taken together, a cell of several once, by the worst of them: fewer than half of the cells are no verdict, and too
    slow is what it is for kda gate regret.
    Environment variables are not looked at.
    """
    from kda_backend.gate import TableError
    from kda_backend.gate.folders import PACKAGED
    from kda_tooling.tuning.rejudged import joined
    from kda_tooling.tuning.rejudged import rejudge as judge

    for run in runs:
        check_outputs({"--json": json}, {"RUNS": run})
    folder = Path(PACKAGED) if tables is None else tables
    of_table: dict[str, dict[str, RegretResult]] = {}
    for run in runs:
        try:
            result = judge(loads(file_text(run)), folder)
            of_table.setdefault(result.table, {})[str(run)] = result
        except TableError as error:
            raise refuse("--tables", f"{error}.") from None
        except JSONDecodeError as error:
            raise refuse("RUNS", f"{run} is not JSON: {error}.") from None
        except RecursionError:
            raise refuse("RUNS", f"{run} is no result of kda gate regret --json: it is nested too deep.") from None
        except (OSError, ValueError) as error:
            raise refuse("RUNS", f"{run}: {error}.") from None
    try:
        judged = {table: joined(list(results.values())) for table, results in of_table.items()}
    except ValueError as error:
        raise refuse("RUNS", f"{error}.") from None
    verdicts = {table: too_slow(result) for table, result in judged.items()}
    write_json(json, [_to_dict(result, verdicts[table], of_table[table]) for table, result in judged.items()])
    console = console_for(json)
    for table, result in judged.items():
        show(result, verdicts[table], console, ", ".join(of_table[table]), "not judged")
    _show_tables(list(judged.values()), console)
    if any(verdicts.values()):
        raise typer.Exit(1)


def _to_dict(result: RegretResult, verdict: list[str], runs: dict[str, RegretResult]) -> dict[str, Any]:
    """For JSON: as of a run, with the files and machines of all in the place of the machine and the seconds."""
    data = to_dict(result, verdict)
    del data["machine"], data["seconds"]
    return {"runs": [{"file": name, "machine": asdict(run.machine)} for name, run in runs.items()], **data}


def _show_tables(results: list[RegretResult], console: Console) -> None:
    """A row for each table."""
    grid = Grid(title="tables, each over its runs", title_justify="left")
    for name in ("table", "cells", "within 1%", "3%", "6%", "worst at", "regret", "over unfused", "over the peers"):
        grid.add_column(name, overflow="fold")
    for result in results:
        worst = max(result.cells, key=lambda cell: cell.share)
        over = [cell.over_peer for cell in result.cells if cell.over_peer is not None]
        grid.add_row(
            plain(result.table.split(",device_name")[0].replace(",", ", ")),  # so that it can be wrapped
            f"{len(result.cells)} of {len(result.cells) + len(result.left_out)}",
            *(f"{result.within(share):.1%}" for share in (0.01, USUAL, MOST)), f"{worst.group}, B={worst.batch}",
            f"{worst.share:.1%}", f"{max(cell.over_unfused for cell in result.cells):.1%}",
            f"{min(over):.2f} to {max(over):.2f}" if over else "-",
        )  # fmt: skip
    console.print(grid)
