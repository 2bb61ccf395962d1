"""`kda doctor`: findings, remedies and exit code for machines of every kind, all of them pretended."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kda_tooling.cli import app
from kda_tooling.commands import doctor as command
from kda_tooling.commands.doctor import Finding, diagnose

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@dataclass
class Pretended:
    """A machine; fields are changed by tests before `diagnose` looks."""

    versions: dict[str, str] = field(default_factory=lambda: {
        "kda-kernels": "0.1.0", "kda-backend": "0.1.0", "kda-tooling": "0.1.0", "torch": "2.11.0+cu130",
        "triton": "3.6.0", "numpy": "2.5.2",
    })  # fmt: skip
    capability: tuple[int, int] | None = (9, 0)
    compilers: tuple[str, ...] = ("gcc",)
    probe: Finding = field(default_factory=lambda: Finding("a small kernel", "compiled and ran in 1.0 s"))
    probed: int = 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """A healthy Hopper machine."""
    pretended = Pretended()

    def version(package: str) -> str:
        if package not in pretended.versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return pretended.versions[package]

    def probe() -> Finding:
        pretended.probed += 1
        return pretended.probe

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(command.importlib.metadata, "version", version)
    monkeypatch.setattr(command.shutil, "which", lambda n: f"/usr/bin/{n}" if n in pretended.compilers else None)
    monkeypatch.setattr(command, "run_one_kernel", probe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pretended.capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretended GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: pretended.capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    return pretended


def found(name: str) -> Finding:
    return next(finding for finding in diagnose()[0] if finding.name == name)


def test_a_healthy_machine(machine: Pretended) -> None:
    findings, usable = diagnose()
    assert usable
    assert machine.probed == 1
    assert not [finding for finding in findings if finding.remedy]
    values = {finding.name: finding.value for finding in findings}
    assert values["GPU"] == "Pretended GPU (sm90, CUDA 13.0)"
    assert values["PDL"] == "on by default"
    assert values["torch"] == "2.11.0+cu130"
    assert values["C compiler"] == "/usr/bin/gcc"
    assert values["kernels run"] == "compiled"


def test_no_gpu_with_a_cpu_build(machine: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.capability = None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not diagnose()[1]
    assert "CPU build" in found("GPU").remedy
    assert "kda demo" in found("kernels run").remedy
    assert machine.probed == 0


def test_no_gpu_with_a_cuda_build(machine: Pretended) -> None:
    machine.capability = None
    assert "nvidia-smi" in found("GPU").remedy
    assert not diagnose()[1]


def test_a_gpu_too_old(machine: Pretended) -> None:
    machine.capability = (7, 5)
    findings, usable = diagnose()
    assert not usable
    assert found("GPU").remedy.startswith("kernels need sm80 or later")
    assert machine.probed == 0
    assert findings[-1].value == "not compiled"


def test_ampere_runs_without_pdl(machine: Pretended) -> None:
    machine.capability = (8, 0)
    assert diagnose()[1]
    assert found("PDL") == Finding("PDL", "not before sm90")


def test_rocm(machine: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert diagnose()[1]
    assert found("GPU").value == "Pretended GPU (ROCm 7.1)"
    assert found("PDL").value == "not on ROCm"


@pytest.mark.parametrize("package", ["torch", "triton", "numpy"])
def test_a_missing_package(package: str, machine: Pretended) -> None:
    del machine.versions[package]
    assert not diagnose()[1]
    assert found(package).value == "not installed"
    assert f"pip install '{package}>=" in found(package).remedy


@pytest.mark.parametrize(
    ("package", "version", "enough"),
    [("torch", "2.10.1", False), ("torch", "2.11.0a0+git1", True), ("triton", "3.5.1", False),
     ("triton", "4.0.0", True), ("numpy", "1.26.4", False)],
)  # fmt: skip
def test_a_package_too_old(package: str, version: str, enough: bool, machine: Pretended) -> None:
    machine.versions[package] = version
    assert diagnose()[1] == enough
    assert bool(found(package).remedy) != enough


def test_a_source_tree_is_no_fault(machine: Pretended) -> None:
    for package in command.OWN_PACKAGES:
        del machine.versions[package]
    assert diagnose()[1]
    assert found("kda-kernels") == Finding("kda-kernels", "not installed, runs from source")


@pytest.mark.parametrize("named", [None, "my-cc"])
def test_no_compiler(named: str | None, machine: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.compilers = () if named is None else ("gcc",)
    if named:
        monkeypatch.setenv("CC", named)
    assert not diagnose()[1]
    assert found("C compiler").value == ("none" if named is None else "CC=my-cc is not an executable")
    assert "install gcc or clang" in found("C compiler").remedy


def test_the_compiler_that_cc_names(machine: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.compilers = ("gcc", "clang-20")
    monkeypatch.setenv("CC", "clang-20")
    assert found("C compiler").value == "/usr/bin/clang-20"


def test_the_interpreter_is_not_compiled_kernels(machine: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not diagnose()[1]
    assert found("kernels run").remedy == "unset TRITON_INTERPRET to run compiled kernels"
    machine.capability = None
    assert not diagnose()[1]
    assert found("kernels run") == Finding("kernels run", "in the interpreter: TRITON_INTERPRET is set")
    assert machine.probed == 0


def test_a_kernel_that_does_not_run_is_the_verdict(machine: Pretended) -> None:
    machine.probe = Finding("a small kernel", "failed: Python.h: No such file", "usual causes: no Python headers")
    findings, usable = diagnose()
    assert not usable
    assert machine.probe in findings
    assert findings[-1].value == "not compiled"


def test_the_probe_turns_any_failure_into_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("Python.h: No such file\nmore")

    monkeypatch.setattr("kda_tooling.problem.random_problems", fail)
    finding = command.run_one_kernel()
    assert finding.value == "failed: Python.h: No such file"
    assert "Python headers" in finding.remedy


@pytest.mark.gpu
def test_the_probe_on_a_gpu() -> None:
    finding = command.run_one_kernel()
    assert finding.value.startswith("compiled and ran")
    assert not finding.remedy
    assert diagnose()[1]


def test_the_probe_runs_a_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kda_tooling import problem

    random_problems = problem.random_problems
    monkeypatch.setattr(problem, "random_problems", lambda *a, **kw: random_problems(*a, **kw | {"device": device}))
    assert command.run_one_kernel().value.startswith("compiled and ran")


@pytest.mark.parametrize("where", ["file", "-"])
@pytest.mark.parametrize("healthy", [True, False])
def test_exit_code_table_and_json(healthy: bool, where: str, machine: Pretended, tmp_path: Path) -> None:
    if not healthy:
        machine.capability = None
    shown = runner.invoke(app, ["doctor"])
    assert shown.exit_code == (0 if healthy else 1)
    assert ("This machine runs compiled kernels." if healthy else "Compiled kernels do not run here.") in shown.stdout
    path = tmp_path / "findings.json"
    as_json = runner.invoke(app, ["doctor", "--json", str(path) if where == "file" else "-"])
    assert as_json.exit_code == shown.exit_code
    assert (as_json.stderr if where == "-" else as_json.stdout) == shown.stdout
    data = json.loads(as_json.stdout if where == "-" else path.read_text())
    assert data["compiled_kernels"] is healthy
    names = [finding["name"] for finding in data["findings"]]
    assert names[:7] == ["Python", *command.OWN_PACKAGES, "torch", "triton", "numpy"]
    assert all(set(finding) == {"name", "value", "remedy"} for finding in data["findings"])
    for finding in data["findings"]:
        assert finding["name"] in shown.stdout


def test_brackets_in_a_finding_are_shown_as_they_are(machine: Pretended) -> None:
    machine.probe = Finding("a small kernel", "failed: [red]bad[/red] [/x]", "why")
    assert "[red]bad[/red] [/x]" in runner.invoke(app, ["doctor"]).stdout


@pytest.mark.parametrize(("file", "message"), [("", "is a folder"), ("missing/findings.json", "is missing")])
def test_where_findings_cannot_be_written_nothing_is_looked_at(
    file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "diagnose", None)
    result = runner.invoke(app, ["doctor", "--json", str(tmp_path / file)])
    assert result.exit_code == 2, (result.output, result.exception)
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_unknown_options_are_refused() -> None:
    assert runner.invoke(app, ["doctor", "--fast"]).exit_code == 2
