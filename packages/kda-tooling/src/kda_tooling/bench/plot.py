"""A sweep's picture: latency against batch size, lanes by colour, owners by line, the byte floor below them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_tooling.bench.arms import OURS
from kda_tooling.bench.results import Cell, SweepResult
from kda_tooling.bench.tables import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_TYPES = (".png", ".svg", ".pdf")

# Okabe and Ito's palette: told apart by colour-blind readers too. A lane has one colour whoever owns it.
LANE_COLOURS = {
    "fused+ring": "#0072B2", "unfused+ring": "#D55E00", "fused": "#56B4E9", "unfused": "#E69F00",
    "fused+ring chunked": "#009E73", "unfused+ring chunked": "#CC79A7", "ring": "#0072B2", "snapshots": "#E69F00",
}  # fmt: skip
PEER_STYLES = (("s", "--"), ("^", "-."), ("D", (0, (3, 1, 1, 1))))
LEAST_DECADES = 1.5
LEAST_TICK_GAP = 0.25
MOST_TICKS = 14


def data_digest(results: Sequence[SweepResult]) -> str:
    """What a picture says it was drawn from: SHA-256 of the results' JSON; stored in the file as its description."""
    return "sha256:" + hashlib.sha256("\n".join(result.to_json() for result in results).encode()).hexdigest()


def check_picture_path(path: Path) -> None:
    """ValueError unless the file's type is one of `FILE_TYPES`."""
    if path.suffix.lower() not in FILE_TYPES:
        raise ValueError(f"{path} must end in {', '.join(FILE_TYPES[:-1])} or {FILE_TYPES[-1]}")


def plot(results: Sequence[SweepResult], path: Path) -> None:
    """Draw ``results`` to ``path``, one panel per kind and draft length, log axes.

    Raises:
        ValueError: the file's type cannot be used, or the results are of several machines or shapes.
    """
    check_picture_path(path)
    figure = draw(results)
    key = "Subject" if path.suffix.lower() == ".pdf" else "Description"
    figure.savefig(path, dpi=140, metadata={key: data_digest(results)})


def draw(results: Sequence[SweepResult]) -> Figure:
    """The picture as a matplotlib figure.

    Raises:
        ValueError: the results are of several machines or shapes.
    """
    subjects = {result.subject for result in results}
    if len(subjects) != 1:
        raise ValueError(f"one picture shows one GPU, shape, dtype and L2 state; these results have {len(subjects)}")
    from matplotlib.figure import Figure

    panels = [(result, title, cells) for result in results for title, cells in result.groups().items()]
    across = min(len(panels), 2 if len(panels) <= 4 else 3)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(6.2 * across + 0.6, 4.6 * down + 1.3), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharey=True)
    peers = sorted({owner for result in results for owner, _ in columns(result)} - {OURS})
    handles: dict[str, Any] = {}
    for axis, (result, title, cells) in zip(axes.flat, panels, strict=False):
        handles |= _panel(axis, result, cells, peers)
        axis.set_title(title, fontsize=12)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    state = "L2-hot" if results[0].settings["hot"] else "L2-cold"
    for row in axes:
        row[0].set_ylabel(f"µs per layer ({state}, median)")
    _widen(axes[0][0])
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2 * across, fontsize=10, frameon=False)
    figure.suptitle(_heading(results[0]), fontsize=11 if across > 1 else 10)
    return figure


def _panel(axis: Any, result: SweepResult, cells: list[Cell], peers: list[str]) -> dict[str, Any]:
    """Draw one panel; returns label -> line."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    lines = {}
    for owner, lane in columns(result):
        points = [(c.batch, arm.median_us) for c in cells if (arm := c.best(owner, lane=lane)) is not None]
        if not points:
            continue
        marker, style = ("o", "-") if owner == OURS else PEER_STYLES[peers.index(owner) % len(PEER_STYLES)]
        label = _words(f"{owner} {lane}")
        # fused over unfused and thinner: both can be seen where they coincide
        fused, ours = lane.startswith("fused"), owner == OURS
        (lines[label],) = axis.plot(
            *zip(*points, strict=True), marker=marker, linestyle=style, markersize=4 if fused else 6.5,
            linewidth=(1.6 if fused else 3.4) if ours else 1.4, color=LANE_COLOURS.get(lane, "#999999"), label=label,
            zorder=3 + 2 * ours + fused,
        )  # fmt: skip
    floor = {c.batch: c.ring_floor_us for c in cells if c.ring_floor_us is not None}
    if floor:
        (lines["byte floor (ring)"],) = axis.plot(list(floor), list(floor.values()), color="black", linestyle=":")
    ticks = _spaced(sorted({cell.batch for cell in cells}))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [str(batch) for batch in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=30))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(labelleft=True)
    axis.set_xlabel("requests in the batch, B")
    axis.grid(True, alpha=0.3)
    return lines


def _spaced(batches: list[int]) -> list[int]:
    """The batch sizes whose labels fit beside each other on an axis of base 2."""
    least = max(LEAST_TICK_GAP, math.log2(batches[-1] / batches[0]) / MOST_TICKS)
    kept = batches[:1]
    for batch in batches[1:]:
        if math.log2(batch / kept[-1]) >= least:
            kept.append(batch)
    return kept


def _widen(axis: Any) -> None:
    """At least `LEAST_DECADES` on the shared y axis, so that noise does not look like a cliff."""
    low, high = axis.get_ylim()
    missing = 10**LEAST_DECADES / (high / low)
    if missing > 1:
        axis.set_ylim(low / missing**0.5, high * missing**0.5)


def _heading(result: SweepResult) -> str:
    m = result.machine
    peers = "".join(f", {name} {version}" for name, version in result.peers.items())
    when = f"{m.date}, torch {m.torch}, triton {m.triton}{peers}, commit {m.commit}"
    return _words(f"KDA on {result.subject}\n{when}")


def _words(text: str) -> str:
    """``text`` for matplotlib, to which two dollar signs would be a formula."""
    return text.replace("$", r"\$")
