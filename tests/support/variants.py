"""Run as a program, without the interpreter: the compiled variants that batch sizes and slot counts make.

Compiles every op for sm90 at each batch size and slot count, launching nothing, and prints one JSON line per kernel,
constants and options: its name, and how many times it was compiled.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from kda_kernels import (
    KdaShape,
    LaunchConfig,
    LayerParams,
    LayerState,
    Ring,
    Snapshots,
    fold,
    gather_conv,
    host_checks,
    new_error_counts,
    scatter_conv,
    scatter_snapshots,
    verify_fused,
    verify_unfused,
)
from kda_kernels.aot import capture

BATCH_SIZES = (1, 2, 3, 16, 256)
SLOT_COUNTS = (1, 5, 16, 400)
# The fewest heads and tokens: strides that batch size or slots could make 1, or a multiple of 16 and then not.
SHAPE, T, L = KdaShape(1, 1, 64, 64), 1, 3
CONFIGS = (LaunchConfig(), LaunchConfig(32, 4, rows_per_thread=2))


def run_all(batch: int, slots: int) -> None:
    """Call every op once per record and configuration."""
    n, d, bf16 = batch * T, SHAPE.conv_dim, torch.bfloat16
    # Transposed: at B = 1 the row stride is 1.
    mixed_qkv, a, b = (torch.zeros(size, n, dtype=bf16).T.contiguous() for size in (d, 64, 1))
    scale = 1 if batch == 1 else 0.125  # an int is as good as a float
    params = LayerParams(torch.zeros(d, 4, dtype=bf16), None, torch.zeros(1), torch.zeros(64), scale=scale)
    state = LayerState.allocate(SHAPE, slots=slots, rows=batch, steps=T, dtype=bf16, device="cpu")
    ring = Ring.allocate(SHAPE, slots=slots, length=L, dtype=bf16, device="cpu")
    snapshots = Snapshots.allocate(SHAPE, rows=batch, steps=T, device="cpu")
    for record in (ring, snapshots):
        for config in CONFIGS:
            for op in (verify_fused, verify_unfused):
                op(
                    mixed_qkv, a, b, shape=SHAPE, params=params, state=state, record=record,
                    slots=torch.zeros(batch, dtype=torch.int32), draft_tokens=T, errors=new_error_counts("cpu"),
                    config=config,
                )  # fmt: skip
    for layers in (1, 3):
        state = LayerState.allocate(
            SHAPE, slots=slots, rows=batch, steps=T, dtype=bf16, device="cpu", num_layers=layers
        )
        ring = Ring.allocate(SHAPE, slots=slots, length=L, dtype=bf16, device="cpu", num_layers=layers)
        snapshots = Snapshots.allocate(SHAPE, rows=batch, steps=T, device="cpu", num_layers=layers)
        rows: dict[str, Any] = {
            "slots": torch.zeros(batch, dtype=torch.int32), "accept_lens": torch.zeros(batch, dtype=torch.int32),
            "draft_tokens": T, "errors": new_error_counts("cpu"),
        }  # fmt: skip
        for config in CONFIGS:
            fold(state.ssm_state, ring, shape=SHAPE, config=config, **rows)
        scatter_conv(state.conv_state, state.conv_window, **rows)
        scatter_snapshots(state.ssm_state, snapshots, **rows)
        compact = LayerState.allocate(
            SHAPE, slots=slots, rows=0, steps=0, dtype=bf16, device="cpu", num_layers=layers, compact_window=True
        )
        gather_conv(compact.conv_state, compact.kept_inputs, **rows)
        # The notes of layers also lie at odd multiples of 8 bytes, what has few values a head (b, A_log, beta) at any
        # of its elements. Constants of their own: no errors, indices ready.
        b_of_layers, rates = torch.zeros(layers, n, 1, dtype=bf16), torch.zeros(layers, 1)
        for layer in range(layers):
            own = dataclasses.replace(params, A_log=rates[layer])
            for config in CONFIGS:
                for op in (verify_fused, verify_unfused):
                    op(
                        mixed_qkv, a, b_of_layers[layer], shape=SHAPE, params=own, state=compact.layer(layer),
                        record=ring.layer(layer), slots=torch.zeros(batch, dtype=torch.int32), draft_tokens=T,
                        config=config, indices_ready=True,
                    )  # fmt: skip


def variants() -> Iterator[tuple[str, int]]:
    """Kernel name and number of compilations, for each kernel with its constants and options."""
    programs: dict[Any, set[str]] = defaultdict(set)
    with host_checks(False), capture("sm90") as compiled:
        for batch in BATCH_SIZES:
            for slots in SLOT_COUNTS:
                run_all(batch, slots)
        for one in compiled:
            key = (one.kernel, repr(one.constexprs), repr(one.options))
            programs[key].add(one.hash)
    for (kernel, _, _), different in programs.items():
        yield kernel, len(different)


if __name__ == "__main__":
    for line in variants():
        sys.stdout.write(json.dumps(line) + "\n")
