"""Store measurements in the asv history, each at its commit: ``python -m benchmarks.store --json FILE_OR_FOLDER ...``.

asv runs the suites here, in the interpreter that runs this script, and replays the files: a machine with a GPU needs
neither asv nor git nor a network.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import idle
from .asv_runs import ENVIRONMENT, ROOT, merged, normalised, run_asv, same_versions, without_empty
from .records import KINDS, Record, files_in, load, record_of
from .source import measure_here
from .spread import with_spread

RESULTS = ROOT / "benchmarks" / "results"
COMMIT = re.compile(r"[0-9a-f]{7,40}")


def machine_name(machine: str) -> str:
    """The GPU model, or compiler, as a folder name: histories are per model."""
    return re.sub(r"[^A-Za-z0-9]+", "_", machine).strip("_")


def resolved(name: str) -> str:
    """The full hash of a commit.

    Raises:
        ValueError: it is no commit of this repository.
    """
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        raise ValueError(f"{name} is no commit of this repository")
    return found


def commit_of(record: Record, given: str | None) -> str:
    """The full hash of the commit that a file was measured at: ``given``, what it says, or its folder's name.

    Raises:
        ValueError: nothing says it, or the tree had changes and none was given; the file and its folder name two; or
            it is no commit of this repository.
    """
    if given is not None:
        return resolved(given)
    folder = Path(record.where).resolve().parent.name
    beside = folder if COMMIT.fullmatch(folder) else None
    said = None if record.commit == "unknown" else record.commit
    if said is not None and "+" in said:
        raise ValueError(
            f"{record.where} was measured at commit {said!r}: measure a committed tree (set KDA_GIT_SHA where .git is "
            "missing), or name the commit with --commit"
        )
    if said is None and beside is None:
        raise ValueError(
            f"{record.where} does not say at which commit it was measured: put it into a folder named after the "
            "commit, set KDA_GIT_SHA where .git is missing, or name the commit with --commit"
        )
    commits = {resolved(name) for name in (said, beside) if name is not None}
    if len(commits) > 1:
        raise ValueError(f"{record.where} says commit {said} and lies in the folder of {beside}: one of them is wrong")
    return commits.pop()


def read(source: Path) -> tuple[list[Record], list[str]]:
    """All files at ``source``, and what is wrong with those that the history cannot take."""
    records, unusable = [], []
    for path in files_in(source):
        try:
            records.append(record_of(load(path)[1], str(path)))
        except (ValueError, OSError) as error:
            unusable.append(str(error))
    return records, unusable


def grouped(records: Iterable[Record], given: str | None) -> tuple[dict[tuple[str, str], list[Record]], list[str]]:
    """(machine, commit) -> the files that make its result, and what is wrong with the others."""
    groups: dict[tuple[str, str], list[Record]] = {}
    unusable = []
    for record in records:
        try:
            group = groups.setdefault((machine_name(record.machine), commit_of(record, given)), [])
            if group and not same_versions(group[0].measured, record.measured):
                raise ValueError(
                    f"{record.where} and {group[0].where} are of one commit and one machine, with other versions of "
                    "driver, torch or triton: store them one after the other; the later replaces the earlier"
                )
            group.append(record)
        except ValueError as error:
            unusable.append(str(error))
    return {key: group for key, group in groups.items() if group}, unusable


def measured_by(group: list[Record]) -> dict[str, Any]:
    """What the files say of machine, versions and date: that of the newest, host times last."""
    ordered = sorted(group, key=lambda record: (-KINDS.index(record.kind), str(record.measured.get("date", ""))))
    return ordered[-1].measured


def store(group: list[Record], machine: str, commit: str, results: Path) -> Path:
    """Replay the files into the history below ``results``; returns the file written.

    Raises:
        ValueError: the stored result of this commit is broken.
        OSError, subprocess.CalledProcessError: as `run_asv`.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, written = Path(folder, "files"), Path(folder, "results")
        source.mkdir()
        for number, record in enumerate(group):
            shutil.copy(record.where, source / f"{number}.json")
        kinds = sorted({record.kind for record in group})
        run_asv(source, machine, written, "--set-commit-hash", commit, kinds=kinds)
        (result,) = Path(written, machine).glob("*-existing*.json")
        data = with_spread(normalised(json.loads(result.read_text()), measured_by(group)), group)
        data = without_empty(data)
        target = results / machine / f"{result.name.partition('-')[0]}-{ENVIRONMENT}.json"
        if target.is_file():
            try:
                data = merged(json.loads(target.read_text()), data)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(f"{target} is broken ({error!r}): remove it, then store anew") from None
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(data) + "\n")
        shutil.copy(Path(written, machine, "machine.json"), target.parent)
        _add_benchmarks(written / "benchmarks.json", results / "benchmarks.json")
    return target


