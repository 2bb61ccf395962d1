"""Where the suite's values come from: a stored sweep, a sweep measured now, or nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import BATCH_SIZES, DRAFT_TOKENS, LANES, OURS, SETTINGS, SOURCE, Cells

SWEEP_TIMEOUT = 900.0


def sweep_arguments() -> list[str]:
    """The `kda sweep` call that fills every cell, with its JSON on standard output."""
    return [
        "sweep", "--lanes", *LANES, "--batch-sizes", *map(str, BATCH_SIZES), "--draft-tokens", *map(str, DRAFT_TOKENS),
        "--json", "-",
    ]  # fmt: skip


def measure() -> str:
    """Run `kda sweep` on this machine's GPU; returns its JSON. A process of its own: it starts compiling workers.

    Raises:
        subprocess.CalledProcessError: the sweep failed; it has said why on standard error.
    """
    command = [sys.executable, "-m", "kda_tooling", *sweep_arguments()]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=SWEEP_TIMEOUT).stdout


def gpu_usable() -> bool:
    """Whether kernels can be measured here; imports torch."""
    import torch

    from kda_tooling.commands.options import interpreter_chosen

    return torch.cuda.is_available() and not interpreter_chosen()


def check_settings(settings: dict[str, Any], where: str) -> None:
    """Refuse a sweep of other kernels than the history is about.

    Raises:
        ValueError: a setting differs; the message names it.
    """
    for name, expected in SETTINGS.items():
        if settings[name] != expected:
            raise ValueError(f"{where}: {name} is {settings[name]!r}; the history is about {name} = {expected!r}")


def cells_of(text: str, where: str) -> Cells:
    """Our ring lanes' fastest arms in a sweep's JSON.

    Raises:
        ValueError: the text is no sweep, or one of other settings, or it has none of the suite's cells.
    """
    from kda_tooling.bench.results import parse_results

    result = parse_results(text, where)
    check_settings(result.settings, where)
    found: Cells = {}
    for cell in result.cells:
        for lane in LANES:
            arm = cell.best(OURS, lane=lane)
            if arm is not None:
                found[lane, cell.draft_tokens, cell.batch] = arm.median_us
    if not any(t in DRAFT_TOKENS and b in BATCH_SIZES for _, t, b in found):
        raise ValueError(f"{where}: no cell of T in {DRAFT_TOKENS} and B in {BATCH_SIZES} with lanes {LANES}")
    return found


class SweepBenchmark:
    """Base of the benchmarks: one `setup_cache` for all of them, so that a live sweep runs once."""

    def setup_cache(self) -> Cells:
        """Every cell's latency; asv hands it to each benchmark and runs this once."""
        path = os.environ.get(SOURCE)
        if path:
            return cells_of(Path(path).read_text(encoding="utf-8"), path)
        if gpu_usable():
            return cells_of(measure(), "the sweep measured now")
        sys.stderr.write(f"no GPU here and {SOURCE} is not set: every cell is skipped\n")
        return {}

    setup_cache.timeout = SWEEP_TIMEOUT  # type: ignore[attr-defined]
