"""Chain verify: one kernel body for the fused lane and for the recurrence of the unfused pair.

``FUSED`` decides only where a token's q, k and v come from: convolved here from mixed_qkv, or loaded from the conv
kernel's output. Everything after that is the same code, so the two lanes cannot differ in a bit.

With ``pending`` (fold on verify) a program first replays the accepted records of the slot's other bank into its rows,
stores them, and goes on with them.

A program owns ``BLOCK_V`` rows of one head's [V, K] state for all T tokens of one request. Recurrent, each token steps
the state; ``CHUNKED``, the loop keeps the tokens and their outputs come after it (`kda_kernels._triton.chunked`).

The tokens are a real loop, not an unrolled one: Triton's layout pass is quadratic in the loads and stores of a kernel
(15 s at T = 8 unrolled). The next token's inputs are loaded before this token's stores, which the compiler could not
do: stores may alias loads.
"""

import triton
import triton.language as tl

from kda_kernels._triton.arithmetic import (
    beta_of,
    conv_silu,
    delta_step,
    dot_k,
    l2_normalise,
    log_decay,
    split_last,
)
from kda_kernels._triton.batches import (
    count_length_error,
    count_parent_error,
    load_column,
    load_range,
    parents_are_earlier,
    previous_column,
    zero_unowned_rows,
)
from kda_kernels._triton.chunked import begin_chunk, chunk_outputs, extend_chunk
from kda_kernels._triton.common import (
    count_accept_error,
    count_row_error,
    count_slot_error,
    load_row,
    load_slot,
    note_inputs,
    pdl_wait,
)
from kda_kernels._triton.pending import load_pending, records_to_fold, replay_records, store_folded


@triton.jit
def load_history(conv_state, channels, D: tl.constexpr):
    """The three columns of ``channels`` in a slot's conv state, oldest first."""
    p = conv_state + channels
    return tl.load(p), tl.load(p + D), tl.load(p + 2 * D)


@triton.jit
def load_taps(conv_weight, conv_bias, channels, HAS_BIAS: tl.constexpr):
    """(bias fp32, w0, w1, w2, w3) of ``channels`` [R, C]: the 4 taps of a channel are one 8- or 16-byte load."""
    w0, w1, w2, w3 = split_last(tl.load(conv_weight + channels[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]))
    if HAS_BIAS:
        bias = tl.load(conv_bias + channels).to(tl.float32)
    else:
        bias = tl.zeros(channels.shape, tl.float32)
    return bias, w0, w1, w2, w3


@triton.jit
def convolved(x0, x1, x2, x3, taps, CONTRACT: tl.constexpr):
    """Conv and SiLU of one token from its four input columns (oldest first) and `load_taps`; activation dtype."""
    return conv_silu(taps[0], x0, x1, x2, x3, taps[1], taps[2], taps[3], taps[4], CONTRACT)


@triton.jit
def store_window(window, x1, x2, x3, channels, mask, D: tl.constexpr):
    """The conv state after a token: its last three input columns. ``window`` points at the token's entry."""
    p = window + channels
    tl.store(p, x1, mask=mask)
    tl.store(p + D, x2, mask=mask)
    tl.store(p + 2 * D, x3, mask=mask)


