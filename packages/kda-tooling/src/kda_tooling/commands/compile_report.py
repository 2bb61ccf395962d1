"""`kda compile-report`: what the compiler makes of every kernel, for GPUs that need not be there."""

from __future__ import annotations

import datetime
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kda_tooling.commands.options import check_output_file, check_output_folder, refuse
from kda_tooling.commands.outputs import check_outputs, console_for, write_json
from kda_tooling.terminal import plain

if TYPE_CHECKING:
    from kda_tooling.compiling.report import CompiledKernel, JobResult
    from kda_tooling.compiling.specs import Selection, Specs

BUDGET = Path("benchmarks/compile-budget.json")
TABLE_BUDGET = Path("benchmarks/table-budget.json")
PACKAGED = "packaged"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "compile-report",
        epilog="Example: [bold]kda compile-report --target sm90 --kernel fused[/bold]. "
        "After a change that is meant to cost more: [bold]kda compile-report --write-budget[/bold], then commit.",
    )(compile_report)


def compile_report(
    target: Annotated[
        list[str] | None,
        typer.Option(help="sm80, sm90, sm100, sm103, sm120, gfx942 or gfx950; repeatable. Default: all."),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            help="conv, recurrence, fused, fold, scatter_conv, scatter_snapshots, gather_conv, advance or flush; "
            "repeatable. Default: all."
        ),
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="Configuration as the table names it; repeatable. Default: all.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the budget; exit 1 if anything exceeds it.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write-budget", help="Write what was measured, plus a small slack, as the new budget.")
    ] = False,
    budget: Annotated[
        Path | None,
        typer.Option(help=f"The budget file; default: {BUDGET}, with --tables {TABLE_BUDGET}.", show_default=False),
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help=f"Compile what the gate tables there name instead; '{PACKAGED}': kda-backend's own."
        ),
    ] = None,
    new: Annotated[
        bool,
        typer.Option(
            "--new",
            help="Only what the budget has no entry for yet; written, it loses entries of what is no longer there.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to FILE ('-': standard output).")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Compiling processes; default: one per core.", min=1)] = None,
) -> None:
    """Compile every kernel ahead of time and show registers, spills, shared memory, shuffles and instructions.

    Needs no GPU. Every configuration is also held to the rules that cost nothing to check: which buffers the code
    writes, and what it reads before the PDL wait. Exit status 1: a rule, the budget or a compilation failed; 2: the
    command could not do what was asked.
    """
    console = Console(stderr=True)
    if budget is None and tables not in (None, PACKAGED) and (check or write or new):
        raise refuse("--budget", f"must be named with tables of one's own: {TABLE_BUDGET} is of the packaged ones.")
    budget = budget or (BUDGET if tables is None else TABLE_BUDGET)
    if check and write:
        raise refuse("--check", "excludes --write-budget: check first, then write if it is meant.")
    check_outputs({"--json": json_file}, {"--budget": budget if check or write or new else None})
    if new and check:
        raise refuse("--new", "compiles what the budget lacks, --check compares with the budget: give one of them.")
    if write:
        check_output_folder("--budget", budget.parent)
        if budget.exists():
            check_output_file("--budget", budget)

    import triton

    from kda_tooling.compiling.budget import BudgetError, load_budget, over_budget, write_budget
    from kda_tooling.compiling.report import compiled_kernels
    from kda_tooling.compiling.specs import SPECS, Selection
    from kda_tooling.compiling.tables import not_in

    try:
        source = SPECS if tables is None else _specs_of_tables(tables)
        selection = Selection(tuple(target or ()), tuple(kernel or ()), tuple(config or ()), source)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if tables is not None and not any(source.values()):
        if tables != PACKAGED:  # a mistyped folder must not pass for one whose kernels are within the budget
            raise refuse("--tables", f"{tables!r} has no table that names a kernel; '{PACKAGED}': kda-backend's own.")
        console.print("no table there names a kernel: nothing to compile")
        if json_file is not None:
            write_json(json_file, _as_json([], [], triton.__version__, 0.0) | {"whole": False})
        return
    if not selection.specs():
        asked = [", ".join(names or ("any",)) for names in (selection.configs, selection.kernels, selection.targets)]
        raise typer.BadParameter(
            "nothing to compile: there is no configuration {} of kernel {} for target {}. Leave out --config, and the "
            "table names those that are.".format(*asked)
        )
    try:
        # A partial write keeps the other entries, so it must be able to read them.
        kept = (write and not selection.everything and budget.exists()) or (new and budget.exists())
        limits = load_budget(budget, triton.__version__) if check or kept else {}
    except BudgetError as error:
        raise refuse("--budget", str(error)) from None
    requested = selection
    if new:
        chosen = {target: tuple(spec for of, spec in selection.specs() if of == target) for target in source}
        selection = Selection(selection.targets, selection.kernels, source=not_in(limits, chosen))
    start = time.perf_counter()
    results = _compile_with_progress(console, selection, jobs)
    seconds = time.perf_counter() - start
    measured = compiled_kernels(results, selection)
    problems = [f"{r.target} {r.config}: does not compile: {r.failure}" for r in results if r.failure]
    problems += [f"{k.target} {k.kernel} {k.config}: {rule}" for k in measured for rule in k.broken]
    if write and not problems:
        try:
            write_budget(budget, measured, triton.__version__, requested, keep=source if new else None)
        except BudgetError as error:
            raise refuse("--budget", str(error)) from None
    if check:
        problems += over_budget(measured, limits, selection)
    _print_tables(console_for(json_file), measured)
    if json_file is not None:
        whole = selection.everything and tables is None and not new
        data = _as_json(measured, problems, triton.__version__, seconds) | {"whole": whole}
        write_json(json_file, data)
    console.print(f"{len(measured)} kernels compiled with triton {triton.__version__} in {seconds:.0f} s")
    if problems:
        for problem in problems:
            console.print(f"[red]{plain(problem)}[/red]", soft_wrap=True, highlight=False)
        if check:
            console.print(
                "Undo the change that caused this, or, if it is worth its cost, write a new budget with "
                "`kda compile-report --write-budget` and commit the diff.",
                soft_wrap=True,
            )
        raise typer.Exit(1)
    if check:
        console.print(f"within the budget {plain(budget)}")
    if write:
        console.print(f"wrote {plain(budget)}")


