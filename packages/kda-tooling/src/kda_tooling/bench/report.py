"""A sweep's tables and picture."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from kda_tooling.bench.arms import OURS
from kda_tooling.bench.results import ArmResult, Cell, SweepResult


def cell_title(cell: Cell) -> str:
    """What the cell measured, in words."""
    what = cell.kind if cell.kind == "verify" else f"{cell.kind}, accept {cell.accept}"
    return f"{what}, T = {cell.draft_tokens}"


def _text(arm: ArmResult | None, with_floor: bool = True) -> str:
    if arm is None:
        return "-"
    floor = f"  {arm.over_floor:.2f}x" if with_floor else ""
    return f"{arm.median_us:.2f} ±{arm.spread * 100:.0f}%{floor}"


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
    groups: dict[str, list[Cell]] = {}
    for cell in result.cells:
        groups.setdefault(cell_title(cell), []).append(cell)
    found = []
    for title, cells in groups.items():
        table = Table(title=f"{title}: us per layer ±spread, x byte floor", title_justify="left")
        if every_arm:
            table.add_column("arm")
            for cell in cells:
                table.add_column(f"B = {cell.batch}", justify="right")
            for name in dict.fromkeys(arm.name for cell in cells for arm in cell.arms):
                row = [next((arm for arm in cell.arms if arm.name == name), None) for cell in cells]
                table.add_row(name, *(_text(arm) for arm in row))
        else:
            _lane_rows(table, cells, result)
        found.append(table)
    return found


def _lane_rows(table: Table, cells: list[Cell], result: SweepResult) -> None:
    lanes = columns(result)
    peers = sorted({owner for owner, _ in lanes} - {OURS})
    table.add_column("B", justify="right")
    table.add_column("layers", justify="right")
    table.add_column("floor, ring", justify="right")
    for owner, lane in lanes:
        table.add_column(f"{owner} {lane}", justify="right")
    for peer in peers:
        table.add_column(f"best ours / best {peer}", justify="right")
    for cell in cells:
        floors = [arm.floor_us for arm in cell.arms if arm.mode == "ring"]
        row = [str(cell.batch), f"{cell.layers}{'' if cell.cold else ' hot'}", f"{floors[0]:.2f}" if floors else "-"]
        row += [_text(cell.best(owner, lane=lane)) for owner, lane in lanes]
        for peer in peers:
            ours, theirs = cell.best(OURS, mode="ring"), cell.best(peer, mode="ring")
            row.append(f"{ours.median_us / theirs.median_us:.2f}" if ours and theirs else "-")
        table.add_row(*row)


def header(result: SweepResult) -> str:
    """The machine and settings in one paragraph."""
    m = result.machine
    peers = ", ".join(f"{name} {version}" for name, version in result.peers.items()) or "none"
    return (
        f"{m.gpu} (sm{m.sm}), {m.clocks}, driver {m.driver}, L2 {m.l2_bytes / 2**20:.0f} MiB, "
        f"copy {m.copy_bytes_per_second / 1e12:.2f} TB/s; torch {m.torch}, triton {m.triton}, Python {m.python}; "
        f"commit {m.commit}, {m.date}; peers: {peers}"
    )


def plot(result: SweepResult, path: Path) -> None:
    """Latency against batch size, one panel per draft length and kind: lanes, peers and byte floor, log axes.

    Raises:
        ValueError: matplotlib cannot write this file type.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    groups: dict[str, list[Cell]] = {}
    for cell in result.cells:
        groups.setdefault(cell_title(cell), []).append(cell)
    figure, axes = plt.subplots(1, len(groups), figsize=(6.4 * len(groups), 5.2), squeeze=False, sharey=True)
    lanes = columns(result)
    colours = dict(zip(lanes, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    for axis, (title, cells) in zip(axes[0], groups.items(), strict=True):
        batches = [cell.batch for cell in cells]
        for owner, lane in lanes:
            points = [(c.batch, best.median_us) for c in cells if (best := c.best(owner, lane=lane)) is not None]
            if points:
                axis.plot(
                    *zip(*points, strict=True), marker="o" if owner == OURS else "s",
                    linestyle="-" if owner == OURS else "--", linewidth=2 if owner == OURS else 1.4,
                    color=colours.get((owner, lane)), label=f"{owner} {lane}",
                )  # fmt: skip
        floors = [(c.batch, arm.floor_us) for c in cells for arm in c.arms if arm.mode == "ring"]
        if floors:
            floor = dict(floors)
            axis.plot(list(floor), list(floor.values()), color="black", linestyle=":", label="byte floor (ring)")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(batches, [str(b) for b in batches])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_xlabel("requests in the batch, B")
        axis.set_title(title)
        axis.grid(True, which="major", alpha=0.35)
    axes[0][0].set_ylabel("us per layer (median, L2-cold)" if result.cells[0].cold else "us per layer (median, hot)")
    axes[0][0].legend(fontsize=8.5)
    shape = result.settings["shape"]
    figure.suptitle(
        f"KDA verify on {result.machine.gpu}, H = {shape['num_heads']}, HV = {shape['num_v_heads']}, "
        f"K = {shape['head_k_dim']}, V = {shape['head_v_dim']}, {result.settings['dtype']}; {result.machine.date}, "
        f"torch {result.machine.torch}, triton {result.machine.triton}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)
