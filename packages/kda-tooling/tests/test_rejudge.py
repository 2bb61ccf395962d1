"""`kda gate rejudge`: a table judged by the times of a run made before it."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kda_backend.gate import TableError, write_table
from kda_backend.gate.decisions import forget_decisions
from kda_backend.gate.folders import PACKAGED, forget
from kda_kernels import KdaShape
from kda_tooling.cli import app
from kda_tooling.commands.regret import to_dict, too_slow
from kda_tooling.tuning.rejudged import joined, rejudge
from tests.support.tables import H200, a_cell, a_table

ROOT = Path(__file__).parents[3]
STORED = sorted((ROOT / "benchmarks" / "measured" / "regret").glob("*.json"))
"""Runs of `kda gate regret` that are kept."""

MACHINE = {
    "gpu": H200, "sm": 90, "l2_bytes": 1, "copy_bytes_per_second": 1e12, "driver": "1", "clocks": "1", "torch": "2",
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


MIXED = timed(2, unfused=1.0) | {"draft_tokens": 3}
"""A cell whose group is of another length."""


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
    assert result.left_out == ["recurrent ring T=4, B=1 (fused+ring bv64.w8.r2.e was not timed)"]
    other = timed(1, "chunked ring T=4", unfused=1.0) | {"arms": {"kda unfused+ring chunked bv32.w2": 1.0}}
    result = rejudge(a_run(timed(2, unfused=4.0, fused=2.0), other), folder)
    assert result.left_out == ["chunked ring T=4, B=1 (the table has nothing of it)"], "the packaged table is no answer"
    few = rejudge(a_run(*run["cells"], other), folder)
    with pytest.raises(ValueError, match="chooses was timed in 1 of 3 cells; fewer than half"):
        joined([few])
    with pytest.raises(ValueError, match="chooses was timed in 0 of 1 cells"):
        joined([rejudge(a_run(timed(1, unfused=4.0)), folder)])
    enough = rejudge(a_run(timed(4, unfused=4.0, fused=3.9)), folder)
    assert len(joined([few, enough]).cells) == 2


def test_a_run_judged_by_its_own_table_is_the_run() -> None:
    """What it says of itself is what is found: nothing is lost between measuring and reading."""
    run = json.loads(STORED[0].read_text())
    own = {cell["batch"]: cell for cell in run["cells"] if cell["group"] == "recurrent ring T=4"}
    found = [cell.to_dict() for cell in rejudge(run, Path(PACKAGED)).cells if cell.group == "recurrent ring T=4"]
    assert found
    for cell in found:
        for name in ("best", "best_us", "unfused_us", "peer", "peer_us", "arms"):
            assert cell[name] == own[cell["batch"]][name]


def runs_of_tables() -> dict[str, list[Any]]:
    """Table's name -> the kept runs of it."""
    found: dict[str, list[Any]] = {}
    for path in STORED:
        run = json.loads(path.read_text())
        found.setdefault(run["table"], []).append(run)
    return found


RUNS = runs_of_tables()


@pytest.mark.parametrize("name", RUNS, ids=lambda name: name.split(",K=")[0])
def test_what_the_packaged_tables_choose_is_fast_in_the_kept_runs(name: str) -> None:
    result = joined([rejudge(run, Path(PACKAGED)) for run in RUNS[name]])
    assert too_slow(result) == []
    assert len(result.cells) >= 7 * len(result.left_out)
    lost = [cell for cell in result.cells if cell.over_peer is not None and cell.over_peer >= 1]
    assert lost == []


def test_every_packaged_table_has_a_kept_run() -> None:
    assert set(RUNS) == {path.name for path in Path(PACKAGED).glob("*.json")}


def test_of_two_runs_as_good_the_one_beside_a_peer_counts_whatever_their_order(folder: Path) -> None:
    runs = [rejudge(a_run(timed(1, unfused=4.0, fused=2.0, **peer)), folder) for peer in ({}, {"sglang": 8.0})]
    for order in (runs, runs[::-1]):
        (cell,) = joined(order).cells
        assert cell.over_peer == 0.25


