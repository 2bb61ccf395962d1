"""What follows the nightly measurement: ``python -m benchmarks.nightly merge | issues | tighten | loosen``.

Each step can be run by hand. Without --apply nothing outside the checkout is written; what would be is said.
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
from pathlib import Path
from typing import Any, NamedTuple

from .asv_runs import ROOT
from .forge import Forge
from .store import RESULTS, replay

BRANCH = "performance-results"
"""The branch that holds the results of every night, and nothing else."""


class Proposal(NamedTuple):
    """The pull request of a `kda gate` command's changes.

    Args:
        branch: its branch, for nothing else.
        title: also the commit's message.
        why: how its text begins.
    """

    branch: str
    title: str
    why: str


PROPOSALS = {
    "tighten": Proposal(
        "gate-tightened", "Gate: unfused where fused got slower",
        "By `kda gate tighten` on the performance history. `kda tune`, or two winning nights (`kda gate loosen`), "
        "reopen the cells.",
    ),
    "loosen": Proposal(
        "gate-loosened", "Gate: fused again where it won twice",
        "By `kda gate loosen` on the performance history: the newest two runs win by the table's margin.",
    ),
}  # fmt: skip
"""Command of `kda gate` -> its pull request."""

LABEL = "performance"
TABLES = Path("packages/kda-backend/src/kda_backend/gate/tables")
MOST_BEHIND = 7
"""Measured commits, one a night at most, by which a GPU may be behind before its cells are lost: a week."""

SHOWN = 100
"""Cells that an issue lists; its text has a limit."""

STATED = re.compile(r"<!-- cells: (.*) -->")
"""In an issue's text: its listed cells with the figures that they are to come back to, as JSON."""


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


def kda(*arguments: str, accepted: tuple[int, ...]) -> None:
    """Run a `kda` command.

    Raises:
        NightlyError: another exit code than those accepted.
    """
    done = subprocess.run([sys.executable, "-m", "kda_tooling", *arguments], cwd=ROOT, check=False)
    if done.returncode not in accepted:
        raise NightlyError(f"kda {' '.join(arguments[:2])} failed with exit code {done.returncode}; it has said why")


def _fail_if_unusable(problems: list[dict[str, Any]]) -> None:
    """Raises `NightlyError` where a file of the history could not be used: what can be done is done by then."""
    for problem in problems:
        sys.stderr.write(f"unusable: {problem['file']}: {problem['message']}\n")
    if problems:
        count = f"{len(problems)} file{'s' * (len(problems) > 1)}"
        raise NightlyError(f"{count} of the history could not be used, or not whole; the rest was, and all of it done")


def issues(forge: Forge, results: Path) -> int:
    """Open or update one issue per benchmark and machine that got slower or was lost; close those that recovered.

    Returns:
        How many benchmarks got slower or were lost.

    Raises:
        NightlyError: there is no history; or, with all done, some file of it could not be used.
    """
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
    every: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in found["cells"]:
        every.setdefault((cell["machine"], cell["benchmark"]), []).append(cell)
        if cell["status"] in ("regression", "lost"):
            groups.setdefault((cell["status"], cell["machine"], cell["benchmark"]), []).append(cell)
    for (status, machine, benchmark), cells in groups.items():
        what = "Slower" if status == "regression" else "Lost"
        count = f"{len(cells)} cell{'s' * (len(cells) > 1)}"
        title = f"{what}: {benchmark} on {machine}, {count}"
        forge.issue(_marker(status, machine, benchmark), title, body_of(status, cells), LABEL)
    gone = {_marker(status, *place): (status, place) for status in ("regression", "lost") for place in every
            if (status, *place) not in groups}  # fmt: skip
    for issue in forge.open_issues(LABEL):
        for marker, (status, place) in gone.items():
            if marker in (issue["body"] or ""):
                _close(forge, issue, status, every[place], found["machines"][place[0]]["newest"][:12])
    sys.stdout.write(f"{len(groups)} benchmarks got slower or were lost\n")
    _fail_if_unusable(found["problems"])
    return len(groups)


def _marker(status: str, machine: str, benchmark: str) -> str:
    return f"<!-- kda regressions: {status} {machine} {benchmark} -->"


def _close(forge: Forge, issue: dict[str, Any], status: str, cells: list[dict[str, Any]], newest: str) -> None:
    """Close the issue where every cell that it states recovered; else say that it stays."""
    back = recovered(issue["body"], status, cells)
    if back is None:
        sys.stdout.write(f"issue {issue['number']} stays: not all its cells are back where they were\n")
        return
    lines = [f"Recovered at {newest}:", "", "| cell | before | now |", "|---|---|---|"]
    for cell, before in back:
        figures = [f"{_shown(one)} {cell['unit']}".strip() for one in (before, cell["after"])]
        now = f"measured; {cell['status']}" if cell["after"] is None else figures[1]
        lines.append(_row([_named(cell), figures[0], now]))
    forge.close_issue(issue["number"], issue["title"], "\n".join(lines) + "\n")


