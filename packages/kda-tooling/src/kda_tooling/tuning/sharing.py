"""Several processes measure on one GPU: what one of them times has the device to itself, all else goes on beside it.

Most of a cell's time is the host's: checking and capturing the calls of some hundred layers. Kernels run for a few
seconds of a minute. So groups are measured in processes of their own that take turns on the device, and so do the
processes of other runs.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from kda_tooling.cores import usable_cores

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

MOST_PROCESSES = 4
"""Turns of more would wait for each other: a group's are a quarter to a third of its time."""

CORES_EACH = 3
"""A process captures on one; compilers of later groups have the others."""


def turn_file() -> Path:
    """The file that whoever measures on the current GPU locks; a user's own."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return Path(tempfile.gettempdir()) / f"kda-{os.getuid()}-{gpu}.turn"


@contextmanager
def turn(file: Path) -> Iterator[None]:
    """Only one process at a time is in here with the same ``file``; one that dies in here leaves it."""
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def gpu_turn(device: str) -> Iterator[None]:
    """No other process that takes turns has kernels on the GPU in here; this one has none after it."""
    if device != "cuda":
        yield
        return
    with turn(turn_file()):
        yield
        torch.cuda.synchronize()


def process_count(asked: int | None, groups: int, needed: int, device_bytes: int) -> int:
    """How many processes to measure in.

    Args:
        asked: by the user, or None.
        groups: number of groups.
        needed: bytes of device memory of the largest cell, in each process.
        device_bytes: the device's memory.
    """
    fit = max(1, device_bytes // max(1, needed))
    return max(1, min(asked or min(MOST_PROCESSES, usable_cores() // CORES_EACH), groups, fit))


def measured_in_processes(
    items: Sequence[Item],
    prepare: Callable[[Item], Prepared],
    measure: Callable[[Item, Prepared], Result],
    count: int,
) -> Iterator[tuple[Prepared, Result]]:
    """``prepare`` and ``measure`` every item, in order; of ``count`` items at a time, unless it is 1.

    Args:
        prepare: runs in this process, in a thread.
        measure: runs in a process of its own, so it and what it takes and gives are picklable.

    Raises:
        RuntimeError: a process died.
        Exception: what either raised; items that have not begun are dropped.
    """
    if count == 1:
        for item in items:
            prepared = prepare(item)
            yield prepared, measure(item, prepared)
        return
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    threads = ThreadPoolExecutor(count)

    def one(item: Item) -> tuple[Prepared, Result]:
        prepared = prepare(item)
        return prepared, pool.submit(measure, item, prepared).result()

    futures = [threads.submit(one, item) for item in items]
    try:
        for future in futures:
            yield future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"one of {count} measuring processes died: is memory short? --processes 1 measures in one"
        ) from None
    finally:
        threads.shutdown(cancel_futures=True)
        pool.shutdown()