def _specs_of_tables(folder: str) -> Specs:
    """What the tables in ``folder`` name; it, or the option, is refused where they cannot be read."""
    from kda_backend.gate.folders import PACKAGED as OWN
    from kda_tooling.compiling.tables import load_tables, table_specs

    path = Path(OWN if folder == PACKAGED else folder)
    if not path.is_dir():
        raise refuse("--tables", f"{folder} is no folder.")
    return table_specs(load_tables(path))


def _compile_with_progress(console: Console, selection: Selection, jobs: int | None) -> list[JobResult]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kda_tooling.compiling.report import compile_all

    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        return compile_all(
            selection,
            jobs=jobs,
            on_start=lambda total: progress.update(task, total=total),
            on_done=lambda done: progress.update(task, advance=1, description=plain(f"{done.target} {done.config}")),
        )


def _print_tables(console: Console, measured: list[CompiledKernel]) -> None:
    from kda_tooling.compiling.specs import KERNELS

    for target in dict.fromkeys(one.target for one in measured):
        table = Table(title=plain(target), title_justify="left")
        table.add_column("kernel", no_wrap=True)
        table.add_column("configuration", no_wrap=True)
        rows = sorted((one for one in measured if one.target == target), key=lambda one: KERNELS.index(one.kernel))
        for figure in rows[0].stats.to_dict():
            table.add_column(figure.replace("_", " "), justify="right")
        for one in rows:
            table.add_row(plain(one.kernel), plain(one.config), *(str(value) for value in one.stats.to_dict().values()))
        console.print(table)


def _as_json(measured: list[CompiledKernel], problems: list[str], version: str, seconds: float) -> dict[str, object]:
    from kda_tooling.bench.machine import git_commit

    return {
        "triton": version,
        "commit": git_commit(),
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds, 1),
        "kernels": [
            {
                "target": k.target,
                "kernel": k.kernel,
                "config": k.config,
                **k.stats.to_dict(),
                "inspection": asdict(k.inspection) if k.inspection else None,
            }
            for k in measured
        ],
        "problems": problems,
    }
