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


def test_every_environment_variable_is_in_the_table() -> None:
    section = TEXT.partition("## Environment variables")[2].partition("\n## ")[0]
    rows = {name for line in section.splitlines() for name in re.findall(r"`([A-Z_]+)`", line[1:].partition("|")[0])}
    folders = [*(ROOT / "packages").glob("*/src"), ROOT / "benchmarks", ROOT / "tests"]
    files = [path for folder in folders for path in folder.rglob("*.py")] + [ROOT / "conftest.py", ROOT / "noxfile.py"]
    named: dict[str, str] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                named[node.value] = path.name
    missing = {name: file for name, file in named.items() if name not in rows}
    assert not missing, f"docs/integration.md has no row for {missing}"
    assert len(named) > 5
