"""Whether the newest values of a cell are worse than those before them: medians, MADs, three windows.

The newest value, the newest two (both) and the newest three (their median) are compared with the median of up to N
values before them. A step that stays is found by the longer windows even if no value differs much from the one before
it, a large one at its first commit.

Noise of a cell is the largest of: the MAD of its baseline, widened for short ones; the median of that over all cells
of its benchmark, since a run's noise is common to its cells; what the run stored as its own spread; and a floor.
``tests/test_history_detector.py`` simulates what comes of it: below 1 false alarm in 1,000 decisions, and a step of 5 %
found within three commits in more than 95 % of the cases, at 1 % of noise between runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WINDOWS = (1, 2, 3)
"""Newest values that are compared with those before them."""

SIGMAS = (4.0, 2.4, 3.3)
"""Threshold of each window, in deviations of the difference: one value sees outliers, two must both be beyond it."""

WINDOW_VARIANCE = (1.0, 1.0, 0.449)
"""Variance of what stands for the window, in variances of one value: itself, either of two, the median of three."""

MEDIAN_VARIANCE = np.pi / 2
"""Variance of the median of n normal values, in variances of one over n."""

MAD_TO_SIGMA = 1.4826
SHORT = 4.0
"""A MAD of n values is taken times 1 + SHORT / n: one that is too small by chance raises alarms, one too large none."""

LEAST_BASELINE = 4
"""Values that a baseline must have."""

TIMED_FLOOR = 0.01
"""Noise between runs that is always granted to what is timed: the most that two sweeps differed by."""

TIMED_LEAST = 0.02
"""Changes below this are none, where values are timed."""

COUNTED_LEAST = 0.01
"""The same where values are counts (bytes, registers, instructions), which have no noise of their own."""


@dataclass(frozen=True)
class Verdicts:
    """What the newest value of each cell comes to; all arrays are of the cells' shape.

    Args:
        before, after: median of the baseline, and what stands for the window; NaN where there is no baseline.
        change: (after - before) / abs(before); infinite where before is 0 and after is not.
        threshold: the change above which it is a regression, below whose negative an improvement.
        window: newest values that were compared: the window with the largest change over threshold.
        noise: standard deviation of one value, as a share, that the threshold is made of.
        baseline: values in the baseline, 0 where there are too few.
    """

    before: Floats
    after: Floats
    change: Floats
    threshold: Floats
    window: Ints
    noise: Floats
    baseline: Ints

    @property
    def worse(self) -> npt.NDArray[np.bool_]:
        """Where it is a regression."""
        return self.change > self.threshold

    @property
    def better(self) -> npt.NDArray[np.bool_]:
        """Where it is an improvement."""
        return self.change < -self.threshold


def masked_median(values: Floats) -> Floats:
    """Median over the last axis of what is not NaN; NaN where nothing is left."""
    ordered = np.sort(values, axis=-1)  # NaN last
    count = np.sum(~np.isnan(values), axis=-1)
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, values.shape[-1] - 1)
    both = np.take_along_axis(ordered, np.stack((low, high), axis=-1), axis=-1)
    return np.where(count > 0, both.mean(axis=-1), np.nan)


def _share(difference: Floats, of: Floats) -> Floats:
    """``difference`` over abs(``of``); 0 where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(difference == 0, 0.0, difference / np.abs(of))


