"""`kda tune`: measure a gate table on this GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

from kda_tooling.commands.gate import GATES, MODES, OPTION_WORDS, OPTIONS
from kda_tooling.commands.many_values import ManyValuesCommand
from kda_tooling.commands.options import (
    FORMS,
    HeadKDim,
    HeadVDim,
    ShortDtype,
    TimedHeads,
    TimedHvHeads,
    check_output_folder,
    refuse,
    require_gpu,
    shape_of,
)
from kda_tooling.commands.outputs import check_outputs, console_for, ended_early, write_json
from kda_tooling.names import long_dtype
from kda_tooling.terminal import plain

if TYPE_CHECKING:
    from kda_backend.gate import Table
    from kda_tooling.tuning.run import TuneResult
    from kda_tooling.tuning.settings import TuneSettings

FAILURES_SHOWN = 20


DraftTokens = Annotated[list[int], typer.Option(help="Tokens verified per request, T.")]
BatchSizes = Annotated[
    list[int] | None,
    typer.Option(help="Requests per batch, B; default: 34 sizes up to 256, and those that just fill the GPU's SMs."),
]
Forms = Annotated[list[str], typer.Option("--form", help=f"Of {', '.join(FORMS)}.")]
Modes = Annotated[list[str], typer.Option("--mode", help=f"State modes: {', '.join(MODES)}.")]
Options = Annotated[list[str], typer.Option("--option", help=f"Pool options: {OPTION_WORDS}.")]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="Processes that measure, in turns, as far as memory allows; default: half of the cores, at most 8.",
    ),
]
Gates = Annotated[list[str], typer.Option("--gate", help=f"Gates of the delta rule: {', '.join(GATES)}.")]
EVERY_T = [2, 3, 4, 5, 6, 7, 8]
EVERY_FORM, EVERY_MODE, PLAIN, SAFE = list(FORMS), list(MODES), list(OPTIONS[:1]), list(GATES[:1])
"""The usual values, those of `kda_tooling.tuning.settings.TuneSettings`, here so that ``--help`` imports no torch."""

READ_ANYWHERE = "'kda gate show' and 'kda gate explain' read tables anywhere."


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        cls=ManyValuesCommand,
        epilog="Examples: [bold]kda tune --heads 16 --hv-heads 16 --into tables[/bold], [bold]kda tune --draft-tokens "
        "3 4 --form recurrent --mode ring --into tables --resume[/bold]. Then "
        "KDA_GATE_TABLES=tables has the gate read it.",
    )(tune)


def tune(
    heads: TimedHeads = 8,
    hv_heads: TimedHvHeads = None,
    head_k_dim: HeadKDim = 128,
    head_v_dim: HeadVDim = 128,
    dtype: ShortDtype = "bf16",
    draft_tokens: DraftTokens = EVERY_T,
    batch_sizes: BatchSizes = None,
    forms: Forms = EVERY_FORM,
    modes: Modes = EVERY_MODE,
    options: Options = PLAIN,
    gates: Gates = SAFE,
    margin: Annotated[float, typer.Option(help="Share of unfused's time by which fused has to win every pass.")] = 0.02,
    passes: Annotated[int, typer.Option(help="Independent passes.")] = 2,
    finalists: Annotated[int, typer.Option(help="Configurations per lane that every pass times.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    into: Annotated[
        Path, typer.Option(help="Folder of the table, written with --check too; made where it is missing.")
    ] = Path(),
    resume: Annotated[bool, typer.Option("--resume", help="Leave what the table there has already.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Drop what the table there has already.")] = False,
    processes: Processes = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Compare with this table of another folder; exit with 1 where a verdict would change."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write a summary here ('-': standard output).")] = None,
) -> None:
    """Measure this GPU's gate table for one head shape: bits first, every lane, two independent passes.

    Candidates that fail are left out and told. Exit codes: 0, and with --check nothing would change; 1, with --check a
    verdict would change (other configurations are told apart from that); 2, refused or ended early: what was measured
    till then is in the table, and --resume goes on from there.
    """
    from kda_backend.gate import TableError, load_table
    from kda_tooling.tuning.settings import TuneSettings

    if resume and fresh:
        raise refuse("--fresh", "drops what --resume would leave: give one of them.")
    try:
        settings = TuneSettings(
            **grid_of(heads, hv_heads, head_k_dim, head_v_dim, dtype, draft_tokens, batch_sizes),
            **kinds_of(forms, modes, options, gates), margin=margin, passes=passes, finalists=finalists, seed=seed,
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    check_output_folder("--into", into)
    check_outputs({"--json": json})
    try:
        compared = load_table(check) if check is not None else None
    except TableError as error:
        raise refuse("--check", f"{error}.") from None
    if check is not None and compared is not None:
        if check.resolve().parent == into.resolve():
            raise refuse("--check", f"{check} is in --into, where this run writes: give another folder.")
        _refuse_foreign(compared, settings)
    require_gpu("tuning", READ_ANYWHERE)
    if compared is not None:
        import torch

        _refuse_foreign(compared, settings, torch.cuda.get_device_name())
    settings = settings if batch_sizes else replace(settings, batch_sizes=usual_sizes_here(settings))
    result = _measure(settings, into, fresh, resume, processes)
    from kda_tooling.tuning.run import changes, other_configs

    changed = changes(result, compared) if compared is not None else []
    configs = other_configs(result, compared) if compared is not None else []
    summary = _summary(result) | ({} if compared is None else {"changes": changed, "configurations": configs})
    write_json(json, summary)
    _show(result, changed, configs, console_for(json))
    if changed:
        raise typer.Exit(1)


def _refuse_foreign(compared: Table, settings: TuneSettings, device_name: str | None = None) -> None:
    """Refuse to compare with a table that is about something else."""
    from kda_tooling.tuning.run import foreign

    if why := foreign(compared, settings.shape, long_dtype(settings.dtype), device_name):
        raise refuse("--check", f"the table {why}.")


def grid_of(
    heads: int,
    hv_heads: int | None,
    head_k_dim: int,
    head_v_dim: int,
    dtype: str,
    draft_tokens: list[int],
    batch_sizes: list[int] | None,
) -> dict[str, Any]:
    """The options that say which shape and sizes, as `TuneSettings` has them."""
    sizes = {"batch_sizes": tuple(sorted(set(batch_sizes)))} if batch_sizes else {}
    return {
        "shape": shape_of(heads, hv_heads, head_k_dim, head_v_dim),
        "dtype": dtype,
        "draft_tokens": tuple(sorted(set(draft_tokens))),
        **sizes,
    }


def usual_sizes_here(settings: TuneSettings) -> tuple[int, ...]:
    """Batch sizes where none were given, for the current CUDA device."""
    import torch

    from kda_tooling.tuning.settings import usual_batch_sizes

    return usual_batch_sizes(settings.shape, torch.cuda.get_device_properties().multi_processor_count)


def kinds_of(forms: list[str], modes: list[str], options: list[str], gates: list[str]) -> dict[str, Any]:
    """The options that say which kinds of verify, as `TuneSettings` has them, each once."""
    kinds = {"forms": forms, "modes": modes, "options": options, "gates": gates}
    return {name: tuple(dict.fromkeys(values)) for name, values in kinds.items()}


def _measure(settings: TuneSettings, into: Path, fresh: bool, resume: bool, processes: int | None) -> TuneResult:
    """Run with a progress bar for compiling and one for the groups."""
    from rich.progress import Progress

    from kda_tooling.tuning.run import run_tune

    with ended_early("tuning"), Progress(console=Console(stderr=True)) as progress:
        compiling = progress.add_task("compiling candidates", total=None)
        measuring = progress.add_task("measuring groups", total=None)
        try:
            into.mkdir(parents=True, exist_ok=True)
            result = run_tune(
                settings, into, fresh=fresh, resume=resume, processes=processes,
                on_compiled=lambda done, of: progress.update(compiling, completed=done, total=of),
                on_group=lambda group, done, of: progress.update(
                    measuring, completed=done, total=of, description=f"measured {group}"
                ),
            )  # fmt: skip
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        progress.update(measuring, total=1, completed=1, description="measured")
    return result


def _summary(result: TuneResult) -> dict[str, Any]:
    from kda_tooling.bench.arms import config_name

    return {
        "table": str(result.path),
        "cells": len(result.measured),
        "lanes": _lane_counts(result),
        "seconds": {name: round(seconds, 1) for name, seconds in result.seconds.items()},
        "failures": [
            {
                "group": str(one.group), "batch": one.batch, "lane": one.lane, "config": config_name(one.config),
                "error": one.error, "broken": one.broken,
            }
            for one in result.failures
        ],
    }  # fmt: skip


def _lane_counts(result: TuneResult) -> dict[str, int]:
    counts = Counter(result.table.verdict(result.table.by_key[key]) for key in result.measured)
    return dict(sorted(counts.items()))


def _show(result: TuneResult, changed: list[str], configs: list[str], console: Console) -> None:
    """The outcome for people."""
    from kda_tooling.bench.arms import config_name

    broken = [one for one in result.failures if one.broken]
    if broken:
        grid = Grid(title="candidates that failed", title_justify="left")
        for name in ("where", "lane", "configuration", "error"):
            grid.add_column(name)
        for one in broken[:FAILURES_SHOWN]:
            where = str(one.group) if one.batch is None else f"{one.group}, B={one.batch}"
            grid.add_row(where, one.lane, config_name(one.config), plain(one.error))
        console.print(grid)
        if len(broken) > FAILURES_SHOWN:
            console.print(f"and {len(broken) - FAILURES_SHOWN} more: --json has them all")
    counts = ", ".join(f"{lane} {count}" for lane, count in _lane_counts(result).items()) or "none"
    console.print(f"cells measured: {len(result.measured)} ({counts})", highlight=False)
    console.print(f"not timed: {len(result.failures)} candidates, {len(broken)} of them broken", highlight=False)
    waited = result.seconds.get("before the first group", 0)
    console.print(f"{result.seconds['all']:.0f} s, {waited:.0f} s of them before the first group", highlight=False)
    console.print(f"table: {plain(result.path)}", highlight=False, soft_wrap=True)
    for line in changed:
        console.print(f"[yellow]changed[/yellow] {plain(line)}", highlight=False, soft_wrap=True)
    for line in configs:
        console.print(f"other configuration: {plain(line)}", highlight=False, soft_wrap=True)
