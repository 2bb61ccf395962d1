"""What `kda regressions` makes of result files: broken ones, failed and missing cells, versions, order, output."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kda_tooling.cli import app
from kda_tooling.history import reading
from kda_tooling.history.reading import read_history
from kda_tooling.history.regressions import IMPROVEMENT, LOST, REGRESSION, UNJUDGED, Report, find_regressions
from tests.support.histories import LATENCY, Place, Repository, wobble

runner = CliRunner()
SLOW = ("fused+ring", 4, 16)


def steady(place: Place, number: int) -> float:
    return 5.0 * wobble(number, place)


def stepped(place: Place, number: int) -> float:
    return steady(place, number) * (1.3 if place == SLOW and number >= 9 else 1)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repository")
    made.describe()
    return made


def reported(repository: Repository) -> Report:
    return find_regressions(read_history(repository.results))


def command(repository: Repository, *arguments: str, code: int) -> str:
    result = runner.invoke(app, ["regressions", "--results", str(repository.results), *arguments])
    assert result.exit_code == code, result.output
    return result.output


def file_of(repository: Repository, number: int) -> Path:
    return repository.results / "NVIDIA_H200" / f"{repository.commits[number][:8]}-replay.json"


def changed(edit: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        data = json.loads(content)
        edit(data)
        return json.dumps(data).encode()

    return apply


def row(data: dict[str, Any]) -> list[Any]:
    return data["results"][LATENCY]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "Error parsing JSON"),
    "truncated": (lambda content: content[: len(content) // 2], "Error parsing JSON"),
    "binary": (lambda _: b"\xff\xfe\x00", "cannot be read"),
    "a list": (lambda _: b"[1, 2]", "cannot be read"),
    "a number": (lambda _: b"7", "cannot be read"),
    "null": (lambda _: b"null", "cannot be read"),
    "nested": (lambda _: b"[" * 100_000, "cannot be read"),
    "an older version": (changed(lambda d: d.update(version=1)), "old file format"),
    "a newer version": (changed(lambda d: d.update(version=3)), "newer than"),
    "a version in words": (changed(lambda d: d.update(version="two")), "cannot be read"),
    "without results": (changed(lambda d: d.pop("results")), "missing key 'results'"),
    "results of nothing": (changed(lambda d: d.update(results=None)), "cannot be read"),
    "another machine's": (changed(lambda d: d["params"].update(machine="x")), "machine name is not"),
    "no hash": (changed(lambda d: d.update(commit_hash="../../x")), "commit_hash must be a git hash"),
    "a NaN date": (changed(lambda d: d.update(date=math.nan)), "date must be milliseconds"),
    "a date in words": (changed(lambda d: d.update(date="today")), "date must be milliseconds"),
    "measured by a list": (changed(lambda d: d.update(measured=[1])), "cannot be read"),
    "values in words": (changed(lambda d: row(d)[0].__setitem__(0, "fast")), "values must be numbers"),
    "true": (changed(lambda d: row(d)[0].__setitem__(0, True)), "values must be numbers"),
    "too few values": (changed(lambda d: row(d)[0].pop()), "16 cells, its result has 15"),
    "one value": (changed(lambda d: row(d).__setitem__(0, 3.0)), "16 cells, its result has float"),
    "no parameters": (changed(lambda d: row(d).__setitem__(1, None)), "its params must be lists"),
    "a huge product": (changed(lambda d: row(d).__setitem__(1, [["1"] * 1000] * 3)), "more than 100000 cells"),
}  # fmt: skip


class TestBrokenFiles:
    @pytest.mark.parametrize("name", BROKEN)
    def test_are_named_and_the_rest_is_read(self, name: str, repository: Repository) -> None:
        repository.history(10, stepped)
        path = file_of(repository, 4)
        edit, message = BROKEN[name]
        path.write_bytes(edit(path.read_bytes()))
        report = reported(repository)
        assert [problem.path for problem in report.history.problems] == [path]
        assert message in str(report.history.problems[0])
        (found,) = report.of(REGRESSION)
        assert found.name.params == tuple(map(str, SLOW))
        assert found.baseline == 8, "the broken commit is none of the nine before the newest"
        assert str(path.name) in command(repository, code=1)

    def test_without_a_regression_they_are_exit_2(self, repository: Repository) -> None:
        repository.history(10, steady)
        command(repository, code=0)
        file_of(repository, 9).write_text("")
        assert "unusable" in command(repository, code=2)

    def test_nothing_but_broken_files_is_exit_2(self, repository: Repository) -> None:
        repository.history(1, steady)
        file_of(repository, 0).write_text("")
        output = " ".join(command(repository, code=2).replace("│", " ").split())
        assert "has no result that can be used" in output
        assert "Error parsing JSON" in output

    @pytest.mark.parametrize(
        "text", [None, "", "[]", '{"version": 1}', '{"machine": "a\\u001b[2J", "version": 1}', '{"version": 9}']
    )
    def test_a_machine_that_is_not_described(self, text: str | None, repository: Repository) -> None:
        repository.history(10, stepped)
        repository.record(9, steady, machine="other")
        description = repository.results / "other" / "machine.json"
        description.unlink()
        if text is not None:
            description.write_text(text)
        report = reported(repository)
        assert [problem.path for problem in report.history.problems] == [description]
        assert "the results beside it are left out" in report.history.problems[0].message
        assert len(report.of(REGRESSION)) == 1
        assert "\x1b" not in command(repository, code=1)

    @pytest.mark.parametrize("text", [None, "", "[]", "{", '{"version": 1}', '{"a": 1, "version": 2}'])
    def test_benchmarks_that_are_not_described(self, text: str | None, repository: Repository) -> None:
        repository.history(10, stepped)
        path = repository.results / "benchmarks.json"
        path.unlink()
        if text is not None:
            path.write_text(text)
        report = reported(repository)
        assert [problem.path for problem in report.history.problems] == [path]
        (found,) = report.of(REGRESSION)
        assert found.cell == "p1=fused+ring, p2=4, p3=16"

    def test_a_fifo_is_not_waited_for(self, repository: Repository) -> None:
        repository.history(10, stepped)
        os.mkfifo(repository.results / "NVIDIA_H200" / "pipe.json")
        assert "is no file" in str(reported(repository).history.problems[0])

    def test_a_missing_folder_is_refused(self, tmp_path: Path) -> None:
        assert runner.invoke(app, ["regressions", "--results", str(tmp_path / "none")]).exit_code == 2
        with pytest.raises(FileNotFoundError, match="no folder of asv results"):
            read_history(tmp_path / "none")


class TestVersions:
    def test_a_benchmark_s_new_version_is_not_compared_with_older_ones(self, repository: Repository) -> None:
        repository.history(9, steady)
        repository.describe(version="2")
        repository.history(1, lambda place, number: 2 * steady(place, number))
        found = reported(repository).of(UNJUDGED)
        assert len(found) == 16
        assert found[0].said == "its version changed to 2: 9 older values are not compared"
        assert "its version changed to 2" in command(repository, code=0)

    def test_a_value_of_another_version_than_the_benchmark_s_is_lost(self, repository: Repository) -> None:
        repository.history(9, steady)
        repository.history(1, steady, version="7")
        assert {one.said for one in reported(repository).of(LOST)} == {"is of version 7; the benchmark's version is 1"}

    def test_other_versions_of_triton_are_another_history(self, repository: Repository) -> None:
        repository.history(9, steady)
        repository.history(1, lambda place, number: 2 * steady(place, number), measured={"triton": "3.7.1"})
        report = reported(repository)
        assert not report.of(REGRESSION)
        assert {one.said for one in report.of(UNJUDGED)} == {"too few values to compare: 1"}
        assert "triton 3.6.0 ends at" in " ".join(command(repository, code=0).split())

    def test_machines_are_judged_apart(self, repository: Repository) -> None:
        repository.history(10, stepped)
        for number in range(10):
            repository.record(number, lambda place, _: 1.0, machine="other", measured={})
        (found,) = reported(repository).of(REGRESSION)
        assert found.machine == "NVIDIA_H200"


class TestOrder:
    def test_it_is_the_log_s_whatever_the_files_times_are(self, repository: Repository) -> None:
        repository.history(10, stepped)
        for number in range(10):
            os.utime(file_of(repository, number), (1e9 - number, 1e9 - number))
        history = read_history(repository.results)
        assert (history.order, [run.commit for run in history.runs]) == ("git", repository.commits)

    def test_without_the_commits_it_is_by_date(self, repository: Repository, tmp_path: Path) -> None:
        repository.history(10, steady)
        for number in range(10):
            path = file_of(repository, number)
            data = json.loads(path.read_text())
            path.write_text(json.dumps(data | {"date": 1e12 - number}))
        elsewhere = Repository(tmp_path / "elsewhere")
        history = read_history(repository.results, elsewhere.folder)
        assert (history.order, [run.commit for run in history.runs]) == ("date", repository.commits[::-1])
        output = command(repository, "--repo", str(elsewhere.folder), code=0)
        assert "the results' dates: not all commits are in the log" in output

    def test_two_files_of_one_commit_are_one_run(self, repository: Repository) -> None:
        repository.history(10, stepped)
        path = file_of(repository, 9)
        path.with_name("copy.json").write_bytes(path.read_bytes())
        assert len(read_history(repository.results).runs) == 10


class TestNoise:
    def test_the_run_s_own_quartiles_count(self, repository: Repository) -> None:
        repository.history(10, stepped, spread=0.2)
        assert not reported(repository).of(REGRESSION)
        assert max(one.noise or 0 for one in reported(repository).findings) == pytest.approx(0.7413 * 0.4, rel=1e-3)

    def test_counts_are_judged_without_noise(self, repository: Repository) -> None:
        repository.describe("compile_signals.CompiledKernel.track_spills", {"kernel": ("a", "b")}, unit="bytes")
        for number in range(10):
            repository.history(1, steady)
            repository.record(
                number, lambda place, n: 8.0 if n == 9 and place == ("b",) else 0.0,
                name="compile_signals.CompiledKernel.track_spills",
            )  # fmt: skip
        (found,) = reported(repository).of(REGRESSION)
        assert (found.name.params, found.ratio, found.after) == (("b",), None, 8.0)
        assert "from 0" in command(repository, code=1)

    def test_improvements_are_said_and_exit_0(self, repository: Repository) -> None:
        repository.history(10, lambda place, number: stepped(place, number) if number < 9 else 3.0)
        assert len(reported(repository).of(IMPROVEMENT)) == 16
        assert "improvements" in command(repository, code=0)


class TestOutput:
    def test_the_table_names_what_is_needed(self, repository: Repository) -> None:
        repository.history(10, stepped)
        output = " ".join(command(repository, code=1).replace("│", " ").split())
        first, last = (commit[:12] for commit in repository.commits[8:])
        assert "lane=fused+ring, T=4, B=16" in output
        assert f"{first}..{last}" in output
        for column in ("benchmark", "cell", "before", "after", "ratio", "threshold", "commits"):
            assert column in output

    def test_json(self, repository: Repository, tmp_path: Path) -> None:
        repository.history(10, stepped)
        command(repository, "--json", str(tmp_path / "report.json"), code=1)
        data = json.loads((tmp_path / "report.json").read_text())
        assert data["exit_code"] == 1
        assert data["counts"] == {"regression": 1, "lost": 0, "improvement": 0, "not judged": 0, "fine": 15}
        assert data["machines"]["NVIDIA_H200"]["newest"] == repository.commits[9]
        found = data["cells"][0]
        assert found["cell"] == {"lane": "fused+ring", "T": "4", "B": "16"}
        assert found["ratio"] == pytest.approx(found["after"] / found["before"])
        assert found["ratio"] > found["threshold"] > 1

    def test_markdown_holds_no_markup_of_the_files(self, repository: Repository) -> None:
        name = "evil.`@all`|<b>.track"
        repository.describe(name, {"B": (1, 2)})
        for number in range(10):
            repository.history(1, steady)
            repository.record(number, lambda place, n: 2.0 if n == 9 else 1.0, name=name)
        result = runner.invoke(app, ["regressions", "--results", str(repository.results), "--markdown", "-"])
        assert result.exit_code == 1
        rows = [line for line in result.stdout.splitlines() if "evil" in line]
        assert len(rows) == 2
        for line in rows:
            assert line.startswith("| `evil.'@all'\\|<b>.track` | `B=")
        assert "2 regressions, 0 lost cells" in result.stdout

    def test_one_output_each(self, repository: Repository, tmp_path: Path) -> None:
        repository.history(1, steady)
        command(repository, "--json", "-", "--markdown", "-", code=2)
        command(repository, "--json", str(tmp_path / "x"), "--markdown", str(tmp_path / "x"), code=2)
        command(repository, "--json", str(tmp_path / "none" / "x"), code=2)
        command(repository, "--baseline", "3", code=2)


def test_without_asv_it_says_how_to_install_it(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.history(1, steady)
    monkeypatch.setitem(sys.modules, "asv.results", None)
    output = " ".join(command(repository, code=2).replace("│", " ").split())
    assert reading.INSTALL in output
    requirement = reading.INSTALL.split("'")[1]
    assert requirement in (Path(__file__).parent.parent / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("first", "newest", "spread", "null"),
    [(5e-324, 1e300, 0.0, "ratio"), (1.0, 1.0, 1e308, "noise")],
    ids=["ratio beyond a double", "noise beyond a double"],
)
def test_figures_that_json_does_not_know_are_null(
    repository: Repository, first: float, newest: float, spread: float, null: str
) -> None:
    """A baseline of 5e-324, and quartiles too far apart: the verdicts hold, nothing that is infinite is written."""
    repository.history(10, lambda place, number: first if number < 9 else newest, spread=spread)
    result = runner.invoke(app, ["regressions", "--results", str(repository.results), "--json", "-"])
    assert isinstance(result.exception, SystemExit | None)
    cells = json.loads(result.stdout)["cells"]
    assert any(one[null] is None for one in cells)


def test_a_repo_that_is_none_is_refused(repository: Repository, tmp_path: Path) -> None:
    """Not ordered by dates, as if nothing had been asked for."""
    repository.history(10, stepped)
    (tmp_path / "none").mkdir()
    output = " ".join(command(repository, "--repo", str(tmp_path / "none"), code=2).replace("│", " ").split())
    assert "is no git repository: give a checkout" in output
    command(repository, "--repo", str(repository.folder), code=1)
