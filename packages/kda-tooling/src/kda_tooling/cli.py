"""The ``kda`` command. torch and the kernels are imported inside the commands, so that ``--help`` stays quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Tools around the Kimi Delta Attention verify kernels.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Tools around the Kimi Delta Attention verify kernels."""


def _positive(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value} is not greater than 0.")
    return value


def _device(value: str) -> str:
    import torch

    if value == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(value).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{value!r} is not a device; allowed are auto, cpu, cuda, cuda:N.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"{value!r} was asked for, but torch sees no GPU here; use --device cpu.")
    return value


@app.command(
    "train-demo",
    epilog="Example: [bold]kda train-demo --minutes 4.5 --device cuda --out assets[/bold]. "
    "Smoke run on a CPU: [bold]kda train-demo --minutes 0.2 --batch 2 --eval-bytes 20000 --out /tmp/demo[/bold]",
)
def train_demo(
    out: Annotated[Path, typer.Option(help="Folder that gets demo_model.safetensors and demo_model.json.")],
    minutes: Annotated[float, typer.Option(help="Wall-clock minutes of training.", callback=_positive)] = 4.5,
    batch: Annotated[int, typer.Option(help="Sequences a step.", min=1)] = 64,
    sequence: Annotated[int, typer.Option(help="Bytes a sequence.", min=8)] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.", callback=_positive)] = 4e-3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the batches.")] = 0,
    compile_model: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    eval_bytes: Annotated[int | None, typer.Option(help="Measure on about so many held-out bytes only.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metadata as JSON on stdout.")] = False,
) -> None:
    """Train the demo's byte-level model on the standard library's source and measure it on held-out modules."""
    device = _device(device)
    from kda_tooling.training import TrainSettings, train_demo

    settings = TrainSettings(
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
    metadata = train_demo(settings, out, command, console)
    bits = metadata["bits_per_byte"]
    console.print(
        f"held-out bits per byte: model [bold]{bits['model']:.3f}[/bold], "
        f"byte 3-gram [bold]{bits['byte_3gram']:.3f}[/bold] ({bits['byte_3gram_smoothing']}); saved in {out}"
    )
    if as_json:
        typer.echo(json.dumps(metadata))
