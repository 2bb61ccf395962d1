"""The asv suites: what verify, commits, rounds, decisions, rings and calls cost, one value per cell, lower is better.

Values come from the files of `kda` commands: replayed from the file or folder that KDA_SWEEP_JSON names, or else
measured once per suite where that can be done. Cells that were not measured are NaN, which asv shows as skipped.
docs/measuring.md says how results are stored and read.

asv imports this package in every process that it starts for a cell: nothing here may import torch.
"""

from __future__ import annotations

import json
from pathlib import Path

OURS = "kda"
LANES = ("unfused+ring", "fused+ring")
OTHER_LANES = ("unfused", "fused", "unfused+ring chunked", "fused+ring chunked")
"""Lanes with snapshots, and the ring lanes in the chunked form."""

ROUND_LANES = ("unfused", "fused", *LANES)
MODES = ("ring", "snapshots")
FORMS = ("recurrent", "chunked")
DRAFT_TOKENS = (4, 8)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ACCEPT = 3
"""Accepted tokens, root included, in rounds and commits."""

SOURCE = "KDA_SWEEP_JSON"
"""Environment variable: a JSON file of one of the commands, or a folder of them."""

SHAPE = {"num_heads": 8, "num_v_heads": 8, "head_k_dim": 128, "head_v_dim": 128}
# What the history is about. A sweep of anything else would draw its values into the same lines.
SETTINGS = {"dtype": "bf16", "lower_bound": -5.0, "bias": True, "hot": False, "shape": SHAPE}
UNSET = ("indices_ready", "fold_on_verify")
"""Settings of a sweep that must not be on."""

HEAD_DIMS = (64, 128)
CALLS = (
    "verify_fused, ring", "verify_fused, snapshots", "verify_unfused, ring", "fold", "scatter_conv",
    "scatter_snapshots", "pool, fused+ring: begin, 8 x verify, commit", "pool, unfused+ring: begin, 8 x verify, commit",
    "(a remembered gate decision)", "(a remembered gate decision, record given)",
)  # fmt: skip
"""What `kda host-time` calls, as it names them."""

TURNS = {"first": "checked", "again": "replayed"}
"""Turn of a call -> its figure in the file of `kda host-time`."""

FIGURES = ("registers", "spills", "shared", "shuffles", "instructions")
"""What is kept of a compiled kernel, as `kda compile-report` names it."""


def compiled() -> dict[str, list[str]]:
    """Target -> "kernel configuration" of all that is compiled for it, by the checked-in budget."""
    budget = json.loads(Path(__file__).with_name("compile-budget.json").read_text(encoding="utf-8"))
    return {
        target: [f"{kernel} {config}" for kernel, configs in kernels.items() for config in configs]
        for target, kernels in budget["limits"].items()
    }


Key = tuple[str | int, ...]
Values = dict[Key, float]
"""A cell's parameters, as its suite has them -> its value."""
