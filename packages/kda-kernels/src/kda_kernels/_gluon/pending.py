"""Fold on verify in verify's Gluon kernel: what is pending, loaded with the inputs and replayed before the tokens."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._gluon.commit import record_buffers, row_by_row, stage_records
from kda_kernels._gluon.layouts import row_layout
from kda_kernels._triton.arithmetic import delta_step


@gluon.jit
def load_records(
    raw_k, ring_g, raw_v, ring_beta, records,
    L: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The first ``records`` records as tiles (k, g, v, beta), other rows 0. Pointers: at record 0 of head and tile."""
    TOKENS: gl.constexpr = max(2, triton.next_power_of_2(L))
    KEYS: gl.constexpr = row_layout(TOKENS, K, WARPS, 4)  # 4: the reduction tree's groups
    GATE: gl.constexpr = row_layout(TOKENS, K, WARPS, 1)
    VALUE: gl.constexpr = row_layout(TOKENS, BLOCK_V, WARPS, 1)
    BETA: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [1, 0])
    k_token = gl.arange(0, TOKENS, gl.SliceLayout(1, KEYS))[:, None]
    k_k = gl.arange(0, K, gl.SliceLayout(0, KEYS))[None, :]
    g_token = gl.arange(0, TOKENS, gl.SliceLayout(1, GATE))[:, None]
    g_k = gl.arange(0, K, gl.SliceLayout(0, GATE))[None, :]
    v_token = gl.arange(0, TOKENS, gl.SliceLayout(1, VALUE))[:, None]
    v_v = gl.arange(0, BLOCK_V, gl.SliceLayout(0, VALUE))[None, :]
    b_token = gl.arange(0, TOKENS, gl.SliceLayout(1, BETA))[:, None]
    k = gl.load(raw_k + k_token * K + k_k, mask=(k_token < records) & (k_k >= 0), other=0.0)
    g = gl.load(ring_g + g_token * K + g_k, mask=(g_token < records) & (g_k >= 0), other=0.0)
    v = gl.load(raw_v + v_token * V + v_v, mask=(v_token < records) & (v_v >= 0), other=0.0)
    beta = gl.load(ring_beta + b_token, mask=b_token < records, other=0.0)
    return k, g, v, beta


@gluon.jit
def fold_records(S, tiles, records, STATE: gl.constexpr):
    """S after the first ``records`` of `load_records`. Every thread has loaded its part of S when the first returns."""
    TOKENS: gl.constexpr = tiles[0].shape[0]
    K: gl.constexpr = tiles[0].shape[1]
    BLOCK_V: gl.constexpr = tiles[2].shape[1]
    ROWS: gl.constexpr = gl.SliceLayout(1, STATE)
    k_shared, decay_shared, v_shared, beta_shared = record_buffers(TOKENS, K, BLOCK_V)
    stage_records(tiles[0], tiles[1], tiles[2], tiles[3], k_shared, decay_shared, v_shared, beta_shared)
    k_rows = row_by_row(k_shared)
    decay_rows = row_by_row(decay_shared)
    v_rows = row_by_row(v_shared)
    beta_rows = row_by_row(beta_shared)
    # Here, or the compiler puts it into the loop. It also keeps a row that two warps hold from being stored by one
    # before the other has loaded it.
    tl.debug_barrier()
    for t in range(0, records):
        k = k_rows.index(t).load(STATE)
        decay = decay_rows.index(t).load(STATE)
        v = gl.sum(v_rows.index(t).permute([1, 0]).load(STATE), 1)
        beta = gl.sum(beta_rows.index(t).load(STATE), 1)
        S = delta_step(S, k, v, decay, beta, ROWS)
    return S
