"""`kda train-demo`: train the model that `kda demo` decodes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kda_tooling.commands.options import positive, resolve_device


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "train-demo",
        epilog="Example: [bold]kda train-demo --minutes 4.5 --device cuda --out assets[/bold]. Smoke run on a CPU: "
        "[bold]kda train-demo --minutes 0.2 --batch 2 --eval-bytes 20000 --out /tmp/demo[/bold]",
    )(train_demo)


def train_demo(
    out: Annotated[Path, typer.Option(help="Folder that gets demo_model.safetensors and demo_model.json.")],
    minutes: Annotated[float, typer.Option(help="Wall-clock minutes of training.", callback=positive)] = 4.5,
    batch: Annotated[int, typer.Option(help="Sequences a step.", min=1)] = 64,
    sequence: Annotated[int, typer.Option(help="Bytes a sequence.", min=8)] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.", callback=positive)] = 4e-3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the batches.")] = 0,
    compile_model: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    eval_bytes: Annotated[int | None, typer.Option(help="Measure on about so many held-out bytes only.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metadata as JSON on stdout.")] = False,
) -> None:
    """Train the demo's byte-level model on the standard library's source and measure it on held-out modules."""
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
        f"kda train-demo --minutes {minutes:g} --batch {batch} --sequence {sequence} --learning-rate {learning_rate:g} "
        f"--seed {seed} --device {device}{' --compile' if compile_model else ''} --out OUT"
    )
    metadata = training.train_demo(settings, out, command, console)
    bits = metadata["bits_per_byte"]
    console.print(
        f"held-out bits per byte: model [bold]{bits['model']:.3f}[/bold], "
        f"byte 3-gram [bold]{bits['byte_3gram']:.3f}[/bold] ({bits['byte_3gram_smoothing']}); saved in {out}"
    )
    if as_json:
        typer.echo(json.dumps(metadata))
