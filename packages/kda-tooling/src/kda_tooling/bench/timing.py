"""Graph-timed, interleaved measurement of several arms, and the statistics that are reported."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Replayable(Protocol):
    """Something that runs all its calls once when replayed: a CUDA graph, or a fake in tests."""

    def replay(self) -> None:
        """Run it."""
        ...


class Stopwatch(Protocol):
    """Times a number of replays, in seconds."""

    def __call__(self, graph: Replayable, replays: int) -> float:
        """Seconds that ``replays`` replays take on the device."""
        ...


@dataclass(frozen=True)
class Timing:
    """Latency of one arm.

    Args:
        passes_us: microseconds per call in each pass.
    """

    passes_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median over the passes."""
        return statistics.median(self.passes_us)

    @property
    def spread(self) -> float:
        """Largest distance of a pass from the median, as a share of it."""
        median = self.median_us
        return max(abs(value - median) for value in self.passes_us) / median


LAUNCH_HEAD_START = 200_000
"""Clock cycles (0.1 ms at 2 GHz) that the device is kept busy before the first event, so that all replays are queued
by then and no launch latency, tens of microseconds for a graph of hundreds of kernels, is timed."""


def cuda_stopwatch(graph: Replayable, replays: int) -> float:
    """Device time between two events around the replays."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(LAUNCH_HEAD_START)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def run_once(calls: Sequence[Callable[[], object]]) -> None:
    """Run ``calls`` on a stream of their own, as `record` wants it: compiled, loaded, their first allocations made."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)


def record(calls: Sequence[Callable[[], object]], rounds: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of all ``calls`` in order, ``rounds`` times over; nothing runs.

    Calls that launch what was never launched before have to be in a `run_once` before: loading a kernel ends a capture.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def capture(calls: Sequence[Callable[[], object]], rounds: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of all ``calls`` in order, ``rounds`` times over; they have run once before, outside the graph."""
    run_once(calls)
    return record(calls, rounds)


def measure_interleaved(
    graphs: dict[str, Replayable],
    calls_per_replay: int,
    *,
    passes: int = 9,
    seconds_per_pass: float = 2e-3,
    max_replays: int = 50,
    stopwatch: Stopwatch = cuda_stopwatch,
) -> dict[str, Timing]:
    """Time every arm in every pass, arms one after the other, so that drift of the machine hits all alike.

    Args:
        graphs: arm name -> graph of ``calls_per_replay`` calls.
        calls_per_replay: calls in one replay; results are per call.
        passes: rounds over all arms; odd, so that the median is a measured value.
        seconds_per_pass: replays are chosen so that an arm's share of a pass takes about this long.
        max_replays: upper limit of those replays.
        stopwatch: device timer; tests give a fake one.

    Raises:
        ValueError: ``passes`` or ``calls_per_replay`` is below 1.
    """
    if passes < 1 or calls_per_replay < 1:
        raise ValueError(f"passes and calls_per_replay must be at least 1, got {passes} and {calls_per_replay}")
    replays = {}
    for name, graph in graphs.items():
        stopwatch(graph, 1)  # warm-up: first replay uploads the graph
        once = stopwatch(graph, 1)
        replays[name] = max(1, min(max_replays, round(seconds_per_pass / max(once, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(passes):
        for name, graph in graphs.items():
            seconds = stopwatch(graph, replays[name])
            times[name].append(seconds / replays[name] / calls_per_replay * 1e6)
    return {name: Timing(tuple(values)) for name, values in times.items()}
