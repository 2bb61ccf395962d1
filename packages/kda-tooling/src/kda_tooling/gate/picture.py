"""A gate table's picture: fused over unfused time as a heat map over T and B, the verdict marked."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_backend.gate import Table, dump_table
from kda_tooling.bench.plot import check_picture_path
from kda_tooling.gate.grid import Grid, cell_text, grids, is_fused

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PANELS = 24
WIDEST = 2.0
"""Of the colour scale: half and double time are the ends of it."""

CELL, AROUND = (0.46, 0.4), (0.65, 0.95)
"""A cell, and what a panel needs beside and above and below its cells, for labels: inches across and down."""

LETTER = 0.075
"""Inches of a letter of a panel's title, about."""

TITLE, BAR, MARGIN, LEAST_WIDTH = 0.6, 0.9, 0.55, 5.5
"""Inches of the picture's title, of the colour bar, of the left and right edge, and of the narrowest picture."""


def plot(table: Table, path: Path) -> None:
    """Draw ``table`` to ``path``.

    Raises:
        ValueError: the file's type cannot be used, or there is nothing to draw.
    """
    check_picture_path(path)
    digest = "sha256:" + hashlib.sha256(dump_table(table).encode()).hexdigest()
    key = "Subject" if path.suffix.lower() == ".pdf" else "Description"
    draw(table).savefig(path, dpi=110, metadata={key: digest})


def draw(table: Table) -> Figure:
    """The picture as a matplotlib figure.

    Raises:
        ValueError: the table has no cells.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    panels = grids(table)[:MOST_PANELS]
    if not panels:
        raise ValueError(f"{table.file_name} has no cells to draw")
    lines = _lines(panels)
    width = max(LEAST_WIDTH, *(sum(map(_width, line)) for line in lines)) + MARGIN
    heights = [max(map(_height, line)) for line in lines]
    height = TITLE + sum(heights) + BAR
    figure = Figure(figsize=(width, height))
    # Blue and red of this map are told apart by colour-blind readers too; the letters say the same.
    norm, colours = TwoSlopeNorm(vmin=-math.log2(WIDEST), vcenter=0.0, vmax=math.log2(WIDEST)), "RdBu_r"
    top = height - TITLE
    for line, tall in zip(lines, heights, strict=True):
        left = MARGIN
        for grid in line:
            wide, high = CELL[0] * len(grid.batches), CELL[1] * len(grid.draft_tokens)
            place = left / width, (top - AROUND[1] / 2 - high) / height, wide / width, high / height
            _panel(figure.add_axes(place), table, grid, norm, colours)
            left += _width(grid)
        top -= tall
    under = figure.add_axes((MARGIN / width, 0.45 / height, min(6.0, width - 2 * MARGIN) / width, 0.15 / height))
    bar = figure.colorbar(ScalarMappable(norm, colours), cax=under, orientation="horizontal")
    ticks = (0.5, 0.7, 1.0, 1.4, 2.0)
    bar.set_ticks([math.log2(tick) for tick in ticks], labels=[f"{tick:g}" for tick in ticks])
    bar.set_label("fused over unfused time, worst pass")
    shape = table.shape
    figure.suptitle(
        f"Lanes on {table.device_name}: H = {shape.num_heads}, HV = {shape.num_v_heads}, K = {shape.head_k_dim}, "
        f"V = {shape.head_v_dim}, {table.dtype}\nF: fused is taken (framed), U: unfused; {table.provenance.date}",
        fontsize=10, x=MARGIN / width, y=1 - 0.1 / height, ha="left", va="top",
    )  # fmt: skip
    return figure


def _width(grid: Grid) -> float:
    return max(CELL[0] * len(grid.batches), LETTER * len(grid.title)) + AROUND[0]


def _height(grid: Grid) -> float:
    return CELL[1] * len(grid.draft_tokens) + AROUND[1]


def _lines(panels: list[Grid]) -> list[list[Grid]]:
    """The panels in lines no wider than the widest of them, in their order."""
    most = max(map(_width, panels))
    lines: list[list[Grid]] = [[]]
    for grid in panels:
        if lines[-1] and sum(map(_width, lines[-1])) + _width(grid) > most:
            lines.append([])
        lines[-1].append(grid)
    return lines


def _panel(axis: Any, table: Table, grid: Grid, norm: Any, colours: str) -> None:
    """Draw one grid."""
    from matplotlib.patches import Rectangle

    rows, columns = grid.draft_tokens, grid.batches
    ratios = [
        [math.nan if (cell := grid.cells.get((t, b))) is None or (r := cell.ratio()) is None else math.log2(r)
         for b in columns]
        for t in rows
    ]  # fmt: skip
    axis.imshow(ratios, norm=norm, cmap=colours, aspect="auto")
    for (t, b), cell in grid.cells.items():
        x, y = columns.index(b), rows.index(t)
        strong = abs(ratios[y][x]) > 0.55  # on dark colours
        fused = is_fused(table, cell)
        axis.text(
            x, y, cell_text(table, cell).replace(" ", "\n", 1), ha="center", va="center", fontsize=7,
            color="white" if strong else "black", fontweight="bold" if fused else "normal",
        )  # fmt: skip
        if fused:
            axis.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor="black", linewidth=1.2))
    axis.set_xticks(range(len(columns)), [str(b) for b in columns])
    axis.set_yticks(range(len(rows)), [str(t) for t in rows])
    axis.set_xlabel("requests in the batch, B", fontsize=8)
    axis.set_ylabel("draft tokens, T", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.set_title(grid.title, fontsize=9, loc="left")