def test_runs_of_a_table_are_judged_together(folder: Path) -> None:
    """One cell of two is too slow, one of fifty-one is not: 98 % are within 3 %."""
    slow = a_run(timed(4, unfused=4.1, fused=3.9), timed(2, unfused=4.0, fused=2.0))
    assert too_slow(rejudge(slow, folder)) != []
    quick = [timed(batch, unfused=3.0, fused=4.0) for batch in range(5, 54)]
    both = joined([rejudge(slow, folder), rejudge(a_run(*quick), folder)])
    assert len(both.cells) == 51
    assert too_slow(both) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": "H=8.json"}, "table must be a gate table's name, got 'H=8.json'"),
        ({"machine": {}}, "machine: expected the keys"),
        *(({"machine": MACHINE | {"sm": sm}}, "machine: sm must be") for sm in ("90", True, -3)),
        ({"machine": MACHINE | {"sm": 70}}, "machine.sm must be 80 or above, got 70"),
        ({"machine": MACHINE | {"sm": 100}}, "machine.sm must be that of the table, which is for sm90, got 100"),
        *(({"machine": MACHINE | {"gpu": gpu}}, "machine: gpu must be") for gpu in (5, None)),
        *(({"machine": MACHINE | {"clocks": clocks}}, "machine: clocks must be") for clocks in (float("nan"), [1])),
        ({"machine": MACHINE | {"gpu": "NVIDIA H100"}}, "table must be that of machine.gpu, H=8,HV=8,K=128,V=128,dev"),
        ({"machine": [1]}, "machine: expected an object, got list"),
        *(
            ({"cells": [timed(1, fused=1.0, unfused=1.0) | {"draft_tokens": t}]}, "draft_tokens")
            for t in (0, 3.9, 1e400, True, "4", 1 << 40)
        ),
        ({"cells": [timed(1, unfused=1.0), timed(2, "recurrent ring T=3", unfused=1.0)]}, "must be one such as"),
        ({"cells": [timed(1, unfused=1.0), MIXED]}, "cells[1].draft_tokens must be that of its group"),
        ({"cells": [timed(1, unfused=1.0) | {"group": [1]}]}, "cells[0].group must be one such as"),
        ({"cells": [timed(1, unfused=1.0) | {"batch": True}]}, "cells[0].batch must be a number of requests"),
        *(
            ({"cells": [timed(1, unfused=1.0) | {"arms": {UNFUSED: 2.0, arm: 1.0}}]}, "cells[0].arms must be named by")
            for arm in ("kda ", "kda", "", "kda fused+ring [/red]", "kda fused")
        ),
        ({"cells": [{"group": "x"}]}, "draft_tokens of a cell: KeyError 'draft_tokens'"),
        ({"cells": [timed(1, "recurrent ring T=5", fused=1.0)]}, "cells[0].group must be one such as"),
        ({"cells": [timed(0, unfused=1.0)]}, "cells[0].batch must be a number of requests"),
        ({"cells": [timed(1, unfused=1.0)] * 2}, "cells[1].batch must be a number of requests, each once"),
        *(
            ({"cells": [timed(1, unfused=us)]}, "cells[0].arms must be microseconds above 0")
            for us in ("fast", 0, -1.0, float("nan"), float("inf"), True)
        ),
        ({"cells": [timed(1, fused=1.0)]}, "cells[0].arms has none of kda unfused+ring"),
        ({"cells": []}, "cells must not be empty"),
    ],
)
def test_what_is_no_run_is_refused(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    run = copy.deepcopy(a_run(timed(1, fused=1.0, unfused=2.0))) | change
    with pytest.raises(ValueError, match=re.escape(message)):
        rejudge(run, folder)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    said = CliRunner().invoke(app, ["gate", "rejudge", str(file), "--tables", str(folder)], env={"COLUMNS": "250"})
    assert said.exit_code == 2
    assert "run.json: " in said.output
    assert message in said.output


def test_a_folder_without_the_table_is_refused(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(TableError):
        rejudge(a_run(timed(1, fused=1.0, unfused=2.0)), folder)
    said = CliRunner().invoke(app, ["gate", "rejudge", str(STORED[0]), "--tables", str(folder)], env={"COLUMNS": "250"})
    assert said.exit_code == 2
    assert "Invalid value for '--tables'" in said.output


@pytest.mark.parametrize(
    "command",
    [
        ["rejudge", str(STORED[0])],
        ["explain", "--batch", "1", "--draft-tokens", "4", "--device-name", H200, "--arch", "sm90"],
        ["show", "--device-name", H200],
        ["regret"],
    ],
)
def test_no_result_is_written_onto_a_table(folder: Path, command: list[str]) -> None:
    (table,) = folder.iterdir()
    before = table.read_text()
    said = CliRunner().invoke(
        app, ["gate", *command, "--tables", str(folder), "--json", str(table)], env={"COLUMNS": "250"}
    )
    assert said.exit_code == 2
    assert "has a gate table's name, and only kda tune writes those" in said.output
    assert table.read_text() == before


@pytest.mark.parametrize("run", [[], {}, {"table": 1}, "x"])
def test_other_json_is_refused(folder: Path, run: object) -> None:
    with pytest.raises(ValueError, match="no result of kda gate regret --json"):
        rejudge(run, folder)


@pytest.mark.parametrize(("us", "code"), [(4.0, 0), (3.6, 1)])
def test_the_command_exits_by_the_verdict(folder: Path, tmp_path: Path, us: float, code: int) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(a_run(timed(1, unfused=4.0, fused=2.0), timed(4, unfused=4.0, fused=us))))
    arguments = ["gate", "rejudge", str(file), "--tables", str(folder), "--json", "-"]
    said = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
    assert said.exit_code == code, said.output
    (written,) = json.loads(said.stdout)
    assert written.pop("runs") == [{"file": str(file), "machine": MACHINE}]
    result = rejudge(json.loads(file.read_text()), folder)
    as_a_run = json.loads(json.dumps(to_dict(result, too_slow(result))))
    assert written == {name: value for name, value in as_a_run.items() if name not in ("machine", "seconds")}
    assert ("too slow" in said.stderr) is bool(code)


def test_the_command_judges_each_table_by_all_its_runs(folder: Path, tmp_path: Path) -> None:
    """One slow cell of fifty-one is none too slow; of another table's two it is, and that table's alone."""
    quick = [timed(batch, unfused=3.0, fused=4.0) for batch in range(5, 54)]
    slow = [timed(4, unfused=4.1, fused=3.9), timed(2, unfused=4.0, fused=2.0)]
    other = dataclasses.replace(a_table(*(a_cell(batch=b, fused=b < 4) for b in (1, 2, 4))), shape=KdaShape(4, 4))
    write_table(other, folder)
    files = []
    for number, (table, cells) in enumerate([(a_table(), slow), (other, slow), (a_table(), quick)]):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(a_run(*cells) | {"table": table.file_name}))
    arguments = ["gate", "rejudge", *map(str, files), "--tables", str(folder), "--json", "-"]
    said = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
    assert said.exit_code == 1, said.output
    first, second = json.loads(said.stdout)
    assert [run["file"] for run in first["runs"]] == [str(files[0]), str(files[2])]
    assert (len(first["cells"]), first["wrong"]) == (51, [])
    assert [run["file"] for run in second["runs"]] == [str(files[1])]
    assert (len(second["cells"]), second["wrong"]) == (2, ["only 50.0% of the cells are within 3% of the best"])


