"""Importing a package needs no GPU, and imports between packages go one way: tooling -> backend -> kernels."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kda_backend", "kda_kernels", "kda_tooling")
OURS = set(PACKAGES)


def sources(package: str) -> Iterator[Path]:
    """Every Python file of an installed or on-path package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None
    yield from sorted(Path(spec.origin).parent.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports anywhere in it, also inside functions; relative imports are its own."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_are_the_declared_dependencies(package: str) -> None:
    """Nothing undeclared, and nothing declared in vain; test_repository.py holds the declarations to the arrows."""
    project = tomllib.loads((ROOT / "packages" / package.replace("_", "-") / "pyproject.toml").read_text())["project"]
    extras = [one for extra in project.get("optional-dependencies", {}).values() for one in extra]
    declared = {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in [*project["dependencies"], *extras]}
    files = list(sources(package))
    assert len(files) > 1
    used: dict[str, str] = {}
    for path in files:
        used.update(dict.fromkeys(imported(path) - set(sys.stdlib_module_names) - {package}, path.name))
    undeclared = {name: file for name, file in used.items() if name not in declared}
    assert not undeclared, f"{package} imports what it does not declare: {undeclared}"
    assert not declared - set(used), f"{package} declares what it does not import: {declared - set(used)}"


def test_the_lower_packages_do_not_know_the_upper_ones() -> None:
    """Also as text, so that `importlib.import_module` or a plugin string does not go around the arrow."""
    for package, above in (("kda_kernels", ("kda_backend", "kda_tooling")), ("kda_backend", ("kda_tooling",))):
        for path in sources(package):
            code = ast.unparse(ast.parse(path.read_text(encoding="utf-8")))
            strings = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
            for name in above:
                hits = [s for s in strings if isinstance(s, str) and s.partition(".")[0] == name]
                assert not hits, f"{path.name} of {package} names {name}: {hits}"


def test_the_oracle_imports_nothing_of_ours_and_no_torch() -> None:
    support = Path(__file__).parent / "support"
    assert imported(support / "oracle.py") <= {"__future__", "dataclasses", "numpy"}
    assert not imported(support / "bounds.py") & (OURS | {"torch"})


@pytest.mark.parametrize("interpret", ["0", "1"])
@pytest.mark.parametrize("package", PACKAGES)
def test_import_needs_no_gpu(package: str, interpret: str) -> None:
    """With all GPUs hidden, in a process of its own, compiled or interpreted."""
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET=interpret)
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    code = f"import {package}, torch; assert not torch.cuda.is_initialized(); print({package}.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_importing_the_kernels_package_changes_no_global_state_when_compiled() -> None:
    """The repairs are for the interpreter; a serving process that imports us keeps its triton as it is."""
    code = (
        "from triton.runtime import interpreter\n"
        "before = interpreter._convert_float, interpreter.InterpretedFunction.__call__\n"
        "import kda_kernels\n"
        "assert (interpreter._convert_float, interpreter.InterpretedFunction.__call__) == before\n"
    )
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
