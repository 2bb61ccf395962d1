"""Chain verify for NVIDIA GPUs with explicit layouts: the same helpers, so the same bits, as the plain Triton kernel.

What the layouts buy (Triton picks its own and cannot be told):

* The state tile has 8 lanes along K and ``ROWS_PER_THREAD`` consecutive rows per thread: a sum over K is two register
  adds and three shuffles, where 32 lanes along K need five, and an SM issues one warp shuffle per clock.
* q and k of all T tokens are one [2T, K] tile, one warp per row: conv, SiLU and norm need no barrier. What a step needs
  (k, q, decay, v, beta) goes through shared memory once; one barrier in the whole kernel.
* Everything is loaded before anything is stored: inputs, then the state tile.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._gluon.layouts import row_layout
from kda_kernels._triton.arithmetic import (
    beta_of,
    conv_silu,
    delta_step,
    dot_k,
    in_layout,
    inverse_norm,
    log_decay,
    split_last,
)
from kda_kernels._triton.common import count_row_error, count_slot_error, load_row, load_slot, pdl_wait


@gluon.constexpr_function
def with_taps(layout):
    """``layout`` of a [R, C] tile extended by a third dimension of 4 values in one thread."""
    return gl.BlockedLayout(
        list(layout.size_per_thread) + [4],
        list(layout.threads_per_warp) + [1],
        list(layout.warps_per_cta) + [1],
        [2, 1, 0],
    )


@gluon.jit
def load_taps(conv_weight, conv_bias, channels, LAYOUT: gl.constexpr, HAS_BIAS: gl.constexpr):
    """(bias fp32, w0, w1, w2, w3) of ``channels`` [R, C]: the 4 taps of a channel are one 8- or 16-byte load."""
    TAPS: gl.constexpr = with_taps(LAYOUT)
    tap = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, TAPS)))
    offsets = gl.convert_layout(channels * 4, gl.SliceLayout(2, TAPS))
    w0, w1, w2, w3 = split_last(gl.load(conv_weight + offsets[:, :, None] + tap[None, None, :]))
    if HAS_BIAS:
        bias = gl.load(conv_bias + channels).to(gl.float32)
    else:
        bias = gl.zeros(channels.shape, gl.float32, LAYOUT)
    return bias, in_layout(w0, LAYOUT), in_layout(w1, LAYOUT), in_layout(w2, LAYOUT), in_layout(w3, LAYOUT)


@gluon.jit
def load_column(x, x_stride, history, token, TAP: gl.constexpr, channels, mask, D: gl.constexpr):
    """Input column ``token - 3 + TAP`` of ``channels``: of the conv state (oldest first) where that is below 0."""
    column = (token - 3 + TAP).to(gl.int64)  # times a row stride it can pass 2^31
    pointer = gl.where(column >= 0, x + column * x_stride + channels, history + (column + 3) * D + channels)
    return gl.load(pointer, mask=mask, other=0.0)


@gluon.jit
def load_columns(x, x_stride, history, token, channels, mask, D: gl.constexpr, FUSED: gl.constexpr):
    """The four input columns of each row's token, oldest first; unfused, only the last is loaded and meant."""
    x3 = load_column(x, x_stride, history, token, 3, channels, mask, D)
    if FUSED:
        x0 = load_column(x, x_stride, history, token, 0, channels, mask, D)
        x1 = load_column(x, x_stride, history, token, 1, channels, mask, D)
        x2 = load_column(x, x_stride, history, token, 2, channels, mask, D)
    else:
        x0 = x3
        x1 = x3
        x2 = x3
    return x0, x1, x2, x3


@gluon.jit
def value_of(columns, taps, FUSED: gl.constexpr, CONTRACT: gl.constexpr):
    """q, k or v of every row's token: its columns convolved, or what the conv kernel left."""
    if FUSED:
        value = conv_silu(
            taps[0], columns[0], columns[1], columns[2], columns[3], taps[1], taps[2], taps[3], taps[4], CONTRACT
        )
    else:
        value = columns[3]
    return value


