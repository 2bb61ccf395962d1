"""What the commands wrote, as values of the history: one record per file."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import (
    ACCEPT,
    BATCH_SIZES,
    CALLS,
    DRAFT_TOKENS,
    FIGURES,
    FORMS,
    HEAD_DIMS,
    LANES,
    MODES,
    OTHER_LANES,
    OURS,
    ROUND_LANES,
    SETTINGS,
    SHAPE,
    TURNS,
    UNSET,
    Key,
    Values,
)  # fmt: skip

if TYPE_CHECKING:  # asv imports this module too: no torch here
    from kda_tooling.bench.machine import Machine
    from kda_tooling.bench.results import Cell, SweepResult

SWEEPS = ("verify", "round", "commit")
KINDS = (*SWEEPS, "regret", "host-time", "memory", "compile")
WRITTEN_BY = "kda sweep, gate regret, host-time, memory or compile-report"
NO_GPU = "no_gpu"
"""The machine of figures that are the same on every one."""


@dataclass(frozen=True)
class Record:
    """One file.

    Args:
        kind: one of `KINDS`.
        where: the file, for messages.
        machine: whose history it belongs to: a GPU model, a compiler, or `NO_GPU`.
        commit: of the measured code, as the file says; None where it says nothing.
        measured: what the file says about machine, versions and date.
        values: the suite's cells that it has.
        passes: of a sweep, every pass of each cell.
    """

    kind: str
    where: str
    machine: str
    commit: str | None
    measured: dict[str, Any]
    values: Values
    passes: dict[Key, list[float]] = field(default_factory=dict)


def kind_of(data: Any, where: str) -> str:
    """Which command wrote ``data``.

    Raises:
        ValueError: none of those that the history takes.
    """
    if isinstance(data, dict):
        settings = data.get("settings")
        if "schema" in data and isinstance(settings, dict) and settings.get("kind") in SWEEPS:
            return str(settings["kind"])
        for kind, keys in (
            ("regret", {"table", "within", "cells"}), ("host-time", {"us_per_call", "shape"}),
            ("memory", {"budget_bytes", "modes", "shape"}), ("compile", {"triton", "kernels"}),
        ):  # fmt: skip
            if keys <= set(data):
                return kind
    raise ValueError(f"{where} is not a file that the history takes: write one with {WRITTEN_BY}")


def load(path: Path) -> tuple[str, str]:
    """(kind, text) of a file.

    Raises:
        ValueError: it is not JSON, or of no command that the history takes.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors
        raise ValueError(f"{path} is not JSON: {error}") from error
    return kind_of(data, str(path)), text


def files_in(source: Path) -> list[Path]:
    """The file itself, or every .json file below the folder.

    Raises:
        FileNotFoundError: there is no such file or folder, or none below it.
    """
    if source.is_file():
        return [source]
    found = sorted(source.rglob("*.json"))
    if not found:
        raise FileNotFoundError(f"{source} is neither a file nor a folder with .json files below it")
    return found


def values_in(source: Path, kind: str) -> Values:
    """The suite's cells in the files of ``kind`` at ``source``; nothing where there is no such file.

    Raises:
        ValueError, OSError: a file is unusable, whatever its kind; the message names it.
    """
    loaded = [(path, *load(path)) for path in files_in(source)]
    return combined(record_of(text, str(path)) for path, found, text in loaded if found == kind)


def combined(records: Iterable[Record]) -> Values:
    """All cells; of one that several files have, the median."""
    found: dict[Any, list[float]] = {}
    for record in records:
        for key, value in record.values.items():
            found.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in found.items()}


def record_of(text: str, where: str) -> Record:
    """A file's text as a record; imports torch.

    Raises:
        ValueError: it is broken, of other kernels than the history is about, or has none of the suite's cells; the
            message says what.
    """
    data = json.loads(text)
    kind = kind_of(data, where)
    if kind in SWEEPS:
        record = _sweep(kind, text, where)
    else:
        read: dict[str, Callable[[dict[str, Any], str], Record]] = {
            "regret": _regret, "host-time": _host_time, "memory": _memory, "compile": _compile,
        }  # fmt: skip
        try:
            record = read[kind](data, where)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is a broken file of kind {kind}: {error!r}") from None
    if not record.values:
        raise ValueError(
            f"{where}: no cell of T in {DRAFT_TOKENS} and B in {BATCH_SIZES} (accept {ACCEPT}) that the history has"
        )
    return record


def check_settings(settings: dict[str, Any], where: str) -> None:
    """Refuse a sweep of other kernels than the history is about.

    Raises:
        ValueError: a setting differs; the message names it.
    """
    for name, expected in (SETTINGS | dict.fromkeys(UNSET, False)).items():
        found = settings.get(name, False)
        if found != expected:
            raise ValueError(f"{where}: {name} is {found!r}; the history is about {name} = {expected!r}")


