"""What follows the nightly measurement, against a repository and a forge that are thrown away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import nightly, store
from benchmarks.forge import Forge
from kda_backend.gate import write_table
from kda_tooling.cli import app
from tests.support.histories import BATCHES, STEPS, Place, Repository, wobble
from tests.support.tables import a_cell, a_table

REAL_KDA = nightly.kda
FILES = Path(__file__).parent / "data" / "history"

GH = """#!{python}
import json, os, pathlib, sys
state = pathlib.Path({state!r})
known = json.loads(state.read_text())
kind, action, *rest = sys.argv[1:]
option = lambda name: rest[rest.index(name) + 1] if name in rest else None
known["calls"].append(f"{{kind}} {{action}}")
if action == "list":
    found = [one for one in known[kind] if "closed" not in one]
    print(json.dumps([one for one in found if option("--head") in (None, one.get("head"))]))
elif action == "close":
    known[kind][int(rest[0]) - 1]["closed"] = option("--comment")
elif action == "create" and kind != "label":
    known[kind].append({{"number": len(known[kind]) + 1, "title": option("--title"), "body": sys.stdin.read(),
                         "head": option("--head")}})
elif action == "edit":
    one = known[kind][int(rest[0]) - 1]
    one |= {{"title": option("--title"), "body": sys.stdin.read()}}
state.write_text(json.dumps(known))
"""


class Gh:
    """A `gh` on the PATH that keeps issues and pull requests in a file."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "gh.json"
        self.state.write_text(json.dumps({"issue": [], "pr": [], "calls": []}))
        program = folder / "gh"
        program.write_text(GH.format(python=sys.executable, state=str(self.state)))
        program.chmod(0o755)

    def __getitem__(self, kind: str) -> list[Any]:
        return json.loads(self.state.read_text())[kind]


@pytest.fixture(autouse=True)
def kda_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for every `kda` command would take most of these tests' time; `REAL_KDA` makes one."""

    def kda(*arguments: str, accepted: tuple[int, ...]) -> None:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in accepted, result.output

    monkeypatch.setattr(nightly, "kda", kda)


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gh:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("GH_TOKEN", raising=False)
    return Gh(folder)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """With an `origin` that takes pushes."""
    made = Repository(tmp_path / "repository")
    subprocess.run(["git", "init", "--quiet", "--bare", str(tmp_path / "origin")], check=True)
    made._git("remote", "add", "origin", str(tmp_path / "origin"))
    made.describe()
    return made


def slower(place: Place, number: int) -> float:
    lane, step, batch = place
    us = 10.0 * batch * wobble(number, place)
    return us if lane == "unfused+ring" else us * 0.85 * (1.3 if number >= 7 and (step, batch) == (4, 1) else 1)


