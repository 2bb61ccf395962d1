"""Launch configurations for callers that name none. No choice here changes a bit, only speed.

Figures: NVIDIA H200, T = 3, 4, 6 and 8 (chunked 5 and 7 too), H = HV = 8, K = V = 128, bf16, L2-cold
(docs/measured-facts.md).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kda_kernels._launch import current_target
from kda_kernels.shapes import MAX_GLUON_CHUNKED_TOKENS, KdaShape, LaunchConfig

PORTABLE = LaunchConfig()
PORTABLE_LONG_CHUNK = LaunchConfig(num_warps=4)
"""Above 8 tokens in the chunked form, which one warp has too few registers for."""

WHOLE_HEAD = LaunchConfig(block_v=128)
"""For the interpreter, whose cost is per program and not per element."""

# Few heads: many small programs to fill the SMs, the state under way at once. Many: larger tiles, which repeat the q
# and k work of a head less; then it depends on the number of tokens whether arithmetic or loads come first.
LONE_HEADS = LaunchConfig(16, 4, rows_per_thread=1, state_first=True, prefetch=True)
FEW_HEADS = LaunchConfig(32, 4, rows_per_thread=2, state_first=True, prefetch=True)
FEW_HEADS_INPUTS_FIRST = replace(FEW_HEADS, state_first=False, prefetch=False)
FEW_HEADS_LONG_DRAFT = LaunchConfig(32, 8, rows_per_thread=1, state_first=True, prefetch=True)
SOME_HEADS = LaunchConfig(64, 8, rows_per_thread=2)
SOME_HEADS_STATE_FIRST = replace(SOME_HEADS, state_first=True)
FIVE_TO_AN_SM = LaunchConfig(32, 4, rows_per_thread=2, max_registers=96)
THREE_TO_AN_SM = replace(SOME_HEADS, max_registers=80)
MANY_HEADS = LaunchConfig(64, 4, rows_per_thread=4)
MANY_HEADS_STATE_FIRST = replace(MANY_HEADS, state_first=True)
MANY_HEADS_LONG_DRAFT = LaunchConfig(128, 8, rows_per_thread=4, max_registers=128)
MANY_HEADS_IN_BLOCKS = replace(MANY_HEADS, token_blocks=True)

WHOLE_HEADS_STATE_FIRST = LaunchConfig(128, 8, rows_per_thread=4, state_first=True)
WHOLE_HEADS_IN_BLOCKS = LaunchConfig(128, 8, rows_per_thread=4, token_blocks=True)
WHOLE_HEADS_IN_BLOCKS_STATE_FIRST = replace(WHOLE_HEADS_IN_BLOCKS, state_first=True)
FEW_HEADS_UNFUSED = LaunchConfig(32, 8, rows_per_thread=1)

_BY_HEADS: dict[str, dict[int, tuple[tuple[int, LaunchConfig], ...]]] = {
    "fused recurrent": {
        3: ((192, FEW_HEADS), (0, MANY_HEADS)),
        4: ((16, LONE_HEADS), (64, FEW_HEADS), (132, SOME_HEADS), (165, FIVE_TO_AN_SM), (0, MANY_HEADS_STATE_FIRST)),
        8: (
            (16, LONE_HEADS), (33, FEW_HEADS_LONG_DRAFT), (132, SOME_HEADS), (198, THREE_TO_AN_SM),
            (0, MANY_HEADS_LONG_DRAFT),
        ),
        0: ((16, LONE_HEADS), (33, FEW_HEADS_LONG_DRAFT), (132, SOME_HEADS), (0, MANY_HEADS_LONG_DRAFT)),
    },
    "fused chunked": {
        3: ((66, FEW_HEADS), (264, WHOLE_HEADS_STATE_FIRST), (0, MANY_HEADS_STATE_FIRST)),
        4: ((8, LONE_HEADS), (66, FEW_HEADS_INPUTS_FIRST), (264, MANY_HEADS), (0, MANY_HEADS_STATE_FIRST)),
        7: (
            (16, LONE_HEADS), (66, THREE_TO_AN_SM), (132, WHOLE_HEADS_IN_BLOCKS_STATE_FIRST),
            (0, WHOLE_HEADS_IN_BLOCKS),
        ),
        0: ((16, LONE_HEADS), (66, SOME_HEADS_STATE_FIRST), (0, MANY_HEADS_IN_BLOCKS)),
    },
    "unfused recurrent": {
        4: ((16, LONE_HEADS), (33, FEW_HEADS_UNFUSED), (132, SOME_HEADS_STATE_FIRST), (0, MANY_HEADS_STATE_FIRST)),
        0: ((16, LONE_HEADS), (132, SOME_HEADS_STATE_FIRST), (0, MANY_HEADS_STATE_FIRST)),
    },
    "unfused chunked": {
        4: ((16, LONE_HEADS), (33, SOME_HEADS_STATE_FIRST), (0, WHOLE_HEADS_STATE_FIRST)),
        0: ((16, LONE_HEADS), (132, SOME_HEADS), (0, MANY_HEADS_IN_BLOCKS)),
    },
    "fused recurrent, pending": {
        4: ((33, LONE_HEADS), (132, SOME_HEADS_STATE_FIRST), (0, MANY_HEADS)),
        0: ((16, LONE_HEADS), (33, FEW_HEADS_LONG_DRAFT), (132, WHOLE_HEADS_STATE_FIRST), (0, MANY_HEADS_LONG_DRAFT)),
    },
    "fused chunked, pending": {
        4: ((16, LONE_HEADS), (132, FEW_HEADS), (0, MANY_HEADS_STATE_FIRST)),
        0: ((16, LONE_HEADS), (33, FEW_HEADS), (132, WHOLE_HEADS_STATE_FIRST), (0, MANY_HEADS)),
    },
}  # fmt: skip
"""Up to T tokens (0: any) -> up to so many heads in the batch (0: any) -> configuration. The limits lie between the
measured batch sizes (8, 16, 64, 66 and 192 no more than that), some where programs need a second wave on 132 SMs: past
33 heads those of a quarter of a head with eight warps, one to an SM; past 132 those of half a head with eight warps,
two to an SM, and past 198 where they have registers for three; past 165 those of a quarter of a head with four warps,
five to an SM; past 264 those of a whole head. Unfused with a pending fold goes by the fused lane's; where it wins, in
large batches, the gate's table names its own."""


