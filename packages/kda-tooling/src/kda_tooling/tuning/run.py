"""A whole tuning run: compile, measure group by group, and keep the table on disk up to date after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from kda_backend.gate import Cell, CellKey, Provenance, Table, judged, load_table, table_name, write_table
from kda_backend.gate.table import MOST_PROVENANCE
from kda_backend.lanes import Target
from kda_kernels import KdaShape
from kda_tooling.bench.arms import config_name
from kda_tooling.bench.machine import Machine, describe_machine
from kda_tooling.bench.sweep import check_memory
from kda_tooling.names import long_dtype
from kda_tooling.tuning.capturing import SECONDS_PER_PASS
from kda_tooling.tuning.compiling import Compiled, Compiling, Failure, candidate_jobs, compile_target
from kda_tooling.tuning.measure import FINAL_PASSES, Measured, measure_group
from kda_tooling.tuning.settings import Group, TuneSettings
from kda_tooling.tuning.sharing import gpu_turn, measured_in_processes, process_count

TIMING = (
    "CUDA graphs of every layer of a rotation past 3x the L2, arms interleaved, median of "
    f"{FINAL_PASSES} of {SECONDS_PER_PASS * 1e3:g} ms; inputs and graphs of each pass are its own"
)


@dataclass
class TuneResult:
    """What a run came to.

    Args:
        table: every cell that is in the file now.
        path: the file.
        keys: of every cell that was asked for.
        measured: those that this run measured; the others it found in the file.
        failures: candidates that were not timed.
        seconds: of the run ("all"), of its beginning ("before the first group" was compiled), and of each group's
            measuring, several of which may go on at a time.
    """

    table: Table
    path: Path
    keys: list[CellKey]
    measured: list[CellKey] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def provenance_of(settings: TuneSettings, machine: Machine) -> Provenance:
    """Where this run's figures are from."""
    return Provenance(
        command=settings.command, git_sha=machine.commit, date=machine.date, gpu=machine.gpu, driver=machine.driver,
        torch=machine.torch, triton=machine.triton, timing=TIMING, margin=settings.margin, passes=settings.passes,
    )  # fmt: skip


def target_of(machine: Machine) -> Target:
    """What kernels run on there, whose `str` is a table's ``arch``."""
    return Target("cuda", machine.sm) if torch.version.hip is None else Target("hip")


def table_file(settings: TuneSettings, machine: Machine, folder: Path) -> Path:
    """The file in ``folder`` that has the machine's table for these heads and this dtype."""
    return folder / table_name(settings.shape, machine.gpu, long_dtype(settings.dtype))


def device_memory() -> int:
    """Bytes of the current CUDA device that are free, those included that this process keeps for reuse."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def start_table(settings: TuneSettings, machine: Machine, into: Path, fresh: bool) -> tuple[Table, Path]:
    """The table to add cells to, and its file: what the folder ``into`` has of it already, or none yet.

    Raises:
        ValueError: what is there cannot be read, or was measured with other versions or rules, so that its cells cannot
            stand beside new ones; ``fresh`` leaves it out of account.
    """
    path = table_file(settings, machine, into)
    own = provenance_of(settings, machine)
    new = Table(settings.shape, machine.gpu, str(target_of(machine)), long_dtype(settings.dtype), own)
    if fresh or not path.exists():
        return new, path
    old = load_table(path)
    for name in ("gpu", "driver", "torch", "triton", "timing", "margin", "passes"):
        before, now = getattr(old.provenance, name), getattr(own, name)
        if before != now:
            raise ValueError(
                f"{path} has cells measured with {name} {before}, this run has {now}: figures of both cannot stand in "
                "one table. Give another --into, or --fresh to leave them out"
            )
    both = replace(
        own, command=_joined(old.provenance.command, own.command), git_sha=_joined(old.provenance.git_sha, own.git_sha)
    )
    return replace(new, provenance=both, cells=old.cells), path


def _joined(before: str, now: str) -> str:
    """Both, in the order of the runs, each once; the oldest are left out where a table would not hold them all."""
    runs = list(dict.fromkeys([*before.split("; "), now]))
    while len(runs) > 1 and len("; ".join(runs)) > MOST_PROVENANCE:
        del runs[0]
    return "; ".join(runs)


def with_cells(table: Table, cells: list[Cell]) -> Table:
    """``table`` with ``cells`` in place of those of the same keys."""
    return replace(table, cells=tuple((dict(table.by_key) | {cell.key: cell for cell in cells}).values()))


def count_of(asked: int | None, settings: TuneSettings, groups: Sequence[Group], machine: Machine) -> int:
    """How many processes measure ``groups``.

    Raises:
        ValueError: one does not fit the device's free memory.
    """
    free = device_memory()
    needed = [check_memory(settings.sweep_settings(group), machine.l2_bytes, free) for group in groups]
    return process_count(asked, len(groups), max(needed, default=0), free)


def _timed_group(settings: TuneSettings, l2_bytes: int, group: Group, compiled: Compiled) -> tuple[Measured, float]:
    """A group's figures, and how many seconds they took."""
    began = time.monotonic()
    return measure_group(settings, group, compiled, l2_bytes), time.monotonic() - began


