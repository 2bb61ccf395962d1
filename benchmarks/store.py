"""Store a sweep in the asv history, at the commit it was measured at: ``python -m benchmarks.store --json FILE``.

asv runs the suite here, in the interpreter that runs this script, and replays the file. Its own result file would name
this interpreter's path and version, which have nothing to do with the measurement and would split every graph: they are
taken out, and the machine that measured is written in.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import SOURCE
from .source import cells_of, gpu_usable, measure

if TYPE_CHECKING:  # asv imports this module too: no torch here
    from kda_tooling.bench.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = "replay"


def machine_name(gpu: str) -> str:
    """The GPU's name as a folder name: histories are per GPU model."""
    return re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_")


def commit_of(machine: Machine, given: str | None) -> str:
    """The full hash of the commit that the sweep was measured at.

    Raises:
        ValueError: the sweep does not say, or says that the tree had changes, and none was given; or it is no commit
            of this repository.
    """
    name = given or machine.commit
    if given is None and (name == "unknown" or "+" in name):
        raise ValueError(
            f"the sweep was measured at commit {name!r}: measure a committed tree (set KDA_GIT_SHA where .git is "
            "missing), or name the commit with --commit"
        )
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        raise ValueError(f"{name} is no commit of this repository")
    return found


def run_asv(sweep: Path, machine: str, results: Path, *options: str) -> None:
    """Run the suite on ``sweep`` with asv, results below ``results``.

    Raises:
        subprocess.CalledProcessError: asv could not run, or a benchmark raised (exit code 2).
    """
    config = json.loads((ROOT / "asv.conf.json").read_text())
    config |= {"repo": str(ROOT), "benchmark_dir": str(ROOT / "benchmarks"), "results_dir": str(results)}
    asv = [sys.executable, "-m", "asv"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "asv.conf.json"
        path.write_text(json.dumps(config))
        # Registered by name only: a new kernel or more memory must not split a line of the graphs. In a home of its
        # own, so that nothing is left in the user's.
        env = os.environ | {SOURCE: str(sweep.resolve()), "HOME": folder}
        if "PYTHONPATH" in env:  # asv drops it
            env["ASV_PYTHONPATH"] = env["PYTHONPATH"]
        register = [*asv, "machine", "--yes", "--machine", machine, "--config", str(path)]
        subprocess.run(register, env=env, check=True, stdout=subprocess.DEVNULL)
        command = [*asv, "run", "--config", str(path), "--machine", machine, "-E", f"existing:{sys.executable}"]
        subprocess.run([*command, "--show-stderr", *options], env=env, check=True)


def normalised(data: dict[str, Any], measured: Machine) -> dict[str, Any]:
    """asv's result with what belongs to the replaying interpreter taken out and the measuring machine written in."""
    return data | {
        "env_name": ENVIRONMENT, "python": "any", "params": data["params"] | {"python": "any"}, "durations": {},
        "measured": dataclasses.asdict(measured),
    }  # fmt: skip


def store(sweep: Path, commit: str | None, results: Path) -> Path:
    """Replay ``sweep`` into the history below ``results``; returns the file written.

    Raises:
        ValueError, OSError, subprocess.CalledProcessError: as `commit_of`, `load_results` and `run_asv`.
    """
    from kda_tooling.bench.results import load_results

    result = load_results(sweep)
    cells_of(sweep.read_text(encoding="utf-8"), str(sweep))
    found, name = commit_of(result.machine, commit), machine_name(result.machine.gpu)
    with tempfile.TemporaryDirectory() as folder:
        run_asv(sweep, name, Path(folder), "--set-commit-hash", found)
        (written,) = Path(folder, name).glob("*-existing*.json")
        data = normalised(json.loads(written.read_text()), result.machine)
        target = results / name / f"{written.name.partition('-')[0]}-{ENVIRONMENT}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(data) + "\n")
        shutil.copy(Path(folder, name, "machine.json"), target.parent)
        shutil.copy(Path(folder, "benchmarks.json"), results)
    return target


def main(arguments: list[str] | None = None) -> None:
    """The command; exits with a message where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store", description="Store a sweep in the asv history (docs/measuring.md)."
    )
    parser.add_argument("--json", type=Path, help="a sweep's JSON; without it one is measured on this GPU")
    parser.add_argument("--commit", help="store under this commit instead of the one that the sweep names")
    parser.add_argument("--dry-run", action="store_true", help="run every benchmark on the file and store nothing")
    given = parser.parse_args(arguments)
    if given.json is None and given.dry_run:
        parser.error("--dry-run needs --json")
    try:
        with tempfile.TemporaryDirectory() as folder:
            sweep = given.json
            if sweep is None:
                if not gpu_usable():
                    parser.error("no GPU here: give --json FILE, a sweep measured elsewhere (kda sweep --json FILE)")
                sweep = Path(folder) / "sweep.json"
                sweep.write_text(measure())
            if given.dry_run:
                run_asv(sweep, "dry_run", Path(folder) / "results", "--quick", "--dry-run")
                sys.stdout.write("every benchmark ran; nothing was stored\n")
                return
            written = store(sweep, given.commit, ROOT / "benchmarks" / "results")
            sys.stdout.write(f"stored {written.relative_to(ROOT)}\n")
    except subprocess.CalledProcessError as error:
        what = "kda sweep" if "kda_tooling" in error.cmd else "asv"
        sys.exit(f"benchmarks.store: {what} failed with exit code {error.returncode}; what it said is above")
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.store: {error}")


if __name__ == "__main__":
    main()
