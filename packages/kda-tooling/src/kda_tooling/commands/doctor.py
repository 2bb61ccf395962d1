"""`kda doctor`: what this machine can run, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kda_tooling.commands.options import interpreter_chosen
from kda_tooling.commands.outputs import check_outputs, console_for, write_json

OWN_PACKAGES = ("kda-kernels", "kda-backend", "kda-tooling")
LEAST_VERSIONS = {"torch": (2, 11), "triton": (3, 6), "numpy": (2, 3)}
"""What the three distributions declare."""

LEAST_SM = 80
PDL_SM = 90


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
    app.command(
        epilog="Examples: [bold]kda doctor[/bold], [bold]kda doctor --json -[/bold]; exit code 0: compiled kernels run "
        "here, 1: not."
    )(doctor)


def _versions() -> tuple[list[Finding], bool]:
    """Findings about packages, and whether those that kernels need are there and new enough."""
    findings, complete = [], True
    for package in OWN_PACKAGES:
        try:
            findings.append(Finding(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package, "not installed, runs from source"))
    for package, least in LEAST_VERSIONS.items():
        needed = f"{package}>={'.'.join(map(str, least))}"
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package, "not installed", f"python -m pip install '{needed}'"))
            complete = False
            continue
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        findings.append(Finding(package, version, "" if numbers >= least else f"python -m pip install '{needed}'"))
        complete = complete and numbers >= least
    return findings, complete


def _device() -> tuple[list[Finding], bool]:
    """Findings about the device, and whether kernels can be compiled for it."""
    try:
        import torch
    except ImportError as error:
        return [Finding("GPU", f"unknown: torch does not import ({error})", "mend torch first")], False
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
    remedy = "" if usable else f"kernels need sm{LEAST_SM} or later; on this machine: kda demo --device cpu"
    findings = [
        Finding("GPU", f"{name} (sm{sm}, CUDA {torch.version.cuda})", remedy),
        Finding("PDL", "on by default" if sm >= PDL_SM else f"not before sm{PDL_SM}"),
    ]
    return findings, usable


def _compiler() -> Finding:
    """The C compiler that Triton builds its launchers with: CC if set, else the first of the usual names."""
    named = os.environ.get("CC")
    candidates = [named] if named else ["cc", "gcc", "clang"]
    found = next((path for name in candidates if (path := shutil.which(name))), None)
    if found:
        return Finding("C compiler", found)
    missing = f"CC={named} is not an executable" if named else "none"
    return Finding("C compiler", missing, "Triton's launcher needs one: install gcc or clang, or set CC to it")


def run_one_kernel() -> Finding:
    """Compile and run one small verify on the GPU: the proof that everything above fits together."""
    started = time.monotonic()
    try:
        import torch

        from kda_kernels import KdaShape, verify_fused
        from kda_tooling.problem import random_problems

        p = random_problems(
            KdaShape(1, 1, 64, 64), layers=1, batch=1, draft_tokens=1, dtype=torch.bfloat16, device="cuda"
        ).layers[0]
        out = verify_fused(
            p.mixed_qkv, p.a, p.b, shape=p.shape, params=p.params, state=p.state, record=p.record("ring"),
            slots=p.slots, draft_tokens=p.draft_tokens,
        )  # fmt: skip
        finite = bool(out.isfinite().all())
    except Exception as error:  # whatever a compiler, driver or missing header may raise: it is the finding
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Finding("a small kernel", f"failed: {first}", "usual causes: no Python headers, an old driver")
    if not finite:
        return Finding("a small kernel", "gave values that are not finite", "run nox -s gpu to see which kernels fail")
    return Finding("a small kernel", f"compiled and ran in {time.monotonic() - started:.1f} s")


def diagnose() -> tuple[list[Finding], bool]:
    """All findings, and whether this machine runs compiled kernels (with the environment as it is)."""
    versions, complete = _versions()
    device, capable = _device()
    compiler = _compiler()
    findings = [Finding("Python", platform.python_version()), *versions, *device, compiler]
    possible = complete and capable and not compiler.remedy
    interpreted = interpreter_chosen()
    if interpreted:
        remedy = "unset TRITON_INTERPRET to run compiled kernels" if possible else ""
        findings.append(Finding("kernels run", "in the interpreter: TRITON_INTERPRET is set", remedy))
        return findings, False
    if not possible:
        remedy = "mend what is missing above; kda demo runs the kernels in Triton's interpreter on the CPU"
        findings.append(Finding("kernels run", "not compiled", remedy))
        return findings, False
    probe = run_one_kernel()
    findings += [probe, Finding("kernels run", "not compiled" if probe.remedy else "compiled")]
    return findings, not probe.remedy


def doctor(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the findings here ('-': standard output).")
    ] = None,
) -> None:
    """Versions, GPU, interpreter or compiled, PDL, what is missing. Exit code 0 if compiled kernels can run here."""
    check_outputs({"--json": json_file})
    findings, usable = diagnose()
    write_json(json_file, {"compiled_kernels": usable, "findings": [asdict(finding) for finding in findings]})
    table = Table(show_header=False)
    for finding in findings:
        table.add_row(*map(escape, (finding.name, finding.value, finding.remedy)))
    console = console_for(json_file)
    console.print(table)
    console.print("This machine runs compiled kernels." if usable else "Compiled kernels do not run here.")
    raise typer.Exit(0 if usable else 1)
