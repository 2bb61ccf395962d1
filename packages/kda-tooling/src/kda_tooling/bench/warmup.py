"""Compile what a sweep will launch, in parallel: each worker process fills Triton's disk cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from kda_kernels import LaunchConfig
from kda_kernels.defaults import default_verify_config
from kda_tooling.bench.arms import OURS, Arm
from kda_tooling.bench.settings import SweepSettings
from kda_tooling.cores import usable_cores

MAX_WORKERS = 16
"""Every worker has a CUDA context of its own, about half a GiB on the device that is measured later."""


def _compile_arm(settings: SweepSettings, draft_tokens: int, batch: int, index: int) -> str:
    """Run arm ``index`` of a cell once, on one layer; returns its name."""
    from kda_tooling.bench.sweep import build_arms, build_problems
    from kda_tooling.peers import load_peer

    problems = build_problems(settings, draft_tokens, batch, 1, "cuda")
    peers = [load_peer(spec) for spec in settings.peers]
    arm = build_arms(settings, problems.layers[0], peers)[index]
    arm.verify(problems.layers[0])
    if settings.kind != "verify":
        accept = settings.accept_for(draft_tokens)
        arm.commit(problems, torch.full((batch,), accept, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    return arm.name


def compile_jobs(
    settings: SweepSettings, arms: dict[int, list[Arm]], device: str = "cuda"
) -> list[tuple[int, int, int]]:
    """(T, B, arm index) of every compilation that may differ.

    ``arms``: T -> the arms of its cells. Our kernels never specialise on the batch size, but their default
    configuration goes by it: one batch size stands for all those with the same one. A peer's may, so each is compiled.
    """
    where = torch.device(device)
    batches = sorted(settings.batch_sizes)
    jobs = []
    for draft_tokens, cell in arms.items():
        for index, arm in enumerate(cell):
            if arm.owner != OURS:
                sizes = batches
            elif arm.config is not None:
                sizes = batches[:1]
            else:
                smallest: dict[LaunchConfig, int] = {}
                for batch in batches:
                    chosen = default_verify_config(
                        settings.shape, batch, draft_tokens, where, form=arm.form,
                        fused=arm.lane.startswith("fused"), pending=arm.fold_on_verify,
                    )  # fmt: skip
                    smallest.setdefault(chosen, batch)
                sizes = list(smallest.values())
            jobs += [(draft_tokens, batch, index) for batch in sizes]
    # Another batch size is mostly the same code: side by side, all workers would compile one kernel, each for itself.
    return sorted(jobs, key=lambda job: job[1])


def compile_all(
    settings: SweepSettings,
    jobs: list[tuple[int, int, int]],
    on_done: Callable[[str], None],
    workers: int | None = None,
) -> None:
    """Compile ``jobs`` over the machine's cores; ``on_done(arm name)`` after each.

    Raises:
        Exception: whatever a compilation raised; the others are cancelled.
    """
    count = max(1, min(workers or usable_cores(), MAX_WORKERS, len(jobs)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        futures = [pool.submit(_compile_arm, settings, *job) for job in jobs]
        try:
            for future in as_completed(futures):
                on_done(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
