"""Break the kernels and the dispatch gate on purpose, one fault at a time, and require the named test to go red.

    python tests/mutants/run.py [--only NAME ...] [--json PATH] [--jobs N] [--list]

Each mutant of `table.py` and `gate.py` is applied to a temporary copy of the packages that goes first on PYTHONPATH;
the tree is never edited. First every named test has to be green on an unedited copy. Then a mutant is *killed* when its
test fails by an assertion, *survives* when it passes, and is an *error* when its old text is not found exactly once, or
the test stops for any other reason (no such test, a crash, an exception that is no assertion). Exit code 0: all killed;
1: a mutant survived or an error; 2: the arguments are wrong.
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
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {name: ROOT / "packages" / name.replace("_", "-") / "src" / name for name in ("kda_kernels", "kda_backend")}
TIMEOUT_S = 180
# pytest's summary of a failed test, whose message begins with the kind of failure; pytest.raises says "Failed: DID NOT"
ASSERTED = re.compile(r"^E\s+(AssertionError|Failed: DID NOT RAISE|assert )", re.MULTILINE)

if str(ROOT) not in sys.path:  # run as a script, the repository is not importable yet
    sys.path.append(str(ROOT))

from tests.mutants.gate import GATE_MUTANTS  # noqa: E402
from tests.mutants.table import MUTANTS as KERNEL_MUTANTS  # noqa: E402
from tests.mutants.table import Mutant  # noqa: E402

MUTANTS = (*KERNEL_MUTANTS, *GATE_MUTANTS)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: killed, survived or error, with a detail where it was not killed."""

    name: str
    outcome: str
    test: str
    reason: str
    detail: str
    seconds: float


def mutated_copy(folder: Path, mutant: Mutant | None) -> str | None:
    """Copy the packages below ``folder`` and apply the mutant; the fault if its old text is not there exactly once."""
    for name, source in PACKAGES.items():
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is None:
        return None
    path = folder / mutant.package / mutant.path
    if not path.is_file():
        return f"{mutant.path} is not a file of {mutant.package}"
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"old text occurs {text.count(mutant.old)} times in {mutant.path}, must be once: edit the table"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return None


def run_tests(folder: Path, tests: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run node ids (below tests/) with the copies in ``folder`` as the packages, in the interpreter."""
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    check = (
        "import sys, kda_backend, kda_kernels, pytest\n"
        "for package in (kda_backend, kda_kernels):\n"
        f"    assert package.__file__.startswith({str(folder)!r}), package.__file__\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", check, "-q", "-p", "no:cacheprovider", "--tb=short", *options]
    return subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def last_lines(done: subprocess.CompletedProcess[str], count: int = 8) -> str:
    return "\n".join((done.stdout + done.stderr).strip().splitlines()[-count:])


def judge(mutant: Mutant) -> Outcome:
    """Apply one mutant and run its test."""
    start = time.monotonic()

    def outcome(what: str, detail: str = "") -> Outcome:
        return Outcome(mutant.name, what, mutant.test, mutant.reason, detail, round(time.monotonic() - start, 1))

    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name).resolve()
        if fault := mutated_copy(folder, mutant):
            return outcome("error", fault)
        try:
            done = run_tests(folder, [mutant.test], "-x")
        except subprocess.TimeoutExpired:
            return outcome("error", f"no result within {TIMEOUT_S} s")
    if done.returncode == 0:
        return outcome("survived", "the test passes with the break")
    if done.returncode != 1:
        return outcome("error", f"pytest ended with exit code {done.returncode}:\n{last_lines(done)}")
    if not ASSERTED.search(done.stdout):
        return outcome("error", f"the test failed, but by no assertion:\n{last_lines(done)}")
    return outcome("killed")


def green_without_mutants(tests: list[str]) -> str | None:
    """What is wrong with the named tests on an unedited copy, or None."""
    with tempfile.TemporaryDirectory(prefix="mutant-none-") as name:
        folder = Path(name).resolve()
        mutated_copy(folder, None)
        done = run_tests(folder, tests)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode != 0 or passed is None or int(passed[1]) < len(tests):
        return f"without any mutant the {len(tests)} named tests must pass:\n{last_lines(done, 20)}"
    return None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="this mutant alone; repeatable")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the outcomes to PATH")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    options = parser.parse_args(arguments)
    names = [mutant.name for mutant in MUTANTS]
    if len(set(names)) != len(names):
        parser.error("two mutants of the table have the same name")
    if unknown := sorted(set(options.only) - set(names)):
        parser.error(f"--only: no mutant {', '.join(unknown)}; there are {', '.join(names)}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    return options


def show(console: Console, outcomes: list[Outcome]) -> None:
    table = Table("mutant", "outcome", "s", "test", "why it must fail")
    styles = {"killed": "green", "survived": "bold red", "error": "bold yellow"}
    for one in outcomes:
        style = styles[one.outcome]
        table.add_row(one.name, f"[{style}]{one.outcome}[/]", f"{one.seconds:.1f}", one.test, one.reason)
    console.print(table)
    for one in outcomes:
        if one.detail:
            console.print(f"{one.name}: {one.detail}", style=styles[one.outcome], markup=False, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(soft_wrap=not sys.stdout.isatty())
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    if options.list:
        for mutant in chosen:
            console.print(f"{mutant.name}: {mutant.reason} ({mutant.test})", markup=False, highlight=False)
        return 0
    start = time.monotonic()
    fault = green_without_mutants(sorted({mutant.test for mutant in chosen}))
    outcomes: list[Outcome] = []
    if fault is None:
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(judge, chosen))
        show(console, outcomes)
    else:
        console.print(fault, style="bold red", markup=False, highlight=False)
    killed = sum(one.outcome == "killed" for one in outcomes)
    seconds = round(time.monotonic() - start, 1)
    console.print(f"{killed} of {len(chosen)} mutants killed in {seconds} s")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "mutants": len(chosen), "killed": killed, "seconds": seconds, "baseline_fault": fault,
            "outcomes": [asdict(one) for one in outcomes],
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
