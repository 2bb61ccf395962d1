"""The detector on simulated histories: false alarms, what is found and when, and its arithmetic."""

from __future__ import annotations

import statistics

import numpy as np
import numpy.typing as npt
import pytest

from kda_tooling.history.detector import LEAST_BASELINE, SHORT, Detector, masked_median

HISTORIES, CELLS, COMMITS = 200, 36, 40
BETWEEN_RUNS, WITHIN_A_RUN = 0.01, 0.004
"""Measured: two sweeps differ by 1.0 % at most, and passes by 0.3 to 0.5 % (docs/measuring.md)."""

Floats = npt.NDArray[np.float64]


def quiet(seed: int, between: float | Floats = BETWEEN_RUNS, commits: int = COMMITS, common: float = 0.0) -> Floats:
    """[histories, cells, commits]: medians around 1 to 100 us; ``common`` of the variance is of the run, not the cell.

    A stored value is a median of passes, whose own noise is below that between runs and is added to it.
    """
    random = np.random.default_rng(seed)
    level = np.exp(random.uniform(0, 4.6, (HISTORIES, CELLS, 1)))
    own = random.normal(size=(HISTORIES, CELLS, commits)) * np.sqrt(1 - common)
    run = random.normal(size=(HISTORIES, 1, commits)) * np.sqrt(common)
    passes = random.normal(size=(HISTORIES, CELLS, commits)) * WITHIN_A_RUN / 3
    return level * np.exp((own + run) * between + passes)


def alarms(values: Floats, spread: Floats | float = WITHIN_A_RUN) -> tuple[int, int]:
    """(alarms, decisions): one decision is one cell at one commit with a baseline."""
    verdicts = Detector().judge_all(values, spread)
    return sum(int(one.worse.sum()) for one in verdicts), sum(int((one.baseline > 0).sum()) for one in verdicts)


class TestFalseAlarms:
    @pytest.mark.parametrize("common", [0.0, 0.5, 0.9])
    def test_below_one_in_a_thousand_decisions(self, common: float) -> None:
        raised, decisions = alarms(quiet(1, common=common))
        assert decisions == HISTORIES * CELLS * (COMMITS - LEAST_BASELINE)
        assert raised <= decisions / 1000

    @pytest.mark.parametrize("between", [0.002, 0.02, 0.04])
    def test_whatever_the_noise_is(self, between: float) -> None:
        raised, decisions = alarms(quiet(2, between))
        assert raised <= decisions / 1000

    def test_where_some_cells_are_noisier(self) -> None:
        each = np.random.default_rng(3).uniform(0.002, 0.02, (HISTORIES, CELLS, 1))
        raised, decisions = alarms(quiet(4, each))
        assert raised <= decisions / 1000

    def test_a_lone_noisy_cell_whose_runs_say_so(self) -> None:
        each = np.full((HISTORIES, CELLS, 1), 0.003)
        each[:, 0] = 0.06
        spread = np.where(np.arange(CELLS) == 0, 0.06, 0.003)[None].repeat(HISTORIES, 0)
        raised, decisions = alarms(quiet(5, each), spread)
        assert raised <= decisions / 1000


