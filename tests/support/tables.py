"""Gate tables with invented figures, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kda_backend.gate import Cell, CellKey, Closed, LaneFigures, Provenance, Table, judged
from kda_backend.lanes import lanes_of
from kda_kernels import KdaShape, LaunchConfig

SHAPE = KdaShape(8, 8, 128, 128)
H200, H200_MULTIPROCESSORS = "NVIDIA H200", 132
SLOW_CONFIG, FAST_CONFIG = LaunchConfig(32, 2), LaunchConfig(64, 8, rows_per_thread=2, state_first=True)
"""Of the unfused and of the fused lane in `a_cell`."""

PROVENANCE = Provenance(
    command="kda tune --heads 8 --hv-heads 8", git_sha="0123456789ab", date="2026-11-29", gpu=H200, driver="580.1",
    torch="2.11.0", triton="3.6.0", timing="CUDA-graph replays, L2-cold", margin=0.02, passes=2,
)  # fmt: skip

CLOSED = Closed("history.json", ("aaa", "bbb"), (2.0, 2.1), (2.2, 2.3), "2026-11-29")


def a_key(**changes: Any) -> CellKey:
    key = CellKey("safe", "recurrent", "ring", "plain", 4, 1)
    return replace(key, **changes)


def a_cell(
    *,
    fused: bool = True,
    unfused_us: Iterable[float] = (4.0, 4.1),
    fused_us: Iterable[float] | None = None,
    configs: tuple[LaunchConfig | None, LaunchConfig | None] = (SLOW_CONFIG, FAST_CONFIG),
    margin: float = 0.02,
    **key: Any,
) -> Cell:
    """A cell whose figures make the fused lane win (``fused``) or lose, or which are given; key as `a_key`."""
    chosen = a_key(**key)
    if fused_us is None:
        fused_us = [us * (0.5 if fused else 1.5) for us in unfused_us]
    plain = chosen.option == "plain"
    figures = [
        LaneFigures(tuple(us), () if plain else tuple(us), config)
        for us, config in zip((unfused_us, fused_us), configs, strict=True)
    ]
    return judged(chosen, dict(zip(lanes_of(chosen.mode), figures, strict=True)), margin)


def cells(verdicts: Mapping[int, bool], **key: Any) -> list[Cell]:
    """B -> whether fused wins there, as cells."""
    return [a_cell(fused=fused, batch=batch, **key) for batch, fused in verdicts.items()]


def a_table(*given: Cell, **changes: Any) -> Table:
    """A table of `SHAPE` on the H200 with these cells."""
    table = Table(SHAPE, H200, "sm90", "bfloat16", PROVENANCE, tuple(given))
    return replace(table, **changes)