def _of_gpu(kind: str, where: str, machine: Machine, values: Values) -> Record:
    return Record(kind, where, machine.gpu, machine.commit, asdict(machine), values)


def _machine(data: Any, where: str) -> Machine:
    from kda_tooling.bench.fields import checked_fields
    from kda_tooling.bench.machine import Machine

    return Machine(**checked_fields(Machine, data, f"{where}: machine"))


def _number(name: str, value: Any, where: str) -> float:
    from kda_tooling.bench.fields import check_number

    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {name} must be a number, got {value!r}")
    check_number(name, value, 0, 1e15, where)
    return value


def _sweep(kind: str, text: str, where: str) -> Record:
    from kda_tooling.bench.results import parse_results

    result: SweepResult = parse_results(text, where)
    check_settings(result.settings, where)
    lanes = {"verify": (*LANES, *OTHER_LANES), "round": ROUND_LANES, "commit": MODES}[kind]
    arms = {
        (lane, cell.draft_tokens, cell.batch): arm
        for cell in result.cells if _in_grid(cell)
        for lane in lanes if (arm := cell.best(OURS, lane=lane)) is not None
    }  # fmt: skip
    values: Values = {key: arm.median_us for key, arm in arms.items()}
    passes: dict[Key, list[float]] = {key: arm.passes_us for key, arm in arms.items()}
    return replace(_of_gpu(kind, where, result.machine, values), passes=passes)


def _in_grid(cell: Cell) -> bool:
    inside = cell.draft_tokens in DRAFT_TOKENS and cell.batch in BATCH_SIZES
    return inside and (cell.kind == "verify" or cell.accept == ACCEPT)


def _regret(data: dict[str, Any], where: str) -> Record:
    from kda_backend.gate import table_name
    from kda_kernels import KdaShape

    machine = _machine(data["machine"], where)
    name = table_name(KdaShape(**SHAPE), machine.gpu, "bfloat16")
    if data["table"] != name:
        raise ValueError(f"{where}: the table is {data['table']!r}; the history is about {name}")
    groups = {f"{form} {mode} T={t}": (form, mode, t) for form in FORMS for mode in MODES for t in DRAFT_TOKENS}
    values: Values = {}
    for cell in data["cells"]:
        if cell["group"] in groups and cell["batch"] in BATCH_SIZES:
            us, best = (_number(name, cell[name], where) for name in ("us", "best_us"))
            if not best:
                raise ValueError(f"{where}: best_us must be above 0 in {cell['group']}, B = {cell['batch']}")
            values[(*groups[cell["group"]], cell["batch"])] = us / best
    return _of_gpu("regret", where, machine, values)


def _host_time(data: dict[str, Any], where: str) -> Record:
    for name, expected in {"shape": SHAPE, "batch_size": 1, "draft_tokens": DRAFT_TOKENS[0]}.items():
        if data[name] != expected:
            raise ValueError(f"{where}: {name} is {data[name]!r}; the history is about {name} = {expected!r}")
    values: Values = {
        (one["op"], turn): _number(figure, one[figure], f"{where}: {one['op']}")
        for one in data["us_per_call"] if one["op"] in CALLS
        for turn, figure in TURNS.items()
    }  # fmt: skip
    return _of_gpu("host-time", where, _machine(data["machine"], where), values)


def _memory(data: dict[str, Any], where: str) -> Record:
    shape = data["shape"]
    for name, value in (("layers", data["layers"]), ("ring_length", data["ring_length"]),
                        ("num_v_heads", shape["num_v_heads"])):  # fmt: skip
        if _number(name, value, where) < 1:
            raise ValueError(f"{where}: {name} must be at least 1, got {value}")
    dim, records = shape["head_k_dim"], data["ring_length"] * shape["num_v_heads"]
    values: Values = {}
    # with fewer q/k heads than v heads a record shares its k, which is another figure
    if dim == shape["head_v_dim"] and dim in HEAD_DIMS and shape["num_heads"] == shape["num_v_heads"]:
        total = _number("ring_bytes_per_slot", data["modes"]["ring"]["ring_bytes_per_slot"], where)
        values[dim,] = total / (records * data["layers"])
    return Record("memory", where, NO_GPU, None, {}, values)


def _compile(data: dict[str, Any], where: str) -> Record:
    values: Values = {}
    kernels = data["kernels"]
    for one in kernels:
        name = f"{one['target']} {one['kernel']} {one['config']}"
        values |= {(name, figure): _number(figure, one[figure], f"{where}: {name}") for figure in FIGURES}
    # A report of chosen kernels or configurations would count fewer variants than there are.
    if data.get("whole"):
        values |= {(target, "variants"): count for target, count in Counter(k["target"] for k in kernels).items()}
    measured: dict[str, Any] = {name: data[name] for name in ("triton", "commit", "date") if name in data}
    return Record("compile", where, f"compiler triton {data['triton']}", data.get("commit"), measured, values)
