"""A gate table as grids over T and B, one per gate, form, mode and pool option: verdicts, ratios, rich tables, JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from kda_backend.gate import OPTIONS, Cell, Table
from kda_backend.lanes import lanes_of
from kda_tooling.terminal import printable

STYLES = {"fused": "bold cyan", "unfused": "yellow"}
"""By what a lane's name begins with; the letter in front says the same without colour."""

LEGEND = (
    "F / U: the verdict, fused or unfused; the number: fused time over unfused time, of the pass that is worst for "
    "fused. x: closed by the performance history; !: a verdict that its figures do not support; ?: not measured."
)


@dataclass(frozen=True)
class Grid:
    """Cells of one gate, form, mode and option.

    Args:
        title: those four, in words.
        cells: (T, B) -> cell.
    """

    title: str
    cells: dict[tuple[int, int], Cell]

    @property
    def draft_tokens(self) -> list[int]:
        """Measured T, ascending."""
        return sorted({t for t, _ in self.cells})

    @property
    def batches(self) -> list[int]:
        """Measured B, ascending."""
        return sorted({b for _, b in self.cells})


def grids(table: Table) -> list[Grid]:
    """The grids of ``table``: those of a plain pool first, within an option in the order of the cells."""
    found: dict[str, dict[tuple[int, int], Cell]] = {}
    for cell in sorted(table.cells, key=lambda cell: OPTIONS.index(cell.key.option)):
        key = cell.key
        title = f"{key.gate} gate, {key.form}, {key.mode}, {key.option}"
        found.setdefault(title, {})[key.draft_tokens, key.batch] = cell
    return [Grid(title, cells) for title, cells in found.items()]


def is_fused(table: Table, cell: Cell) -> bool:
    """Whether the verdict of ``cell`` is the fused lane."""
    return table.verdict(cell) == lanes_of(cell.key.mode)[1]


def cell_text(table: Table, cell: Cell) -> str:
    """``F 0.62``, ``U 1.04 x`` and so on; see `LEGEND`."""
    ratio = cell.ratio()
    marks = [
        "F" if is_fused(table, cell) else "U",
        "?" if ratio is None else f"{ratio:.2f}",
        "x" if cell.closed is not None else "",
        "!" if cell.lane != cell.supported(table.margin) else "",
    ]
    return " ".join(mark for mark in marks if mark)


def rich_tables(table: Table) -> list[RichTable]:
    """One table per grid: B down, of which there are many, T across."""
    made = []
    for grid in grids(table):
        one = RichTable(title=grid.title, title_justify="left")
        one.add_column("B", justify="right", no_wrap=True)
        for t in grid.draft_tokens:
            one.add_column(f"T={t}", justify="right", no_wrap=True)
        for batch in grid.batches:
            row = [Text(str(batch))]
            for t in grid.draft_tokens:
                cell = grid.cells.get((t, batch))
                style = "" if cell is None else STYLES["fused" if is_fused(table, cell) else "unfused"]
                row.append(Text("" if cell is None else cell_text(table, cell), style=style))
            one.add_row(*row)
        made.append(one)
    return made


def heading(table: Table) -> str:
    """What the table is for and where it is from, in two lines."""
    shape, made = table.shape, table.provenance
    fused = sum(is_fused(table, cell) for cell in table.cells)
    return printable(
        f"{table.device_name} ({table.arch}), H = {shape.num_heads}, HV = {shape.num_v_heads}, "
        f"K = {shape.head_k_dim}, V = {shape.head_v_dim}, {table.dtype}: {len(table.cells)} cells, {fused} fused, "
        f"{len(table.cells) - fused} unfused; margin {100 * table.margin:g} % in each of {made.passes} passes\n"
        f"{made.date}, commit {made.git_sha}, driver {made.driver}, torch {made.torch}, triton {made.triton}, "
        f"{made.timing}: {made.command}"
    )


def as_data(table: Table) -> dict[str, Any]:
    """The same as JSON data."""
    return {
        "file_name": table.file_name, "device_name": table.device_name, "arch": table.arch, "dtype": table.dtype,
        "shape": asdict(table.shape), "provenance": asdict(table.provenance), "doubts": list(table.doubts),
        "cells": [
            {
                **asdict(cell.key), "stated": cell.lane, "lane": table.verdict(cell), "ratio": cell.ratio(),
                "closed": None if cell.closed is None else asdict(cell.closed),
            }
            for cell in table.cells
        ],
    }  # fmt: skip
