"""Chain verify for NVIDIA GPUs with explicit layouts: the same helpers, so the same bits, as the plain Triton kernel.

What the layouts buy (Triton picks its own and cannot be told):

* The state tile has 8 lanes along K and ``ROWS_PER_THREAD`` consecutive rows per thread: a sum over K is two register
  adds and three shuffles, where 32 lanes along K need five, and an SM issues one warp shuffle per clock.
* q and k of all T tokens are one [2T, K] tile, one warp per row: conv, SiLU and norm need no barrier. What a step needs
  (k, q, decay, v, beta) goes through shared memory once.
* Everything is loaded before anything is stored, but for the state with STATE_LAST: inputs, then the state tile.

What was tried and did not pay (skewed tiles, staged columns, several tiles per program, a staggered first wave) is in
docs/measured-facts.md.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._gluon.chunked import prepare_chunk, store_chunk
from kda_kernels._gluon.inputs import (
    clamped,
    load_columns,
    load_taps,
    prefetch_l2,
    qk_rows,
    store_window,
    value_of,
)
from kda_kernels._gluon.layouts import packed, row_layout, state_layout
from kda_kernels._gluon.pending import fold_records, load_records
from kda_kernels._triton.arithmetic import beta_of, delta_step, dot_k, in_layout, inverse_norm, log_decay
from kda_kernels._triton.common import (
    count_accept_error,
    count_row_error,
    count_slot_error,
    load_row,
    load_slot,
    note_inputs,
    pdl_wait,
)
from kda_kernels._triton.pending import load_pending, records_to_fold, store_folded


@gluon.jit(
    do_not_specialize=["num_slots", "num_rows"],
    do_not_specialize_on_alignment=[
        "slots", "rows", "errors", "parity", "pending", "epoch", "kept_inputs", "b", "A_log", "ring_beta", "folded",
    ],
)
def verify_gluon_kernel(
    x, x_stride,  # [B*T, D]: mixed_qkv (fused) or the conv kernel's output
    conv_weight, conv_bias,  # [D, 4], [D]
    conv_state, conv_state_pitch,  # [slots, 3, D]
    window, window_pitch, kept_inputs,  # [rows, steps, 3, D] or None; [3] or None
    a, a_stride, b, b_stride,  # [B*T, HV*K], [B*T, HV]
    A_log, dt_bias, lower_bound,  # [HV], [HV*K]
    ssm_state, ssm_state_pitch,  # [slots, HV, V, K] fp32
    snapshots, snapshots_pitch,  # [rows, steps, HV, V, K] fp32
    raw_v, raw_v_pitch, raw_k, raw_k_pitch,  # [slots, HV, L, V], [slots, H, L, K]
    ring_g, ring_g_pitch, ring_beta, ring_beta_pitch,  # [slots, HV, L, K], [slots, HV, L] fp32
    out,  # [B*T, HV, V]
    slots, rows, errors,  # [B], [B], [len(ErrorKind)]
    num_slots, num_rows, scale,
    parity, pending, epoch, folded, folded_pitch,  # [slots], or None; [slots, HV, V // 8]
    T: gl.constexpr, L: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BLOCK_V: gl.constexpr, FUSED: gl.constexpr, RING: gl.constexpr, HAS_BIAS: gl.constexpr,
    SAFE_GATE: gl.constexpr, CONTRACT: gl.constexpr, HAS_ROWS: gl.constexpr, COUNT: gl.constexpr, PDL: gl.constexpr,
    CHUNKED: gl.constexpr, INDICES_READY: gl.constexpr,
    ROWS_PER_THREAD: gl.constexpr, WARPS: gl.constexpr, STATE_FIRST: gl.constexpr, PREFETCH: gl.constexpr,
    TOKEN_BLOCKS: gl.constexpr, STATE_LAST: gl.constexpr,
):  # fmt: skip
    TP: gl.constexpr = max(2, triton.next_power_of_2(T))
    # Order of the q | k tile's rows, which decides what a thread's rows can share: short drafts do better with taps,
    # long ones with addresses.
    PAIRED: gl.constexpr = TP <= 4
    PENDING: gl.constexpr = pending is not None
    D: gl.constexpr = 2 * H * K + HV * V
    NUM_V: gl.constexpr = V // BLOCK_V
    ACT: gl.constexpr = out.dtype.element_ty
    STATE: gl.constexpr = state_layout(ROWS_PER_THREAD, WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(1, STATE)
    QK: gl.constexpr = row_layout(2 * TP, K, WARPS, 4)  # 4: the reduction tree's groups
    GATE: gl.constexpr = row_layout(TP, K, WARPS, 1)
    VALUE: gl.constexpr = row_layout(TP, BLOCK_V, WARPS, 1)
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    pid = gl.program_id(0)
    i_v = pid % NUM_V
    i_hv = (pid // NUM_V) % HV
    i_n = pid // (NUM_V * HV)
    i_h = i_hv // (HV // H)

    # Rows of the tiles of inputs are tokens; those of the q | k tile are q and k of a token in turn
    # (PAIRED), or q's tokens and then k's.
    qk_row = gl.arange(0, 2 * TP, gl.SliceLayout(1, QK))[:, None]
    qk_k = gl.arange(0, K, gl.SliceLayout(0, QK))[None, :]
    if PAIRED:
        qk_token = qk_row // 2
        is_k = qk_row % 2 == 1
    else:
        qk_token = qk_row & (TP - 1)
        is_k = qk_row >= TP
    qk_channels = gl.where(is_k, H * K, 0) + i_h * K + qk_k
    v_token = gl.arange(0, TP, gl.SliceLayout(1, VALUE))[:, None]
    v_v = i_v * BLOCK_V + gl.arange(0, BLOCK_V, gl.SliceLayout(0, VALUE))[None, :]
    v_channels = 2 * H * K + i_hv * V + v_v + v_token * 0
    g_token = gl.arange(0, TP, gl.SliceLayout(1, GATE))[:, None]
    g_k = gl.arange(0, K, gl.SliceLayout(0, GATE))[None, :]
    b_token = gl.arange(0, TP, TOKENS)
    state_v = i_v * BLOCK_V + gl.arange(0, BLOCK_V, ROWS)
    state_k = gl.arange(0, K, gl.SliceLayout(0, STATE))

    # Layer parameters: no kernel of a step writes them, so they may be read before the wait.
    qk_taps = ()
    v_taps = ()
    if FUSED:
        qk_taps = load_taps(conv_weight, conv_bias, qk_channels, QK, HAS_BIAS)
        v_taps = load_taps(conv_weight, conv_bias, v_channels, VALUE, HAS_BIAS)
    gate_bias = gl.load(dt_bias + i_hv * K + g_k)
    rate_log = gl.load(A_log + i_hv)

    if not INDICES_READY:
        pdl_wait(PDL)
    slot, slot_usable = load_slot(slots, i_n, num_slots)
    row, row_usable = load_row(rows, i_n, num_rows, HAS_ROWS)
    if INDICES_READY:
        if PREFETCH:
            # Nothing can go stale: L2 is where all SMs and the preceding kernel's stores meet. No branch before a wait.
            tile = slot * ssm_state_pitch + (i_hv * V + i_v * BLOCK_V) * K
            prefetch_l2(ssm_state + tile, slot_usable, 4 * BLOCK_V * K)
        pdl_wait(PDL)
    if kept_inputs is not None:
        note_inputs(kept_inputs, pid == 0, x, x_stride, gl.num_programs(0) // (HV * NUM_V) * T)
    token = i_n.to(gl.int64) * T
    p_out = out + (token * HV + i_hv) * V + state_v
    usable = slot_usable & row_usable
    ring_slot = slot
    if PENDING:
        ring_slot, pending_slot, records, pending_valid = load_pending(parity, pending, slot, usable, num_slots, L)
        now = gl.load(epoch + slot, mask=usable, other=0)
        count_pending = usable & (not pending_valid)
        usable = usable & pending_valid
    if not usable:
        first = (i_hv == 0) & (i_v == 0)
        count_slot_error(errors, slot, num_slots, first, COUNT)
        count_row_error(errors, row, num_rows, first, HAS_ROWS, COUNT)
        if PENDING:
            count_accept_error(errors, count_pending, first, COUNT)
        for t in gl.static_range(T):
            gl.store(p_out + t * HV * V, gl.zeros([BLOCK_V], ACT, ROWS))
        return

    x += token * x_stride
    history = x
    if FUSED:
        history = conv_state + slot * conv_state_pitch
    gate_input = gl.load(a + (token + clamped(g_token, T, TP)) * a_stride + i_hv * K + g_k)
    beta_input = gl.load(b + (token + clamped(b_token, T, TP)) * b_stride + i_hv)
    qk_columns = load_columns(x, x_stride, history, clamped(qk_token, T, TP), qk_channels, D, FUSED)
    v_columns = load_columns(x, x_stride, history, clamped(v_token, T, TP), v_channels, D, FUSED)
    if PENDING:
        # A repeated verify loads records that are in the state already: to ask first would hold up every load from here
        # on for as long as the answer takes.
        pending_records = load_records(
            raw_k + pending_slot * raw_k_pitch + i_h * L * K, ring_g + pending_slot * ring_g_pitch + i_hv * L * K,
            raw_v + pending_slot * raw_v_pitch + i_hv * L * V + i_v * BLOCK_V,
            ring_beta + pending_slot * ring_beta_pitch + i_hv * L, records, L, K, V, BLOCK_V, WARPS,
        )  # fmt: skip
    head = i_hv * V * K + state_v[:, None] * K + state_k[None, :]
    p_state = ssm_state + slot * ssm_state_pitch + head
    if STATE_LAST:
        # It comes by way of L2 and is loaded where it is needed: till then it holds no registers, which lets one more
        # program onto an SM.
        if not (INDICES_READY and PREFETCH):
            tile = slot * ssm_state_pitch + (i_hv * V + i_v * BLOCK_V) * K
            prefetch_l2(ssm_state + tile, slot_usable, 4 * BLOCK_V * K)
    else:
        S = gl.load(p_state)
    if PENDING:
        p_folded = folded + slot * folded_pitch + (i_hv * V + i_v * BLOCK_V) // 8
        records = records_to_fold(records, p_folded, now)
    if STATE_FIRST:
        # Left alone, the compiler issues the state's loads after the convolution, which waits for the inputs. So the
        # biases go a way through shared memory, for its barrier: no load can be scheduled after it, and no arithmetic
        # that needs a bias before it.
        gate_kept = gl.allocate_shared_memory(
            gl.float32, [TP, K], packed(2), gate_bias + gl.zeros([TP, K], gl.float32, GATE)
        )  # fmt: skip
        if FUSED:
            qk_kept = gl.allocate_shared_memory(gl.float32, [2 * TP, K], packed(2), qk_taps[0])
            v_kept = gl.allocate_shared_memory(gl.float32, [TP, BLOCK_V], packed(2), v_taps[0])
            qk_taps = (qk_kept.load(QK), qk_taps[1], qk_taps[2], qk_taps[3], qk_taps[4])
            v_taps = (v_kept.load(VALUE), v_taps[1], v_taps[2], v_taps[3], v_taps[4])
        gate_bias = gate_kept.load(GATE)
    qk_raw = value_of(qk_columns, qk_taps, FUSED, CONTRACT)
    v_raw = value_of(v_columns, v_taps, FUSED, CONTRACT)
    g = log_decay(gate_input.to(gl.float32), gate_bias, rate_log, lower_bound, SAFE_GATE)
    beta = beta_of(beta_input.to(gl.float32))

    # What the v tiles of a head share is written by one of them each, spread over the tiles.
    qk_owned = (qk_token < T) & (i_hv % (HV // H) == 0) & (qk_row % NUM_V == i_v) & (qk_k >= 0)
    v_mask = (v_token < T) & (v_v >= 0)
    if FUSED and window is not None:
        p_window = window + row * window_pitch
        store_window(p_window + qk_token * (3 * D), qk_columns, qk_channels, qk_owned, D)
        store_window(p_window + v_token * (3 * D), v_columns, v_channels, v_mask, D)
    if RING:
        # Records past the ring are dropped, not written into the next head's.
        KEPT: gl.constexpr = min(T, L)
        p_k = raw_k + ring_slot * raw_k_pitch + (i_h * L + qk_token) * K + qk_k
        gl.store(p_k, qk_raw, mask=qk_owned & is_k & (qk_token < KEPT))
        p_v = raw_v + ring_slot * raw_v_pitch + (i_hv * L + v_token) * V + v_v
        gl.store(p_v, v_raw, mask=v_mask & (v_token < KEPT))
        p_g = ring_g + ring_slot * ring_g_pitch + (i_hv * L + g_token) * K + g_k
        gl.store(p_g, g, mask=(g_token < KEPT) & (g_token % NUM_V == i_v) & (g_k >= 0))
        gl.store(ring_beta + ring_slot * ring_beta_pitch + i_hv * L + b_token, beta, mask=(b_token < KEPT) & (i_v == 0))

    qk = qk_raw.to(gl.float32)
    qk = qk * in_layout(inverse_norm(dot_k(qk, qk)), gl.SliceLayout(1, QK))[:, None]
    qk = gl.where(is_k, qk, qk * scale)
    qk_shared = gl.allocate_shared_memory(gl.float32, [2 * TP, K], packed(2), qk)
    decay_shared = gl.allocate_shared_memory(gl.float32, [TP, K], packed(2), gl.exp(g))
    v_shared = gl.allocate_shared_memory(gl.float32, [TP, BLOCK_V], packed(2), v_raw.to(gl.float32))
    beta_shared = gl.allocate_shared_memory(gl.float32, [TP], packed(1), beta)
    if STATE_FIRST:
        # Memory that is reused up to here would take another barrier.
        gate_kept._keep_alive()
        if FUSED:
            qk_kept._keep_alive()
            v_kept._keep_alive()
    if PENDING:
        if records > 0:
            S = fold_records(S, pending_records, records, STATE)
            store_folded(p_state, S, p_folded, state_v - i_v * BLOCK_V, now)
    if CHUNKED:
        q_rows, k_rows = qk_rows(qk_shared, PAIRED)
        w_shared, c_shared = prepare_chunk(q_rows, k_rows, decay_shared, beta_shared, T, TP, K, WARPS, TOKEN_BLOCKS)
        if STATE_LAST:
            S = gl.load(p_state)
        store_chunk(S, w_shared, c_shared, v_shared, p_out, HV * V, T, TP, STATE, WARPS)
        return
    for t in gl.static_range(T):
        q = qk_shared.slice(2 * t if PAIRED else t, 1).load(STATE)
        k = qk_shared.slice(2 * t + 1 if PAIRED else TP + t, 1).load(STATE)
        decay = decay_shared.slice(t, 1).load(STATE)
        v = gl.sum(v_shared.slice(t, 1).permute([1, 0]).load(STATE), 1)
        beta_t = gl.sum(beta_shared.reshape([1, TP]).slice(t, 1, 1).load(STATE), 1)
        S = delta_step(S, k, v, decay, beta_t, ROWS)
        gl.store(p_out + t * HV * V, in_layout(dot_k(S, q), ROWS).to(ACT))
        if not RING:
            gl.store(snapshots + row * snapshots_pitch + t * HV * V * K + head, S)
