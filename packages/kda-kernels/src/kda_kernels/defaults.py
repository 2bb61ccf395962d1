"""Launch configurations for callers that name none. No choice here changes a bit, only speed.

Figures: NVIDIA H200, T = 4 and 8, H = HV = 8, K = V = 128, bf16, L2-cold (docs/measured-facts.md).
"""

from __future__ import annotations

import torch

from kda_kernels._launch import current_target
from kda_kernels.shapes import KdaShape, LaunchConfig

PORTABLE = LaunchConfig()
WHOLE_HEAD = LaunchConfig(block_v=128)
"""For the interpreter, whose cost is per program and not per element."""

# Few heads: many small programs to fill the SMs. Many: larger tiles, which repeat the q and k work of a head less.
FEW_HEADS = LaunchConfig(block_v=32, num_warps=4, rows_per_thread=2)
SOME_HEADS = LaunchConfig(block_v=64, num_warps=8, rows_per_thread=2, max_registers=128)
MANY_HEADS = LaunchConfig(block_v=64, num_warps=4, rows_per_thread=2)
MANY_HEADS_LONG_DRAFT = LaunchConfig(block_v=128, num_warps=8, rows_per_thread=4, max_registers=128)


def default_verify_config(shape: KdaShape, batch: int, draft_tokens: int, device: torch.device) -> LaunchConfig:
    """Configuration of a verify of ``batch`` requests of ``draft_tokens`` tokens on ``device``.

    Fused+ring without error counters in us at B = 1 / 4 / 16 / 64 / 256, T = 4: 2.97 / 3.47 / 5.91 / 16.7 / 54.0, the
    portable kernel 5.8 / 6.4 / 10.3 / 34.4 / 123. The limits lie between the measured batch sizes, the upper one where
    SOME_HEADS would need a second wave of programs on 132 SMs.
    """
    backend = current_target(device)[0]
    if backend == "interpreter":
        return WHOLE_HEAD
    if backend != "cuda":
        return PORTABLE
    heads = batch * shape.num_v_heads
    if heads <= (64 if draft_tokens <= 4 else 32):
        return FEW_HEADS
    if heads <= 192:
        return SOME_HEADS
    if draft_tokens <= 4:
        return MANY_HEADS
    return MANY_HEADS_LONG_DRAFT if shape.head_v_dim == 128 else SOME_HEADS


def default_fold_config(device: torch.device) -> LaunchConfig:
    """Configuration of a fold on ``device``: one warp of 16 rows is the fastest at every batch size measured."""
    return WHOLE_HEAD if current_target(device)[0] == "interpreter" else PORTABLE
