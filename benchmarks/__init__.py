"""The asv suite: latencies and ratios of the ring lanes, one value per cell, lower is better.

Values come from a sweep of `kda sweep`: replayed from the JSON file that KDA_SWEEP_JSON names, or else measured once
where a GPU is. Without either every cell is NaN, which asv shows as skipped. Cells that a replayed sweep lacks are NaN
too. docs/measuring.md says how results are stored and read.

asv imports this package in one process per benchmark and parameter: nothing here may import torch.
"""

from __future__ import annotations

OURS = "kda"
LANES = ("unfused+ring", "fused+ring")
DRAFT_TOKENS = (4, 8)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

SOURCE = "KDA_SWEEP_JSON"
"""Environment variable: path of a sweep's JSON."""

# What the history is about. A sweep of anything else would draw its values into the same lines.
SETTINGS = {
    "kind": "verify", "dtype": "bf16", "lower_bound": -5.0, "bias": True, "hot": False,
    "shape": {"num_heads": 8, "num_v_heads": 8, "head_k_dim": 128, "head_v_dim": 128},
}  # fmt: skip

Cells = dict[tuple[str, int, int], float]
"""(lane, T, B) -> microseconds per layer."""