@pytest.mark.parametrize("command", [["rejudge", str(STORED[0])], ["regret"]])
def test_a_folder_that_is_not_there_is_refused_by_its_option(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").touch()
    for tables in ("missing", "file"):
        said = CliRunner().invoke(app, ["gate", *command, "--tables", str(tmp_path / tables)], env={"COLUMNS": "250"})
        assert said.exit_code == 2
        assert "Invalid value for '--tables'" in said.output


def test_a_cell_of_several_runs_counts_once_by_the_worst(folder: Path, tmp_path: Path) -> None:
    runs = [a_run(timed(1, unfused=4.0, fused=us), timed(2, unfused=4.0)) for us in (2.0, 4.1)]
    (cell,) = joined([rejudge(run, folder) for run in [*runs, runs[0]]]).cells
    assert cell.us == 4.1
    both = joined([rejudge(run, folder) for run in (runs[0], a_run(timed(2, unfused=4.0, fused=2.0)))])
    assert [cell.batch for cell in both.cells] == [1, 2]
    assert both.left_out == [], "another run timed it"


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    for file in (broken, deep, tmp_path / "missing.json", tmp_path):
        said = CliRunner().invoke(app, ["gate", "rejudge", str(file)], env={"COLUMNS": "250"})
        assert said.exit_code == 2
        assert file.name in said.output
