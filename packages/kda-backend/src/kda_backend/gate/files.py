"""JSON text of gate tables and back, strictly: unknown keys, doubled keys and what JSON does not know are refused."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kda_backend.gate.cells import Cell, CellKey, Closed, LaneFigures, config_fields
from kda_backend.gate.table import SCHEMA, Provenance, Table, TableError
from kda_kernels import KdaShape, LaunchConfig

MOST_BYTES = 16 << 20
"""Of a table's file; a thousand cells are 0.3 MB."""

SHAPE_NAMES = {"num_heads": "H", "num_v_heads": "HV", "head_k_dim": "K", "head_v_dim": "V"}
HEADER = ("schema", "shape", "device_name", "arch", "dtype", "provenance", "cells")
CELL_KEY = ("gate", "form", "mode", "option", "T", "B")
CELL = (*CELL_KEY, "lane", "lanes")


def load_table(path: Path) -> Table:
    """The table in the file ``path``, every value checked.

    A verdict that its own figures do not support is no error: it is in `Table.doubts`, and counts as unfused.

    Raises:
        TableError: the file is not there or cannot be read, is no table, of another schema, or for something else than
            its name says; or a value in it is refused. The message names the file and the cell.
    """
    try:
        data = _json(_bytes(path))
        table = _table(data)
        if table.file_name != path.name:
            raise ValueError(f"its contents are those of {table.file_name}: a table is found by its name")
    except (TypeError, ValueError, OSError, RecursionError) as problem:
        detail = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        if isinstance(problem, RecursionError):
            detail = "its brackets are nested too deeply"
        raise TableError(f"{path}: {detail}") from problem
    return table


def _bytes(path: Path) -> bytes:
    """The file's contents, never more than `MOST_BYTES` and never from anything but a file."""
    if path.exists() and not path.is_file():
        raise ValueError("is no file")
    with path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"is larger than the {MOST_BYTES >> 20} MiB that a table may have")
    return content


def _json(content: bytes) -> Any:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_constant)
    except json.JSONDecodeError as problem:
        raise ValueError(f"is not JSON: {problem}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} is there twice in one object")
        found[name] = value
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number that a table may hold")


def _object(name: str, data: Any, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """``data`` as an object that has all keys ``needed`` and none but these and the ``optional`` ones."""
    if not isinstance(data, dict):
        raise ValueError(f"{name} must be an object, got {type(data).__name__}")
    missing = [key for key in needed if key not in data]
    unknown = sorted(set(data) - {*needed, *optional})
    if missing or unknown:
        raise ValueError(
            f"{name} must have the keys {', '.join((*needed, *(f'[{key}]' for key in optional)))}: "
            f"missing {missing}, unknown {[key[:40] for key in unknown[:5]]}"
        )
    return data


def _table(data: Any) -> Table:
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError("is no gate table: it must be an object with the key schema")
    schema = data["schema"]
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA}, got {str(schema)[:40]!r}: written by another version, tune again")
    _object("the table", data, HEADER)
    shape = _object("shape", data["shape"], tuple(SHAPE_NAMES.values()))
    provenance = _object("provenance", data["provenance"], [each.name for each in fields(Provenance)])
    if not isinstance(data["cells"], list):
        raise ValueError(f"cells must be a list, got {type(data['cells']).__name__}")
    return Table(
        KdaShape(**{name: shape[letter] for name, letter in SHAPE_NAMES.items()}), data["device_name"], data["arch"],
        data["dtype"], Provenance(**provenance), tuple(_cell(i, each) for i, each in enumerate(data["cells"])),
    )  # fmt: skip


def _cell(position: int, data: Any) -> Cell:
    where = f"cell {position + 1}"
    try:
        _object(where, data, CELL, ("closed",))
        key = CellKey(*(data[name] for name in CELL_KEY))
        where = f"cell {position + 1} ({key})"
        if not isinstance(data["lanes"], dict):
            raise ValueError(f"lanes must be an object, got {type(data['lanes']).__name__}")
        lanes = {lane: _lane(lane, figures) for lane, figures in data["lanes"].items()}
        closed = None
        if "closed" in data:
            closed = Closed(**_object("closed", data["closed"], [each.name for each in fields(Closed)]))
        return Cell(key, data["lane"], lanes, closed)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{where}: {problem}") from None


def _lane(lane: str, data: Any) -> LaneFigures:
    _object(lane[:40], data, (), ("us", "round_us", "config", "why"))
    config = data.get("config")
    if config is not None:
        config = LaunchConfig(**_object(f"{lane} config", config, (), [each.name for each in fields(LaunchConfig)]))
    return LaneFigures(data.get("us", ()), data.get("round_us", ()), config, data.get("why"))


def _line(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def dump_table(table: Table) -> str:
    """The JSON text of ``table``: sorted, one cell a line, so that a diff shows what changed."""
    shape = {letter: getattr(table.shape, name) for name, letter in SHAPE_NAMES.items()}
    values: dict[str, Any] = {
        "schema": SCHEMA, "shape": shape, "device_name": table.device_name, "arch": table.arch, "dtype": table.dtype,
    }  # fmt: skip
    lines = [f' "{name}": {_line(value)},' for name, value in values.items()]
    provenance = [f'  "{name}": {_line(value)}' for name, value in asdict(table.provenance).items()]
    lines += [' "provenance": {', ",\n".join(provenance), " },"]
    cells = [f"  {_line(_cell_data(cell))}" for cell in table.cells]
    lines += [' "cells": [', ",\n".join(cells), " ]"] if cells else [' "cells": []']
    return "\n".join(["{", *lines, "}"]) + "\n"


def _cell_data(cell: Cell) -> dict[str, Any]:
    key = cell.key
    data: dict[str, Any] = dict(
        zip(CELL_KEY, (key.gate, key.form, key.mode, key.option, key.draft_tokens, key.batch), strict=True)
    )
    data["lane"] = cell.lane
    data["lanes"] = {lane: _lane_data(cell.lanes[lane]) for lane in sorted(cell.lanes, reverse=True)}
    if cell.closed is not None:
        data["closed"] = asdict(cell.closed)
    return data


def _lane_data(figures: LaneFigures) -> dict[str, Any]:
    if figures.why is not None:
        return {"why": figures.why}
    data: dict[str, Any] = {"us": figures.us}
    if figures.round_us:
        data["round_us"] = figures.round_us
    if figures.config is not None:
        data["config"] = config_fields(figures.config)
    return data


def write_table(table: Table, folder: Path) -> Path:
    """Write ``table`` into ``folder`` under its own name, replacing a file there whole or not at all; the path.

    Of a link there, the file that it leads to is replaced, and the link stays.

    Raises:
        OSError: the folder cannot be written; what was there stays.
    """
    path, text = folder / table.file_name, dump_table(table)
    target = os.path.realpath(path)
    handle, name = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path
