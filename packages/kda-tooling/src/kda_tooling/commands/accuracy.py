"""`kda accuracy`: both forms of verify, and a peer's lanes, against an fp64 oracle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kda_tooling.commands.many_values import ManyValuesCommand
from kda_tooling.commands.options import (
    HeadKDim,
    HeadVDim,
    ShortDtype,
    TimedHeads,
    TimedHvHeads,
    interpreter_chosen,
    parse_lower_bound,
    shape_of,
)
from kda_tooling.commands.outputs import check_outputs, console_for, ended_early, write_json
from kda_tooling.terminal import plain

if TYPE_CHECKING:
    from kda_tooling.bench.accuracy import AccuracySettings, Comparison

MAX_INTERPRETED = 50_000


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        cls=ManyValuesCommand,
        epilog="Examples: [bold]kda accuracy[/bold], [bold]kda accuracy --draft-tokens 4 8 16 --outputs 4000000 "
        "--peer sglang=peer --json accuracy.json[/bold]",
    )(accuracy)


def _device(outputs: int) -> str:
    """Where to run: a GPU, or for a few outputs the CPU when kernels are interpreted."""
    if interpreter_chosen():
        if outputs > MAX_INTERPRETED:
            raise typer.BadParameter(
                f"TRITON_INTERPRET is set and --outputs is {outputs}: interpreted kernels take seconds per thousand. "
                f"Unset it to use a GPU, or ask for at most {MAX_INTERPRETED}."
            )
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter(
            "accuracy is measured on a CUDA device and torch sees none here. To see the command work without one, "
            f"interpret the kernels: TRITON_INTERPRET=1 kda accuracy --outputs {MAX_INTERPRETED // 10}."
        )
    return "cuda"


def accuracy(
    draft_tokens: Annotated[list[int], typer.Option(help="Tokens verified per request, T; up to 16.")] = [4, 8],  # noqa: B006
    outputs: Annotated[int, typer.Option(help="Outputs of each arm at every T, at least.")] = 1_000_000,
    heads: TimedHeads = 8,
    hv_heads: TimedHvHeads = None,
    head_k_dim: HeadKDim = 128,
    head_v_dim: HeadVDim = 128,
    lower_bound: Annotated[
        str, typer.Option(help="Safe gate's bound, below 0; 'none' for the standard gate.")
    ] = "-5.0",
    dtype: ShortDtype = "bf16",
    peer: Annotated[list[str], typer.Option(help="NAME=FOLDER of another project's kernels, e.g. sglang=peer.")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here ('-': standard output).")
    ] = None,
) -> None:
    """Compare both forms' outputs with an fp64 oracle: share within 1 ulp, error norms, and who is nearer where.

    The oracle starts from the same 16-bit q, k and v and the same fp32 gates as every arm, so the figures are of norm,
    delta rule and the last rounding. Bits are checked first: both lanes of a form are one arm.

    Exit code 1 when the chunked form misses its contract or lanes differ, 2 for wrong arguments or an early end.
    """
    from kda_tooling.bench.accuracy import AccuracySettings
    from kda_tooling.peers import load_peer

    bound = parse_lower_bound(lower_bound)
    try:
        settings = AccuracySettings(
            draft_tokens=tuple(sorted(set(draft_tokens))), outputs=outputs,
            shape=shape_of(heads, hv_heads, head_k_dim, head_v_dim),
            dtype=dtype, lower_bound=bound, peers=tuple(peer), seed=seed,
        )  # fmt: skip
        for spec in settings.peers:
            load_peer(spec)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None
    check_outputs({"--json": json_file})
    device = _device(outputs)
    found = _measure(settings, device)
    from kda_tooling.bench.accuracy import report_data

    write_json(json_file, report_data(settings, found, device))
    _show(found, console_for(json_file))
    if any(one.broken_promises() for one in found):
        raise typer.Exit(1)


def _measure(settings: AccuracySettings, device: str) -> list[Comparison]:
    """Measure under a progress bar; exits with 1 where the bits differ."""
    from rich.progress import Progress

    from kda_tooling.bench.accuracy import measure
    from kda_tooling.bench.bits import BitsDifferError

    console = Console(stderr=True)
    with ended_early("the comparison"), Progress(console=console) as progress:
        tasks = {t: progress.add_task(f"T = {t}", total=settings.outputs) for t in settings.draft_tokens}
        try:
            return measure(settings, device, lambda t, done: progress.update(tasks[t], completed=done))
        except BitsDifferError as error:
            console.print(f"[red]Bits differ, nothing was compared:[/red] {plain(error)}", highlight=False)
            raise typer.Exit(1) from None


def _show(found: list[Comparison], console: Console) -> None:
    for one in found:
        table = Table(title=f"T = {one.draft_tokens}: against the fp64 oracle", title_justify="left")
        for name in ("arm", "outputs", "within 1 ulp", "max ulps", "error norm", "x recurrent"):
            table.add_column(name, justify="left" if name == "arm" else "right")
        for name, errors in one.arms.items():
            table.add_row(
                plain(name), f"{errors.outputs:,}", f"{errors.within / errors.outputs:.4%}", f"{errors.max_ulps:.1f}",
                f"{errors.norm:.4e}", f"{one.over_recurrent(name):.5f}",
            )  # fmt: skip
        console.print(table)
        pairs = Table(title=f"T = {one.draft_tokens}: values that differ, and which is nearer", title_justify="left")
        for name in ("one", "other", "differ", "one nearer", "other nearer", "equally near"):
            pairs.add_column(name, justify="left" if name in ("one", "other") else "right")
        for (first, second), d in one.pairs.items():
            counts = (d.differ, d.one_nearer, d.other_nearer, d.equally_near)
            pairs.add_row(plain(first), plain(second), *(f"{count:,}" for count in counts))
        console.print(pairs)
        before = ", ".join(f"{form} {errors.norm:.2e}" for form, errors in one.before_rounding.items())
        console.print(
            f"error norm before rounding (the torch reference in fp32 stands in): {before}, "
            f"{one.before_rounding_ratio:.2f}x",
            highlight=False,
        )
    judged = [broken for one in found if (broken := one.broken_promises()) is not None]
    for said in (said for broken in judged for said in broken):
        console.print(f"[bold red]Contract of the chunked form missed:[/bold red] {plain(said)}", highlight=False)
    if len(judged) < len(found):
        console.print("Too few outputs to judge the chunked form's contract by.")
    elif not any(judged):
        console.print("[green]The chunked form keeps its contract.[/green]")
