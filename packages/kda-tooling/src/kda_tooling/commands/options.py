"""Option values that several commands check alike. Refusals exit with 2 before anything runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

LANES = ("unfused", "unfused+ring", "fused", "fused+ring")
"""`kda_backend.LANES`, here for options, so that ``--help`` need not import torch."""


def interpreter_chosen() -> bool:
    """Whether the environment asks for Triton's interpreter, spelt as Triton allows."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "yes", "on", "y"}


def positive(value: float | None) -> float | None:
    """Typer callback for numbers above 0."""
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value} is not greater than 0.")
    return value


def refuse(option: str, message: str) -> typer.BadParameter:
    """The error to raise for an option whose value cannot be used."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def check_output_file(option: str, path: Path) -> None:
    """Refuse a file that could not be written after minutes of work. Raises ``typer.BadParameter``."""
    if path.is_dir():
        raise refuse(option, f"{path} is a folder.")
    if not path.absolute().parent.is_dir():
        raise refuse(option, f"the folder {path.absolute().parent} is missing.")


def resolve_device(value: str) -> str:
    """``auto`` to the device to use, others checked. Raises ``typer.BadParameter``."""
    import torch

    if value == "auto":
        return "cuda" if torch.cuda.is_available() and not interpreter_chosen() else "cpu"
    try:
        kind = torch.device(value).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise refuse("--device", f"{value!r} is not a device; allowed are auto, cpu, cuda, cuda:N.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise refuse("--device", f"{value!r} was asked for, but torch sees no GPU here; use --device cpu.")
    return value


def choose_kernels(device: str) -> None:
    """Have Triton interpret kernels for the CPU and compile them for a GPU; it decides when it is first imported.

    Raises ``typer.BadParameter`` when that cannot be had any more.
    """
    if device == "cpu":
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        elif not interpreter_chosen():
            raise refuse("--device", "cpu needs TRITON_INTERPRET=1, set before anything imports triton.")
    elif interpreter_chosen():
        raise refuse("--device", f"{device} runs compiled kernels, but TRITON_INTERPRET is set; unset it.")
