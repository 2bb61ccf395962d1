"""What follows the nightly measurement: ``python -m benchmarks.nightly merge | issues | tighten``.

Each step can be run by hand. Without --apply nothing outside the checkout is written; what would be is said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .asv_runs import ROOT
from .forge import Forge
from .store import RESULTS, replay

BRANCH = "performance-results"
"""The branch that holds the results of every night, and nothing else."""

TIGHTENED = "gate-tightened"
LABEL = "performance"
TABLES = Path("packages/kda-backend/src/kda_backend/gate/tables")
MOST_BEHIND = 7
"""Measured commits, one a night at most, by which a GPU may be behind before its cells are lost: a week."""

SHOWN = 100
"""Cells that an issue lists; its text has a limit."""


class NightlyError(RuntimeError):
    """A step cannot be done; the message says why."""


def merge(forge: Forge, measured: Path, results: Path) -> list[str]:
    """Gather the history of the checkout and of the branch, add the files in ``measured``, and renew the branch.

    Returns:
        What is wrong with files that could not be stored; the rest is stored.
    """
    shutil.rmtree(results, ignore_errors=True)
    tip = forge.tip(BRANCH)  # first: where that fails, the steps that follow find no history, not half of one
    shutil.copytree(RESULTS, results)
    if tip is not None:
        forge.extract(tip, results)
        _newest_benchmarks(results)
    unusable = replay(measured, None, results)
    commit = forge.commit(results, ["."], None, tip, f"Results up to {forge.git('rev-parse', '--short=12', 'HEAD')}")
    if forge.same_files(commit, tip):
        sys.stdout.write(f"{BRANCH} has all of it\n")
    elif forge.would(f"push {commit[:12]} to {BRANCH}"):
        forge.push(commit, BRANCH)
    return unusable


def _newest_benchmarks(results: Path) -> None:
    """What the checkout says of its benchmarks holds, not what an earlier one said."""
    path = results / "benchmarks.json"
    old, new = (json.loads(one.read_text(encoding="utf-8")) for one in (path, RESULTS / "benchmarks.json"))
    path.write_text(json.dumps(old | new, indent=4, sort_keys=True) + "\n", encoding="utf-8")


def kda(*arguments: str, accepted: tuple[int, ...] = (0, 1)) -> int:
    """Run a `kda` command; its exit code.

    Raises:
        NightlyError: another exit code than those accepted.
    """
    done = subprocess.run([sys.executable, "-m", "kda_tooling", *arguments], cwd=ROOT, check=False)
    if done.returncode not in accepted:
        raise NightlyError(f"kda {' '.join(arguments[:2])} failed with exit code {done.returncode}; it has said why")
    return done.returncode


def issues(forge: Forge, results: Path) -> int:
    """Open or update one issue per benchmark and machine that got slower or was lost; returns their number."""
    with tempfile.TemporaryDirectory() as folder:
        report, page = Path(folder, "report.json"), Path(folder, "report.md")
        # exit code 2 without a regression: some file is broken, which the report names
        kda("regressions", "--results", str(results), "--max-age", str(MOST_BEHIND), "--json", str(report),
            "--markdown", str(page), accepted=(0, 1, 2))  # fmt: skip
        if not report.is_file():
            raise NightlyError(f"kda regressions read nothing in {results}; it has said why")
        found = json.loads(report.read_text(encoding="utf-8"))
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(page.read_text(encoding="utf-8"))
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in found["cells"]:
        if cell["status"] in ("regression", "lost"):
            groups.setdefault((cell["status"], cell["machine"], cell["benchmark"]), []).append(cell)
    for (status, machine, benchmark), cells in groups.items():
        what = "Slower" if status == "regression" else "Lost"
        count = f"{len(cells)} cell{'s' * (len(cells) > 1)}"
        forge.issue(
            f"<!-- kda regressions: {status} {machine} {benchmark} -->", f"{what}: {benchmark} on {machine}, {count}",
            body_of(status, cells), LABEL,
        )  # fmt: skip
    for problem in found["problems"]:
        sys.stderr.write(f"unusable: {problem['file']}: {problem['message']}\n")
    sys.stdout.write(f"{len(groups)} benchmarks got slower or were lost\n")
    return len(groups)


def body_of(status: str, cells: list[dict[str, Any]]) -> str:
    """An issue's text: the cells as a table."""
    figures = ("before", "after", "ratio", "threshold")
    columns = ["cell", *figures, "commits"] if status == "regression" else ["cell", "why"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for cell in cells[:SHOWN]:
        name = ", ".join(f"{key}={value}" for key, value in cell["cell"].items())
        if status == "regression":
            shown = [_shown(cell[key]) for key in figures]
            row = [name, *(f"{one} {cell['unit']}".strip() for one in shown[:2]), *shown[2:],
                   "..".join(dict.fromkeys(one[:12] for one in cell["commits"]))]  # fmt: skip
        else:
            row = [name, str(cell["said"])]
        lines.append("| " + " | ".join(one.replace("|", "\\|").replace("\n", " ") for one in row) + " |")
    rest = [f"and {len(cells) - SHOWN} more"] if len(cells) > SHOWN else []
    end = "Found by `kda regressions`; `docs/regressions.md` says how, `docs/measuring.md` how it is measured."
    return "\n".join([*lines, *rest, "", end])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def tighten(forge: Forge, results: Path) -> int:
    """Close the cells of every packaged table that the history shows to lose, as a pull request.

    Returns:
        How many tables changed.
    """
    tables = sorted((forge.checkout / TABLES).glob("*.json"))
    changed, texts = [], []
    with tempfile.TemporaryDirectory() as folder:
        copies = Path(folder, TABLES)
        copies.mkdir(parents=True)
        for table in tables:
            copy, report = Path(shutil.copy(table, copies)), Path(folder, "report.json")
            report.unlink(missing_ok=True)
            kda("gate", "tighten", str(copy), "--results", str(results), "--repo", str(forge.checkout), "--apply",
                "--json", str(report), accepted=(0, 1, 2))  # fmt: skip
            if not report.is_file():
                raise NightlyError(f"kda gate tighten could not use {table.name} or {results}; it has said why")
            found = json.loads(report.read_text(encoding="utf-8"))
            if found["applied"]:
                changed.append(table)
                texts.append(f"`{table.name}`\n\n```diff\n{found['diff'].strip()}\n```")
        if changed:
            _propose(forge, Path(folder), changed, texts)
    sys.stdout.write(f"{len(changed)} of {len(tables)} tables change\n")
    return len(changed)


def _propose(forge: Forge, files: Path, changed: list[Path], texts: list[str]) -> None:
    title = "Gate: unfused where fused got slower"
    head = forge.git("rev-parse", "HEAD")
    paths = [str(TABLES / table.name) for table in changed]
    commit = forge.commit(files, paths, head, head, title)
    if forge.same_files(commit, forge.tip(TIGHTENED)):
        sys.stdout.write(f"{TIGHTENED} has it already\n")
    elif forge.would(f"push {commit[:12]} to {TIGHTENED}"):
        forge.push(commit, TIGHTENED, force=True)
    body = "By `kda gate tighten` on the performance history. `kda tune` or two winning nights reopen the cells.\n\n"
    forge.pull_request(TIGHTENED, title, body + "\n\n".join(texts) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """The command; exits with a message where a step cannot be done, and with 1 where a file could not be stored."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--results", type=Path, default=Path("history"), help="folder of the gathered results")
    shared.add_argument("--apply", action="store_true", help="push, open issues and pull requests")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nightly", description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    merging = steps.add_parser("merge", parents=[shared], help="add measured files to the results branch")
    merging.add_argument("measured", type=Path, help="folder of JSON files that nox -s bench -- --keep wrote")
    steps.add_parser("issues", parents=[shared], help="open or update one issue per regression")
    steps.add_parser("tighten", parents=[shared], help="propose tightened gate tables as a pull request")
    given = parser.parse_args(arguments)
    forge, results = Forge(ROOT, given.apply), given.results.resolve()
    unusable: list[str] = []
    try:
        if given.step == "merge":
            unusable = merge(forge, given.measured, results)
        elif given.step == "issues":
            issues(forge, results)
        else:
            tighten(forge, results)
    except subprocess.CalledProcessError as error:
        sys.exit(f"benchmarks.nightly: {' '.join(map(str, error.cmd[:3]))} failed; what it said is above")
    except (NightlyError, ValueError, OSError) as error:
        sys.exit(f"benchmarks.nightly: {error}")
    for wrong in unusable:
        sys.stderr.write(f"not stored: {wrong}\n")
    if unusable:
        sys.exit(1)


if __name__ == "__main__":
    main()
