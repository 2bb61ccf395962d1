"""The launch configurations that are tried, and which of them compiling already rules out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kda_kernels import KdaShape, LaunchConfig
from kda_kernels.shapes import BLOCK_TOKENS, MAX_GLUON_CHUNKED_TOKENS, SUPPORTED_ROWS_PER_THREAD
from kda_tooling.bench.arms import MAX_STATE_REGISTERS

TILES = ((16, 4), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8))
"""(block_v, num_warps) of the kernel with layouts of its own. Rows per thread follow: as many as make the warps' rows
fill the tile once, the layout that reads a state row in the fewest, longest pieces."""

PORTABLE_TILES = ((8, 1), (16, 1), (32, 1), (16, 4), (32, 4))
"""Of the portable kernel, for devices or lengths that the other does not take."""

SM_REGISTERS, REGISTER_UNIT = 65_536, 8
"""Registers of an SM, and the multiple of them in which a thread gets its own."""

LEAST_SHARE, LEAST_REGISTERS = 0.6, 32
"""Share of its registers, and count, below which a kernel is not compiled again with fewer: it would spill."""

MOST_SPILLS = 256
"""Bytes of stack per thread above which a configuration is not timed: every measured one lost."""

ONE_WAVE_WARPS = 132 * 16
"""Warps that are resident at once at 128 registers a thread, on 132 SMs."""


@dataclass(frozen=True)
class Figures:
    """What the compiler says of a candidate's kernels.

    Args:
        registers: per thread, the most of them.
        spills: bytes of stack per thread, the most of them.
    """

    registers: int
    spills: int


def candidates(shape: KdaShape, draft_tokens: int, form: str, lane: str, nvidia: bool) -> list[LaunchConfig]:
    """Configurations to compile for a lane. All give the same bits: there is no knob here that could change one.

    Args:
        shape: head layout; tiles larger than V are left out.
        draft_tokens: T.
        form: the portable kernel alone takes longer chunks.
        lane: unfused lanes may prefetch, since the kernel before them writes no index.
        nvidia: whether the device is an NVIDIA GPU, which the kernel with layouts of its own is for.
    """
    v = shape.head_v_dim
    if not nvidia or (form == "chunked" and draft_tokens > MAX_GLUON_CHUNKED_TOKENS):
        return [LaunchConfig(*tile) for tile in PORTABLE_TILES if tile[0] <= v]
    found = []
    for block_v, warps in TILES:
        rows = block_v // (4 * warps)
        too_many = block_v * shape.head_k_dim // (32 * warps) > MAX_STATE_REGISTERS
        if block_v > v or too_many or rows not in SUPPORTED_ROWS_PER_THREAD:
            continue
        plain = LaunchConfig(block_v, warps, rows_per_thread=rows)
        found += [plain, replace(plain, state_first=True)]
        if form == "chunked" and draft_tokens > BLOCK_TOKENS:
            found += [replace(one, token_blocks=True) for one in found[-2:]]
        if lane.startswith("unfused") and block_v <= 32:
            found.append(replace(plain, state_first=True, prefetch=True))
    return found


def capped(config: LaunchConfig, figures: Figures) -> list[LaunchConfig]:
    """``config`` with fewer registers than it was compiled to, where that fits one more program into an SM's."""
    if config.rows_per_thread is None or config.max_registers is not None or figures.spills:
        return []
    threads = 32 * config.num_warps
    own = -(-figures.registers // REGISTER_UNIT) * REGISTER_UNIT
    programs = SM_REGISTERS // (own * threads)
    cap = SM_REGISTERS // ((programs + 1) * threads) // REGISTER_UNIT * REGISTER_UNIT
    return [replace(config, max_registers=cap)] if cap >= max(LEAST_SHARE * figures.registers, LEAST_REGISTERS) else []


def ruled_out(figures: Figures) -> str | None:
    """Why a compiled candidate is not worth timing, or None."""
    if figures.spills > MOST_SPILLS:
        return f"spills {figures.spills} bytes per thread; more than {MOST_SPILLS} never won"
    return None


def fits_heads(config: LaunchConfig, alternatives: Sequence[LaunchConfig], heads: int, head_v_dim: int) -> bool:
    """Whether ``config`` can be a ring's fastest of ``alternatives`` for a batch of ``heads`` heads, requests times HV.

    Past two waves of programs, tiles of an eighth of a head repeat a head's q and k work too often, and programs of one
    row a thread have too little to do between their barriers.
    """
    if config.rows_per_thread != 1 or heads * (head_v_dim // config.block_v) * config.num_warps <= 2 * ONE_WAVE_WARPS:
        return True
    return not any((one.rows_per_thread or 0) > 1 for one in alternatives)
