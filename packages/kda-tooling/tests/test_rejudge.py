"""`kda gate rejudge`: a table judged by the times of a run made before it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kda_backend.gate import TableError, write_table
from kda_backend.gate.decisions import forget_decisions
from kda_backend.gate.folders import PACKAGED, forget
from kda_tooling.cli import app
from kda_tooling.commands.regret import to_dict, too_slow
from kda_tooling.tuning.rejudged import rejudge
from tests.support.tables import H200, a_cell, a_table

ROOT = Path(__file__).parents[3]
STORED = sorted((ROOT / "benchmarks" / "measured" / "regret").glob("*.json"))
"""Runs of `kda gate regret` that are kept."""

MACHINE = {
    "gpu": H200, "sm": 90, "l2_bytes": 1, "copy_bytes_per_second": 1e12, "driver": "1", "clocks": "", "torch": "2",
    "triton": "3", "python": "3", "commit": "abc", "date": "2026-01-01",
}  # fmt: skip
UNFUSED, FUSED = "kda unfused+ring bv32.w2", "kda fused+ring bv64.w8.r2.e"
SGLANG = "sglang unfused+ring"


def a_run(*cells: dict[str, Any]) -> dict[str, Any]:
    """What is read of a result of `kda gate regret --json`."""
    return {"machine": MACHINE, "table": a_table().file_name, "seconds": 1.0, "cells": list(cells)}


def timed(batch: int, group: str = "recurrent ring T=4", **us: float) -> dict[str, Any]:
    names = {"unfused": UNFUSED, "fused": FUSED, "sglang": SGLANG}
    return {"group": group, "draft_tokens": 4, "batch": batch, "arms": {names[one]: time for one, time in us.items()}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    """A table with the fused lane at B = 1 and 2 and the unfused one at 4, each in its one configuration."""
    forget()
    forget_decisions()
    write_table(a_table(*(a_cell(batch=b, fused=b < 4) for b in (1, 2, 4))), tmp_path)
    return tmp_path


def test_the_choice_of_the_table_has_the_time_of_the_run(folder: Path) -> None:
    run = a_run(timed(1, unfused=4.0, fused=2.0, sglang=8.0), timed(4, unfused=4.0, fused=3.9))
    one, four = rejudge(run, folder).cells
    assert (one.lane, one.us, one.best_us, one.unfused_us, one.peer, one.peer_us) == (
        "fused+ring", 2.0, 2.0, 4.0, SGLANG, 8.0,
    )  # fmt: skip
    assert (four.lane, four.us, four.best, four.peer) == ("unfused+ring", 4.0, FUSED, None)
    assert four.share == pytest.approx(4.0 / 3.9 - 1)


def test_what_the_run_did_not_time_is_named(folder: Path) -> None:
    run = a_run(timed(1, unfused=4.0), timed(2, unfused=4.0, fused=2.0))
    result = rejudge(run, folder)
    assert [cell.batch for cell in result.cells] == [2]
    assert result.left_out == ["recurrent ring T=4, B=1 (fused+ring bv64.w8.r2.e)"]
    with pytest.raises(ValueError, match="timed nothing of what the table chooses"):
        rejudge(a_run(timed(1, unfused=4.0)), folder)


def test_a_run_judged_by_its_own_table_is_the_run() -> None:
    """What it says of itself is what is found: nothing is lost between measuring and reading."""
    run = json.loads(STORED[0].read_text())
    own = {cell["batch"]: cell for cell in run["cells"] if cell["group"] == "recurrent ring T=4"}
    found = [cell.to_dict() for cell in rejudge(run, Path(PACKAGED)).cells if cell.group == "recurrent ring T=4"]
    assert found
    for cell in found:
        for name in ("best", "best_us", "unfused_us", "peer", "peer_us", "arms"):
            assert cell[name] == own[cell["batch"]][name]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_what_the_packaged_tables_choose_is_fast_in_every_kept_run(path: Path) -> None:
    result = rejudge(json.loads(path.read_text()), Path(PACKAGED))
    assert too_slow(result) == []
    assert len(result.cells) >= 7 * len(result.left_out)
    lost = [cell for cell in result.cells if cell.over_peer is not None and cell.over_peer >= 1]
    assert lost == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": "H=8.json"}, "table is 'H=8.json'"),
        ({"machine": {}}, "TypeError"),
        ({"cells": [{"group": "x"}]}, "KeyError: 'draft_tokens'"),
        ({"cells": [timed(1, "recurrent ring T=5", fused=1.0)]}, "KeyError: 'recurrent ring T=5'"),
        ({"cells": [timed(1) | {"arms": {FUSED: "fast"}}]}, "could not convert"),
        ({"cells": []}, "--draft-tokens"),
    ],
)
def test_what_is_no_run_is_refused(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    run = copy.deepcopy(a_run(timed(1, fused=1.0, unfused=2.0))) | change
    with pytest.raises(ValueError, match="no result of kda gate regret --json") as refused:
        rejudge(run, folder)
    assert message in str(refused.value)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    said = CliRunner().invoke(app, ["gate", "rejudge", str(file), "--tables", str(folder)], env={"COLUMNS": "250"})
    assert said.exit_code == 2
    assert "run.json: no result of kda gate regret --json" in said.output


def test_a_folder_without_the_table_is_refused(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(TableError):
        rejudge(a_run(timed(1, fused=1.0, unfused=2.0)), folder)


@pytest.mark.parametrize(("us", "code"), [(4.0, 0), (3.6, 1)])
def test_the_command_exits_by_the_verdict(folder: Path, tmp_path: Path, us: float, code: int) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(a_run(timed(1, unfused=4.0, fused=2.0), timed(4, unfused=4.0, fused=us))))
    arguments = ["gate", "rejudge", str(file), "--tables", str(folder), "--json", "-"]
    said = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
    assert said.exit_code == code, said.output
    (written,) = json.loads(said.stdout)
    result = rejudge(json.loads(file.read_text()), folder)
    assert written == json.loads(json.dumps(to_dict(result, too_slow(result))))
    assert ("too slow" in said.stderr) is bool(code)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for file in (broken, tmp_path / "missing.json", tmp_path):
        said = CliRunner().invoke(app, ["gate", "rejudge", str(file)], env={"COLUMNS": "250"})
        assert said.exit_code == 2
        assert file.name in said.output