@dataclass(frozen=True)
class Detector:
    """The rule with its settings.

    Args:
        baseline: N, values before the window that it is compared with.
        floor: noise, as a share, that is always granted; 0 for counts.
        least: change, as a share, below which nothing is reported.

    Raises:
        ValueError: a setting is out of range.
    """

    baseline: int = 20
    floor: float = TIMED_FLOOR
    least: float = TIMED_LEAST

    def __post_init__(self) -> None:
        if not LEAST_BASELINE <= self.baseline <= 1000:
            raise ValueError(f"baseline must be within {LEAST_BASELINE}..1000 commits, got {self.baseline}")
        if not (0 <= self.floor < 1 and 0 <= self.least < 1):
            raise ValueError(f"floor and least must be shares within 0..1, got {self.floor}, {self.least}")

    def judge(self, values: Floats, spread: Floats | float = 0.0) -> Verdicts:
        """Verdicts at the newest commit; arguments as `judge_all`."""
        return self._judge(values, spread, every=False)[-1]

    def judge_all(self, values: Floats, spread: Floats | float = 0.0) -> list[Verdicts]:
        """Verdicts at every commit, each from the values up to it alone.

        Args:
            values: [..., cells, commits], oldest first; cells of one benchmark on one machine. A cell with fewer
                values has NaN before its first one.
            spread: [..., cells], share: what a run stored as its own spread.

        Raises:
            ValueError: ``values`` has no commit, or fewer than two axes.
        """
        return self._judge(values, spread, every=True)

    def _judge(self, values: Floats, spread: Floats | float, every: bool) -> list[Verdicts]:
        if values.ndim < 2 or values.shape[-1] < 1:
            raise ValueError(f"values must be [..., cells, commits] with a commit, got shape {values.shape}")
        commits = values.shape[-1]
        start = np.zeros(values.shape[:-1], dtype=np.int64)
        found = []
        for newest in range(commits):
            # A lasting improvement starts a new level: else a fall back to the old one would look like no change.
            # One that just began has no baseline of its own yet, and is not begun again.
            longest, first = self._compare(values, newest, WINDOWS[-1], start, spread), newest - WINDOWS[-1] + 1
            start = np.where(longest.better & (first - start >= LEAST_BASELINE), first, start)
            if every or newest == commits - 1:
                found.append(self._verdicts(values, newest, start, spread))
        return found

    def _verdicts(self, values: Floats, newest: int, start: Ints, spread: Floats | float) -> Verdicts:
        """The window that says most, of all windows."""
        each = [self._compare(values, newest, window, start, spread) for window in WINDOWS]
        with np.errstate(invalid="ignore", divide="ignore"):
            strength = np.stack([np.abs(_share(one.change, one.threshold)) for one in each])
        chosen = np.argmax(np.where(np.isnan(strength), -1.0, strength), axis=0)[None]

        def pick(name: str) -> npt.NDArray:
            return np.take_along_axis(np.stack([getattr(one, name) for one in each]), chosen, axis=0)[0]

        return Verdicts(*(pick(name) for name in Verdicts.__dataclass_fields__))

    @staticmethod
    def _stands_for(window: Floats, before: Floats) -> Floats:
        """One value for a window, so that a single outlier is none: the median; of two, the one nearer to before."""
        if window.shape[-1] != 2:
            return np.median(window, axis=-1)
        nearer = np.abs(window[..., 0] - before) < np.abs(window[..., 1] - before)
        return np.where(nearer, window[..., 0], window[..., 1])

    def _compare(self, values: Floats, newest: int, window: int, start: Ints, spread: Floats | float) -> Verdicts:
        """The newest ``window`` values up to index ``newest`` against the baseline before them, from ``start`` on."""
        end = newest + 1 - window
        shape = values.shape[:-1]
        if end < LEAST_BASELINE:
            nothing = np.full(shape, np.nan)
            sizes = np.full(shape, window), np.zeros(shape, dtype=np.int64)
            return Verdicts(nothing, nothing, nothing, nothing, sizes[0], nothing, sizes[1])
        begin = max(0, end - self.baseline)
        whole = values[..., begin:end]
        level = np.where(np.arange(begin, end) >= start[..., None], whole, np.nan)
        enough = np.sum(~np.isnan(level), axis=-1, keepdims=True) >= LEAST_BASELINE
        base = np.where(enough, level, whole)
        count = np.sum(~np.isnan(base), axis=-1)
        count = np.where(count >= LEAST_BASELINE, count, 0)
        before = np.where(count > 0, masked_median(base), np.nan)
        after = self._stands_for(values[..., end : newest + 1], before)
        of = np.maximum(count, 1)
        own = _share(MAD_TO_SIGMA * masked_median(np.abs(base - before[..., None])), before) * (1 + SHORT / of)
        usual = masked_median(np.where(np.isfinite(own), own, np.nan))[..., None]  # over the cells
        noise = np.fmax(np.fmax(own, usual), np.maximum(spread, self.floor))
        at = WINDOWS.index(window)
        threshold = SIGMAS[at] * noise * np.sqrt(WINDOW_VARIANCE[at] + MEDIAN_VARIANCE / of)
        change = _share(after - before, before)
        return Verdicts(
            before, after, change, np.maximum(threshold, self.least), np.full(shape, window), noise, count
        )  # fmt: skip
