"""docs/integration.md: its engine runs, and its table has every environment variable that the sources name."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "integration.md").read_text()
ENGINE, GRAPH = re.findall(r"^```python\n(.+?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"(KDA|SGLANG|TRITON|CUDA|OMP|MASTER)_[A-Z_]+")


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "docs/integration.md", "exec"), names)


def test_the_small_engine_runs(device: str) -> None:
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    run(ENGINE, names)
    assert names["device"] == device
    assert names["pool"].free_slots == 8
    assert all(len(text) >= 5 for text in names["texts"].values()), "four rounds give at least a token each"


@pytest.mark.gpu
def test_the_captured_engine_replays_what_eager_rounds_do() -> None:
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    run(ENGINE, names)
    pool = names["pool"]
    before = pool.ssm_state.clone()
    run(GRAPH, names)
    moved = (before != pool.ssm_state).flatten(2).any(-1).all(0).nonzero().flatten().tolist()
    assert moved == [2, 5]
    graphed = pool.ssm_state.clone()
    pool.ssm_state.copy_(before)
    pool.begin(names["slots"], 3)
    names["forward"](names["fed"])  # the conv state has moved on: another outcome, of the same rows
    pool.commit(names["accept_lens"])
    assert not torch.equal(pool.ssm_state, graphed)
    assert torch.equal(pool.ssm_state[:, [0, 1, 3, 4, 6, 7]], before[:, [0, 1, 3, 4, 6, 7]])
    assert pool.error_summary() is None


def variables(text: str) -> set[str]:
    """The names in the first column of the tables under "Environment variables"."""
    section = text.partition("## Environment variables")[2].partition("\n## ")[0]
    cells = [line[1:].partition("|")[0] for line in section.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([A-Z_]+)`", cell)}


def read_from_environment(tree: ast.AST) -> set[str]:
    """The literal names that are looked up in `os.environ`, or asked of it or of `os.getenv`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            place, key = node.value, node.slice
        elif isinstance(node, ast.Call) and node.args:
            key = node.args[0]
            place = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            if ast.unparse(node.func) in ("os.getenv", "getenv"):
                place = node.func
        else:
            continue
        if ast.unparse(place) in ("os.environ", "environ", "os.getenv", "getenv") and isinstance(key, ast.Constant):
            found.add(key.value)
    return found


def test_every_environment_variable_is_in_the_table() -> None:
    rows = variables(TEXT)
    sources = [*(ROOT / "packages").glob("*/src"), ROOT / "benchmarks"]
    scripts = [ROOT / "conftest.py", ROOT / "noxfile.py"]
    files = [path for folder in [*sources, ROOT / "tests"] for path in folder.rglob("*.py")] + scripts
    named: dict[str, str] = {}
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                named[node.value] = path.name
        if ROOT / "tests" not in path.parents:  # tests hand on PATH and the like to what they start
            named |= dict.fromkeys(read_from_environment(tree), path.name)
    missing = {name: file for name, file in named.items() if name not in rows}
    assert not missing, f"docs/integration.md has no row for {missing}"
    assert {"KDA_LANE", "GH_TOKEN", "GITHUB_REF_NAME", "CC"} <= named.keys(), "what is looked for must be found"


@pytest.mark.parametrize("page", ["docs/sglang.md", "docs/gate.md", "CONTRIBUTING.md"])
def test_the_table_has_what_other_pages_tables_have(page: str) -> None:
    theirs = variables((ROOT / page).read_text())
    assert theirs
    assert theirs <= variables(TEXT)