def default_verify_config(
    shape: KdaShape,
    batch: int,
    draft_tokens: int,
    device: torch.device,
    *,
    form: str = "recurrent",
    chains: bool = True,
    fused: bool = True,
    pending: bool = False,
) -> LaunchConfig:
    """Configuration of a verify of ``batch`` requests of ``draft_tokens`` tokens on ``device``.

    ``chains=False``: a ragged or tree batch, which only the portable kernel takes. ``pending``: it also folds the last
    round.
    """
    backend = current_target(device)[0]
    if backend == "interpreter":
        return WHOLE_HEAD
    long_chunk = form == "chunked" and draft_tokens > MAX_GLUON_CHUNKED_TOKENS
    if backend != "cuda" or long_chunk or not chains:
        return PORTABLE_LONG_CHUNK if long_chunk else PORTABLE
    heads = batch * shape.num_v_heads
    own, of_fused = (f"{lane} {form}{', pending' if pending else ''}" for lane in ("unfused", "fused"))
    by_tokens = _BY_HEADS.get(of_fused if fused else own, _BY_HEADS[of_fused])
    by_heads = next(choices for most, choices in by_tokens.items() if draft_tokens <= most or not most)
    config = next(config for most, config in by_heads if heads <= most or not most)
    return SOME_HEADS if config.block_v > shape.head_v_dim else config


FOLD_SHORT = LaunchConfig(8, 1, rows_per_thread=2)
FOLD_LONG = LaunchConfig(32, 4, rows_per_thread=2)


def default_fold_config(draft_tokens: int, device: torch.device) -> LaunchConfig:
    """Configuration of a fold of up to ``draft_tokens`` records a slot on ``device``."""
    backend = current_target(device)[0]
    if backend == "cuda":
        return FOLD_SHORT if draft_tokens <= 4 else FOLD_LONG
    return WHOLE_HEAD if backend == "interpreter" else PORTABLE
