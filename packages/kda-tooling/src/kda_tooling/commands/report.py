"""`kda report`: show stored sweeps, redraw their picture, renew the README's results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kda_tooling.commands.options import check_output_file, refuse
from kda_tooling.commands.outputs import check_outputs, console_for, write_output
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


def check_picture(plot: Path | None) -> None:
    """Refuse a picture of a type that cannot be drawn, before anything is read or measured for it."""
    from kda_tooling.bench.plot import check_picture_path

    if plot is None:
        return
    try:
        check_picture_path(plot)
    except ValueError as error:
        raise refuse("--plot", f"{error}.") from None


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
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the results here ('-': standard output), several as a list of them."),
    ] = None,
) -> None:
    """Show stored sweeps as tables; redraw their picture; renew the README's results from them."""
    from kda_tooling.bench.markdown import replace_block, results_block
    from kda_tooling.bench.plot import plot as draw
    from kda_tooling.bench.results import load_results

    if readme is not None:
        check_output_file("--readme", readme)
    check_picture(plot)
    for source in results:
        check_outputs({"--json": json_file, "--plot": plot}, {"RESULTS": source, "--readme": readme})
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
    texts = [result.to_json() for result, _ in loaded]
    write_output(json_file, (texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]") + "\n")
    console = console_for(json_file)
    for result, _ in loaded:
        show(result, every_arm, console)
