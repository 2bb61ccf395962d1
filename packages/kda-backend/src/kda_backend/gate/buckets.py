"""From the measured batch sizes of one table to a verdict and a launch configuration for any batch size.

Verdicts go by the measured B below. Configurations go by the one above: it was found for as many programs or more, so
that what fits the device's SMs in one wave there does so here. That of the B below may not: at T = 8, eight heads and
B = 5 on an H200 it is a third slower (docs/measured-facts.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kda_backend.gate.cells import Cell
from kda_backend.gate.table import Table
from kda_backend.lanes import lanes_of


class Bucket(NamedTuple):
    """The cell that a batch size falls into and the lane there.

    Args:
        cell: whose launch configurations are taken.
        lane: the verdict, or None where there is none.
        said: how it came about.
    """

    cell: Cell
    lane: str | None
    said: str


def own_bucket(table: Table, cells: Mapping[int, Cell], batch: int) -> Bucket | None:
    """By the device's own table: the largest measured B up to ``batch``; between a fused and an unfused one, unfused.

    Above the largest measured B: that one. The launch configuration is that of the smallest measured B from ``batch``
    on.

    Args:
        table: whose cells they are.
        cells: B -> cell, at one T.
        batch: B.
    """
    at = max((b for b in cells if b <= batch), default=None)
    if at is None:
        return None
    cell, lane = cells[at], table.verdict(cells[at])
    said = f"B={at}: {_figures(table, cell)}"
    above = min((b for b in cells if b > batch), default=None)
    unfused, fused = lanes_of(cell.key.mode)
    if batch == at or above is None:
        return Bucket(cell, lane, said if batch == at else f"{said} (the largest measured)")
    if lane == fused and table.verdict(cells[above]) == unfused:
        return Bucket(cells[above], unfused, f"B={batch} lies between B={at}, fused, and B={above}, unfused")
    return Bucket(cells[above], lane, f"{said}; launched as at B={above}")


def other_bucket(table: Table, cells: Mapping[int, Cell], batch: int) -> Bucket | None:
    """By the table of another device of the architecture: configurations, and a verdict only where those around agree.

    Around a B are the measured ones next to it, itself if it is one, and all from its half to its double: with half the
    SMs as many programs are as many waves at half the batch size, and tables may have four sizes in a factor of two.
    Beyond the largest measured B there is no verdict. Arguments as `own_bucket`.
    """
    at = max((b for b in cells if b <= batch), default=None)
    if at is None:
        return None
    above = min((b for b in cells if b > batch), default=None)
    below = max((b for b in cells if b < at), default=None) if at == batch else None
    near = (b for b in cells if batch <= 2 * b <= 4 * batch)
    around = sorted({b for b in (below, at, above) if b is not None}.union(near))
    launched = cells[at if at == batch or above is None else above]
    verdicts = {table.verdict(cells[b]) for b in around}
    measured = ", ".join(f"B={b}" for b in around) if len(around) < 4 else f"B={around[0]} to {around[-1]}"
    if above is None and at < batch:
        said = f"B={batch} is beyond the largest measured, B={at}: its configurations, no verdict"
        return Bucket(launched, None, said)
    if len(around) < 2:
        return Bucket(launched, None, f"only {measured} is measured near B={batch}: its configurations, no verdict")
    if len(verdicts) > 1:
        return Bucket(launched, None, f"{measured} do not agree: their configurations, no verdict")
    return Bucket(launched, verdicts.pop(), f"{measured} agree; B={at}: {_figures(table, cells[at])}")


def _figures(table: Table, cell: Cell) -> str:
    """The figures that decided, in words, and why fused is not taken where some of them are in its favour."""
    what = "round" if cell.decides_by_round else "verify"
    measured = [
        f"{lane} {' / '.join(f'{us:g}' for us in cell.deciding(lane))}" if cell.deciding(lane)
        else f"{lane} not measured ({cell.lanes[lane].why})"
        for lane in sorted(cell.lanes)
    ]  # fmt: skip
    unfused, fused = lanes_of(cell.key.mode)
    passes = zip(cell.deciding(unfused), cell.deciding(fused), strict=False)
    why = ""
    if cell.closed is not None:
        why = f", closed on {cell.closed.date} by {cell.closed.history}"
    elif cell.lane != cell.supported(table.margin):
        why = f", and it states {cell.lane}, which they do not support: unfused"
    elif cell.lane == unfused and any(quick < slow for slow, quick in passes):
        why = f", where fused does not win by {100 * table.margin:g} % in every pass"
    return f"{what} {', '.join(measured)} us{why}"
