"""Commit kernels, one launch for all layers: fold the ring into the state, copy conv windows and snapshots back."""

import triton
import triton.language as tl

from kda_kernels._triton.arithmetic import delta_step, l2_normalise
from kda_kernels._triton.batches import count_length_error, count_parent_error, load_range, on_path, parents_are_earlier
from kda_kernels._triton.common import (
    count_accept_error,
    count_row_error,
    count_slot_error,
    load_accept,
    load_row,
    load_slot,
    load_track,
    pdl_wait,
)


@triton.jit(
    # ring_beta_layer_pitch: slots * HV * L, a multiple of 16 or not by the number of slots
    do_not_specialize=["num_slots", "batch", "limit", "draft_tokens", "ring_beta_layer_pitch"],
    do_not_specialize_on_alignment=["slots", "accept_lens", "track_slots", "track_steps", "errors", "starts"],
)
def fold_kernel(
    ssm_state, ssm_layer_pitch, ssm_pitch,  # [layers, slots, HV, V, K] fp32, updated in place
    raw_v, raw_v_layer_pitch, raw_v_pitch,  # [layers, slots, HV, L, V]
    raw_k, raw_k_layer_pitch, raw_k_pitch,  # [layers, slots, H, L, K]
    ring_g, ring_g_layer_pitch, ring_g_pitch,  # [layers, slots, HV, L, K] fp32
    ring_beta, ring_beta_layer_pitch, ring_beta_pitch,  # [layers, slots, HV, L] fp32
    slots, accept_lens, track_slots, track_steps, errors,
    num_slots, batch, limit,
    starts, draft_tokens,  # [B+1] or None; the integer goes with it
    L: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_TRACK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    NUM_V: tl.constexpr = V // BLOCK_V
    pid = tl.program_id(0)
    i_v = pid % NUM_V
    i_hv = (pid // NUM_V) % HV
    i_n = (pid // (NUM_V * HV)) % batch
    i_layer = tl.cast(pid // (NUM_V * HV) // batch, tl.int64)
    i_h = i_hv // (HV // H)
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
    if HAS_TRACK:
        track_slot, track_step, track = load_track(
            track_slots, track_steps, i_n, accept, num_slots, errors, first, COUNT
        )

    k_range = tl.arange(0, K)[None, :]
    v_range = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    p_v = raw_v + i_layer * raw_v_layer_pitch + slot * raw_v_pitch + i_hv * L * V + v_range
    p_k = raw_k + i_layer * raw_k_layer_pitch + slot * raw_k_pitch + i_h * L * K + k_range
    p_g = ring_g + i_layer * ring_g_layer_pitch + slot * ring_g_pitch + i_hv * L * K + k_range
    p_beta = ring_beta + i_layer * ring_beta_layer_pitch + slot * ring_beta_pitch + i_hv * L
    p_layer = ssm_state + i_layer * ssm_layer_pitch + i_hv * V * K + v_range[:, None] * K + k_range
    p_state = p_layer + slot * ssm_pitch
    S = tl.load(p_state)
    for t in range(0, accept.to(tl.int32)):
        k = l2_normalise(tl.load(p_k + t * K).to(tl.float32))
        v = tl.load(p_v + t * V).to(tl.float32)
        S = delta_step(S, k, v, tl.exp(tl.load(p_g + t * K)), tl.load(p_beta + t))
        if HAS_TRACK:
            if track & (t == track_step):
                tl.store(p_layer + track_slot * ssm_pitch, S)
    tl.store(p_state, S)


@triton.jit(
    do_not_specialize=["num_slots", "num_rows", "batch", "limit"],
    do_not_specialize_on_alignment=[
        "slots", "rows", "accept_lens", "track_slots", "track_steps", "errors", "starts", "parents"
    ],
)
def scatter_kernel(
    dst, dst_layer_pitch, dst_pitch,  # [layers, slots, N]: conv state or recurrent state
    src, src_layer_pitch, src_pitch,  # [layers, rows, steps, N]: conv windows or snapshots
    slots, rows, accept_lens, track_slots, track_steps, errors,
    num_slots, num_rows, batch, limit,
    starts, parents,  # [B+1] or None, [B, T] or None
    N: tl.constexpr, BLOCK_N: tl.constexpr, LAST_STEPS: tl.constexpr, T: tl.constexpr,  # T: of a tree
    HAS_ROWS: tl.constexpr, HAS_TRACK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``dst[layer, slots[b]] = src[layer, row(b), accept_lens[b] - 1]``, and the same for the tracked step.

    With ``LAST_STEPS``, ``accept_lens`` holds the last accepted step and not the number of accepted ones; with
    ``parents``, that of a tree, and only a step on the path to it is tracked.
    """
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    i_n = (pid // NUM_N) % batch
    i_layer = tl.cast(pid // NUM_N // batch, tl.int64)
    pdl_wait(PDL)

    first = pid == i_n * NUM_N
    slot, slot_usable = load_slot(slots, i_n, num_slots)
    row, row_usable = load_row(rows, i_n, num_rows, HAS_ROWS)
    accept, valid = load_accept(accept_lens, i_n, limit, LAST_STEPS)
    usable = slot_usable & row_usable
    if starts is not None:
        _, length, range_usable = load_range(starts, i_n, limit)
        usable = usable & range_usable
        valid = valid & (accept <= length)  # entries past the request's own are older ones
    if parents is not None:
        parents += tl.cast(i_n, tl.int64) * T
        is_tree = (not usable) | parents_are_earlier(parents, T if starts is None else length, T)
        usable = usable & is_tree
    if not (usable & valid & (accept > 0)):
        count_slot_error(errors, slot, num_slots, first, COUNT)
        count_row_error(errors, row, num_rows, first, HAS_ROWS, COUNT)
        if starts is not None:
            count_length_error(errors, range_usable, first, COUNT)
        if parents is not None:
            count_parent_error(errors, is_tree, first, COUNT)
        count_accept_error(errors, usable & (not valid), first, COUNT)
        return
    offsets = (pid % NUM_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offsets < N
    p_src = src + i_layer * src_layer_pitch + row * src_pitch + offsets
    p_dst = dst + i_layer * dst_layer_pitch + offsets
    tl.store(p_dst + slot * dst_pitch, tl.load(p_src + (accept - 1) * N, mask=mask), mask=mask)
    if HAS_TRACK:
        track_slot, track_step, track = load_track(
            track_slots, track_steps, i_n, accept, num_slots, errors, first, COUNT
        )
        if parents is not None:
            track = track & on_path(parents, accept.to(tl.int32) - 1, tl.where(track, track_step, 0))
        if track:
            tl.store(p_dst + track_slot * dst_pitch, tl.load(p_src + track_step * N, mask=mask), mask=mask)