def run_tune(
    settings: TuneSettings,
    into: Path,
    *,
    fresh: bool = False,
    resume: bool = False,
    processes: int | None = None,
    on_compiled: Callable[[int, int], None] = lambda done, of: None,
    on_group: Callable[[Group, int, int], None] = lambda group, done, of: None,
) -> TuneResult:
    """Tune on the current CUDA device. The file is written, whole, after every group.

    Args:
        settings: what to measure.
        into: folder of the table.
        fresh: cells that the file has already are dropped.
        resume: groups that the file has already, every batch size of them, are left as they are.
        processes: groups measured at a time; None: as the machine's cores and the device's memory allow.
        on_compiled: called with (done, of) while compiling, from another thread.
        on_group: called with (group, done, of) after each group.

    Raises:
        ValueError: see `start_table` and `kda_tooling.bench.sweep.check_memory`.
        OSError: the file cannot be written.
        RuntimeError: the GPU is unusable (`kda_tooling.tuning.capturing.ContextLostError`), or compilers or measuring
            processes die. What was measured before is in the file.
    """
    began = time.monotonic()
    with gpu_turn("cuda"):
        machine = describe_machine()
    table, path = start_table(settings, machine, into, fresh)
    result = TuneResult(table, path, settings.keys())
    groups = [
        group
        for group in settings.groups()
        if not (resume and all(group.key(batch) in table.by_key for batch in settings.batch_sizes))
    ]
    count = count_of(processes, settings, groups, machine)
    jobs = candidate_jobs(settings, groups, torch.version.hip is None)
    with Compiling(settings, jobs, compile_target(machine), on_compiled) as compiling:

        def compiled(group: Group) -> Compiled:
            found = compiling.of(group)
            if group == groups[0]:
                result.seconds["before the first group"] = time.monotonic() - began
            return found

        measure = partial(_timed_group, settings, machine.l2_bytes)
        with closing(measured_in_processes(groups, compiled, measure, count)) as ended:
            for number, (group, candidates, (measured, seconds)) in enumerate(ended, 1):
                result.failures += candidates.failures + measured.failures
                cells = [judged(group.key(batch), lanes, settings.margin) for batch, lanes in measured.lanes.items()]
                result.table = with_cells(result.table, cells)
                write_table(result.table, into)
                result.measured += [cell.key for cell in cells]
                result.seconds[str(group)] = seconds
                on_group(group, number, len(groups))
    result.seconds["all"] = time.monotonic() - began
    if groups and load_table(path) != result.table:
        raise RuntimeError(f"{path} read back is not the table that was written")
    return result


def foreign(other: Table, shape: KdaShape, dtype: str, device_name: str | None = None) -> str | None:
    """Why nothing can be said by ``other`` of these heads, activations ("bfloat16") and device, or None."""
    ours = table_name(shape, other.device_name if device_name is None else device_name, dtype)
    return None if ours == other.file_name else f"is {other.file_name}, this run is about {ours}"


def changes(result: TuneResult, other: Table) -> list[str]:
    """The cells asked for whose verdict is not ``other``'s, in words.

    Raises:
        ValueError: ``other`` is of other heads, another device or other activations.
    """
    if why := foreign(other, result.table.shape, result.table.dtype, result.table.device_name):
        raise ValueError(f"the table {why}")
    found = []
    for key in result.keys:
        new, old = result.table.by_key[key], other.by_key.get(key)
        verdict = result.table.verdict(new)
        if old is None:
            found.append(f"{key}: {verdict}, not in the table")
        elif (before := other.verdict(old)) != verdict:
            found.append(f"{key}: {verdict}, the table says {before}")
    return found


def other_configs(result: TuneResult, other: Table) -> list[str]:
    """The lanes of cells asked for that ``other`` has too and launches in another configuration, in words."""
    found = []
    for key in result.keys:
        new, old = result.table.by_key[key], other.by_key.get(key)
        for lane in new.lanes if old is not None else ():
            now, before = (config_name(cell.config(lane)) for cell in (new, old) if cell is not None)
            if now != before:
                found.append(f"{key}, {lane}: {now}, the table says {before}")
    return found
