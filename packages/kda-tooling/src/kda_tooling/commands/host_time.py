"""`kda host-time`: what a call costs the host outside CUDA graphs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kda_tooling.commands.options import (
    MOST_TIMED_BATCH,
    MOST_TIMED_TOKENS,
    TimedHeads,
    TimedHvHeads,
    require_gpu,
    shape_of,
)
from kda_tooling.commands.outputs import check_outputs, console_for, ended_early, write_json
from kda_tooling.terminal import plain

MAX_CALLS = 10**6


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(epilog="Example: [bold]kda host-time --calls 2000 --json host-time.json[/bold]")(host_time)


def host_time(
    calls: Annotated[int, typer.Option(min=1, max=MAX_CALLS, help="Calls of each op, each way.")] = 2000,
    batch_size: Annotated[int, typer.Option(min=1, max=MOST_TIMED_BATCH, help="Requests per batch, B.")] = 1,
    draft_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_TIMED_TOKENS, help="Tokens verified per request, T.")
    ] = 4,
    heads: TimedHeads = 8,
    hv_heads: TimedHvHeads = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here ('-': standard output).")
    ] = None,
) -> None:
    """Time what a verify or commit call costs the host outside CUDA graphs: a first call, and calls that equal it.

    From the call to its return, allocation of the output and the driver's launch included; the device is not waited
    for. Keep the batch small, or the launch queue fills and the host waits.
    """
    shape = shape_of(heads, hv_heads)
    check_outputs({"--json": json_file})
    require_gpu("kda host-time")
    import torch

    from kda_tooling.bench.host_time import measure, processor
    from kda_tooling.bench.machine import describe_machine

    with ended_early("measuring"):
        try:
            times = measure(shape, batch=batch_size, draft_tokens=draft_tokens, calls=calls)
        except torch.OutOfMemoryError as error:
            raise typer.BadParameter(
                f"--batch-size {batch_size}, --draft-tokens {draft_tokens} and --heads {heads} do not fit this GPU: "
                f"{error}"
            ) from None
    console = console_for(json_file)
    table = Table(title=f"us of the host per call, B = {batch_size}, T = {draft_tokens}", title_justify="left")
    for name in ("call", "first", "again"):
        table.add_column(name, justify="left" if name == "call" else "right")
    for one in times:
        table.add_row(plain(one.op), f"{one.checked:.1f}", f"{one.replayed:.1f}")
    console.print(table)
    data = {
        "machine": asdict(describe_machine()), "processor": processor(), "shape": asdict(shape),
        "batch_size": batch_size, "draft_tokens": draft_tokens, "calls": calls,
        "us_per_call": [asdict(one) for one in times],
    }  # fmt: skip
    write_json(json_file, data)
