"""Compile candidates in parallel, filling Triton's disk cache, and say what came of each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

import torch

from kda_backend.gate.cells import COMPACT_WINDOW, FOLD_ON_VERIFY
from kda_kernels import LaunchConfig, _launch
from kda_kernels.aot import TARGETS, capture
from kda_tooling.bench.arms import Arm, our_arms, with_config
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.sweep import build_problems
from kda_tooling.bench.warmup import MAX_WORKERS
from kda_tooling.compiling.stats import registers_and_spills
from kda_tooling.cores import usable_cores
from kda_tooling.problem import Problems
from kda_tooling.terminal import in_a_line
from kda_tooling.tuning.candidates import Figures, candidates, capped, ruled_out
from kda_tooling.tuning.settings import Group, TuneSettings

Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """A candidate that is not timed.

    Args:
        group: where.
        lane: of which lane.
        config: the configuration.
        error: why.
        broken: whether something is wrong with it, rather than that it cannot win.
        batch: B, where only there; None: at every B.
    """

    group: Group
    lane: str
    config: LaunchConfig
    error: str
    broken: bool = True
    batch: int | None = None


@dataclass
class Compiled:
    """What is left to time of a group, configurations of each lane; and what is not."""

    configs: dict[str, list[LaunchConfig]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def arm_of(settings: TuneSettings, group: Group, lane: str, config: LaunchConfig | None) -> Arm:
    """``lane`` as ``group``'s cells have it, launched with ``config``."""
    folds, compact = FOLD_ON_VERIFY in group.option, COMPACT_WINDOW in group.option
    arms = our_arms(settings.shape, (lane,), False, forms=(group.form,), fold_on_verify=folds, compact_window=compact)
    (arm,) = (arm for arm in arms if arm.fold_on_verify == folds and arm.compact_window == compact)
    return with_config(arm, config)


Job = tuple[Group, str, LaunchConfig]
"""(group, lane, configuration) to compile."""

Found = list[tuple[LaunchConfig, Figures | str]]
"""What came of a job: configurations, and figures or an error of each."""

REFERENCE = LaunchConfig()
"""What every candidate's bits are compared with: the portable kernel, unfused."""

CHECK_BATCH = 3
"""Requests of the batch that bits are compared on first."""

MOST_DEATHS = 8
"""Compilers that may die in a run before it ends: then it is the machine, short of memory say, and no candidate."""


def candidate_jobs(settings: TuneSettings, groups: Iterable[Group], nvidia: bool) -> list[Job]:
    """Every candidate of ``groups``."""
    return [
        (group, lane, config)
        for group in groups
        for lane in group.lanes
        for config in candidates(settings.shape, group.draft_tokens, group.form, lane, nvidia)
    ]