def _add_benchmarks(found: Path, known: Path) -> None:
    """Write what asv discovered beside what an earlier, perhaps partial, run did."""
    old = json.loads(known.read_text()) if known.is_file() else {}
    known.write_text(json.dumps(old | json.loads(found.read_text()), indent=4, sort_keys=True) + "\n")


def replay(source: Path, given: str | None, results: Path) -> list[str]:
    """Store every file at ``source``; returns what is wrong with those that could not be stored.

    Raises:
        OSError, subprocess.CalledProcessError: as `run_asv`.
    """
    records, unusable = read(source)
    groups, refused = grouped(records, given)
    for (machine, commit), group in groups.items():
        try:
            written = store(group, machine, commit, results)
        except ValueError as error:
            refused.append(str(error))
            continue
        sys.stdout.write(f"stored {os.path.relpath(written)} from {', '.join(record.where for record in group)}\n")
    return unusable + refused


def main(arguments: list[str] | None = None) -> None:
    """The command; exits with 1 and a message where a file could not be stored."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store", description="Store measurements in the asv history (docs/measuring.md)."
    )
    parser.add_argument(
        "--json", type=Path, action="append", default=[],
        help="a JSON file of kda sweep, gate regret, host-time, memory or compile-report, or a folder of them; "
        "repeatable; without it this machine is measured",
    )  # fmt: skip
    parser.add_argument("--commit", help="store under this commit instead of the one that the files name")
    parser.add_argument("--keep", type=Path, help="keep the files measured here in this folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the history's folder")
    parser.add_argument("--dry-run", action="store_true", help="run every benchmark on the files and store nothing")
    given = parser.parse_args(arguments)
    if given.dry_run and len(given.json) != 1:
        parser.error("--dry-run needs one --json")
    if given.json and given.keep:
        parser.error("--keep is for files measured here; with --json nothing is measured")
    try:
        if given.dry_run:
            with tempfile.TemporaryDirectory() as folder:
                run_asv(given.json[0], "dry_run", Path(folder), "--quick", "--dry-run")
            sys.stdout.write("every benchmark ran; nothing was stored\n")
            return
        if given.json:
            unusable = [wrong for source in given.json for wrong in replay(source, given.commit, given.results)]
        else:
            unusable = _measured(given.keep, given.commit, given.results)
    except subprocess.CalledProcessError as error:
        what = "kda" if "kda_tooling" in error.cmd else "asv"
        sys.exit(f"benchmarks.store: {what} failed with exit code {error.returncode}; what it said is above")
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.store: {error}")
    for wrong in unusable:
        sys.stderr.write(f"not stored: {wrong}\n")
    if unusable:
        sys.exit(1)


def _measured(keep: Path | None, commit: str | None, results: Path) -> list[str]:
    """Measure here, then store; as `replay`."""
    from kda_tooling.bench.machine import git_commit

    head = commit or git_commit()
    if commit is None and not COMMIT.fullmatch(head):
        raise ValueError(
            f"this tree is at commit {head!r}: measure a committed tree (set KDA_GIT_SHA where .git is missing), or "
            "name the commit with --commit"
        )
    if shutil.which("nvidia-smi") and (busy := idle.reasons()):
        raise ValueError(f"the GPU is busy: {'; '.join(busy)}; wait until it is free")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep or Path(temporary)) / resolved(head)[:12]
        folder.mkdir(parents=True, exist_ok=True)
        failed = measure_here(folder)
        return failed + replay(folder, commit, results)


if __name__ == "__main__":
    main()
