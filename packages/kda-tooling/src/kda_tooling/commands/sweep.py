"""`kda sweep`: measure every lane beside peers and the byte floor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kda_tooling.commands.many_values import ManyValuesCommand
from kda_tooling.commands.options import (
    FORMS,
    LANES,
    HeadKDim,
    HeadVDim,
    ShortDtype,
    TimedHeads,
    TimedHvHeads,
    parse_lower_bound,
    refuse,
    require_gpu,
    shape_of,
)
from kda_tooling.commands.outputs import check_outputs, console_for, ended_early, write_output
from kda_tooling.commands.report import check_picture, show
from kda_tooling.terminal import plain

if TYPE_CHECKING:
    from kda_tooling.bench.results import SweepResult
    from kda_tooling.bench.settings import SweepSettings


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        cls=ManyValuesCommand,
        epilog="Examples: [bold]kda sweep[/bold], [bold]kda sweep --batch-sizes 1 4 16 64 --draft-tokens 4 8 "
        "--peer sglang=peer --json sweep.json --plot sweep.png[/bold], [bold]kda sweep --round --modes fused+ring "
        "unfused+ring[/bold]",
    )(sweep)


def _check_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuse files that could not be written after minutes of measuring."""
    check_picture(plot)
    check_outputs({"--json": json, "--plot": plot})


