"""Fold for NVIDIA GPUs with explicit layouts: the same helpers, so the same bits, as the plain Triton kernel.

A fold is a copy of the state with some arithmetic on the way, so it is built to keep bytes moving:

* Once the slot and the accept length are known, everything is loaded at once: the records of all accepted tokens as
  one tile each, then the program's rows of the state. Norms and decays are computed while the state is on its way.
* The state tile has 8 lanes along K and ``ROWS_PER_THREAD`` consecutive rows per thread (see `verify`): three shuffles
  a sum instead of five. What a step needs goes through shared memory once.
* Steps are a loop, not unrolled: the accept length is known at run time only, and small code starts faster.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._gluon.layouts import packed, row_layout, state_layout
from kda_kernels._triton.arithmetic import delta_step, dot_k, in_layout, inverse_norm
from kda_kernels._triton.batches import count_length_error, load_range
from kda_kernels._triton.common import (
    count_accept_error,
    count_slot_error,
    load_accept,
    load_slot,
    load_track,
    pdl_wait,
)


@gluon.jit
def row_by_row(tile):
    """A [rows, columns] tile of shared memory as [rows, 1, columns]: ``.index(t)`` is row t, for a run-time t."""
    return tile._reinterpret(tile.dtype, [tile.shape[0], 1, tile.shape[1]], tile.layout)


@gluon.jit
def record_buffers(TOKENS: gl.constexpr, K: gl.constexpr, BLOCK_V: gl.constexpr):
    """Shared memory for `stage_records`: k, decay, v and beta of TOKENS records."""
    return (
        gl.allocate_shared_memory(gl.float32, [TOKENS, K], packed(2)),
        gl.allocate_shared_memory(gl.float32, [TOKENS, K], packed(2)),
        gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_V], packed(2)),
        gl.allocate_shared_memory(gl.float32, [TOKENS, 1], packed(2)),
    )


@gluon.jit
def stage_records(k, g, v, beta, k_shared, decay_shared, v_shared, beta_shared):
    """What the steps need of the records, into shared memory: normalised k, exp(g), v and beta, all fp32."""
    k = k.to(gl.float32)
    k_shared.store(k * in_layout(inverse_norm(dot_k(k, k)), gl.SliceLayout(1, k.type.layout))[:, None])
    decay_shared.store(gl.exp(g))
    v_shared.store(v.to(gl.float32))
    beta_shared.store(beta)


@gluon.jit(
    # ring_beta_layer_pitch: slots * HV * L, a multiple of 16 or not by the number of slots
    do_not_specialize=["num_slots", "batch", "limit", "draft_tokens", "ring_beta_layer_pitch"],
    do_not_specialize_on_alignment=["slots", "accept_lens", "track_slots", "track_steps", "errors", "starts"],
)
def fold_gluon_kernel(
    ssm_state, ssm_layer_pitch, ssm_pitch,  # [layers, slots, HV, V, K] fp32, updated in place
    raw_v, raw_v_layer_pitch, raw_v_pitch,  # [layers, slots, HV, L, V]
    raw_k, raw_k_layer_pitch, raw_k_pitch,  # [layers, slots, H, L, K]
    ring_g, ring_g_layer_pitch, ring_g_pitch,  # [layers, slots, HV, L, K] fp32
    ring_beta, ring_beta_layer_pitch, ring_beta_pitch,  # [layers, slots, HV, L] fp32
    slots, accept_lens, track_slots, track_steps, errors,
    num_slots, batch, limit,
    starts, draft_tokens,  # [B+1] or None; the integer goes with it
    L: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    HAS_TRACK: gl.constexpr, COUNT: gl.constexpr, PDL: gl.constexpr,
    TOKENS: gl.constexpr, ROWS_PER_THREAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Arguments as `fold_kernel`; ``TOKENS``, a power of two from 2 on, is at least ``limit``."""
    NUM_V: gl.constexpr = V // BLOCK_V
    STATE: gl.constexpr = state_layout(ROWS_PER_THREAD, WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(1, STATE)
    KEYS: gl.constexpr = row_layout(TOKENS, K, WARPS, 4)  # 4: the reduction tree's groups
    GATE: gl.constexpr = row_layout(TOKENS, K, WARPS, 1)
    VALUE: gl.constexpr = row_layout(TOKENS, BLOCK_V, WARPS, 1)
    BETA: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [1, 0])

    pid = gl.program_id(0)
    i_v = pid % NUM_V
    i_hv = (pid // NUM_V) % HV
    i_n = (pid // (NUM_V * HV)) % batch
    i_layer = (pid // (NUM_V * HV) // batch).to(gl.int64)
    i_h = i_hv // (HV // H)

    k_token = gl.arange(0, TOKENS, gl.SliceLayout(1, KEYS))[:, None]
    k_k = gl.arange(0, K, gl.SliceLayout(0, KEYS))[None, :]
    g_token = gl.arange(0, TOKENS, gl.SliceLayout(1, GATE))[:, None]
    g_k = gl.arange(0, K, gl.SliceLayout(0, GATE))[None, :]
    v_token = gl.arange(0, TOKENS, gl.SliceLayout(1, VALUE))[:, None]
    v_v = i_v * BLOCK_V + gl.arange(0, BLOCK_V, gl.SliceLayout(0, VALUE))[None, :]
    b_token = gl.arange(0, TOKENS, gl.SliceLayout(1, BETA))[:, None]
    state_v = i_v * BLOCK_V + gl.arange(0, BLOCK_V, ROWS)
    state_k = gl.arange(0, K, gl.SliceLayout(0, STATE))
    # A layer's base addresses do not depend on what is loaded next.
    p_k = raw_k + i_layer * raw_k_layer_pitch + (i_h * L + k_token) * K + k_k
    p_g = ring_g + i_layer * ring_g_layer_pitch + (i_hv * L + g_token) * K + g_k
    p_v = raw_v + i_layer * raw_v_layer_pitch + (i_hv * L + v_token) * V + v_v
    p_beta = ring_beta + i_layer * ring_beta_layer_pitch + i_hv * L + b_token
    p_layer = ssm_state + i_layer * ssm_layer_pitch + i_hv * V * K + state_v[:, None] * K + state_k[None, :]

    pdl_wait(PDL)
    first = pid == i_n * (NUM_V * HV)
    slot, usable = load_slot(slots, i_n, num_slots)
    accept, valid = load_accept(accept_lens, i_n, limit)
    if starts is not None:
        _, length, range_usable = load_range(starts, i_n, draft_tokens)
        usable = usable & range_usable
        valid = valid & (accept <= length)  # records past the request's own are older ones
    if not (usable & valid & (accept > 0)):
        count_slot_error(errors, slot, num_slots, first, COUNT)
        if starts is not None:
            count_length_error(errors, range_usable, first, COUNT)
        count_accept_error(errors, usable & (not valid), first, COUNT)
        return

    # No byte of a record past the accepted prefix is read.
    k = gl.load(p_k + slot * raw_k_pitch, mask=(k_token < accept) & (k_k >= 0), other=0.0)
    g = gl.load(p_g + slot * ring_g_pitch, mask=(g_token < accept) & (g_k >= 0), other=0.0)
    v = gl.load(p_v + slot * raw_v_pitch, mask=(v_token < accept) & (v_v >= 0), other=0.0)
    beta = gl.load(p_beta + slot * ring_beta_pitch, mask=b_token < accept, other=0.0)
    p_state = p_layer + slot * ssm_pitch
    S = gl.load(p_state)
    # All loads in flight before the first result is waited for. Left alone, the compiler issues the state's only after
    # the norms: the barrier keeps them above it, and a block of its own (always entered) keeps the norms below it. It
    # also means that a row which two warps hold (more warps than rows) is loaded by both before either stores it.
    tl.debug_barrier()
    k_shared, decay_shared, v_shared, beta_shared = record_buffers(TOKENS, K, BLOCK_V)
    if batch > 0:
        stage_records(k, g, v, beta, k_shared, decay_shared, v_shared, beta_shared)
    if HAS_TRACK:
        track_slot, track_step, track = load_track(
            track_slots, track_steps, i_n, accept, num_slots, errors, first, COUNT
        )
    k_rows = row_by_row(k_shared)
    decay_rows = row_by_row(decay_shared)
    v_rows = row_by_row(v_shared)
    beta_rows = row_by_row(beta_shared)
    tl.debug_barrier()  # here, or the compiler puts it into the loop
    for t in range(0, accept.to(gl.int32)):
        k_t = k_rows.index(t).load(STATE)
        decay = decay_rows.index(t).load(STATE)
        v_t = gl.sum(v_rows.index(t).permute([1, 0]).load(STATE), 1)
        beta_t = gl.sum(beta_rows.index(t).load(STATE), 1)
        S = delta_step(S, k_t, v_t, decay, beta_t, ROWS)
        if HAS_TRACK:
            if track & (t == track_step):
                gl.store(p_layer + track_slot * ssm_pitch, S)
    gl.store(p_state, S)
