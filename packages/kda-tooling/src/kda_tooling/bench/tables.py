"""A sweep's tables for the terminal."""

from __future__ import annotations

from rich.table import Table

from kda_kernels import FORMS
from kda_tooling.bench.arms import OURS
from kda_tooling.bench.results import ArmResult, Cell, SweepResult
from kda_tooling.terminal import plain

MOST_COLUMNS = 6
"""Lanes that stand side by side; more of them are listed one below the other."""


def _text(arm: ArmResult | None) -> str:
    return "-" if arm is None else f"{arm.median_us:.2f} ±{arm.spread * 100:.1f}%  {arm.over_floor:.2f}x"


def columns(result: SweepResult) -> list[tuple[str, str]]:
    """(owner, lane) of every lane measured, ours first; a lane's fastest arm stands for it in the table."""
    seen: dict[tuple[str, str], None] = {}
    for cell in result.cells:
        for arm in cell.arms:
            seen[arm.owner, arm.lane] = None
    return sorted(seen, key=lambda key: (key[0] != OURS, key))


def tables(result: SweepResult, every_arm: bool = False) -> list[Table]:
    """One table per draft length and kind: us per layer with spread and ratio to the byte floor.

    Each lane shows its fastest arm; ``every_arm`` lists all of them, one row per arm.
    """
    found = []
    for title, cells in result.groups().items():
        table = Table(title=f"{title}: us per layer ±spread, x byte floor", title_justify="left")
        if every_arm:
            table.add_column("arm")
            for cell in cells:
                table.add_column(f"B = {cell.batch}", justify="right")
            for name in dict.fromkeys(arm.name for cell in cells for arm in cell.arms):
                row = [next((arm for arm in cell.arms if arm.name == name), None) for cell in cells]
                table.add_row(plain(name), *(_text(arm) for arm in row))
        elif len(columns(result)) > MOST_COLUMNS:
            _lanes_down(table, cells, result)
        else:
            _lane_rows(table, cells, result)
        skipped = {f"{name}: {why}" for cell in cells for name, why in cell.skipped.items()}
        if skipped:
            table.caption = plain("not measured: " + "; ".join(sorted(skipped)))
            table.caption_justify = "left"
        found.append(table)
    return found


def best_ratio(cell: Cell, peer: str, form: str = FORMS[0]) -> float | None:
    """Our fastest ring arm's latency in ``form`` over the peer's fastest; None where one is missing."""
    ours, theirs = cell.best(OURS, mode="ring", form=form), cell.best(peer, mode="ring")
    return ours.median_us / theirs.median_us if ours and theirs else None


def peers_of(result: SweepResult) -> list[str]:
    """Names of the peers that have an arm."""
    return sorted({owner for owner, _ in columns(result)} - {OURS})


def ratio_columns(result: SweepResult) -> list[tuple[str, str, str]]:
    """(heading, peer, form) of every comparison with a peer: forms are compared apart, their bits are not equal."""
    ours = {arm.form for cell in result.cells for arm in cell.arms if arm.owner == OURS and arm.mode == "ring"}
    forms = [form for form in FORMS if form in (ours or FORMS[:1])]
    return [
        (f"best ours{'' if form == FORMS[0] else ' ' + form} / best {peer}", peer, form)
        for peer in peers_of(result)
        for form in forms
    ]


def _lane_rows(table: Table, cells: list[Cell], result: SweepResult) -> None:
    lanes = columns(result)
    ratios = ratio_columns(result)
    table.add_column("B", justify="right")
    table.add_column("layers", justify="right")
    table.add_column("floor, ring", justify="right")
    for owner, lane in lanes:
        table.add_column(plain(f"{owner} {lane}"), justify="right")
    for heading, _, _ in ratios:
        table.add_column(plain(heading), justify="right")
    for cell in cells:
        floor = cell.ring_floor_us
        row = [str(cell.batch), f"{cell.layers}{'' if cell.cold else ' hot'}", "-" if floor is None else f"{floor:.2f}"]
        row += [_text(cell.best(owner, lane=lane)) for owner, lane in lanes]
        for _, peer, form in ratios:
            ratio = best_ratio(cell, peer, form)
            row.append("-" if ratio is None else f"{ratio:.2f}")
        table.add_row(*row)


def _lanes_down(table: Table, cells: list[Cell], result: SweepResult) -> None:
    """What `_lane_rows` shows, one row per lane and one column per batch size."""
    table.add_column("lane")
    for cell in cells:
        table.add_column(f"B = {cell.batch}{'' if cell.cold else ' hot'}", justify="right")
    floors = [cell.ring_floor_us for cell in cells]
    table.add_row("floor, ring", *("-" if floor is None else f"{floor:.2f}" for floor in floors))
    for owner, lane in columns(result):
        table.add_row(plain(f"{owner} {lane}"), *(_text(cell.best(owner, lane=lane)) for cell in cells))
    for heading, peer, form in ratio_columns(result):
        found = [best_ratio(cell, peer, form) for cell in cells]
        table.add_row(plain(heading), *("-" if ratio is None else f"{ratio:.2f}" for ratio in found))


def header(result: SweepResult) -> str:
    """The machine and settings in one paragraph."""
    m = result.machine
    peers = ", ".join(f"{name} {version}" for name, version in result.peers.items()) or "none"
    return (
        f"{m.gpu} (sm{m.sm}), {m.clocks}, driver {m.driver}, L2 {m.l2_bytes / 2**20:.0f} MiB, "
        f"copy {m.copy_bytes_per_second / 1e12:.2f} TB/s; torch {m.torch}, triton {m.triton}, Python {m.python}; "
        f"commit {m.commit}, {m.date}; peers: {peers}"
    )
