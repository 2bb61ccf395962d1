"""Compile every kernel for every target without a GPU, in parallel, and collect the figures of the machine code."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from kda_tooling.compiling.rules import Inspection
from kda_tooling.compiling.specs import CompileSpec, Selection
from kda_tooling.compiling.stats import CodeStats
from kda_tooling.cores import usable_cores


@dataclass(frozen=True)
class CompiledKernel:
    """Figures of one kernel in one configuration on one target.

    Args:
        target: "sm90", ...
        kernel: one of `kda_tooling.compiling.specs.KERNELS`.
        config: name of the configuration.
        stats: figures of the machine code.
        inspection: what the code writes and what it reads before the PDL wait; None where there is no PTX to read.
    """

    target: str
    kernel: str
    config: str
    stats: CodeStats
    inspection: Inspection | None

    @property
    def broken(self) -> tuple[str, ...]:
        """Rules of `kda_tooling.compiling.rules` that the code breaks, a sentence each."""
        return self.inspection.broken if self.inspection else ()


@dataclass(frozen=True)
class JobResult:
    """What one (target, configuration) gave: compiled kernels, or the reason why there are none."""

    target: str
    config: str
    kernels: tuple[CompiledKernel, ...]
    failure: str | None
    seconds: float


def _compile_job(target: str, spec: CompileSpec) -> JobResult:
    """Runs in a worker, which imports Triton without the interpreter."""
    from kda_kernels.aot import capture
    from kda_tooling.compiling.rules import inspect
    from kda_tooling.compiling.stats import code_stats

    start = time.perf_counter()
    try:
        with capture(target) as compiled:
            spec.call()
        labelled = [(spec.label_of(variant.kernel), variant) for variant in compiled]
        kernels = tuple(
            CompiledKernel(
                target,
                label,
                spec.name,
                code_stats(variant),
                inspect(variant, label, spec.record, spec.pending, spec.compact),
            )
            for label, variant in labelled
            if label in spec.labels
        )
        failure = None if kernels else "no kernel was launched"
    except Exception as error:  # a compiler error must not take the other configurations' results with it
        kernels, failure = (), f"{type(error).__name__}: {error}"
    return JobResult(target, spec.name, kernels, failure, time.perf_counter() - start)


@contextlib.contextmanager
def _without_interpreter() -> Iterator[None]:
    """Hide TRITON_INTERPRET from processes started inside: interpreted kernels have no machine code."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def compile_all(
    selection: Selection,
    *,
    jobs: int | None = None,
    on_start: Callable[[int], None] = lambda total: None,
    on_done: Callable[[JobResult], None] = lambda result: None,
) -> list[JobResult]:
    """Compile what ``selection`` asks for in ``jobs`` processes (None: one per core).

    Results come in the order of the selection's specs; ``on_start`` gets the number of configurations,
    ``on_done`` each result as it arrives.
    """
    order = selection.specs()
    on_start(len(order))
    # Long compilations first, so that no core is left alone with one at the end.
    queue = sorted(order, key=lambda job: -_relative_cost(*job))
    results: dict[tuple[str, CompileSpec], JobResult] = {}
    context = multiprocessing.get_context("spawn")
    workers = min(jobs or usable_cores(), len(order) or 1)
    with _without_interpreter(), ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(_compile_job, *job): job for job in queue}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            on_done(results[futures[future]])
    return [results[job] for job in order]


def _relative_cost(target: str, spec: CompileSpec) -> int:
    return spec.draft_tokens**2 * (3 if spec.op == "verify_fused" else 1)


def compiled_kernels(results: list[JobResult], selection: Selection) -> list[CompiledKernel]:
    """The kernels of ``results`` that were asked for: a spec may bring a companion that was not."""
    return [one for result in results for one in result.kernels if selection.covers(one.target, one.kernel, one.config)]