@triton.jit(
    do_not_specialize=["num_slots", "num_rows", "batch", "num_tokens"],
    do_not_specialize_on_alignment=[
        "slots", "rows", "errors", "starts", "parents", "parity", "pending", "epoch", "kept_inputs",
        "b", "A_log", "ring_beta", "folded",
    ],
)
def verify_kernel(
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
    starts, parents, batch, num_tokens,  # [B+1] or None, [B, T] or None; the integers go with starts
    parity, pending, epoch, folded, folded_pitch,  # [slots], or None; [slots, HV, V // 8]
    T: tl.constexpr, L: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, FUSED: tl.constexpr, RING: tl.constexpr, HAS_BIAS: tl.constexpr,
    SAFE_GATE: tl.constexpr, CONTRACT: tl.constexpr, HAS_ROWS: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
    CHUNKED: tl.constexpr, INDICES_READY: tl.constexpr,
):  # fmt: skip
    tl.static_assert(RING or not CHUNKED, "the chunked form has no states to store")
    RAGGED: tl.constexpr = starts is not None
    TREE: tl.constexpr = parents is not None
    tl.static_assert(not (TREE and (RING or FUSED)), "a token of a tree starts from its parent's snapshot")
    tl.static_assert(not (RAGGED and FUSED), "the fused lane takes chains of one length")
    PENDING: tl.constexpr = pending is not None
    tl.static_assert(RING or not PENDING, "what is pending are records of a ring")
    D: tl.constexpr = 2 * H * K + HV * V
    NUM_V: tl.constexpr = V // BLOCK_V
    pid = tl.program_id(0)
    i_v = pid % NUM_V
    i_hv = (pid // NUM_V) % HV
    i_n = pid // (NUM_V * HV)
    i_h = i_hv // (HV // H)
    if RAGGED:
        pdl_wait(PDL)  # before programs part
        if i_n >= batch:  # programs behind those of the batch look after the rows that belong to no request
            of_batch = batch * (HV * NUM_V)
            zero_unowned_rows(
                out, starts, pid - of_batch, tl.num_programs(0) - of_batch, batch, num_tokens, T, HV * V
            )
            return

    k_range = tl.arange(0, K)[None, :]
    v_range = (i_v * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    q_channels = i_h * K + k_range
    k_channels = H * K + q_channels
    v_channels = 2 * H * K + i_hv * V + v_range
    if not RAGGED:
        token = tl.cast(i_n, tl.int64) * T
        p_out = out + (token * HV + i_hv) * V + i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    ACT: tl.constexpr = out.dtype.element_ty

    # Layer parameters: no kernel of a step writes them, so they may be read before the wait.
    if FUSED:
        q_taps = load_taps(conv_weight, conv_bias, q_channels, HAS_BIAS)
        k_taps = load_taps(conv_weight, conv_bias, k_channels, HAS_BIAS)
        v_taps = load_taps(conv_weight, conv_bias, v_channels, HAS_BIAS)
    rate_log = tl.load(A_log + i_hv)
    gate_bias = tl.load(dt_bias + i_hv * K + k_range)

    if not (INDICES_READY or RAGGED):
        pdl_wait(PDL)
    slot, slot_usable = load_slot(slots, i_n, num_slots)
    row, row_usable = load_row(rows, i_n, num_rows, HAS_ROWS)
    if INDICES_READY and not RAGGED:
        pdl_wait(PDL)
    if kept_inputs is not None:
        note_inputs(kept_inputs, pid == 0, x, x_stride, tl.num_programs(0) // (HV * NUM_V) * T)
    usable = slot_usable & row_usable
    ring_slot = slot
    if PENDING:
        ring_slot, pending_slot, records, pending_valid = load_pending(parity, pending, slot, usable, num_slots, L)
        count_pending = usable & (not pending_valid)
        usable = usable & pending_valid
    if RAGGED:
        token, length, range_usable = load_range(starts, i_n, T)
        range_usable = range_usable & (token + length <= num_tokens)
        length = length.to(tl.int32)
        p_out = out + (token * HV + i_hv) * V + i_v * BLOCK_V + tl.arange(0, BLOCK_V)
        usable = usable & range_usable
    if TREE:
        parents += tl.cast(i_n, tl.int64) * T
        is_tree = (not usable) | parents_are_earlier(parents, length if RAGGED else T, T)
        usable = usable & is_tree
    if not usable:
        first = (i_hv == 0) & (i_v == 0)
        count_slot_error(errors, slot, num_slots, first, COUNT)
        count_row_error(errors, row, num_rows, first, HAS_ROWS, COUNT)
        if PENDING:
            count_accept_error(errors, count_pending, first, COUNT)
        if TREE:
            count_parent_error(errors, is_tree, first, COUNT)
        if RAGGED:
            count_length_error(errors, range_usable, first, COUNT)
            for t in range(tl.where(range_usable, length, 0)):  # a wrong range may hold a neighbour's rows
                tl.store(p_out + t * HV * V, tl.zeros([BLOCK_V], ACT))
        else:
            for t in tl.static_range(T):
                tl.store(p_out + t * HV * V, tl.zeros([BLOCK_V], ACT))
        return
    if RAGGED:
        if length == 0:
            return

    x += token * x_stride
    a += token * a_stride + i_hv * K
    b += token * b_stride + i_hv
    head = i_hv * V * K + tl.trans(v_range) * K + k_range
    if FUSED:
        history = conv_state + slot * conv_state_pitch
        q0, q1, q2 = load_history(history, q_channels, D)
        k0, k1, k2 = load_history(history, k_channels, D)
        v0, v1, v2 = load_history(history, v_channels, D)
    q_next = tl.load(x + q_channels)
    k_next = tl.load(x + k_channels)
    v_next = tl.load(x + v_channels)
    a_next = tl.load(a + k_range)
    b_next = tl.load(b)
    p_state = ssm_state + slot * ssm_state_pitch + head
    if PENDING:
        S = tl.load(p_state)
        tile = tl.arange(0, BLOCK_V)
        now = tl.load(epoch + slot)
        p_folded = folded + slot * folded_pitch + (i_hv * V + i_v * BLOCK_V) // 8
        records = records_to_fold(records, p_folded, now)
        if records > 0:
            tl.debug_barrier()  # no thread stores what another one has yet to load
            S = replay_records(
                S, raw_k + pending_slot * raw_k_pitch + i_h * L * K + k_range,
                raw_v + pending_slot * raw_v_pitch + i_hv * L * V + i_v * BLOCK_V + tile,
                ring_g + pending_slot * ring_g_pitch + i_hv * L * K + k_range,
                ring_beta + pending_slot * ring_beta_pitch + i_hv * L, records, K, V,
            )  # fmt: skip
            store_folded(p_state, S, p_folded, tile, now)
            if CHUNKED:
                tl.debug_barrier()  # loaded again below, not by the threads that stored it
    elif not CHUNKED:  # that form's tiles of all tokens leave the state no registers until they are used up
        S = tl.load(p_state)

    # One program writes what a k head, or all v tiles of a v head, share.
    owns_head = i_v == 0
    owns_k_head = owns_head & (i_hv % (HV // H) == 0)
    if CHUNKED:
        TP: tl.constexpr = max(2, triton.next_power_of_2(T))
        t_index = tl.arange(0, TP)[:, None]
        s_index = tl.arange(0, TP)[None, :]
        chunk = begin_chunk(TP, K, BLOCK_V)
    for t in range(length if RAGGED else T):
        q3 = q_next
        k3 = k_next
        v3 = v_next
        g = log_decay(a_next.to(tl.float32), gate_bias, rate_log, lower_bound, SAFE_GATE)
        beta = beta_of(b_next.to(tl.float32))
        following = tl.cast(min(t + 1, (length if RAGGED else T) - 1), tl.int64)  # times a row stride it can pass 2^31
        q_next = tl.load(x + following * x_stride + q_channels)
        k_next = tl.load(x + following * x_stride + k_channels)
        v_next = tl.load(x + following * x_stride + v_channels)
        a_next = tl.load(a + following * a_stride + k_range)
        b_next = tl.load(b + following * b_stride)

        if FUSED:
            q_raw = convolved(q0, q1, q2, q3, q_taps, CONTRACT)
            k_raw = convolved(k0, k1, k2, k3, k_taps, CONTRACT)
            v_raw = convolved(v0, v1, v2, v3, v_taps, CONTRACT)
            if window is not None:
                p_window = window + row * window_pitch + t * 3 * D
                store_window(p_window, q1, q2, q3, q_channels, owns_k_head, D)
                store_window(p_window, k1, k2, k3, k_channels, owns_k_head, D)
                store_window(p_window, v1, v2, v3, v_channels, None, D)
            q0 = q1
            q1 = q2
            q2 = q3
            k0 = k1
            k1 = k2
            k2 = k3
            v0 = v1
            v1 = v2
            v2 = v3
        else:
            q_raw = q3
            k_raw = k3
            v_raw = v3

        if RING:
            kept = t < L  # records past the ring are dropped, not written into the next head's
            tl.store(raw_k + ring_slot * raw_k_pitch + (i_h * L + t) * K + k_range, k_raw, mask=kept & owns_k_head)
            tl.store(raw_v + ring_slot * raw_v_pitch + (i_hv * L + t) * V + v_range, v_raw, mask=kept)
            tl.store(ring_g + ring_slot * ring_g_pitch + (i_hv * L + t) * K + k_range, g, mask=kept & owns_head)
            tl.store(ring_beta + ring_slot * ring_beta_pitch + i_hv * L + t, beta, mask=kept & owns_head)

        k = l2_normalise(k_raw.to(tl.float32))
        q = l2_normalise(q_raw.to(tl.float32)) * scale
        if CHUNKED:
            chunk = extend_chunk(chunk, q, k, v_raw.to(tl.float32), tl.exp(g), beta, t, t_index, s_index)
        else:
            if TREE:
                parent = tl.load(parents + t).to(tl.int32)
                if parent != t - 1:  # else S is the parent's already
                    tl.debug_barrier()  # another thread may have stored what this one loads
                    if parent < 0:
                        S = tl.load(p_state)
                    else:
                        S = tl.load(snapshots + row * snapshots_pitch + parent * HV * V * K + head)
            S = delta_step(S, k, tl.reshape(v_raw, (BLOCK_V,)).to(tl.float32), tl.exp(g), beta)
            tl.store(p_out + t * HV * V, dot_k(S, q).to(ACT))
            if not RING:
                tl.store(snapshots + row * snapshots_pitch + t * HV * V * K + head, S)

    if CHUNKED:
        p_out = p_out[None, :] + t_index * (HV * V)
        o = chunk_outputs(tl.load(p_state), chunk, t_index, s_index, T)
        tl.store(p_out, o.to(ACT), mask=t_index < (length if RAGGED else T))


@triton.jit(
    do_not_specialize=["num_slots", "num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["slots", "rows", "starts", "parents", "kept_inputs"],
)
def conv_kernel(
    x, x_stride,  # mixed_qkv [B*T, D]
    conv_weight, conv_bias,  # [D, 4], [D]
    conv_state, conv_state_pitch,  # [slots, 3, D]
    window, window_pitch, kept_inputs,  # [rows, steps, 3, D] or None; [3] or None
    y,  # [B*T, D]
    slots, rows,
    num_slots, num_rows,
    starts, parents, num_tokens,  # [B+1] or None, [B, T] or None; the integer goes with starts
    T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr, CONTRACT: tl.constexpr,
    HAS_ROWS: tl.constexpr, PDL: tl.constexpr, INDICES_READY: tl.constexpr,
):  # fmt: skip
    """The unfused pair's first kernel: conv, SiLU and windows of BLOCK_D channels of one request's T tokens."""
    RAGGED: tl.constexpr = starts is not None
    TREE: tl.constexpr = parents is not None
    NUM_D: tl.constexpr = D // BLOCK_D
    pid = tl.program_id(0)
    i_n = pid // NUM_D
    channels = (pid % NUM_D) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    if not RAGGED:
        token = tl.cast(i_n, tl.int64) * T
    taps = load_taps(conv_weight, conv_bias, channels, HAS_BIAS)
    if not INDICES_READY:
        pdl_wait(PDL)
    slot, slot_usable = load_slot(slots, i_n, num_slots)
    row, row_usable = load_row(rows, i_n, num_rows, HAS_ROWS)
    if INDICES_READY:
        pdl_wait(PDL)
    if kept_inputs is not None:
        note_inputs(kept_inputs, pid == 0, x, x_stride, num_tokens if RAGGED else tl.num_programs(0) // NUM_D * T)
    # Out-of-range indices are counted by the recurrence, which reads the same ones.
    usable = slot_usable & row_usable
    if RAGGED:
        token, length, range_usable = load_range(starts, i_n, T)
        usable = usable & range_usable & (token + length <= num_tokens) & (length > 0)
        length = length.to(tl.int32)
    if TREE:
        parents += tl.cast(i_n, tl.int64) * T
        usable = usable & parents_are_earlier(parents, length if RAGGED else T, T)
    if not usable:
        return
    x += token * x_stride
    y += token * D
    history = conv_state + slot * conv_state_pitch
    if not TREE:
        x0, x1, x2 = load_history(history, channels, D)
    x_next = tl.load(x + channels)
    for t in range(length if RAGGED else T):
        x3 = x_next
        following = tl.cast(min(t + 1, (length if RAGGED else T) - 1), tl.int64)
        x_next = tl.load(x + following * x_stride + channels)
        if TREE:
            c2 = previous_column(parents, t + 3)
            c1 = previous_column(parents, c2)
            x0 = load_column(history, x, x_stride, previous_column(parents, c1), channels, D)
            x1 = load_column(history, x, x_stride, c1, channels, D)
            x2 = load_column(history, x, x_stride, c2, channels, D)
        tl.store(y + t * D + channels, convolved(x0, x1, x2, x3, taps, CONTRACT))
        if window is not None:
            store_window(window + row * window_pitch + t * 3 * D, x1, x2, x3, channels, None, D)
        if not TREE:
            x0 = x1
            x1 = x2
            x2 = x3
