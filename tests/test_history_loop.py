"""From recorded results to closed cells and back, on a throw-away repository: regressions, tighten, decide, loosen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kda_backend import Target
from kda_backend.gate import decide, load_table, write_table
from kda_backend.gate.decisions import forget_decisions
from kda_backend.gate.folders import forget
from kda_tooling.cli import app
from tests.support.histories import BATCHES, GPU, STEPS, Figures, Place, Repository, wobble
from tests.support.tables import SHAPE, a_cell, a_table

pytestmark = pytest.mark.usefixtures("fresh_gate")

runner = CliRunner()
UNFUSED_US = 10.0
NEAR, FAR = ((4, 1), (8, 16)), (4, 64)
PLANTED = (*NEAR, FAR)
"""(T, B) of the cells that become slower: at 0.85 of unfused's time before, and at 0.50."""

OTHERS = [(t, b) for t in STEPS for b in BATCHES if (t, b) not in PLANTED]


def share(step: int, batch: int) -> float:
    """Fused over unfused where nothing is planted."""
    return 0.85 if (step, batch) in NEAR else 0.50


def figures(slow: range) -> Figures:
    """Latencies with noise; the planted cells of the fused lane take 1.3 times as long at the commits ``slow``."""

    def figure(place: Place, number: int) -> float:
        lane, step, batch = place
        us = UNFUSED_US * batch * wobble(number, place)
        if lane == "unfused+ring":
            return us
        return us * share(step, batch) * (1.3 if number in slow and (step, batch) in PLANTED else 1)

    return figure


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repository")
    made.describe()
    return made


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    cells = [
        a_cell(draft_tokens=t, batch=b, unfused_us=(UNFUSED_US * b,) * 2, fused_us=(UNFUSED_US * b * share(t, b),) * 2)
        for t in STEPS for b in BATCHES
    ]  # fmt: skip
    snapshots = a_cell(mode="snapshots", draft_tokens=4, batch=1)
    return write_table(a_table(*cells, snapshots, a_cell(form="chunked"), a_cell(batch=2)), folder)


