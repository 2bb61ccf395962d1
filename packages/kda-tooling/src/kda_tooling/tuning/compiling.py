"""Compile candidates for the current device in parallel, filling Triton's disk cache, and say what came of each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch

from kda_backend.gate.cells import COMPACT_WINDOW, FOLD_ON_VERIFY
from kda_kernels import LaunchConfig, _launch
from kda_tooling.bench.arms import Arm, our_arms, with_config
from kda_tooling.bench.sweep import build_problems
from kda_tooling.bench.warmup import MAX_WORKERS
from kda_tooling.cores import usable_cores
from kda_tooling.tuning.candidates import Figures, candidates, capped, ruled_out
from kda_tooling.tuning.settings import Group, TuneSettings


@dataclass(frozen=True)
class Failure:
    """A candidate that is not timed.

    Args:
        group: where.
        lane: of which lane.
        config: the configuration.
        error: why.
        broken: whether something is wrong with it, rather than that it cannot win.
    """

    group: Group
    lane: str
    config: LaunchConfig
    error: str
    broken: bool = True


@dataclass
class Compiled:
    """What is left to time: configurations of each lane of each group; and what is not."""

    configs: dict[tuple[Group, str], list[LaunchConfig]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def arm_of(settings: TuneSettings, group: Group, lane: str, config: LaunchConfig | None) -> Arm:
    """``lane`` as ``group``'s cells have it, launched with ``config``."""
    folds, compact = FOLD_ON_VERIFY in group.option, COMPACT_WINDOW in group.option
    arms = our_arms(settings.shape, (lane,), False, forms=(group.form,), fold_on_verify=folds, compact_window=compact)
    (arm,) = (arm for arm in arms if arm.fold_on_verify == folds and arm.compact_window == compact)
    return with_config(arm, config)


Job = tuple[Group, str, LaunchConfig]
"""(group, lane, configuration) to compile."""


def candidate_jobs(settings: TuneSettings, groups: Iterable[Group], nvidia: bool) -> list[Job]:
    """Every candidate of ``groups``."""
    return [
        (group, lane, config)
        for group in groups
        for lane in group.lanes
        for config in candidates(settings.shape, group.draft_tokens, group.form, lane, nvidia)
    ]


def compile_jobs(
    settings: TuneSettings,
    jobs: Sequence[Job],
    on_done: Callable[[int, int], None] = lambda done, of: None,
    workers: int | None = None,
) -> Compiled:
    """Compile ``jobs`` over the machine's cores, and what `capped` makes of them; ``on_done(done, of)`` after each.

    One that fails to compile is a failure of its own; the others go on.
    """
    compiled = Compiled()
    for group, lane, _ in jobs:
        compiled.configs.setdefault((group, lane), [])
    count = max(1, min(workers or usable_cores(), MAX_WORKERS, len(jobs)))
    found: dict[int, list[tuple[LaunchConfig, Figures | str]]] = {}
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compile_one, settings, *job): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            index = futures[future]
            try:
                found[index] = future.result()
            except BrokenProcessPool:  # a compiler that died took the pool with it: no verdict on any one candidate
                raise
            except Exception as failed:
                found[index] = [(jobs[index][2], in_a_line(failed))]
            on_done(len(found), len(jobs))
    for index, (group, lane, _) in enumerate(jobs):  # in the jobs' order, whatever finished first
        for config, figures in found[index]:
            error = figures if isinstance(figures, str) else ruled_out(figures)
            if error is None:
                compiled.configs[group, lane].append(config)
            else:
                compiled.failures.append(Failure(group, lane, config, error, broken=isinstance(figures, str)))
    return compiled


def compile_one(
    settings: TuneSettings, group: Group, lane: str, config: LaunchConfig, device: str = "cuda"
) -> list[tuple[LaunchConfig, Figures | str]]:
    """Compile a candidate, and then what `capped` makes of it; figures, or the error, of each."""
    results: list[tuple[LaunchConfig, Figures | str]] = []
    waiting = [config]
    problem = build_problems(settings.sweep_settings(group), group.draft_tokens, 1, 1, device).layers[0]
    while waiting:
        one = waiting.pop(0)
        try:
            figures = _figures(lambda: arm_of(settings, group, lane, one).verify(problem))  # noqa: B023
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            results.append((one, in_a_line(error)))
            continue
        results.append((one, figures))
        waiting += capped(one, figures)
    return results


def _figures(call: Callable[[], Any]) -> Figures:
    """The figures of the kernels that ``call`` launches, the largest of each."""
    made: list[Any] = []
    ordinary = _launch.LAUNCHER

    def launcher(*launch: Any) -> Any:
        made.append(ordinary(*launch))
        return made[-1]

    _launch.LAUNCHER = launcher
    try:
        call()
    finally:
        _launch.LAUNCHER = ordinary
    kernels = [kernel for kernel in made if hasattr(kernel, "n_regs")]
    return Figures(
        registers=max((kernel.n_regs for kernel in kernels), default=0),
        spills=max((4 * kernel.n_spills for kernel in kernels), default=0),  # Triton counts words
    )


def in_a_line(error: BaseException) -> str:
    """The error's class and message, as a table may hold it."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__
