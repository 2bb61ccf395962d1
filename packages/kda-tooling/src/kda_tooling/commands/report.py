"""`kda report`: show stored sweeps, redraw their picture, renew the README's results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kda_tooling.commands.options import check_distinct, check_output_file
from kda_tooling.commands.outputs import console_for
from kda_tooling.terminal import plain

if TYPE_CHECKING:
    from kda_tooling.bench.results import SweepResult


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        epilog="Example: [bold]kda report benchmarks/measured/h200-verify.json --readme README.md "
        "--plot docs/sweep.png[/bold]"
    )(report)


def show(result: SweepResult, every_arm: bool, console: Console) -> None:
    """Print a sweep: the machine, then its tables; ``every_arm`` lists all arms, not each lane's fastest."""
    from kda_tooling.bench.tables import header, tables

    console.print(plain(header(result)))
    for table in tables(result, every_arm):
        console.print(table)


def _read(page: Path) -> str:
    """The page's text with its own line ends, whatever else it holds kept for `str.encode` with surrogateescape."""
    return page.read_bytes().decode("utf-8", "surrogateescape")


def report(
    results: Annotated[
        list[Path], typer.Argument(help="JSON files that kda sweep wrote.", exists=True, dir_okay=False)
    ],
    every_arm: Annotated[bool, typer.Option("--every-arm", help="Print all arms, not each lane's fastest.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the picture here (.png, .svg, .pdf).")] = None,
    readme: Annotated[
        Path | None,
        typer.Option(help="Replace the results between this file's markers.", exists=True, dir_okay=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of tables.")] = False,
) -> None:
    """Show stored sweeps as tables; redraw their picture; renew the README's results from them."""
    from kda_tooling.bench.markdown import replace_block, results_block
    from kda_tooling.bench.plot import plot as draw
    from kda_tooling.bench.results import load_results

    if readme is not None:
        check_output_file("--readme", readme)
    for source in results:
        check_distinct({"RESULTS": source, "--readme": readme, "--plot": plot})
    try:
        loaded = [(load_results(path), path) for path in results]
        page = None if readme is None else replace_block(_read(readme), results_block(loaded, readme, plot))
        if plot is not None:
            draw([result for result, _ in loaded], plot)
            typer.echo(f"drew {plot}", err=True)
        if readme is not None and page is not None:
            same = page == _read(readme)
            readme.write_bytes(page.encode("utf-8", "surrogateescape"))
            typer.echo(f"{readme}: {'unchanged' if same else 'results renewed'}", err=True)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        texts = [result.to_json() for result, _ in loaded]
        typer.echo(texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]")
    for result, _ in loaded:
        if not json:
            show(result, every_arm, console_for())