def sweep(
    lanes: Annotated[  # typer reads the default once
        list[str], typer.Option("--modes", "--lanes", help=f"Lanes to measure: {', '.join(LANES)}.")
    ] = list(LANES),  # noqa: B006
    batch_sizes: Annotated[list[int], typer.Option(help="Requests per batch, B.")] = [1, 4, 16, 64],  # noqa: B006
    draft_tokens: Annotated[list[int], typer.Option(help="Tokens verified per request, T.")] = [4],  # noqa: B006
    heads: TimedHeads = 8,
    hv_heads: TimedHvHeads = None,
    head_k_dim: HeadKDim = 128,
    head_v_dim: HeadVDim = 128,
    lower_bound: Annotated[
        str, typer.Option(help="Safe gate's bound, below 0; 'none' for the standard gate.")
    ] = "-5.0",
    dtype: ShortDtype = "bf16",
    bias: Annotated[bool, typer.Option(help="Conv bias.")] = True,
    form: Annotated[
        list[str], typer.Option(help=f"Forms of ring lanes: {', '.join(FORMS)}. chunked alone: ring lanes only.")
    ] = list(FORMS[:1]),  # noqa: B006
    sweep_bv: Annotated[bool, typer.Option("--sweep-bv", help="All launch configurations of the fused lanes.")] = False,
    round_: Annotated[
        bool, typer.Option("--round", help="Time verify on every layer plus one all-layer commit.")
    ] = False,
    commit: Annotated[bool, typer.Option("--commit", help="Time the all-layer commit alone.")] = False,
    accept: Annotated[int | None, typer.Option(help="Accept length of commits; default: T - 1.")] = None,
    hot: Annotated[
        bool, typer.Option("--hot/--cold", help="One argument set over and over, or rotate past 3x the L2 (default).")
    ] = False,
    indices_ready: Annotated[
        bool, typer.Option("--indices-ready", help="Declare slots and rows unwritten by the kernel before (PDL).")
    ] = False,
    fold_on_verify: Annotated[
        bool, typer.Option("--fold-on-verify", help="With --round: ring lanes also folding the last round on verify.")
    ] = False,
    compact_window: Annotated[
        bool, typer.Option("--compact-window", help="With --round: every lane also without conv windows.")
    ] = False,
    passes: Annotated[int, typer.Option(help="Interleaved passes, odd.")] = 9,
    peer: Annotated[list[str], typer.Option(help="NAME=FOLDER of another project's kernels, e.g. sglang=peer.")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    every_arm: Annotated[bool, typer.Option("--every-arm", help="Print all arms, not each lane's fastest.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results here ('-': standard output).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against batch size here (.png, .svg, .pdf).")] = None,
) -> None:
    """Time verify lanes, rounds or commits on this GPU: bits checked first, arms interleaved, L2 cold, floor beside.

    Exit code 1 when arms differ in a bit, 2 for wrong arguments or an early end.
    """
    from kda_tooling.bench.settings import SweepSettings
    from kda_tooling.peers import load_peer

    if round_ and commit:
        raise refuse("--round", "times verify plus commit, --commit the commit alone: give one of them.")
    bound = parse_lower_bound(lower_bound)
    forms = tuple(one for one in FORMS if one in form) + tuple(one for one in form if one not in FORMS)
    if forms == ("chunked",) and tuple(lanes) == LANES:  # all lanes: those that this form is of
        lanes = [lane for lane in LANES if lane.endswith("+ring")]
    try:
        settings = SweepSettings(
            lanes=tuple(dict.fromkeys(lanes)), batch_sizes=tuple(sorted(set(batch_sizes))),
            draft_tokens=tuple(sorted(set(draft_tokens))),
            shape=shape_of(heads, hv_heads, head_k_dim, head_v_dim),
            dtype=dtype, lower_bound=bound, bias=bias, forms=forms,
            kind="round" if round_ else "commit" if commit else "verify", accept=accept,
            sweep_configs=sweep_bv, hot=hot, passes=passes, peers=tuple(peer), seed=seed,
            indices_ready=indices_ready, fold_on_verify=fold_on_verify, compact_window=compact_window,
        )  # fmt: skip
        for spec in settings.peers:
            load_peer(spec)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None
    _check_outputs(json, plot)
    require_gpu(
        "a sweep",
        "Without a GPU use 'kda demo' (kernels interpreted) or 'nox -s compile' (kernels compiled ahead).",
    )
    result = _measure(settings)
    write_output(json, result.to_json() + "\n")
    show(result, every_arm or sweep_bv, console_for(json))
    if plot is not None:
        from kda_tooling.bench.plot import plot as draw

        draw([result], plot)


def _measure(settings: SweepSettings) -> SweepResult:
    """Compile in parallel, then measure, with a progress bar each; exits with 1 where the bits differ."""
    import torch
    from rich.progress import Progress

    from kda_tooling.bench.bits import BitsDifferError
    from kda_tooling.bench.sweep import build_arms, build_problems, check_memory, run_sweep
    from kda_tooling.bench.warmup import compile_all, compile_jobs
    from kda_tooling.peers import load_peer

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        check_memory(settings, properties.L2_cache_size, properties.total_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(stderr=True)
    with ended_early("the sweep"):
        peers = [load_peer(spec) for spec in settings.peers]
        arms = {
            t: build_arms(settings, build_problems(settings, t, 1, 1, "cuda").layers[0], peers)
            for t in settings.draft_tokens
        }
        jobs = compile_jobs(settings, arms)
        started = time.monotonic()
        with Progress(console=console) as progress:
            task = progress.add_task(f"compiling {len(jobs)} variants", total=len(jobs))
            compile_all(settings, jobs, on_done=lambda name: progress.advance(task))
        compiled = time.monotonic()
        cells = settings.cells()
        with Progress(console=console) as progress:
            task = progress.add_task("measuring", total=len(cells))

            def on_cell(draft_tokens: int, batch: int) -> None:
                progress.update(
                    task, description=f"measuring T = {draft_tokens}, B = {batch}",
                    completed=cells.index((draft_tokens, batch)),
                )  # fmt: skip

            try:
                result = run_sweep(settings, on_cell)
            except BitsDifferError as error:
                console.print(f"[red]Bits differ, nothing was timed:[/red] {plain(error)}", highlight=False)
                raise typer.Exit(1) from None
            progress.update(task, completed=len(cells))
    console.print(f"compiled in {compiled - started:.0f} s, measured in {time.monotonic() - compiled:.0f} s")
    return result
