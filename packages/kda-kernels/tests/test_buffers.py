"""Byte counts of the allocated groups are those that the shape gives, with and without layers."""

from __future__ import annotations

import pytest
import torch

from kda_kernels import KdaShape, LayerState, Ring, Snapshots

SHAPES = [KdaShape(1, 1, 64, 64), KdaShape(2, 6, 128, 64), KdaShape(1, 2, 64, 128)]
SLOTS, ROWS, STEPS, LENGTH = 5, 3, 4, 7


@pytest.mark.parametrize("num_layers", [None, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_num_bytes(shape: KdaShape, dtype: torch.dtype, num_layers: int | None) -> None:
    layers = num_layers or 1
    common = {"device": "cpu", "num_layers": num_layers}
    ring = Ring.allocate(shape, slots=SLOTS, length=LENGTH, dtype=dtype, **common)
    snapshots = Snapshots.allocate(shape, rows=ROWS, steps=STEPS, **common)
    state = LayerState.allocate(shape, slots=SLOTS, rows=ROWS, steps=STEPS, dtype=dtype, **common)
    assert ring.num_bytes == layers * SLOTS * LENGTH * shape.ring_bytes_per_token(dtype)
    assert snapshots.num_bytes == layers * ROWS * STEPS * shape.snapshot_bytes_per_token()
    assert state.num_bytes == layers * (
        SLOTS * shape.state_bytes_per_slot(dtype) + ROWS * STEPS * shape.window_bytes_per_token(dtype)
    )
    compact = LayerState.allocate(
        shape, slots=SLOTS, rows=ROWS, steps=STEPS, dtype=dtype, compact_window=True, **common
    )
    assert compact.num_bytes == layers * (SLOTS * shape.state_bytes_per_slot(dtype) + 3 * 8)
    assert compact.conv_window is None
    with pytest.raises(ValueError, match="commit it with gather_conv"):
        _ = compact.windows
    for group in (ring, snapshots, state, compact):
        if num_layers:
            assert group.layer(0).num_bytes * num_layers == group.num_bytes


def test_bytes_by_hand() -> None:
    """H = 1, HV = 2, K = 64, V = 128 in 16 bits: the figures without the formulas."""
    shape = KdaShape(num_heads=1, num_v_heads=2, head_k_dim=64, head_v_dim=128)
    assert shape.ring_bytes_per_token(torch.bfloat16) == 2 * (256 + 64) + 4 * (128 + 2)
    assert shape.snapshot_bytes_per_token() == 65536
    assert shape.window_bytes_per_token(torch.bfloat16) == 3 * 384 * 2
    assert shape.state_bytes_per_slot(torch.bfloat16) == 65536 + 2304