def test_one_issue_per_benchmark_that_got_slower(
    repository: Repository, gh: Gh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    repository.history(8, slower)
    assert nightly.issues(Forge(repository.folder, apply=False), repository.results) == 1
    assert "--apply would: open an issue: Slower: ring_latency" in capsys.readouterr().out
    assert gh["calls"] == [], "a dry run asks nothing"

    forge = Forge(repository.folder, apply=True)
    nightly.issues(forge, repository.results)
    (issue,) = gh["issue"]
    assert issue["title"] == "Slower: ring_latency.RingLatency.track_verify on NVIDIA_H200, 1 cell"
    assert "| lane=fused+ring, T=4, B=1 | 8." in issue["body"]
    assert repository.commits[7][:12] in issue["body"]
    assert "1 regression" in (tmp_path / "summary.md").read_text()

    nightly.issues(forge, repository.results)
    assert (len(gh["issue"]), gh["calls"].count("issue edit")) == (1, 0), "the same again says nothing new"

    def more(place: Any, number: int) -> float:
        return slower(place, number) * (1.3 if number >= 7 and place[1:] == (8, 16) else 1)

    repository.record(7, more)
    nightly.issues(forge, repository.results)
    (issue,) = gh["issue"]
    assert gh["calls"].count("issue edit") == 1
    assert issue["title"].endswith("3 cells")


def test_without_regressions_there_is_no_issue(repository: Repository, gh: Gh) -> None:
    repository.history(8, lambda place, number: 10.0 * wobble(number, place))
    assert nightly.issues(Forge(repository.folder, apply=True), repository.results) == 0
    assert gh["calls"] == ["issue list"]


def test_an_issue_closes_when_its_cells_are_back(
    repository: Repository, gh: Gh, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.history(8, slower)
    forge = Forge(repository.folder, apply=True)
    nightly.issues(forge, repository.results)
    repository.history(1, lambda place, number: slower(place, 0))
    nightly.issues(Forge(repository.folder, apply=False), repository.results)
    assert "closed" not in gh["issue"][0], "a dry run closes nothing"
    assert nightly.issues(forge, repository.results) == 0
    (issue,) = gh["issue"]
    assert issue["closed"].startswith(f"Recovered at {repository.commits[8][:12]}:\n\n| cell | before | now |")
    assert "| lane=fused+ring, T=4, B=1 | 8.5" in issue["closed"]
    assert "close issue 1: Slower: " in capsys.readouterr().out
    nightly.issues(forge, repository.results)
    assert gh["calls"].count("issue close") == 1


def test_a_regression_that_became_the_baseline_is_no_recovery(
    repository: Repository, gh: Gh, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.history(8, slower)
    forge = Forge(repository.folder, apply=True)
    nightly.issues(forge, repository.results)
    repository.history(30, slower)
    assert nightly.issues(forge, repository.results) == 0
    assert "closed" not in gh["issue"][0]
    assert "issue 1 stays: not all its cells are back where they were" in capsys.readouterr().out


def test_a_new_triton_is_no_recovery(repository: Repository, gh: Gh) -> None:
    repository.history(8, slower)
    forge = Forge(repository.folder, apply=True)
    nightly.issues(forge, repository.results)
    repository.history(1, lambda place, number: slower(place, 0), measured={"gpu": "NVIDIA H200", "triton": "3.7.1"})
    assert nightly.issues(forge, repository.results) == 0
    assert "closed" not in gh["issue"][0]


def test_a_lost_cell_s_issue_closes_when_it_is_measured_again(repository: Repository, gh: Gh) -> None:
    repository.history(3, lambda place, number: None if number == 2 and place[2] == 1 else 10.0)
    forge = Forge(repository.folder, apply=True)
    assert nightly.issues(forge, repository.results) == 1
    repository.history(1, lambda place, number: None if place == ("fused+ring", 4, 1) else 10.0)
    assert nightly.issues(forge, repository.results) == 1
    assert "closed" not in gh["issue"][0]
    repository.history(1, lambda place, number: 10.0)
    assert nightly.issues(forge, repository.results) == 0
    (issue,) = gh["issue"]
    assert "| lane=fused+ring, T=4, B=1 | - us | measured; not judged |" in issue["closed"]


@pytest.mark.parametrize("text", ["", "<!-- cells: [ -->", "<!-- cells: 7 -->", "<!-- cells: [[1]] -->"])
def test_an_issue_that_somebody_edited_stays(text: str, repository: Repository) -> None:
    assert nightly.recovered(text, "regression", []) is None


def test_what_an_issue_states_cannot_end_its_comment() -> None:
    cell = {"cell": {"x": "--> @all"}, "unit": "", "before": 1.0, "threshold": 1.1, "said": "", "status": "fine",
            "after": 1.0}  # fmt: skip
    body = nightly.body_of("lost", [cell])
    assert "@all" not in body.partition("<!-- cells")[2].partition("-->")[2]
    assert nightly.recovered(body, "regression", [cell]) == [(cell, 1.0)]
    assert nightly.recovered(body, "regression", [cell | {"status": "lost"}]) is None, "its GPU is too far behind"
    assert nightly.recovered(body, "regression", [cell | {"after": 1.11}]) is None
    assert nightly.recovered(body, "lost", [cell | {"status": "lost"}]) is None


def broken(repository: Repository, number: int) -> Path:
    path = repository.results / "NVIDIA_H200" / f"{repository.commits[number][:8]}-replay.json"
    path.write_text("{")
    return path


@pytest.mark.parametrize("step", ["issues", "tighten", "loosen"])
def test_a_broken_file_fails_the_step_that_has_done_its_work(
    step: str, repository: Repository, gh: Gh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table_in(repository)
    repository.history(9, slower)
    path = broken(repository, 3)
    monkeypatch.setattr(nightly, "kda", REAL_KDA)
    monkeypatch.setattr(nightly, "Forge", lambda _, apply: Forge(repository.folder, apply))
    with pytest.raises(SystemExit) as stopped:
        nightly.main([step, "--results", str(repository.results), "--apply"])
    assert "1 file of the history could not be used" in str(stopped.value)
    assert f"unusable: {path}" in capsys.readouterr().err
    assert len(gh["issue"] + gh["pr"]) == (step != "loosen")


def test_a_lost_cell_has_an_issue_of_its_own(repository: Repository, gh: Gh) -> None:
    repository.history(8, lambda place, number: None if number == 7 and place[2] == 1 else 10.0)
    assert nightly.issues(Forge(repository.folder, apply=True), repository.results) == 1
    assert gh["issue"][0]["title"].startswith("Lost: ring_latency.RingLatency.track_verify on NVIDIA_H200, 4 cells")


def test_a_gpu_that_is_a_week_behind_is_lost(repository: Repository, gh: Gh) -> None:
    repository.history(4, lambda place, number: 10.0)
    repository.history(7, lambda place, number: 10.0, machine="other", measured={})
    assert nightly.issues(Forge(repository.folder, apply=True), repository.results) == 0
    repository.history(1, lambda place, number: 10.0, machine="other", measured={})
    assert nightly.issues(Forge(repository.folder, apply=True), repository.results) == 1
    assert gh["issue"][0]["title"].startswith("Lost: ring_latency.RingLatency.track_verify on NVIDIA_H200, 16 cells")


def test_no_history_is_an_error(repository: Repository, gh: Gh) -> None:
    with pytest.raises(nightly.NightlyError, match="read nothing"):
        nightly.issues(Forge(repository.folder, apply=True), repository.results)


def table_in(repository: Repository) -> Path:
    folder = repository.folder / nightly.TABLES
    folder.mkdir(parents=True)
    cells = [
        a_cell(draft_tokens=t, batch=b, unfused_us=(10.0 * b,) * 2, fused_us=(8.5 * b,) * 2)
        for t in STEPS for b in BATCHES
    ]  # fmt: skip
    path = write_table(a_table(*cells), folder)
    repository.add(str(nightly.TABLES))
    return path


def test_the_tightened_table_is_a_pull_request(
    repository: Repository, gh: Gh, capsys: pytest.CaptureFixture[str]
) -> None:
    table = table_in(repository)
    before = table.read_text()
    repository.history(8, slower)
    assert nightly.revise(Forge(repository.folder, apply=False), repository.results, "tighten") == 1
    assert "--apply would: open a pull request" in capsys.readouterr().out
    assert gh["calls"] == []
    assert repository._git("ls-remote", "origin") == ""

    for _ in range(2):
        assert nightly.revise(Forge(repository.folder, apply=True), repository.results, "tighten") == 1
    (request,) = gh["pr"]
    assert request["head"] == "gate-tightened"
    assert "```diff" in request["body"]
    assert table.name in request["body"]
    assert table.read_text() == before, "the checkout stays as it is"
    assert repository._git("status", "--porcelain", "--untracked-files=no") == ""
    repository._git("fetch", "--quiet", "origin", "gate-tightened")
    assert repository._git("diff", "--name-only", "HEAD", "FETCH_HEAD") == str(nightly.TABLES / table.name)
    assert repository._git("rev-parse", "FETCH_HEAD^") == repository.commits[-1]
    assert "has it already" in capsys.readouterr().out


def test_a_table_that_holds_is_left(repository: Repository, gh: Gh) -> None:
    table_in(repository)
    repository.history(8, lambda place, number: 10.0 * place[2] * (0.85 if place[0] == "fused+ring" else 1))
    assert nightly.revise(Forge(repository.folder, apply=True), repository.results, "tighten") == 0
    assert gh["calls"] == ["pr list"]
    assert repository._git("ls-remote", "origin") == ""


def test_a_pull_request_that_the_history_no_longer_shows_is_closed(
    repository: Repository, gh: Gh, capsys: pytest.CaptureFixture[str]
) -> None:
    table_in(repository)
    repository.history(8, slower)
    forge = Forge(repository.folder, apply=True)
    nightly.revise(forge, repository.results, "tighten")
    repository.history(1, lambda place, number: None if place == ("fused+ring", 4, 1) else slower(place, 0))
    assert nightly.revise(forge, repository.results, "tighten") == 0
    assert "closed" not in gh["pr"][0], "its cell was not measured: nothing is known of it"
    repository.history(1, lambda place, number: slower(place, 0))
    assert nightly.revise(Forge(repository.folder, apply=False), repository.results, "tighten") == 0
    assert "closed" not in gh["pr"][0], "a dry run closes nothing"
    assert nightly.revise(forge, repository.results, "tighten") == 0
    assert gh["pr"][0]["closed"] == (
        f"By the history at {repository.commits[9][:12]}, `kda gate tighten` changes nothing: this is out of date."
    )
    assert "close pull request 1: Gate: unfused where fused got slower" in capsys.readouterr().out


def test_two_winning_nights_reopen_the_cells(repository: Repository, gh: Gh) -> None:
    table = table_in(repository)
    repository.history(8, slower)
    forge = Forge(repository.folder, apply=True)
    nightly.revise(forge, repository.results, "tighten")
    repository._git("fetch", "--quiet", "origin", "gate-tightened")
    repository._git("reset", "--quiet", "--hard", "FETCH_HEAD")  # merged
    repository._tip = repository._git("rev-parse", "HEAD")
    repository.history(1, lambda place, number: slower(place, 0))
    assert nightly.revise(forge, repository.results, "loosen") == 0
    repository.history(1, lambda place, number: slower(place, 0))
    assert nightly.revise(forge, repository.results, "loosen") == 1
    request = gh["pr"][-1]
    assert (request["head"], request["title"]) == ("gate-loosened", "Gate: fused again where it won twice")
    repository._git("fetch", "--quiet", "origin", "gate-loosened")
    assert '"closed"' in table.read_text()
    assert '"closed"' not in repository._git("show", f"FETCH_HEAD:{nightly.TABLES / table.name}")


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were replayed, each leaving a result of its name."""
    seen: list[Path] = []

    def replay(source: Path, given: str | None, results: Path) -> list[str]:
        seen.append(source)
        (results / "GPU").mkdir(exist_ok=True)
        (results / "GPU" / f"{source.name}-replay.json").write_text("{}")
        return ["broken.json is not JSON"] if source.name == "second" else []

    monkeypatch.setattr(nightly, "replay", replay)
    return seen


def test_results_gather_on_their_branch(
    repository: Repository, gh: Gh, replayed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit()
    monkeypatch.setattr(nightly, "RESULTS", repository.results)
    out, forge = tmp_path / "gathered", Forge(repository.folder, apply=True)
    nightly.merge(Forge(repository.folder, apply=False), tmp_path / "first", out)
    assert repository._git("ls-remote", "origin") == ""
    nightly.merge(forge, tmp_path / "first", out)
    assert nightly.merge(forge, tmp_path / "second", out) == ["broken.json is not JSON"]
    nightly.merge(forge, tmp_path / "second", out)
    repository._git("fetch", "--quiet", "origin", nightly.BRANCH)
    files = repository._git("ls-tree", "-r", "--name-only", "FETCH_HEAD").split()
    assert files == ["GPU/first-replay.json", "GPU/second-replay.json", "benchmarks.json"]
    assert len(repository._git("log", "--format=%h", "FETCH_HEAD").split()) == 2, "no commit where nothing changed"
    assert {path.name for path in (out / "GPU").iterdir()} == {"first-replay.json", "second-replay.json"}
    assert repository._git("status", "--porcelain", "--untracked-files=no") == ""


def test_the_checkouts_benchmarks_hold(
    repository: Repository, gh: Gh, replayed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit()
    monkeypatch.setattr(nightly, "RESULTS", repository.results)
    out, forge = tmp_path / "gathered", Forge(repository.folder, apply=True)
    nightly.merge(forge, tmp_path / "first", out)
    repository.describe(version="2")
    nightly.merge(forge, tmp_path / "first", out)
    known = json.loads((out / "benchmarks.json").read_text())
    assert known["ring_latency.RingLatency.track_verify"]["version"] == "2"


def test_a_branch_that_cannot_be_fetched_leaves_no_history(repository: Repository, tmp_path: Path) -> None:
    """Half of one would be judged by the steps that follow."""
    out = tmp_path / "gathered"
    out.mkdir()
    repository._git("remote", "set-url", "origin", str(tmp_path / "none"))
    with pytest.raises(subprocess.CalledProcessError):
        nightly.merge(Forge(repository.folder, apply=False), tmp_path / "first", out)
    assert not out.exists()


def test_the_command_tells_what_was_not_stored(
    replayed: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Forge, "tip", lambda self, branch: None)
    with pytest.raises(SystemExit) as stopped:
        nightly.main(["merge", str(tmp_path / "second"), "--results", str(tmp_path / "out")])
    assert stopped.value.code == 1
    assert "not stored: broken.json" in capsys.readouterr().err


def test_a_real_file_goes_all_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """asv runs: a measured folder of this repository's newest commit becomes a result beside the history."""
    monkeypatch.setattr(Forge, "tip", lambda self, branch: None)
    folder = tmp_path / "measured" / store.resolved("HEAD")[:12]
    folder.mkdir(parents=True)
    shutil.copy(FILES / "memory.json", folder)
    nightly.main(["merge", str(tmp_path / "measured"), "--results", str(tmp_path / "out")])
    assert list((tmp_path / "out" / "no_gpu").glob("*-replay.json"))
    assert list((tmp_path / "out" / "NVIDIA_H200").glob("*-replay.json")), "beside what was there"


def test_a_step_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(*args: object) -> None:
        raise subprocess.CalledProcessError(1, ["gh", "issue", "list", "--state"])

    monkeypatch.setattr(nightly, "issues", failing)
    with pytest.raises(SystemExit, match="gh issue list failed"):
        nightly.main(["issues", "--results", str(tmp_path)])
