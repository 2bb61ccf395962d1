"""What the three distributions and the repository's front page promise about themselves."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kda_backend.lanes import OLDEST_ARCH
from kda_kernels.shapes import PDL_ARCH
from kda_tooling.commands import doctor

ROOT = Path(__file__).parent.parent
PACKAGES = {
    # distribution -> what it may depend on; arrows go one way, tooling -> backend -> kernels
    "kda-kernels": {"torch", "triton", "numpy"},
    "kda-backend": {"kda-kernels", "torch"},
    "kda-tooling": {
        *("kda-kernels", "kda-backend", "torch", "triton", "numpy"),
        *("typer", "rich", "matplotlib", "safetensors"),
    },
}


def project(name: str) -> dict[str, object]:
    return tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", PACKAGES)
def test_declared_dependencies(name: str) -> None:
    declared = {re.match(r"[\w-]+", requirement)[0] for requirement in project(name)["dependencies"]}
    assert declared == PACKAGES[name]


def test_the_oldest_versions_are_the_declared_ones() -> None:
    """`kda doctor` names them, and nox's session of the oldest ones installs them."""
    declared = dict(requirement.split(">=") for requirement in project("kda-kernels")["dependencies"])
    assert {name: ".".join(map(str, least)) for name, least in doctor.LEAST_VERSIONS.items()} == declared
    written = re.search(r"^LOWEST = (.+)$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert written is not None
    oldest = {name: version.removesuffix(".0") for name, version in ast.literal_eval(written[1]).items()}
    assert oldest == {name: version for name, version in declared.items() if name != "torch"}
    assert (doctor.LEAST_SM, doctor.PDL_SM) == (OLDEST_ARCH, PDL_ARCH)


def test_the_three_share_version_python_and_licence() -> None:
    for key in ("version", "requires-python", "license"):
        assert len({project(name)[key] for name in PACKAGES}) == 1
    licence = (ROOT / "LICENSE").read_bytes()
    for name in PACKAGES:
        assert (ROOT / "packages" / name / "LICENSE").read_bytes() == licence
    assert f"## {project('kda-kernels')['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_admit_what_is_declared() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    for name, dependencies in PACKAGES.items():
        assert dependencies - set(PACKAGES) <= set(pins), f"{name} has an unpinned dependency"


def test_readme_gives_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "python3 -m pip install nox && python3 -m nox -s demo" in lines
    assert "python3 -m pip install nox && python3 -m nox -s tests" in lines


def test_ci_run_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_nox_session_is_described(nox_sessions: dict[str, str]) -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for session, description in nox_sessions.items():
        assert description, f"nox session {session} has no docstring"
        assert f"| `{session}` |" in contributing, f"CONTRIBUTING.md does not list {session}"


@pytest.mark.parametrize("name", PACKAGES)
def test_built_wheel_holds_every_source_file(name: str, tmp_path: Path) -> None:
    folder = ROOT / "packages" / name
    build = "import os, sys, flit_core.buildapi as api; os.chdir(sys.argv[1]); print(api.build_wheel(sys.argv[2]))"
    wheel = subprocess.run(
        [sys.executable, "-c", build, str(folder), str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        held = set(archive.namelist())
    source = {
        str(path.relative_to(folder / "src"))
        for path in (folder / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert source <= held
    assert f"{name.replace('-', '_')}/py.typed" in held
    assert any(entry.endswith("licenses/LICENSE") for entry in held)
