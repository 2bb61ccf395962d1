"""What `kda regressions` misses: failed and missing cells, whatever their versions; values that are none; machines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kda_tooling.cli import app
from kda_tooling.history.reading import read_history
from kda_tooling.history.regressions import IMPROVEMENT, LOST, REGRESSION, UNJUDGED, find_regressions
from tests.support.histories import LATENCY, Repository
from tests.test_history_reading import SLOW, command, file_of, reported, steady, stepped

runner = CliRunner()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repository")
    made.describe()
    return made


class TestCellsThatAreNotThere:
    @pytest.mark.parametrize(("value", "said"), [(None, "failed"), (math.nan, "was skipped (NaN)")])
    def test_failed_and_skipped_ones_are_lost(self, value: float | None, said: str, repository: Repository) -> None:
        repository.history(10, lambda place, number: value if place == SLOW and number == 9 else steady(place, number))
        (found,) = reported(repository).of(LOST)
        assert found.name.params == tuple(map(str, SLOW))
        assert found.said.startswith(f"{said} at the newest commit, last measured at {repository.commits[8][:12]}")
        assert "lost NVIDIA_H200" in command(repository, code=1)

    def test_infinity_is_no_value(self, repository: Repository) -> None:
        repository.history(
            10, lambda place, number: math.inf if place == SLOW and number == 9 else steady(place, number)
        )
        assert len(reported(repository).of(LOST)) == 1

    def test_a_benchmark_that_is_missing_is_lost_with_all_cells(self, repository: Repository) -> None:
        repository.describe("other.Suite.track", {"B": (1, 2)})
        for number in range(10):
            repository.history(1, steady)
            if number < 9:
                repository.record(number, steady, name="other.Suite.track")
        report = reported(repository)
        assert {one.name.benchmark for one in report.of(LOST)} == {"other.Suite.track"}
        assert len(report.of(LOST)) == 2

    def test_one_that_was_taken_out_of_the_suite_is_not(self, repository: Repository) -> None:
        repository.describe("other.Suite.track", {"B": (1, 2)})
        repository.history(9, steady)
        for number in range(9):
            repository.record(number, steady, name="other.Suite.track")
        repository.history(1, steady)
        del repository.described["other.Suite.track"]
        repository.describe()
        assert not reported(repository).of(LOST)

    def test_one_that_was_never_measured_is_said_and_not_judged(self, repository: Repository) -> None:
        repository.history(10, lambda place, number: math.nan if place == SLOW else steady(place, number))
        (found,) = reported(repository).of(UNJUDGED)
        assert found.said == "was skipped (NaN); never measured before"
        assert "never measured before: 1 cells" in command(repository, code=0)

    def test_a_short_history_is_not_judged(self, repository: Repository) -> None:
        repository.history(4, stepped)
        assert {one.said for one in reported(repository).of(UNJUDGED)} == {"too few values to compare: 4"}

    def test_of_two_slow_ones_among_gaps_the_range_is_right(self, repository: Repository) -> None:
        repository.history(10, lambda place, number: None if number in (5, 8) else stepped(place, number))
        (found,) = reported(repository).of(REGRESSION)
        assert found.commits == (repository.commits[7], repository.commits[9])


class TestVersions:
    def test_what_fails_with_a_new_triton_is_lost(self, repository: Repository) -> None:
        """It has no history of its own versions: what was measured with others is missed all the same."""
        repository.describe("other.Suite.track", {"B": (1, 2)})
        repository.history(8, steady)
        for number in range(8):
            repository.record(number, steady, name="other.Suite.track")
        repository.history(
            1, lambda place, number: None if place[0] == "fused+ring" else 2 * steady(place, number),
            measured={"triton": "3.7.1"},
        )  # fmt: skip
        report = reported(repository)
        lost = report.of(LOST)
        assert {one.name.params[0] for one in lost if one.name.benchmark == LATENCY} == {"fused+ring"}
        assert len(lost) == 8 + 2
        end = f" at the newest commit, last measured at {repository.commits[7][:12]} with driver 580.1"
        assert {one.said.partition(",")[0] for one in lost} == {
            "failed at the newest commit",
            "is missing at the newest commit",
        }
        assert all(end in one.said and "triton 3.6.0" in one.said for one in lost)
        assert {one.said for one in report.of(UNJUDGED)} == {"too few values to compare: 1"}
        assert not report.of(REGRESSION), "values are compared among equal versions alone"
        command(repository, code=1)

    def test_two_versions_at_the_newest_commit_do_not_miss_each_other_s_cells(self, repository: Repository) -> None:
        repository.describe("other.Suite.track", {"B": (1, 2)})
        repository.history(9, steady)
        path = repository.record(8, steady, name="other.Suite.track")
        data = json.loads(path.read_text())
        halves = [dict(data, results={name: data["results"][name]}) for name in (LATENCY, "other.Suite.track")]
        path.write_text(json.dumps(halves[0]))
        path.with_name("other.json").write_text(json.dumps(halves[1] | {"measured": {"triton": "3.7.1"}}))
        assert not reported(repository).of(LOST)


class TestValuesThatAreNone:
    """A time of 0 is no improvement, and no level that later times fall back from."""

    @pytest.mark.parametrize("value", [0.0, -0.0, -3.0, -5e-324])
    @pytest.mark.parametrize("unit", ["us per layer", "us per call", "ratio", "chosen / best"])
    def test_times_and_ratios_are_above_0(self, unit: str, value: float, repository: Repository) -> None:
        repository.describe(unit=unit)
        repository.history(10, lambda place, number: value if place == SLOW and number >= 7 else steady(place, number))
        report = reported(repository)
        assert not report.of(IMPROVEMENT)
        (found,) = report.of(LOST)
        assert found.name.params == tuple(map(str, SLOW))
        said = f"is {value:g} {unit}, which must be above 0"
        assert found.said == f"{said} at the newest commit, last measured at {repository.commits[6][:12]}"
        assert [problem.path for problem in report.history.problems] == sorted(
            file_of(repository, number) for number in (7, 8, 9)
        )
        assert report.history.problems[0].message == f"{LATENCY} (fused+ring, 4, 16) {said}"

    def test_they_start_no_level(self, repository: Repository) -> None:
        repository.history(14, lambda place, number: 0.0 if 6 <= number < 10 else steady(place, number))
        report = reported(repository)
        assert not report.of(REGRESSION)
        assert not report.of(LOST)
        assert "as are 15 more cells" in command(repository, code=2)

    @pytest.mark.parametrize("unit", ["bytes", "registers", "instructions", "shuffles", "kernels"])
    def test_a_count_may_be_0_and_not_less(self, unit: str, repository: Repository) -> None:
        repository.describe(unit=unit)
        repository.history(10, lambda place, number: 0.0 if number == 9 else 8.0)
        report = reported(repository)
        assert not report.history.problems
        assert len(report.of(IMPROVEMENT)) == 16
        repository.record(9, lambda place, number: -1.0 if place == SLOW else 8.0)
        (problem,) = reported(repository).history.problems
        assert problem.message == f"{LATENCY} (fused+ring, 4, 16) is -1 {unit}, which must be at least 0"

    def test_without_a_known_unit_0_may_be_a_count(self, repository: Repository) -> None:
        repository.history(10, lambda place, number: -1.0 if place == SLOW else 0.0)
        (repository.results / "benchmarks.json").unlink()
        _, *problems = reported(repository).history.problems
        assert {problem.message for problem in problems} == {
            f"{LATENCY} (fused+ring, 4, 16) is -1, which must be at least 0"
        }


class TestAge:
    """A machine that is measured no longer is judged at its own newest commit, which is said."""

    @pytest.fixture
    def stopped(self, repository: Repository) -> Repository:
        """NVIDIA_H200 measured at 8 of 11 commits, the compiler at all."""
        repository.describe("compile_signals.CompiledKernel.track_spills", {"kernel": ("a", "b")}, unit="bytes")
        repository.history(8, lambda place, number: stepped(place, number + 2))
        repository.commit(3)
        for number in range(11):
            repository.record(
                number, lambda place, n: 8.0, name="compile_signals.CompiledKernel.track_spills", machine="compiler",
                measured={"triton": "3.6.0"},
            )  # fmt: skip
        return repository

    def test_it_is_always_noted(self, stopped: Repository) -> None:
        (note,) = reported(stopped).notes
        first, last = stopped.commits[7][:12], stopped.commits[10][:12]
        assert note == (
            f"NVIDIA_H200: its newest measured commit, {first}, is 3 measured commits older than the history's, {last}"
        )
        assert note in " ".join(command(stopped, code=1).split())
        data = json.loads(runner.invoke(app, ["regressions", "--results", str(stopped.results), "--json", "-"]).stdout)
        assert {name: one["age"] for name, one in data["machines"].items()} == {"NVIDIA_H200": 3, "compiler": 0}

    def test_beyond_max_age_its_cells_are_lost(self, stopped: Repository) -> None:
        assert not find_regressions(read_history(stopped.results), max_age=3).of(LOST)
        report = find_regressions(read_history(stopped.results), max_age=2)
        assert {one.machine for one in report.of(LOST)} == {"NVIDIA_H200"}
        assert (len(report.of(LOST)), len(report.of(REGRESSION))) == (15, 1), "a regression stays one"
        assert all(one.said.endswith("older than the history's; at most 2 may be") for one in report.of(LOST))

    def test_it_is_exit_1(self, repository: Repository) -> None:
        repository.history(8, steady)
        repository.record(7, steady, machine="other")
        repository.history(1, steady, machine="other")
        command(repository, code=0)
        command(repository, "--max-age", "1", code=0)
        assert "at most 0 may be: 16 cells" in command(repository, "--max-age", "0", code=1)
        command(repository, "--max-age", "-1", code=2)
        with pytest.raises(ValueError, match="max_age must be a count of commits, at least 0, or None, got -1"):
            find_regressions(read_history(repository.results), max_age=-1)

    def test_one_without_a_gpu_ends_with_its_triton(self, repository: Repository) -> None:
        """Compilers are named after it, so an old one is only noted."""
        repository.history(8, steady, machine="compiler_triton_3_6_0", measured={"triton": "3.6.0"})
        repository.history(8, steady, machine="compiler_triton_3_7_1", measured={"triton": "3.7.1"})
        assert "compiler_triton_3_6_0: its newest" in command(repository, "--max-age", "0", code=0)
