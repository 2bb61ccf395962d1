"""Shared by every test of the repository, from the source tree and from built wheels alike.

Decides where kernels run: compiled on a CUDA device, or in Triton's interpreter on CPU tensors. The interpreter must be
chosen before triton is imported, hence the environment variable is set while this file loads.
Tests marked `gpu` need the former; elsewhere they are left out and the summary says how many.
"""

from __future__ import annotations

import datetime
import errno
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "yes", "on", "y"}
RUNS_GPU_TESTS = HAS_CUDA and not INTERPRETED

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a GPU image of its own may lack it; its gpu tests do not use it
    pass
else:
    # The interpreter's speed depends on the machine, and a red run must be repeatable.
    settings.register_profile("repository", deadline=None, derandomize=True)
    settings.load_profile("repository")

NOT_RUN = pytest.StashKey[int]()
WRITTEN = pytest.StashKey[float]()
FACTS = pytest.StashKey[dict[str, object]]()
SECONDS_BETWEEN_SUMMARIES = 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --summary-json."""
    parser.addoption(
        "--summary-json",
        type=Path,
        metavar="PATH",
        help="write counts, versions, GPU and git sha of this run to PATH",
    )


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors of a test live: "cuda" when kernels run compiled on a GPU, else "cpu"."""
    return "cuda" if RUNS_GPU_TESTS else "cpu"


REPORTER: pytest.TerminalReporter | None = None
"""Of the process that writes --summary-json: a run's workers, which have none, do not."""


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Find the reporter that counts outcomes.

    Raises:
        pytest.UsageError: --summary-json names what no file can be written to; said here, not after a whole run.
    """
    global REPORTER
    config = session.config
    path: Path | None = config.getoption("--summary-json")
    if path is None or hasattr(config, "workerinput"):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise pytest.UsageError(
            f"--summary-json must be a file that can be written, got {path}: {error.strerror}"
        ) from None
    REPORTER = config.pluginmanager.get_plugin("terminalreporter")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out gpu tests where they cannot run; after -k and -m, so that only tests asked for are counted."""
    if RUNS_GPU_TESTS:
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
    config.stash[NOT_RUN] = len(left_out)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Hand a worker's count to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gpu_tests_not_run"] = session.config.stash.get(NOT_RUN, 0)
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take a worker's count; each worker collects the whole suite, so they agree."""
    count = getattr(node, "workeroutput", {}).get("gpu_tests_not_run", 0)
    node.config.stash[NOT_RUN] = max(count, node.config.stash.get(NOT_RUN, 0))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the summary file up to date, so that a run that is stopped from outside leaves its counts."""
    if report.when != "teardown" or REPORTER is None:
        return
    if time.monotonic() - REPORTER.config.stash.get(WRITTEN, -SECONDS_BETWEEN_SUMMARIES) >= SECONDS_BETWEEN_SUMMARIES:
        write_summary(REPORTER, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Say how many gpu tests were not run and why; write the summary file if asked."""
    not_run = config.stash.get(NOT_RUN, 0)
    if not_run:
        why = "TRITON_INTERPRET is set" if HAS_CUDA else "no CUDA device"
        terminalreporter.write_line(f"{not_run} gpu tests not run here: {why}", yellow=True, bold=True)
    if REPORTER is not None:
        write_summary(terminalreporter, int(exitstatus))
        terminalreporter.write_line(f"summary written to {config.getoption('--summary-json')}")


def write_summary(reporter: pytest.TerminalReporter, exit_status: int | None) -> None:
    """Write --summary-json; ``exit_status`` is None while tests run, and stays so in a run that was stopped."""
    config = reporter.config
    if FACTS not in config.stash:
        config.stash[FACTS] = run_facts(config)
    outcomes = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    counts = {outcome: len(reporter.stats.get(outcome, [])) for outcome in outcomes}
    not_run = {"gpu_tests_not_run": config.stash.get(NOT_RUN, 0)}
    path: Path = config.getoption("--summary-json")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.stash[FACTS] | {"exit_status": exit_status} | counts | not_run, indent=2) + "\n"
    whole = path.with_name(path.name + ".partial")
    whole.write_text(text)
    whole.replace(path)
    config.stash[WRITTEN] = time.monotonic()


def run_facts(config: pytest.Config) -> dict[str, object]:
    """What a reader needs to judge or repeat a run: source version, arguments, software and GPU."""

    def output(*command: str) -> str | None:
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    def version(distribution: str) -> str | None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    named = os.environ.get("KDA_GIT_SHA")
    changes = None if named else output("git", "status", "--porcelain", "--untracked-files=no")
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        # KDA_GIT_SHA names the version of a tree that was copied without its .git folder: what git says is of another.
        "git_sha": named or output("git", "rev-parse", "HEAD"),
        "git_changes": None if changes is None else bool(changes),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # Paths that begin at the root are the machine's own business: their last part says enough.
        "arguments": [Path(a).name if a.startswith("/") else a for a in map(str, config.invocation_params.args)],
        "kernels": "interpreter" if INTERPRETED else "compiled",
        "gpu": torch.cuda.get_device_name() if HAS_CUDA else None,
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "numpy": version("numpy"),
    }
