"""The workflows may only call nox, with actions pinned: what CI does, anyone can do by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

# Actions that only set a job up; whatever does work is a nox session.
ALLOWED_ACTIONS = {"actions/checkout", "actions/setup-python"}
PINNED = re.compile(r"(?P<action>[\w.-]+/[\w./-]+)@[0-9a-f]{40}")
NOX_CALL = re.compile(
    r"(python3 -m pip install (-c constraints\.txt )?nox && )?"
    r"python3 -m nox -s (?P<sessions>[\w ]+?)( -- [\w ./=-]+)?"
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
    assert {path.name for path in WORKFLOWS} >= {"ci.yml", "gpu.yml"}


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
    assert workflow["concurrency"]["cancel-in-progress"] is True
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert "permissions" not in job


def test_ci_covers_every_session_but_the_gpu_ones(nox_sessions: dict[str, str]) -> None:
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    called = {name for step, row in steps(ci) if "run" in step for name in sessions_called(step["run"], row)}
    assert called == set(nox_sessions) - {"dev", "gpu", "sanitize", "sweep", "bench", "dashboard"}


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