class TestSteps:
    @pytest.mark.parametrize("at", [12, 24, 36])
    @pytest.mark.parametrize("common", [0.0, 0.9])
    def test_five_per_cent_that_stay_are_found_within_three_commits(self, at: int, common: float) -> None:
        least = 0.95 if at > 12 else 0.9  # 12 commits know less of the noise than 20
        values = quiet(6, commits=at + 3, common=common)
        values[..., at:] *= 1.05
        verdicts = Detector().judge_all(values, WITHIN_A_RUN)[-3:]
        found = np.any([one.worse for one in verdicts], axis=0)
        assert found.mean() >= least

    @pytest.mark.parametrize("step", [1.1, 1.3])
    def test_a_large_one_is_found_at_its_first_commit(self, step: float) -> None:
        values = quiet(7, commits=25)
        values[..., 24] *= step
        assert Detector().judge(values, WITHIN_A_RUN).worse.mean() >= 0.99

    def test_a_slope_whose_every_commit_is_within_the_noise_is_found(self) -> None:
        values = quiet(8, commits=30)
        values[..., 24:] *= 1.01 ** np.arange(1, 7)
        assert Detector().judge(values, WITHIN_A_RUN).worse.mean() >= 0.85

    def test_one_slow_run_is_gone_at_the_next_commit(self) -> None:
        values = quiet(9, commits=26)
        values[..., 24] *= 1.2
        assert Detector().judge(values[..., :25]).worse.mean() >= 0.99
        assert Detector().judge(values, WITHIN_A_RUN).worse.mean() <= 0.01

    def test_after_an_improvement_the_old_level_is_a_regression(self) -> None:
        values = quiet(10, 0.003, commits=40)
        values[..., 25:33] *= 0.8
        assert Detector().judge(values[..., :28]).better.all()
        later = Detector().judge(values[..., :36])
        assert later.worse.all(), "of 20 commits, 8 are of the new level: their median is the old one"
        assert not Detector().judge(values[..., :33]).worse.any()

    def test_the_window_says_how_many_runs_are_slow(self) -> None:
        values = np.full((1, 30), 10.0)
        values[:, 29:] = 13
        assert Detector().judge(values).window[0] == 1
        values[:, 27:] = 13
        assert Detector().judge(values).window[0] == 3


class TestArithmetic:
    def test_the_threshold_is_what_the_documentation_says(self) -> None:
        values = np.array([[10, 10.2, 9.8, 10.3, 9.7, 10.1, 12.0]])
        found = Detector().judge(values)
        before = statistics.median(values[0, :6])
        mad = statistics.median(abs(values[0, :6] - before))
        noise = 1.4826 * mad / before * (1 + SHORT / 6)
        assert found.before[0] == pytest.approx(before)
        assert found.noise[0] == pytest.approx(noise)
        assert found.threshold[0] == pytest.approx(4 * noise * np.sqrt(1 + np.pi / 2 / 6))
        assert found.change[0] == pytest.approx(12 / before - 1)

    def test_the_stored_spread_raises_the_threshold(self) -> None:
        values = np.full((2, 20), 10.0)
        values[:, 19] = 11.5
        found = Detector().judge(values, np.array([0.003, 0.06]))
        assert found.worse.tolist() == [True, False]

    def test_the_noise_of_the_other_cells_counts(self) -> None:
        values = np.concatenate([quiet(11, 0.03)[0], np.full((1, COMMITS), 10.0)])
        alone = Detector().judge(values[-1:])
        together = Detector().judge(values)
        assert together.noise[-1] > 2 * alone.noise[0]

    def test_counts_have_no_noise(self) -> None:
        values = np.array([[168.0] * 9 + [170], [168.0] * 9 + [169], [0.0] * 9 + [16], [0.0] * 10])
        found = Detector(floor=0, least=0.01).judge(values)
        assert found.worse.tolist() == [True, False, True, False]
        assert found.change[2] == np.inf

    def test_too_few_values_are_not_judged(self) -> None:
        values = np.full((2, 6), 10.0)
        values[1, :2] = np.nan
        values[:, -1] = 100
        found = Detector().judge(values)
        assert found.baseline.tolist() == [5, 0]
        assert found.worse.tolist() == [True, False]

    def test_judging_the_newest_is_the_last_of_judging_all(self) -> None:
        values = quiet(12, commits=30)[:3]
        one, last = Detector().judge(values), Detector().judge_all(values)[-1]
        for name in ("before", "after", "change", "threshold", "window", "noise", "baseline"):
            np.testing.assert_array_equal(getattr(one, name), getattr(last, name))

    def test_medians_leave_nan_out(self) -> None:
        values = np.array([[3.0, np.nan, 1, 2], [np.nan] * 4, [4, 1, np.nan, np.nan]])
        np.testing.assert_array_equal(masked_median(values), [2, np.nan, 2.5])

    @pytest.mark.parametrize("given", [{"baseline": 3}, {"baseline": 1001}, {"floor": -0.1}, {"least": 1}])
    def test_settings_out_of_range_are_refused(self, given: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="must be"):
            Detector(**given)  # type: ignore[arg-type]

    def test_values_without_commits_are_refused(self) -> None:
        with pytest.raises(ValueError, match="commits"):
            Detector().judge(np.zeros(3))
        with pytest.raises(ValueError, match="commits"):
            Detector().judge(np.zeros((3, 0)))