def run(*arguments: object, code: int) -> str:
    result = runner.invoke(app, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    return result.output


def as_json(*arguments: object, code: int) -> dict[str, Any]:
    result = runner.invoke(app, [*(str(one) for one in arguments), "--json", "-"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def lanes(table: Path) -> dict[tuple[int, int], str]:
    """What `decide` takes at every T and B of the history."""
    forget()
    forget_decisions()
    return {
        (t, b): decide(
            SHAPE, mode="ring", batch=b, draft_tokens=t, device_name=GPU, target=Target("cuda", 90),
            environ={"KDA_GATE_TABLES": str(table.parent)},
        ).lane
        for t in STEPS for b in BATCHES
    }  # fmt: skip


def cells_of(data: list[dict[str, Any]], status: str) -> set[tuple[int, int]]:
    return {
        (int(one["cell"]["T"]), int(one["cell"]["B"])) for one in data
        if one["status"] == status and one["cell"]["lane"] == "fused+ring"
    }  # fmt: skip


@pytest.mark.parametrize("planted", [7, 5], ids=["at the newest commit", "three commits ago, and lasting"])
def test_a_slower_lane_closes_its_cells_until_it_wins_twice(planted: int, repository: Repository, table: Path) -> None:
    results, slow = ["--results", repository.results], range(planted, 9)
    repository.history(8, figures(slow))
    before = load_table(table)

    report = as_json("regressions", *results, code=1)
    assert report["order"] == "git"
    found = [one for one in report["cells"] if one["status"] == "regression"]
    assert cells_of(found, "regression") == set(PLANTED)
    assert len(found) == 3
    for one in found:
        assert one["commits"] == [repository.commits[planted - 1], repository.commits[planted]]
        assert one["ratio"] == pytest.approx(1.3, rel=0.02)
        assert 1.02 <= one["threshold"] < 1.06
    assert report["counts"]["lost"] == 0

    shown = run("gate", "tighten", table, *results, code=1)
    assert load_table(table) == before, "without --apply nothing is written"
    assert shown.count("closed safe gate, recurrent, ring, plain") == 2
    added = [line for line in shown.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(added) == 2
    assert all('"closed": {"history": "asv NVIDIA_H200 ring_latency' in line for line in added)

    changes = as_json("gate", "tighten", table, *results, "--apply", code=1)
    assert changes["applied"]
    after = load_table(table)
    closed = {(cell.key.draft_tokens, cell.key.batch): cell.closed for cell in after.cells if cell.closed is not None}
    assert set(closed) == set(NEAR)
    for one in closed.values():
        assert one is not None
        assert one.commits == tuple(commit[:12] for commit in repository.commits[planted:])
        assert all(
            f / u == pytest.approx(0.85 * 1.3, rel=0.02) for u, f in zip(one.unfused_us, one.fused_us, strict=True)
        )
    kept = [cell for cell in after.cells if cell.closed is None]
    assert kept == [cell for cell in before.cells if (cell.key.draft_tokens, cell.key.batch) not in NEAR
                    or (cell.key.mode, cell.key.form) != ("ring", "recurrent")]  # fmt: skip
    expected = dict.fromkeys((*OTHERS, FAR), "fused+ring") | dict.fromkeys(NEAR, "unfused+ring")
    assert lanes(table) == expected

    text = table.read_text()
    run("gate", "tighten", table, *results, "--apply", code=0)
    run("gate", "loosen", table, *results, "--apply", code=0)
    assert table.read_text() == text, "nothing new, nothing changed"

    repository.history(1, figures(slow))  # still slow
    run("gate", "loosen", table, *results, "--apply", code=0)
    repository.history(1, figures(slow))  # recovered: one pass
    output = run("gate", "loosen", table, *results, "--apply", code=0)
    assert output.count("1 of 2 runs in a row") == 2
    assert lanes(table) == expected
    repository.history(1, figures(slow))  # the second pass
    changes = as_json("gate", "loosen", table, *results, code=1)
    assert not changes["applied"]
    assert [one["action"] for one in changes["changes"]] == ["reopened"] * 2
    run("gate", "loosen", table, *results, "--apply", code=1)
    assert load_table(table) == before
    assert set(lanes(table).values()) == {"fused+ring"}
    run("gate", "loosen", table, *results, "--apply", code=0)
    run("gate", "tighten", table, *results, "--apply", code=0)
    assert load_table(table) == before
    assert as_json("regressions", *results, code=0)["counts"]["regression"] == 0


def test_wins_with_a_loss_between_are_not_two_passes(repository: Repository, table: Path) -> None:
    slow = [7, 9]
    repository.history(8, lambda place, number: figures(range(7, 8))(place, number))
    run("gate", "tighten", table, "--results", repository.results, "--apply", code=1)
    for number in (8, 9, 10):
        repository.history(1, figures(range(number, number + 1) if number in slow else range(0)))
        run("gate", "loosen", table, "--results", repository.results, "--apply", code=0)
    repository.history(1, figures(range(0)))
    run("gate", "loosen", table, "--results", repository.results, "--apply", code=1)


def test_a_closing_commit_measured_again_is_no_later_pass(repository: Repository, table: Path) -> None:
    repository.history(8, figures(range(7, 8)))
    run("gate", "tighten", table, "--results", repository.results, "--apply", code=1)
    repository.record(7, figures(range(0)))
    repository.history(1, figures(range(0)))
    run("gate", "loosen", table, "--results", repository.results, "--apply", code=0)
    repository.history(1, figures(range(0)))
    run("gate", "loosen", table, "--results", repository.results, "--apply", code=1)


def test_two_runs_that_lose_without_a_step_close_nothing_and_three_do(repository: Repository, table: Path) -> None:
    """The table is wrong about two cells that never changed: only runs in a row say so."""
    always = figures(range(0, 99))
    repository.history(2, always)
    output = run("gate", "tighten", table, "--results", repository.results, "--apply", code=0)
    assert output.count("loses in its newest 2 runs, without a regression") == 2
    repository.history(1, always)
    changes = as_json("gate", "tighten", table, "--results", repository.results, "--apply", code=1)
    assert [(one["T"], one["B"], one["action"]) for one in changes["changes"]] == [(4, 1, "closed"), (8, 16, "closed")]
    assert all("the newest 3 runs all lose" in one["why"] for one in changes["changes"])


@pytest.mark.parametrize("ratio", [1.0, 1.019])
def test_a_regression_within_the_margin_closes_nothing(ratio: float, repository: Repository, table: Path) -> None:
    def figure(place: Place, number: int) -> float:
        lane, step, batch = place
        fused = ratio if number >= 7 else share(step, batch)
        return UNFUSED_US * batch * (1 if lane == "unfused+ring" else fused)

    repository.history(8, figure)
    assert as_json("regressions", "--results", repository.results, code=1)["counts"]["regression"] == 8
    assert as_json("gate", "tighten", table, "--results", repository.results, code=0)["changes"] == []


def test_cells_without_evidence_at_the_newest_commit_stay(repository: Repository, table: Path) -> None:
    slow = figures(range(7, 99))

    def lost(place: Place, number: int) -> float | None:
        return None if number == 8 and place == ("fused+ring", 4, 1) else slow(place, number)

    repository.history(9, lost)
    changes = as_json("gate", "tighten", table, "--results", repository.results, code=1)["changes"]
    assert [(one["T"], one["B"], one["action"]) for one in changes] == [(4, 1, "left"), (8, 16, "closed")]
    assert "not measured at the newest commit" in changes[0]["why"]


NEXT = {"gpu": GPU, "torch": "2.11.0", "triton": "3.7.1"}


def test_runs_of_two_versions_are_no_row_of_losses(repository: Repository, table: Path) -> None:
    always = figures(range(99))
    repository.history(2, always)
    repository.history(1, always, measured=NEXT)
    changes = as_json("gate", "tighten", table, "--results", repository.results, code=0)["changes"]
    assert [one["why"].partition(",")[0] for one in changes] == ["loses in its newest 1 runs"] * 2
    repository.history(2, always, measured=NEXT)
    changes = as_json("gate", "tighten", table, "--results", repository.results, code=1)["changes"]
    assert [[one["commit"] for one in change["runs"]] for change in changes] == [repository.commits[2:]] * 2


def test_passes_of_two_versions_reopen_nothing_and_two_of_one_do(repository: Repository, table: Path) -> None:
    """The commit that closed the cells was measured with the older versions."""
    repository.history(8, figures(range(7, 8)))
    run("gate", "tighten", table, "--results", repository.results, "--apply", code=1)
    repository.history(1, figures(range(0)))
    repository.history(1, figures(range(0)), measured=NEXT)
    assert run("gate", "loosen", table, "--results", repository.results, code=0).count("1 of 2 runs in a row") == 2
    repository.history(1, figures(range(0)), measured=NEXT)
    changes = as_json("gate", "loosen", table, "--results", repository.results, code=1)["changes"]
    assert [one["action"] for one in changes] == ["reopened"] * 2


def test_another_gpu_s_history_says_nothing(repository: Repository, table: Path) -> None:
    other = {"gpu": "NVIDIA H100", "torch": "2.11.0"}
    repository.history(8, figures(range(7, 8)), machine="NVIDIA_H100", measured=other)
    assert as_json("gate", "tighten", table, "--results", repository.results, code=0)["changes"] == []


def test_a_history_without_the_closing_commit_reopens_nothing(
    repository: Repository, table: Path, tmp_path: Path
) -> None:
    repository.history(8, figures(range(7, 8)))
    run("gate", "tighten", table, "--results", repository.results, "--apply", code=1)
    other = Repository(tmp_path / "other")
    other.describe()
    other.history(3, figures(range(0)))
    changes = as_json("gate", "loosen", table, "--results", other.results, code=0)["changes"]
    assert [one["action"] for one in changes] == ["left"] * 2
    assert all("the history has no run of" in one["why"] for one in changes)


def test_what_cannot_be_used_is_exit_2_and_changes_nothing(repository: Repository, table: Path, tmp_path: Path) -> None:
    before = table.read_bytes()
    assert "no result file at all" in " ".join(
        run("gate", "tighten", table, "--results", repository.results, "--apply", code=2).replace("│", " ").split()
    )
    repository.history(8, figures(range(7, 8)))
    assert table.read_bytes() == before
    broken = tmp_path / table.name
    broken.write_text("{}")
    run("gate", "tighten", broken, "--results", repository.results, "--apply", code=2)
    run("gate", "loosen", broken, "--results", repository.results, "--apply", code=2)
    assert broken.read_text() == "{}"
    run("gate", "tighten", table, "--results", tmp_path / "none", code=2)
    run("gate", "tighten", table, "--results", repository.results, "--json", table, code=2)
    assert table.read_bytes() == before


@pytest.mark.parametrize("us", [1e300, 1e-5], ids=["too long", "too short"])
def test_a_figure_that_no_table_may_hold_is_no_evidence(us: float, repository: Repository, table: Path) -> None:
    """The fused lane's at ``us``, unfused's at half of it, for three runs: closed, if they were times."""
    usual = figures(range(0))
    repository.history(10, lambda place, n: us * (1 if place[0] == "fused+ring" else 0.5) if n > 6 else usual(place, n))
    assert as_json("gate", "tighten", table, "--results", repository.results, code=0)["changes"] == []


def test_a_table_that_cannot_be_written_is_still_shown_its_diff(
    repository: Repository, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.history(8, figures(range(7, 8)))
    monkeypatch.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)
    before = table.read_bytes()
    assert as_json("gate", "tighten", table, "--results", repository.results, code=1)["changes"]
    output = run("gate", "tighten", table, "--results", repository.results, "--apply", code=2)
    assert "cannot be written" in " ".join(output.replace("│", " ").split())
    assert table.read_bytes() == before
