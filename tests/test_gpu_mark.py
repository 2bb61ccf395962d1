"""Without a GPU the gpu-marked tests are left out, and the run says so: on the terminal and in the summary file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SUITE = """
import os

import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(3))
def test_needs_a_gpu(case):
    raise RuntimeError("must not run here")


def test_runs_anywhere(device):
    assert device == "cpu"
    assert os.environ["TRITON_INTERPRET"] == "1"
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small repository with our conftest.py and pytest settings."""
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_suite.py").write_text(SUITE)
    return tmp_path


def run(suite: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Plain `pytest` as on a machine without a GPU: nothing set for Triton, no CUDA device visible."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_", "KDA_"))}
    env |= {"CUDA_VISIBLE_DEVICES": "", "KDA_GIT_SHA": "0123abc"}
    command = [sys.executable, "-m", "pytest", *args]
    return subprocess.run(command, cwd=suite, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "two workers"])
def test_left_out_loudly(suite: Path, workers: list[str]) -> None:
    result = run(suite, *workers, "--summary-json", "out/summary.json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 gpu tests not run here: no CUDA device" in result.stdout
    summary = json.loads((suite / "out" / "summary.json").read_text())
    assert (summary["passed"], summary["failed"], summary["skipped"], summary["gpu_tests_not_run"]) == (1, 0, 0, 3)
    assert (summary["git_sha"], summary["kernels"], summary["gpu"]) == ("0123abc", "interpreter", None)
    assert {"torch", "triton", "numpy", "python", "date", "driver", "cuda"} <= set(summary)


def test_asking_for_gpu_tests_alone_is_not_a_success(suite: Path) -> None:
    result = run(suite, "-m", "gpu")
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "3 gpu tests not run here: no CUDA device" in result.stdout


@pytest.mark.parametrize("name", ["folder", "file/summary.json", ""])
def test_a_summary_that_cannot_be_written_is_said_before_the_first_test(suite: Path, name: str) -> None:
    (suite / "folder").mkdir()
    (suite / "file").touch()
    result = run(suite, f"--summary-json={name}")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR, result.stdout + result.stderr
    assert "--summary-json must be a file that can be written" in result.stderr
    assert "1 passed" not in result.stdout


STOPPED = """
import os
import signal


def test_done():
    pass


def test_the_run_is_stopped_from_outside():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_stopped_leaves_its_counts(suite: Path) -> None:
    (suite / "tests" / "test_suite.py").write_text(STOPPED)
    result = run(suite, "--summary-json", "summary.json")
    assert result.returncode == -9
    summary = json.loads((suite / "summary.json").read_text())
    assert (summary["exit_status"], summary["passed"], summary["git_sha"]) == (None, 1, "0123abc")


def test_workers_leave_the_summary_to_the_run(suite: Path) -> None:
    (suite / "tests" / "test_suite.py").write_text(
        "from pathlib import Path\n\n\n"
        "def test_a_worker_has_no_reporter(pytestconfig):\n"
        "    (conftest,) = (p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, 'write_summary'))\n"
        "    Path('reporter.txt').write_text(str(conftest.REPORTER))\n"
    )
    result = run(suite, "-n", "1", "--summary-json", "summary.json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (suite / "reporter.txt").read_text() == "None"
    assert json.loads((suite / "summary.json").read_text())["passed"] == 1