class Compiling:
    """Candidates on their way through compilers in processes of their own, in the jobs' order.

    A group can be measured while the next ones are compiled: on an NVIDIA GPU the compilers do without it, and what
    they leave in Triton's disk cache is what a launch here finds. Elsewhere a compiler has to launch.

    Args:
        settings: of the run.
        jobs: what to compile, and with it what `capped` makes of it.
        target: name of the GPU's target in `kda_kernels.aot.TARGETS`; None: compilers launch on the device.
        on_done: called with (done, of) after each job, from another thread.
        references: compile what the jobs' groups compare bits with, too: left to whoever measures, it would be compiled
            in a turn on the GPU.
    """

    def __init__(
        self,
        settings: TuneSettings,
        jobs: Sequence[Job],
        target: str | None = None,
        on_done: Callable[[int, int], None] = lambda done, of: None,
        references: bool = True,
    ) -> None:
        self._jobs, self._on_done = jobs, on_done
        self._done = self._deaths = 0
        self._counting = Lock()
        count = max(1, min(usable_cores() - 1, MAX_WORKERS, len(jobs)))
        self._idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
        for _ in range(count):
            self._idle.put(_compiler())
        self._threads = ThreadPoolExecutor(count)
        self._references: dict[Group, Future[None]] = {}
        self._futures: list[Future[Found]] = []
        for group, lane, config in jobs:
            if references and group not in self._references:
                self._references[group] = self._threads.submit(
                    self._compile, compile_reference, settings, group, target
                )
            self._futures.append(
                self._threads.submit(self._compile, compile_one, settings, group, lane, config, target)
            )
        for future in self._futures:
            future.add_done_callback(self._count)

    def __enter__(self) -> Compiling:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().shutdown()

    def _compile(self, what: Callable[..., Result], *given: Any) -> Result:
        """What comes of ``what(*given)`` in an idle compiler, which is replaced if it dies.

        Raises:
            RuntimeError: the compiler died.
            BrokenProcessPool: too many have.
        """
        compiler = self._idle.get()
        try:
            return compiler.submit(what, *given).result()
        except BrokenProcessPool:
            compiler.shutdown()
            compiler = _compiler()
            with self._counting:
                self._deaths += 1
            if self._deaths > MOST_DEATHS:
                raise BrokenProcessPool(f"more than {MOST_DEATHS} compilers died: is memory short?") from None
            raise RuntimeError("its compiler died") from None
        finally:
            self._idle.put(compiler)

    def _count(self, _: object) -> None:
        with self._counting:
            self._done += 1
            self._on_done(self._done, len(self._jobs))

    def of(self, group: Group) -> Compiled:
        """What came of ``group``'s jobs; waits for them. One that fails to compile is a failure of its own."""
        if group in self._references:
            self._references[group].exception()  # whoever measures meets it again, and says so
        compiled = Compiled({lane: [] for lane in group.lanes})
        for (of, lane, config), future in zip(self._jobs, self._futures, strict=True):
            if of != group:
                continue
            try:
                found = future.result()
            except BrokenProcessPool:  # too many died for any one candidate to be the cause
                raise
            except Exception as failed:
                found = [(config, in_a_line(failed))]
            for one, figures in found:
                error = figures if isinstance(figures, str) else ruled_out(figures)
                if error is None:
                    compiled.configs[lane].append(one)
                else:
                    compiled.failures.append(Failure(group, lane, one, error, broken=isinstance(figures, str)))
        return compiled


def _compiler() -> ProcessPoolExecutor:
    """One process, so that a death is that of the candidate it was compiling, and of no other."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def compile_target(machine: Machine) -> str | None:
    """`Compiling`'s target for ``machine``."""
    name = f"sm{machine.sm}"
    return name if torch.version.hip is None and name in TARGETS else None


def compile_one(
    settings: TuneSettings,
    group: Group,
    lane: str,
    config: LaunchConfig,
    target: str | None = None,
    device: str = "cuda",
) -> Found:
    """Compile a candidate, and then what `capped` makes of it; figures, or the error, of each.

    ``target`` as `Compiling`'s; without one the kernels are launched on ``device``.
    """
    results: Found = []
    waiting = [config]
    device = "cpu" if target else device
    problem = build_problems(settings.sweep_settings(group), group.draft_tokens, 1, 1, device).layers[0]
    while waiting:
        one = waiting.pop(0)
        call = partial(arm_of(settings, group, lane, one).verify, problem)
        try:
            figures = _figures_of_launches(call) if target is None else _figures_of_code(call, target)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            results.append((one, in_a_line(error)))
            continue
        results.append((one, figures))
        waiting += capped(one, figures)
    return results


def check_problems(settings: TuneSettings, group: Group, device: str) -> Problems:
    """What bits are checked on: one layer of `CHECK_BATCH` requests."""
    return build_problems(settings.sweep_settings(group), group.draft_tokens, CHECK_BATCH, 1, device)


def compile_reference(settings: TuneSettings, group: Group, target: str | None = None, device: str = "cuda") -> None:
    """Compile what two rounds of `REFERENCE` launch; ``target`` and ``device`` as `compile_one`'s."""
    device = "cpu" if target else device
    problems = check_problems(settings, group, device)
    arm = arm_of(settings, group, group.lanes[0], REFERENCE)
    accept_lens = torch.ones(CHECK_BATCH, dtype=torch.int32, device=device)
    with capture(target) if target else nullcontext():
        arm.verify(problems.layers[0])
        arm.commit(problems, accept_lens)
        if arm.fold_on_verify:
            problems.flush()
    if device == "cuda":
        torch.cuda.synchronize()  # what fails there fails here, and not under a candidate's name


def _figures_of_code(call: Callable[[], Any], target: str) -> Figures:
    """The figures of the kernels that ``call`` would launch on ``target``, the largest of each."""
    with capture(target) as compiled:
        call()
    figures = [registers_and_spills(variant) for variant in compiled]
    return Figures(max(registers for registers, _ in figures), max(spills for _, spills in figures))


def _figures_of_launches(call: Callable[[], Any]) -> Figures:
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
