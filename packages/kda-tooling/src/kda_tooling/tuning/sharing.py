"""Several processes measure on one GPU: what one of them times has the device to itself, all else goes on beside it.

Most of a cell's time is the host's: capturing the calls of some hundred layers. Kernels run for a few seconds of
a minute. So groups are measured in processes of their own that take turns on the device, and so do the
processes of other runs: one that times is alone there, those that make inputs or compare bits are there together.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from kda_tooling.cores import usable_cores

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

MOST_PROCESSES = 8
"""Turns of more would wait for each other: a group's are an eighth to a quarter of its time."""

CORES_EACH = 2
"""A process captures on one; compilers of later groups have the others."""

RESERVE = 2 << 30
"""Bytes of device memory for a process's context and for the outputs that its graphs keep."""

FOLDER = "~/.cache/kda"
"""Of the turn files: one that other users cannot open a file in."""


def turn_file() -> Path:
    """The file that whoever measures on the current GPU locks."""
    folder = Path(FOLDER).expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}.turn"


@contextmanager
def turn(file: Path, alone: bool = True) -> Iterator[None]:
    """Only one process at a time is in here with the same ``file``, or several that are not ``alone`` and no other.

    A process that dies in here leaves it. Whoever wants to be ``alone`` keeps those behind from entering before it.
    """
    with file.open("a+") as lock:  # over NFS, a file is locked with others only where it can be read
        with file.with_suffix(".door").open("a+") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextmanager
def gpu_turn(device: str, alone: bool = True) -> Iterator[None]:
    """`turn` on the current GPU: what this process runs there ends in here, unless something raises."""
    if device != "cuda":
        yield
        return
    with turn(turn_file(), alone):
        yield
        torch.cuda.synchronize()


def gpu_shared(device: str) -> AbstractContextManager[None]:
    """Several may have kernels on the GPU in here, but nobody times: for inputs, checks and first runs."""
    return gpu_turn(device, alone=False)


def process_count(asked: int | None, groups: int, needed: int, free_bytes: int) -> int:
    """How many processes to measure in.

    Args:
        asked: by the user, or None.
        groups: number of groups.
        needed: bytes of device memory of the largest cell, in each process.
        free_bytes: of the device's memory.
    """
    fit = free_bytes // (needed + RESERVE)
    return max(1, min(asked or min(MOST_PROCESSES, usable_cores() // CORES_EACH), groups, fit))


def measured_in_processes(
    items: Sequence[Item],
    prepare: Callable[[Item], Prepared],
    measure: Callable[[Item, Prepared], Result],
    count: int,
) -> Generator[tuple[Item, Prepared, Result]]:
    """``prepare`` and ``measure`` every item, and give it with what came of it once that is there.

    ``count`` items are begun at a time, in order; more than one are given in the order in which they end. Whoever may
    leave before the last one closes the iterator (`contextlib.closing`).

    Args:
        prepare: runs in this process; in a thread, unless ``count`` is 1.
        measure: runs in this process if ``count`` is 1, else in one of ``count`` others: then it and what it takes and
            gives are picklable.

    Raises:
        RuntimeError: a process died.
        Exception: what either raised; of items that have not ended, none is given, and no other one is begun.
    """
    if count == 1:
        for item in items:
            prepared = prepare(item)
            yield item, prepared, measure(item, prepared)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent)
    threads = ThreadPoolExecutor(count)

    def one(item: Item) -> tuple[Item, Prepared, Result]:
        prepared = prepare(item)
        try:
            return item, prepared, pool.submit(measure, item, prepared).result()
        except BrokenProcessPool as broken:
            raise RuntimeError(
                f"one of {count} measuring processes died: is memory short? --processes 1 measures in one"
            ) from broken

    futures = [threads.submit(one, item) for item in items]
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        # Threads may wait for compilers, which whoever started those ends.
        threads.shutdown(wait=False, cancel_futures=True)
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this process as soon as its parent has ended, however that did: it would hold the GPU's memory for good."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
