"""Where a suite's values come from: stored files, a measurement made now, or nowhere.

``python -m benchmarks.source FOLDER`` measures into files, which `benchmarks.store` stores elsewhere: no asv, no git.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import ACCEPT, BATCH_SIZES, DRAFT_TOKENS, HEAD_DIMS, LANES, SHAPE, SOURCE, Values
from .records import KINDS, combined, record_of, values_in

TIMEOUT = 1800.0
"""Seconds that a suite's measurement may take: compiling every kernel on two cores takes about 300."""

WITHOUT_GPU = ("memory", "compile")
"""Kinds that any machine can measure."""

Command = tuple[str, ...]


def commands(kind: str) -> list[Command]:
    """The `kda` calls that fill every cell of the kind's suites; the JSON file's name follows the last word."""
    grid = ("--batch-sizes", *map(str, BATCH_SIZES), "--draft-tokens", *map(str, DRAFT_TOKENS))
    accept = ("--accept", str(ACCEPT))
    calls: dict[str, list[Command]] = {
        "verify": [
            ("sweep", "--modes", *LANES, *grid, "--form", "recurrent", "chunked", "--json"),
            ("sweep", "--modes", "unfused", "fused", *grid, "--json"),
        ],
        "round": [("sweep", "--round", "--modes", "unfused", "fused", *LANES, *grid, *accept, "--json")],
        "commit": [("sweep", "--commit", "--modes", "fused", "fused+ring", *grid, *accept, "--json")],
        "regret": [("gate", "regret", *grid, "--json")],
        "host-time": [("host-time", "--json")],
        "memory": [
            ("memory", "--budget", "80GiB", "--heads", "8", "--layers", "1", "--head-k-dim", dim, "--head-v-dim", dim,
             "--json")
            for dim in map(str, HEAD_DIMS)
        ],
        "compile": [("compile-report", "--json")],
    }  # fmt: skip
    return calls[kind]


def measure(kind: str, folder: Path) -> list[Path]:
    """Run the kind's commands here, each in a process of its own; returns their JSON files, below ``folder``.

    Raises:
        subprocess.CalledProcessError: a command failed; it has said why on standard error.
    """
    written = []
    for number, arguments in enumerate(commands(kind)):
        path = folder / f"{kind}-{number}.json"
        command = [sys.executable, "-m", "kda_tooling", *arguments, str(path)]
        # what a command shows is no output of ours; its exit code 1 is about the figures, which it has written
        done = subprocess.run(command, stdout=sys.stderr, check=False, timeout=TIMEOUT)
        if done.returncode and not (kind == "regret" and done.returncode == 1 and path.is_file()):
            raise subprocess.CalledProcessError(done.returncode, command)
        written.append(path)
    return written


def gpu_usable() -> bool:
    """Whether kernels can be measured here; imports torch."""
    import torch

    from kda_tooling.commands.options import interpreter_chosen

    return torch.cuda.is_available() and not interpreter_chosen()


def table_here() -> bool:
    """Whether the packaged tables have one for this GPU and the history's shape; imports torch."""
    import torch

    from kda_backend.gate import table_name
    from kda_backend.gate.folders import PACKAGED
    from kda_kernels import KdaShape

    name = table_name(KdaShape(**SHAPE), torch.cuda.get_device_name(), "bfloat16")
    return Path(PACKAGED, name).is_file()


def measurable() -> Iterator[str]:
    """The kinds that can be measured on this machine; says on standard error which cannot, and why."""
    gpu = gpu_usable()
    for kind in KINDS:
        if not gpu and kind not in WITHOUT_GPU:
            why = "no GPU here"
        elif kind == "regret" and not table_here():
            why = "this GPU has no packaged table; kda tune writes one"
        else:
            yield kind
            continue
        sys.stderr.write(f"{kind} is not measured: {why}\n")


def values_of(kind: str) -> Values:
    """The suite's cells: replayed, or measured where that can be done."""
    path = os.environ.get(SOURCE)
    if path:
        return values_in(Path(path), kind)
    if kind not in WITHOUT_GPU and not gpu_usable():
        sys.stderr.write(f"no GPU here and {SOURCE} is not set: every cell is skipped\n")
        return {}
    if kind == "regret" and not table_here():
        sys.stderr.write("this GPU has no packaged table: every cell is skipped\n")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        return combined(record_of(path.read_text(encoding="utf-8"), str(path)) for path in measure(kind, Path(folder)))


def measure_here(folder: Path, kinds: Iterable[str] | None = None) -> list[str]:
    """Measure ``kinds``, or all that this machine can, into ``folder``; returns what failed, which stops no other."""
    failed = []
    for kind in measurable() if kinds is None else kinds:
        try:
            measure(kind, folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(f"{kind}: {error}")
    return failed


def main(arguments: list[str] | None = None) -> None:
    """The command; exits with 1 where a kind could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.source",
        description="Measure this machine's cells of the history into JSON files; stores nothing.",
        epilog="Example: KDA_GIT_SHA=COMMIT python -m benchmarks.source history/COMMIT verify round; elsewhere then "
        "nox -s bench -- --json history",
    )
    parser.add_argument("folder", type=Path, help="where to; made where it is missing")
    every = f"of {', '.join(KINDS)}; default: all that this machine can measure"
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=every)
    given = parser.parse_args(arguments)
    if unknown := [kind for kind in given.kinds if kind not in KINDS]:
        parser.error(f"KIND must be of {', '.join(KINDS)}; got {', '.join(unknown)}")
    try:
        given.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"folder: {given.folder} cannot be made: {error.strerror}; name another")
    failed = measure_here(given.folder, given.kinds or None)
    for wrong in failed:
        sys.stderr.write(f"not measured: {wrong}\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
