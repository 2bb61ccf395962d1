"""Shared memory of every SM left full of NaN, for whatever kernel runs next to find where it reads before it writes."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._gluon.layouts import packed

FLOATS = 16_384
"""64 KB a program: three fit an SM of 227 KB at a time, and cover most of it."""

WARPS = 8


@gluon.jit
def _fill(out, FLOATS: gl.constexpr, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    values = gl.full([FLOATS], float("nan"), gl.float32, LAYOUT)
    shared = gl.allocate_shared_memory(gl.float32, [FLOATS], packed(1), values)
    gl.store(out + gl.arange(0, FLOATS, LAYOUT), shared.load(LAYOUT))


def poison_shared_memory(device: str) -> None:
    """Fill it. Kernels of the same stream find it so, as far as nothing else runs between."""
    out = torch.empty(FLOATS, device=device)
    programs = 6 * torch.cuda.get_device_properties(device).multi_processor_count
    _fill[(programs,)](out, FLOATS, WARPS, num_warps=WARPS)
    assert bool(out.isnan().all())
