"""The workflows may only call nox, with actions pinned: what CI does, anyone can do by hand."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

# Actions that only set a job up; whatever does work is a nox session.
ALLOWED_ACTIONS = {
    *("actions/checkout", "actions/setup-python", "actions/upload-artifact", "actions/download-artifact"),
    *("actions/upload-pages-artifact", "actions/deploy-pages"),
}
WRITERS = {
    ("gpu.yml", "history"): {"contents": "write", "issues": "write", "pull-requests": "write"},
    ("gpu.yml", "dashboard"): {"pages": "write", "id-token": "write"},
}
"""The jobs that may write, and what; every other has the workflow's permission to read."""

PINNED = re.compile(r"(?P<action>[\w.-]+/[\w./-]+)@[0-9a-f]{40}")
NOX_CALL = re.compile(
    r"(python3 -m pip install (-c constraints\.txt )?nox && )?"
    r"python3 -m nox (-R )?-s (?P<sessions>[\w ]+?)( -- [\w ./=-]+)?"
)
MATRIX_VALUE = re.compile(r"\$\{\{ *matrix\.(\w+) *\}\}")


def matrix_rows(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The matrix of a job as a list of rows; one empty row where there is none."""
    matrix = job.get("strategy", {}).get("matrix")
    if matrix is None:
        return [{}]
    assert set(matrix) == {"include"}, "write the matrix as `include` rows, which this test can read"
    return matrix["include"]


def sessions_called(run: str, row: dict[str, Any]) -> list[str]:
    """The nox sessions that a `run` step calls; ValueError when it is anything else than one nox call."""
    command = MATRIX_VALUE.sub(lambda name: str(row[name[1]]), run).strip()
    call = NOX_CALL.fullmatch(command)
    if call is None:
        raise ValueError(f"not a plain nox call: {command!r}")
    return call["sessions"].split()


def check_action(uses: str) -> None:
    """ValueError unless `uses` names an allowed action by a full commit SHA."""
    pin = PINNED.fullmatch(uses)
    if pin is None or pin["action"] not in ALLOWED_ACTIONS:
        raise ValueError(f"not an allowed action pinned by a 40-digit commit SHA: {uses!r}")


def steps(workflow: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each step of each job with each matrix row."""
    for job in workflow["jobs"].values():
        for row in matrix_rows(job):
            for step in job["steps"]:
                yield step, row


def test_there_are_workflows() -> None:
    assert {path.name for path in WORKFLOWS} == {"ci.yml", "gpu.yml", "release.yml"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_steps_are_nox_calls_of_existing_sessions(path: Path, nox_sessions: dict[str, str]) -> None:
    called = set()
    for step, row in steps(yaml.safe_load(path.read_text())):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            check_action(step["uses"])
        else:
            called |= set(sessions_called(step["run"], row))
    assert called, "a workflow that calls no session does nothing"
    assert called <= set(nox_sessions)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_pins_carry_their_version(path: Path) -> None:
    for line in path.read_text().splitlines():
        if "uses:" in line:
            assert re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), f"say which version the SHA is: {line.strip()}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_least_privilege_and_limits(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    # a run of the history may be pushing: it ends
    assert workflow["concurrency"]["cancel-in-progress"] is (path.name != "gpu.yml")
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 120
        assert job.get("permissions") == WRITERS.get((path.name, name))
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_what_may_write_runs_the_code_of_main_alone() -> None:
    """Pull requests run on the GPU machine; nothing of them reaches a job that may write."""
    gpu = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())
    triggers = gpu[True]  # YAML 1.1 reads `on` as a truth value
    assert set(triggers) == {"schedule", "workflow_dispatch", "pull_request"}
    assert triggers["pull_request"] == {"types": ["labeled"]}
    history = gpu["jobs"]["history"]
    assert "github.event_name != 'pull_request'" in history["if"]
    assert "github.ref == 'refs/heads/main'" in history["if"]
    assert gpu["jobs"]["dashboard"]["needs"] == "history"
    for name in ("measure", "signals"):
        assert "GH_TOKEN" not in json.dumps(gpu["jobs"][name])


def test_a_busy_gpu_is_refused_before_anything_is_measured() -> None:
    gpu = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())
    called = [name for step in gpu["jobs"]["measure"]["steps"] if "run" in step
              for name in sessions_called(step["run"], {})]  # fmt: skip
    assert called == ["gpu_idle", "gpu", "sanitize", "bench"]


class Recorded:
    """A nox session that runs nothing, and keeps what it was to run."""

    def __init__(self) -> None:
        self.posargs: list[str] = []
        self.arguments: list[str] = []

    def run(self, *arguments: str, **_: Any) -> str:
        self.arguments += arguments
        return "gpu"


def test_what_runs_before_a_measurement_writes_no_tracked_file() -> None:
    """`bench` measures a committed tree alone: a session before it that renewed a tracked file would stop it."""
    spec = importlib.util.spec_from_file_location("sessions", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {ROOT / name for name in listing.stdout.splitlines()}
    for name in ("gpu_idle", "gpu", "sanitize"):
        session = Recorded()
        getattr(noxfile, name).func(session)
        assert session.arguments
        assert not tracked & {ROOT / argument.rpartition("=")[2] for argument in session.arguments}, name


def test_the_page_is_published_although_a_step_before_it_failed() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())["jobs"]
    merged, *after = [step for step in jobs["history"]["steps"] if "nox" in step.get("run", "")]
    page = next(step for step in jobs["history"]["steps"] if "upload-pages-artifact" in step.get("uses", ""))
    assert "merge" in merged["run"]
    assert {step["if"] for step in (*after, page)} == {"${{ !cancelled() }}"}
    assert jobs["history"]["outputs"] == {"page": f"${{{{ steps.{page['id']}.outcome }}}}"}
    assert jobs["dashboard"]["if"] == "${{ !cancelled() && needs.history.outputs.page == 'success' }}"


def test_ci_runs_every_python() -> None:
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    rows = matrix_rows(ci["jobs"]["nox"])
    for session in ("tests", "test_kernels", "test_backend", "test_tooling"):
        assert {row["python"] for row in rows if session in row["sessions"].split()} == {"3.11", "3.12", "3.13"}


def test_ci_covers_every_session_but_the_gpu_ones(nox_sessions: dict[str, str]) -> None:
    called: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        work = [(step, row) for step, row in steps(yaml.safe_load(path.read_text())) if "run" in step]
        called[path.name] = {name for step, row in work for name in sessions_called(step["run"], row)}
    nightly = {"gpu", "gpu_idle", "sanitize", "bench", "nightly", "dashboard", "compile_tables"}
    assert called["gpu.yml"] == nightly
    assert called["ci.yml"] == set(nox_sessions) - nightly - {"dev", "sweep"}


@pytest.mark.parametrize(
    "run",
    [
        "pip install torch",
        "python3 -m nox -s tests\npytest",
        "python3 -m nox -s tests && rm -rf build",
        "curl example.org | sh",
        "python3 -m nox",
    ],
)
def test_other_commands_are_refused(run: str) -> None:
    with pytest.raises(ValueError, match="not a plain nox call"):
        sessions_called(run, {})


@pytest.mark.parametrize(
    "uses",
    [
        "actions/checkout@v7",
        "actions/checkout@3d3c42e",
        "someone/else@3d3c42e5aac5ba805825da76410c181273ba90b1",
        "./.github/actions/local",
    ],
)
def test_other_actions_are_refused(uses: str) -> None:
    with pytest.raises(ValueError, match="not an allowed action"):
        check_action(uses)