@gluon.jit
def store_window(window, columns, channels, mask, D: gl.constexpr):
    """The conv state after each row's token; ``window`` points at its entry."""
    gl.store(window + channels, columns[1], mask=mask)
    gl.store(window + D + channels, columns[2], mask=mask)
    gl.store(window + 2 * D + channels, columns[3], mask=mask)


@gluon.jit(
    do_not_specialize=["num_slots", "num_rows"],
    do_not_specialize_on_alignment=["slots", "rows", "errors"],
)
def verify_gluon_kernel(
    x, x_stride,  # [B*T, D]: mixed_qkv (fused) or the conv kernel's output
    conv_weight, conv_bias,  # [D, 4], [D]
    conv_state, conv_state_pitch,  # [slots, 3, D]
    window, window_pitch,  # [rows, steps, 3, D]
    a, a_stride, b, b_stride,  # [B*T, HV*K], [B*T, HV]
    A_log, dt_bias, lower_bound,  # [HV], [HV*K]
    ssm_state, ssm_state_pitch,  # [slots, HV, V, K] fp32
    snapshots, snapshots_pitch,  # [rows, steps, HV, V, K] fp32
    raw_v, raw_v_pitch, raw_k, raw_k_pitch,  # [slots, HV, L, V], [slots, H, L, K]
    ring_g, ring_g_pitch, ring_beta, ring_beta_pitch,  # [slots, HV, L, K], [slots, HV, L] fp32
    out,  # [B*T, HV, V]
    slots, rows, errors,  # [B], [B], [len(ErrorKind)]
    num_slots, num_rows, scale,
    T: gl.constexpr, L: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BLOCK_V: gl.constexpr, FUSED: gl.constexpr, RING: gl.constexpr, HAS_BIAS: gl.constexpr,
    SAFE_GATE: gl.constexpr, CONTRACT: gl.constexpr, HAS_ROWS: gl.constexpr, COUNT: gl.constexpr, PDL: gl.constexpr,
    CHUNKED: gl.constexpr, INDICES_READY: gl.constexpr,
    ROWS_PER_THREAD: gl.constexpr, WARPS: gl.constexpr, STAGGER: gl.constexpr,
):  # fmt: skip
    TP: gl.constexpr = max(2, triton.next_power_of_2(T))
    D: gl.constexpr = 2 * H * K + HV * V
    NUM_V: gl.constexpr = V // BLOCK_V
    ACT: gl.constexpr = out.dtype.element_ty
    STATE: gl.constexpr = gl.BlockedLayout([ROWS_PER_THREAD, 4], [4, 8], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, STATE)
    QK: gl.constexpr = row_layout(2 * TP, K, WARPS, 4)  # 4: the reduction tree's groups
    GATE: gl.constexpr = row_layout(TP, K, WARPS, 1)
    VALUE: gl.constexpr = row_layout(TP, BLOCK_V, WARPS, 1)
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    pid = gl.program_id(0)
    i_v = pid % NUM_V
    i_hv = (pid // NUM_V) % HV
    i_n = pid // (NUM_V * HV)
    i_h = i_hv // (HV // H)

    # Rows of the tiles of inputs are tokens; the q | k tile has q's tokens first, then k's.
    qk_row = gl.arange(0, 2 * TP, gl.SliceLayout(1, QK))[:, None]
    qk_k = gl.arange(0, K, gl.SliceLayout(0, QK))[None, :]
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
        pdl_wait(PDL)
    token = i_n.to(gl.int64) * T
    p_out = out + (token * HV + i_hv) * V + state_v
    if not (slot_usable & row_usable):
        first = (i_hv == 0) & (i_v == 0)
        count_slot_error(errors, slot, num_slots, first, COUNT)
        count_row_error(errors, row, num_rows, first, HAS_ROWS, COUNT)
        for t in gl.static_range(T):
            gl.store(p_out + t * HV * V, gl.zeros([BLOCK_V], ACT, ROWS))
        return

    x += token * x_stride
    history = x
    if FUSED:
        history = conv_state + slot * conv_state_pitch
    qk_mask = (qk_token < T) & (qk_k >= 0)
    v_mask = (v_token < T) & (v_v >= 0)
    g_mask = (g_token < T) & (g_k >= 0)
    gate_input = gl.load(a + (token + g_token) * a_stride + i_hv * K + g_k, mask=g_mask, other=0.0)
    beta_input = gl.load(b + (token + b_token) * b_stride + i_hv, mask=b_token < T, other=0.0)
    qk_columns = load_columns(x, x_stride, history, qk_token, qk_channels, qk_mask, D, FUSED)
    v_columns = load_columns(x, x_stride, history, v_token, v_channels, v_mask, D, FUSED)
    head = i_hv * V * K + state_v[:, None] * K + state_k[None, :]
    S = gl.load(ssm_state + slot * ssm_state_pitch + head)

    qk_raw = value_of(qk_columns, qk_taps, FUSED, CONTRACT)
    v_raw = value_of(v_columns, v_taps, FUSED, CONTRACT)
    g = log_decay(gate_input.to(gl.float32), gate_bias, rate_log, lower_bound, SAFE_GATE)
    beta = beta_of(beta_input.to(gl.float32))

    # Rows that the v tiles of a head share are written by one tile each, spread over the tiles.
    qk_owned = qk_mask & (i_hv % (HV // H) == 0) & ((qk_row & (NUM_V - 1)) == i_v)
    if FUSED:
        p_window = window + row * window_pitch
        store_window(p_window + qk_token * (3 * D), qk_columns, qk_channels, qk_owned, D)
        store_window(p_window + v_token * (3 * D), v_columns, v_channels, v_mask, D)
    if RING:
        # Records past the ring are dropped, not written into the next head's.
        KEPT: gl.constexpr = min(T, L)
        p_k = raw_k + slot * raw_k_pitch + (i_h * L + qk_token) * K + qk_k
        gl.store(p_k, qk_raw, mask=qk_owned & is_k & (qk_token < KEPT))
        gl.store(raw_v + slot * raw_v_pitch + (i_hv * L + v_token) * V + v_v, v_raw, mask=v_mask & (v_token < KEPT))
        p_g = ring_g + slot * ring_g_pitch + (i_hv * L + g_token) * K + g_k
        gl.store(p_g, g, mask=g_mask & (g_token < KEPT) & ((g_token & (NUM_V - 1)) == i_v))
        gl.store(ring_beta + slot * ring_beta_pitch + i_hv * L + b_token, beta, mask=(b_token < KEPT) & (i_v == 0))

    qk = qk_raw.to(gl.float32)
    qk = qk * in_layout(inverse_norm(dot_k(qk, qk)), gl.SliceLayout(1, QK))[:, None]
    qk = gl.where(is_k, qk, qk * scale)
    qk_shared = gl.allocate_shared_memory(gl.float32, [2 * TP, K], SHARED, qk)
    decay_shared = gl.allocate_shared_memory(gl.float32, [TP, K], SHARED, gl.exp(g))
    v_shared = gl.allocate_shared_memory(gl.float32, [TP, BLOCK_V], SHARED, v_raw.to(gl.float32))
    beta_shared = gl.allocate_shared_memory(gl.float32, [TP], gl.SwizzledSharedLayout(1, 1, 1, [0]), beta)
    for t in gl.static_range(T):
        q = qk_shared.slice(t, 1).load(STATE)
        k = qk_shared.slice(TP + t, 1).load(STATE)
        decay = decay_shared.slice(t, 1).load(STATE)
        v = gl.sum(v_shared.slice(t, 1).permute([1, 0]).load(STATE), 1)
        beta_t = gl.sum(beta_shared.reshape([1, TP]).slice(t, 1, 1).load(STATE), 1)
        S = delta_step(S, k, v, decay, beta_t, ROWS)
        gl.store(p_out + t * HV * V, in_layout(dot_k(S, q), ROWS).to(ACT))
        if not RING:
            gl.store(snapshots + row * snapshots_pitch + t * HV * V * K + head, S)
