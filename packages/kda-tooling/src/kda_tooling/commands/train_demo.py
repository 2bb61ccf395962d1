"""`kda train-demo`: train the model that `kda demo` decodes with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kda_tooling.commands.options import check_output_folder, positive, refuse, resolve_device
from kda_tooling.commands.outputs import check_outputs, console_for, write_json
from kda_tooling.terminal import plain

MAX_BATCH = 4096
MAX_SEQUENCE = 1 << 16
MAX_STEP_BYTES = 1 << 20
"""Batch times sequence: 16 times the default. A step's memory grows with it."""

MAX_MINUTES = 24 * 60


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "train-demo",
        epilog="Example: [bold]kda train-demo --minutes 4.5 --device cuda --out assets[/bold]. Smoke run on a CPU: "
        "[bold]kda train-demo --minutes 0.2 --batch 2 --eval-bytes 20000 --out /tmp/demo[/bold]",
    )(train_demo)


def train_demo(
    out: Annotated[Path, typer.Option(help="Folder that gets demo_model.safetensors and demo_model.json.")],
    minutes: Annotated[
        float, typer.Option(help="Wall-clock minutes of training.", callback=positive, max=MAX_MINUTES)
    ] = 4.5,
    batch: Annotated[int, typer.Option(help="Sequences a step.", min=1, max=MAX_BATCH)] = 64,
    sequence: Annotated[int, typer.Option(help="Bytes a sequence.", min=8, max=MAX_SEQUENCE)] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.", callback=positive)] = 4e-3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the batches.", min=0, max=2**63 - 1)] = 0,
    compile_model: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    eval_bytes: Annotated[int | None, typer.Option(help="Measure on about so many held-out bytes only.", min=1)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the metadata here ('-': standard output).")
    ] = None,
) -> None:
    """Train the demo's byte-level model on the standard library's source and measure it on held-out modules.

    Exit code 1 when the model diverged (nothing is saved), 2 for wrong arguments.
    """
    if batch * sequence > MAX_STEP_BYTES:
        raise refuse(
            "--sequence",
            f"{batch} sequences of {sequence} bytes are {batch * sequence} a step; at most {MAX_STEP_BYTES}.",
        )
    check_output_folder("--out", out)
    for made in (out, out / "demo_model.safetensors", out / "demo_model.json"):
        check_outputs({"--json": json_file}, {"--out": made})
    device = resolve_device(device)
    from kda_tooling.demo import training

    settings = training.TrainSettings(
        minutes=minutes,
        batch=batch,
        sequence=sequence,
        learning_rate=learning_rate,
        seed=seed,
        device=device,
        compile=compile_model,
        eval_bytes=eval_bytes,
    )
    console = Console(stderr=True)
    command = (
        f"kda train-demo --minutes {minutes} --batch {batch} --sequence {sequence} --learning-rate {learning_rate} "
        f"--seed {seed} --device {device}{' --compile' if compile_model else ''}"
        f"{'' if eval_bytes is None else f' --eval-bytes {eval_bytes}'} --out OUT"
    )
    try:
        metadata = training.train_demo(settings, out, command, console)
    except training.DivergedError as error:
        console.print(f"[red]The model diverged, nothing is saved:[/red] {plain(error)}", highlight=False)
        raise typer.Exit(1) from None
    write_json(json_file, metadata)
    bits = metadata["bits_per_byte"]
    console_for(json_file).print(
        f"held-out bits per byte: model [bold]{bits['model']:.3f}[/bold], "
        f"byte 3-gram [bold]{bits['byte_3gram']:.3f}[/bold] ({bits['byte_3gram_smoothing']}); saved in {plain(out)}"
    )