def recovered(body: str, status: str, cells: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float | None]] | None:
    """(cell, value that the issue states from before) of an issue's cells; None where one is not as it was.

    A slower one must be judged, and at most the threshold above what it was when the issue was renewed last: a
    regression that is left alone becomes the baseline, which is no recovery. A lost one must be measured.
    """
    said = STATED.search(body)
    by_name = {_named(cell): cell for cell in cells}
    found = []
    try:
        for name, before, threshold in [] if said is None else json.loads(said[1]):
            cell = by_name.get(name)
            if cell is None or cell["status"] == "lost":
                return None
            if status == "regression" and (cell["after"] is None or cell["after"] > before * threshold):
                return None
            found.append((cell, before))
    except (ValueError, TypeError):  # somebody edited it
        return None
    return found or None


def body_of(status: str, cells: list[dict[str, Any]]) -> str:
    """An issue's text: the cells as a table."""
    figures = ("before", "after", "ratio", "threshold")
    columns = ["cell", *figures, "commits"] if status == "regression" else ["cell", "why"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for cell in cells[:SHOWN]:
        name = _named(cell)
        if status == "regression":
            shown = [_shown(cell[key]) for key in figures]
            row = [name, *(f"{one} {cell['unit']}".strip() for one in shown[:2]), *shown[2:],
                   "..".join(dict.fromkeys(one[:12] for one in cell["commits"]))]  # fmt: skip
        else:
            row = [name, str(cell["said"])]
        lines.append(_row(row))
    rest = [f"and {len(cells) - SHOWN} more"] if len(cells) > SHOWN else []
    end = "Found by `kda regressions`; `docs/regressions.md` says how, `docs/measuring.md` how it is measured."
    stated = json.dumps([(_named(cell), cell["before"], cell["threshold"]) for cell in cells[:SHOWN]])
    stated = stated.replace(">", "\\u003e")  # the end of a comment is none in JSON
    return "\n".join([*lines, *rest, "", end, "", f"<!-- cells: {stated} -->"])


def _named(cell: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in cell["cell"].items())


def _row(texts: list[str]) -> str:
    return "| " + " | ".join(one.replace("|", "\\|").replace("\n", " ") for one in texts) + " |"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def revise(forge: Forge, results: Path, command: str) -> int:
    """`kda gate tighten` or ``loosen`` on every packaged table, as a pull request; closes one that holds no longer.

    Returns:
        How many tables changed.

    Raises:
        NightlyError: a table or the history cannot be used; or, with all done, some file of the history could not.
    """
    tables = sorted((forge.checkout / TABLES).glob("*.json"))
    changed, texts, undecided = [], [], False
    problems: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copies = Path(folder, TABLES)
        copies.mkdir(parents=True)
        for table in tables:
            copy, report = Path(shutil.copy(table, copies)), Path(folder, "report.json")
            report.unlink(missing_ok=True)
            kda("gate", command, str(copy), "--results", str(results), "--repo", str(forge.checkout), "--apply",
                "--json", str(report), accepted=(0, 1, 2))  # fmt: skip
            if not report.is_file():
                raise NightlyError(f"kda gate {command} could not use {table.name} or {results}; it has said why")
            found = json.loads(report.read_text(encoding="utf-8"))
            problems |= {(one["file"], one["message"]): one for one in found["problems"]}
            undecided |= any(not one["judged"] for one in found["changes"])
            if found["applied"]:
                changed.append(table)
                texts.append(f"`{table.name}`\n\n```diff\n{found['diff'].strip()}\n```")
        if changed:
            _propose(forge, PROPOSALS[command], Path(folder), changed, texts)
        elif not undecided:
            said = f"By the history at {forge.git('rev-parse', '--short=12', 'HEAD')}, `kda gate {command}` "
            forge.close_pull_request(PROPOSALS[command].branch, said + "changes nothing: this is out of date.")
    sys.stdout.write(f"{len(changed)} of {len(tables)} tables change\n")
    _fail_if_unusable(list(problems.values()))
    return len(changed)


def _propose(forge: Forge, proposal: Proposal, files: Path, changed: list[Path], texts: list[str]) -> None:
    branch, title, why = proposal
    head = forge.git("rev-parse", "HEAD")
    paths = [str(TABLES / table.name) for table in changed]
    commit = forge.commit(files, paths, head, head, title)
    if forge.same_files(commit, forge.tip(branch)):
        sys.stdout.write(f"{branch} has it already\n")
    elif forge.would(f"push {commit[:12]} to {branch}"):
        forge.push(commit, branch, force=True)
    forge.pull_request(branch, title, "\n\n".join([why, *texts]) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """The command; exits with 1 and a message where a step cannot be done, or a file not be stored or used."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--results", type=Path, default=Path("history"), help="folder of the gathered results")
    shared.add_argument("--apply", action="store_true", help="push, open issues and pull requests")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nightly", description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    merging = steps.add_parser("merge", parents=[shared], help="add measured files to the results branch")
    merging.add_argument("measured", type=Path, help="folder of JSON files that nox -s bench -- --keep wrote")
    steps.add_parser("issues", parents=[shared], help="open or update one issue per regression, close what recovered")
    for command, closes in (("tighten", "close cells that lose"), ("loosen", "reopen closed cells that win again")):
        steps.add_parser(command, parents=[shared], help=f"{closes}, in the gate tables, as a pull request")
    given = parser.parse_args(arguments)
    forge, results = Forge(ROOT, given.apply), given.results.resolve()
    unusable: list[str] = []
    try:
        if given.step == "merge":
            unusable = merge(forge, given.measured, results)
        elif given.step == "issues":
            issues(forge, results)
        else:
            revise(forge, results, given.step)
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
