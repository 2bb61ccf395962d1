"""`kda gate regret`: what a table's decisions cost on this GPU, measured again."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

from kda_tooling.commands.gate import gate
from kda_tooling.commands.many_values import ManyValuesCommand
from kda_tooling.commands.options import HeadKDim, HeadVDim, ShortDtype, TimedHeads, TimedHvHeads, require_gpu
from kda_tooling.commands.outputs import check_outputs, console_for, ended_early, is_stdout, write_json
from kda_tooling.commands.tune import (
    EVERY_FORM,
    EVERY_MODE,
    EVERY_T,
    PLAIN,
    READ_ANYWHERE,
    SAFE,
    DraftTokens,
    Forms,
    Gates,
    Modes,
    Options,
    Processes,
    grid_of,
    kinds_of,
    usual_sizes_here,
)
from kda_tooling.terminal import plain

if TYPE_CHECKING:
    from kda_tooling.tuning.regret import RegretResult
    from kda_tooling.tuning.settings import TuneSettings

BETWEEN = (9, 11, 15, 19, 36, 72)
"""Batch sizes that are measured by default beside those that `kda tune` measures: most tables have none of them."""

_SIZES_HELP = f"Requests per batch, B; default: those of kda tune, and {' '.join(map(str, BETWEEN))}."
RegretSizes = Annotated[list[int] | None, typer.Option("--batch-sizes", help=_SIZES_HELP)]

USUAL, MOST, SHARE = 0.03, 0.06, 0.98
"""Regret that a share of the cells keep to, regret that all do, and that share. The help states them."""


def register() -> None:
    """Add the command to ``kda gate``."""
    gate.command(
        cls=ManyValuesCommand,
        epilog="Examples: [bold]kda gate regret --draft-tokens 4 8[/bold], [bold]kda gate regret --tables tables "
        "--heads 16 --form recurrent --mode ring --peer sglang=peer --json regret.json[/bold]",
    )(regret)


def regret(
    heads: TimedHeads = 8,
    hv_heads: TimedHvHeads = None,
    head_k_dim: HeadKDim = 128,
    head_v_dim: HeadVDim = 128,
    dtype: ShortDtype = "bf16",
    draft_tokens: DraftTokens = EVERY_T,
    batch_sizes: RegretSizes = None,
    forms: Forms = EVERY_FORM,
    modes: Modes = EVERY_MODE,
    options: Options = PLAIN,
    gates: Gates = SAFE,
    tables: Annotated[
        Path | None, typer.Option(help="Folder of the table; default: the packaged ones.", exists=True, file_okay=False)
    ] = None,
    peer: Annotated[list[str], typer.Option(help="NAME=FOLDER of another project's kernels, e.g. sglang=peer.")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 1000,
    processes: Processes = None,
    json: Annotated[Path | None, typer.Option(help="Write every cell here ('-': standard output).")] = None,
) -> None:
    """Time what the gate chooses beside all that its table knows; exit with 1 where it is too slow.

    Too slow: more than 3 % over the best in more than 2 % of the cells, or more than 6 % in any, or more than 3 % over
    our own unfused lane.
    """
    from kda_tooling.tuning.settings import TuneSettings

    try:
        settings = TuneSettings(
            **grid_of(heads, hv_heads, head_k_dim, head_v_dim, dtype, draft_tokens, batch_sizes),
            **kinds_of(forms, modes, options, gates), seed=seed,
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    check_outputs({"--json": json})
    require_gpu("kda gate regret", READ_ANYWHERE)
    if not batch_sizes:
        settings = replace(settings, batch_sizes=tuple(sorted({*usual_sizes_here(settings), *BETWEEN})))
    result = _measure(settings, tables, peer, processes, json)
    verdict = too_slow(result)
    write_json(json, to_dict(result, verdict), "cells")
    show(result, verdict, console_for(json))
    if verdict:
        raise typer.Exit(1)


def too_slow(result: RegretResult) -> list[str]:
    """What is wrong, in words; nothing where the table is good."""
    wrong = []
    if result.within(USUAL) < SHARE:
        wrong.append(f"only {result.within(USUAL):.1%} of the cells are within {USUAL:.0%} of the best")
    for cell in result.cells:
        where = f"{cell.group}, B={cell.batch}: {cell.lane} {cell.config}"
        if cell.share > MOST:
            wrong.append(f"{where} is {cell.share:.1%} over {cell.best}")
        if cell.over_unfused > USUAL:
            wrong.append(f"{where} is {cell.over_unfused:.1%} over our unfused lane")
    return wrong


def to_dict(result: RegretResult, verdict: list[str]) -> dict[str, Any]:
    """For JSON."""
    return {
        "machine": asdict(result.machine), "table": result.table, "seconds": round(result.seconds, 1),
        "within": {str(share): round(result.within(share), 4) for share in (0.01, USUAL, MOST)},
        "wrong": verdict, "left_out": result.left_out, "cells": [cell.to_dict() for cell in result.cells],
    }  # fmt: skip


def _measure(
    settings: TuneSettings, tables: Path | None, peers: list[str], processes: int | None, json: Path | None
) -> RegretResult:
    """Run with progress bars; a file for ``json`` has after each group what is measured so far."""
    from rich.progress import Progress

    from kda_backend.gate.folders import PACKAGED
    from kda_tooling.tuning.regret import measure_regret

    with ended_early("measuring"), Progress(console=Console(stderr=True)) as progress:
        compiling = progress.add_task("compiling", total=None)
        measuring = progress.add_task("measuring groups", total=None)

        def on_group(so_far: RegretResult, done: int, of: int) -> None:
            progress.update(measuring, completed=done, total=of)
            if not is_stdout(json):
                write_json(json, to_dict(so_far, too_slow(so_far)) | {"groups": [done, of]}, "cells")

        try:
            result = measure_regret(
                settings, Path(PACKAGED) if tables is None else tables, peers=peers, processes=processes,
                on_compiled=lambda done, of: progress.update(compiling, completed=done, total=of),
                on_group=on_group,
            )  # fmt: skip
        except (ValueError, ImportError) as error:
            raise typer.BadParameter(str(error)) from None
        progress.update(measuring, total=1, completed=1, description="measured")
    return result


def show(
    result: RegretResult,
    verdict: list[str],
    console: Console,
    run: str | None = None,
    why_left_out: str = "the table has nothing of them",
) -> None:
    """The worst cell of each group, and what is wrong; ``run``: the stored one, if none was made."""
    title = f"regret by {result.table}" + ("" if run is None else f" in {run}")
    grid = Grid(title=plain(title), title_justify="left")
    for name in ("cells of", "number", "fused", "worst at", "chosen", "best", "regret", "over the peers, worst"):
        grid.add_column(name, overflow="fold")
    for group in dict.fromkeys(cell.group for cell in result.cells):
        cells = [cell for cell in result.cells if cell.group == group]
        worst = max(cells, key=lambda cell: cell.share)
        over = [cell.over_peer for cell in cells if cell.over_peer is not None]
        grid.add_row(
            group, str(len(cells)), str(sum(cell.lane.startswith("fused") for cell in cells)), f"B={worst.batch}",
            f"{worst.lane} {worst.config}, {worst.us:.2f} us", f"{worst.best}, {worst.best_us:.2f} us",
            f"{worst.share:.1%}", f"{max(over):.2f}" if over else "-",
        )  # fmt: skip
    console.print(grid)
    console.print(
        f"{len(result.cells)} cells, {result.within(0.01):.1%} within 1%, {result.within(USUAL):.1%} within "
        f"{USUAL:.0%}, {result.within(MOST):.1%} within {MOST:.0%} of the best"
        + (f"; {result.seconds:.0f} s" if run is None else f"; {len(result.left_out)} more left out"),
        highlight=False,
    )
    if result.left_out:
        console.print(
            f"[yellow]left out[/yellow], {why_left_out}: {plain('; '.join(result.left_out))}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for line in verdict:
        console.print(f"[red]too slow[/red] {plain(line)}", highlight=False, soft_wrap=True)
