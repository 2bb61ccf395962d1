"""`kda doctor`: what this machine can run, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import json as json_module
import os
import platform
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kda_tooling.commands.options import interpreter_chosen

PACKAGES = ("kda-kernels", "kda-backend", "kda-tooling", "torch", "triton", "numpy")
LEAST_SM = 80


@dataclass(frozen=True)
class Finding:
    """One checked thing.

    Args:
        name: what was looked at.
        value: what was found.
        remedy: how to get what is missing; empty where nothing is.
    """

    name: str
    value: str
    remedy: str = ""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(epilog="Example: [bold]kda doctor --json[/bold]; exit code 0: compiled kernels run here, 1: not.")(doctor)


def _versions() -> list[Finding]:
    findings = []
    for package in PACKAGES:
        try:
            findings.append(Finding(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            own = package.startswith("kda-")
            remedy = "run from source (PYTHONPATH); fine" if own else f"python -m pip install {package}"
            findings.append(Finding(package, "not installed", "" if own else remedy))
    return findings


def _device() -> tuple[list[Finding], bool]:
    """Findings about the device, and whether kernels can run compiled on it."""
    try:
        import torch
    except ImportError as error:
        return [Finding("GPU", f"torch does not import: {error}", "python -m pip install torch")], False
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        remedy = (
            "check the driver with nvidia-smi or rocminfo"
            if built
            else "this torch is a CPU build: install one for CUDA or ROCm (pytorch.org/get-started)"
        )
        return [Finding("GPU", "none that torch can see", f"{remedy}; without a GPU: kda demo, nox -s compile")], False
    name = torch.cuda.get_device_name()
    if torch.version.hip is not None:
        return [Finding("GPU", f"{name} (ROCm {torch.version.hip})"), Finding("PDL", "not on ROCm")], True
    major, minor = torch.cuda.get_device_capability()
    sm = major * 10 + minor
    usable = sm >= LEAST_SM
    findings = [
        Finding("GPU", f"{name} (sm{sm}, CUDA {torch.version.cuda})", "" if usable else f"needs sm{LEAST_SM} or later"),
        Finding("PDL", "on by default" if sm >= 90 else "not before sm90"),
    ]
    return findings, usable


def diagnose() -> tuple[list[Finding], bool]:
    """All findings, and whether this machine can run compiled kernels."""
    findings = [Finding("Python", platform.python_version()), *_versions()]
    device, usable = _device()
    interpreted = interpreter_chosen()
    how = "interpreter (TRITON_INTERPRET is set)" if interpreted else "compiled" if usable else "not at all"
    remedy = ""
    if interpreted and usable:
        remedy = "unset TRITON_INTERPRET to run compiled kernels"
    elif not usable and not interpreted:
        remedy = "kda demo runs the kernels in Triton's interpreter"
    findings += [*device, Finding("kernels run", how, remedy)]
    compiler = next((path for path in (os.environ.get("CC"), _which("cc"), _which("gcc"), _which("clang")) if path), None)
    findings.append(
        Finding("C compiler", compiler or "none", "" if compiler else "Triton's launcher needs one: install gcc or clang")
    )
    return findings, usable and not interpreted and compiler is not None


def _which(name: str) -> str | None:
    import shutil

    return shutil.which(name)


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Versions, GPU, interpreter or compiled, PDL, what is missing. Exit code 0 if compiled kernels can run here."""
    findings, usable = diagnose()
    if json:
        typer.echo(json_module.dumps({"compiled_kernels": usable, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        table = Table(show_header=False)
        for finding in findings:
            table.add_row(finding.name, finding.value, finding.remedy)
        console = Console()
        console.print(table)
        console.print("This machine can run compiled kernels." if usable else "Compiled kernels do not run here.")
    raise typer.Exit(0 if usable else 1)
