"""Interleaved timing with a clock that tests wind by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kda_tooling.bench.timing import Replayable, Timing, measure_interleaved


class FakeGraph:
    """A graph whose replays take the given seconds, one after the other, the last one for ever."""

    def __init__(self, name: str, *seconds: float) -> None:
        self.name = name
        self._seconds: Iterator[float] = itertools.chain(seconds, itertools.repeat(seconds[-1]))

    def replay(self) -> None:
        raise AssertionError("the fake stopwatch asks for the time instead")

    def next(self) -> float:
        return next(self._seconds)


class FakeStopwatch:
    """Adds up the seconds of a graph's replays and remembers every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __call__(self, graph: Replayable, replays: int) -> float:
        assert isinstance(graph, FakeGraph)
        self.calls.append((graph.name, replays))
        return sum(graph.next() for _ in range(replays))


def measure(*graphs: FakeGraph, calls: int = 10, **options: float) -> tuple[dict[str, Timing], FakeStopwatch]:
    stopwatch = FakeStopwatch()
    named: dict[str, Replayable] = {graph.name: graph for graph in graphs}
    return measure_interleaved(named, calls, stopwatch=stopwatch, **options), stopwatch  # type: ignore[arg-type]


def test_arms_take_turns_in_every_pass() -> None:
    timings, stopwatch = measure(FakeGraph("a", 1e-3), FakeGraph("b", 1e-3), FakeGraph("c", 1e-3), passes=3)
    probes, passes = stopwatch.calls[:6], stopwatch.calls[6:]
    assert probes == [(name, 1) for name in "aabbcc"]
    assert [name for name, _ in passes] == list("abcabcabc")
    assert all(len(timing.passes_us) == 3 for timing in timings.values())


def test_times_are_per_call() -> None:
    timings, _ = measure(FakeGraph("a", 1e-3), FakeGraph("b", 3e-3), calls=192)
    assert timings["a"].median_us == pytest.approx(1e3 / 192)
    assert timings["b"].median_us == pytest.approx(3e3 / 192)
    assert timings["a"].spread == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("seconds", "replays"), [(1e-3, 2), (0.9e-3, 2), (1e-4, 20), (1e-6, 50), (0.0, 50), (5.0, 1)])
def test_replays_fill_a_pass_within_limits(seconds: float, replays: int) -> None:
    _, stopwatch = measure(FakeGraph("a", seconds), passes=3, seconds_per_pass=2e-3, max_replays=50)
    assert stopwatch.calls[2:] == [("a", replays)] * 3


def test_replays_are_chosen_per_arm() -> None:
    _, stopwatch = measure(FakeGraph("slow", 1e-3), FakeGraph("fast", 2e-4), passes=1)
    assert stopwatch.calls[4:] == [("slow", 2), ("fast", 10)]


def test_the_first_replay_counts_for_nothing() -> None:
    timings, _ = measure(FakeGraph("a", 7.0, 1e-3), calls=1, passes=3)
    assert timings["a"].passes_us == pytest.approx((1e3,) * 3)


def test_drift_hits_all_arms_alike() -> None:
    """A machine that slows down by half in the last passes: the ratio of two arms does not see it."""
    slow_down = (1.0,) * 10 + (1.5,)
    graphs = [FakeGraph(name, *(us * 2e-3 * factor for factor in slow_down)) for name, us in (("a", 1), ("b", 2))]
    timings, _ = measure(*graphs, passes=21)
    ratios = [b / a for a, b in zip(timings["a"].passes_us, timings["b"].passes_us, strict=True)]
    assert ratios == pytest.approx([2.0] * 21)
    assert timings["b"].median_us / timings["a"].median_us == pytest.approx(2.0)


def test_the_median_ignores_one_bad_pass_and_the_spread_shows_it() -> None:
    timing = Timing((10.0, 10.1, 30.0, 9.9, 10.0))
    assert timing.median_us == 10.0
    assert timing.spread == pytest.approx(2.0)


@pytest.mark.parametrize(("calls", "passes"), [(0, 3), (-1, 3), (1, 0), (1, -5)])
def test_nothing_to_time_is_refused(calls: int, passes: int) -> None:
    with pytest.raises(ValueError, match="passes and calls_per_replay must be at least 1"):
        measure(FakeGraph("a", 1.0), calls=calls, passes=passes)


def test_a_failing_arm_fails_the_measurement() -> None:
    def broken(graph: Replayable, replays: int) -> float:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        measure_interleaved({"a": FakeGraph("a", 1.0)}, 1, stopwatch=broken)
