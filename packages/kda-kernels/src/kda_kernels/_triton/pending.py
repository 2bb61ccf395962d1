"""Fold on verify: replaying, once, the accepted records of a slot's other bank; and what commits swap the banks."""

import triton
import triton.language as tl

from kda_kernels._triton.arithmetic import delta_step, l2_normalise
from kda_kernels._triton.batches import count_length_error, load_range
from kda_kernels._triton.common import (
    count_accept_error,
    count_slot_error,
    load_accept,
    load_slot,
    load_track,
    pdl_wait,
)


@triton.jit
def load_pending(parity, pending, slot, usable, num_slots, L: tl.constexpr):
    """(ring slot to write, ring slot to replay, records int32, valid) of a slot; ``usable``: whether there is one."""
    bank = tl.load(parity + slot, mask=usable, other=0).to(tl.int64)
    records = tl.load(pending + slot, mask=usable, other=0)
    valid = (bank >= 0) & (bank <= 1) & (records >= 0) & (records <= L)
    return slot + bank * num_slots, slot + (1 - bank) * num_slots, records, valid


@triton.jit
def records_to_fold(records, folded, now):
    """How many records a tile's rows still need: none if ``folded``, its first entry, is of epoch ``now``."""
    return tl.where(tl.load(folded) == now, 0, records)


@triton.jit
def store_folded(p_state, S, folded, rows, now):
    """A tile of the state and its entries of ``folded``. ``rows``: the tile's, as they are numbered in ``folded``.

    The caller has seen to it that all threads have loaded both before.
    """
    tl.store(p_state, S)
    tl.store(folded + rows // 8, rows * 0 + now, mask=rows % 8 == 0)


@triton.jit
def replay_records(S, p_k, p_v, p_g, p_beta, records, K: tl.constexpr, V: tl.constexpr):
    """S after ``records`` records. p_k, p_g: at [1, K] of record 0; p_v: at the tile's [BLOCK_V]; p_beta: its beta."""
    for t in range(0, records):
        k = l2_normalise(tl.load(p_k + t * K).to(tl.float32))
        v = tl.load(p_v + t * V).to(tl.float32)
        S = delta_step(S, k, v, tl.exp(tl.load(p_g + t * K)), tl.load(p_beta + t))
    return S


@triton.jit(
    # ring_beta_layer_pitch, folded_layer_pitch: a multiple of 16 or not by the number of slots
    do_not_specialize=["num_slots", "batch", "ring_beta_layer_pitch", "folded_layer_pitch"],
    do_not_specialize_on_alignment=["slots", "track_slots", "track_steps", "errors", "parity", "pending", "epoch"],
)
def flush_kernel(
    ssm_state, ssm_layer_pitch, ssm_pitch,  # [layers, slots, HV, V, K] fp32, updated in place
    raw_v, raw_v_layer_pitch, raw_v_pitch,  # [layers, 2 * slots, HV, L, V]
    raw_k, raw_k_layer_pitch, raw_k_pitch,  # [layers, 2 * slots, H, L, K]
    ring_g, ring_g_layer_pitch, ring_g_pitch,  # [layers, 2 * slots, HV, L, K] fp32
    ring_beta, ring_beta_layer_pitch, ring_beta_pitch,  # [layers, 2 * slots, HV, L] fp32
    parity, pending, epoch,  # [slots]
    folded, folded_layer_pitch, folded_pitch,  # [layers, slots, HV, V // 8]
    slots, track_slots, track_steps, errors,
    num_slots, batch,
    L: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_TRACK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`fold_kernel` of what is pending, where it is not in the state yet."""
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
    _, bank, records, valid = load_pending(parity, pending, slot, usable, num_slots, L)
    if not (usable & valid & (records > 0)):
        count_slot_error(errors, slot, num_slots, first, COUNT)
        count_accept_error(errors, usable & (not valid), first, COUNT)
        return
    now = tl.load(epoch + slot)
    p_folded = folded + i_layer * folded_layer_pitch + slot * folded_pitch + (i_hv * V + i_v * BLOCK_V) // 8
    if records_to_fold(records, p_folded, now) == 0:
        return
    if HAS_TRACK:
        track_slot, track_step, track = load_track(
            track_slots, track_steps, i_n, records, num_slots, errors, first, COUNT
        )
    k_range = tl.arange(0, K)[None, :]
    tile = tl.arange(0, BLOCK_V)
    v_range = i_v * BLOCK_V + tile
    p_k = raw_k + i_layer * raw_k_layer_pitch + bank * raw_k_pitch + i_h * L * K + k_range
    p_v = raw_v + i_layer * raw_v_layer_pitch + bank * raw_v_pitch + i_hv * L * V + v_range
    p_g = ring_g + i_layer * ring_g_layer_pitch + bank * ring_g_pitch + i_hv * L * K + k_range
    p_beta = ring_beta + i_layer * ring_beta_layer_pitch + bank * ring_beta_pitch + i_hv * L
    p_layer = ssm_state + i_layer * ssm_layer_pitch + i_hv * V * K + v_range[:, None] * K + k_range
    S = tl.load(p_layer + slot * ssm_pitch)
    tl.debug_barrier()  # no thread stores what another one has yet to load
    if HAS_TRACK:
        if track:
            before = track_step + 1
            S = replay_records(S, p_k, p_v, p_g, p_beta, before, K, V)
            tl.store(p_layer + track_slot * ssm_pitch, S)
            p_k += before * K
            p_v += before * V
            p_g += before * K
            p_beta += before
            records -= before
    S = replay_records(S, p_k, p_v, p_g, p_beta, records, K, V)
    store_folded(p_layer + slot * ssm_pitch, S, p_folded, tile, now)


@triton.jit(
    do_not_specialize=["num_slots", "limit", "length", "draft_tokens"],
    do_not_specialize_on_alignment=[
        "slots", "accept_lens", "track_slots", "track_steps", "errors", "starts", "parity", "pending", "epoch"
    ],
)
def advance_kernel(
    parity, pending, epoch,  # [slots]
    slots, accept_lens, track_slots, track_steps, errors,
    num_slots, limit, length,
    starts, draft_tokens,  # [B+1] or None; the integer goes with it
    HAS_TRACK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Make the records of one batch position's accepted prefix the pending ones, and its tracking slot's none."""
    i_n = tl.program_id(0)
    pdl_wait(PDL)
    first = i_n >= 0
    slot, usable = load_slot(slots, i_n, num_slots)
    accept, valid = load_accept(accept_lens, i_n, limit)
    if starts is not None:
        _, tokens, range_usable = load_range(starts, i_n, draft_tokens)
        usable = usable & range_usable
        valid = valid & (accept <= tokens)  # records past the request's own are older ones
    bank = tl.load(parity + slot, mask=usable, other=0)
    records = tl.load(pending + slot, mask=usable, other=0)
    now = tl.load(epoch + slot, mask=usable, other=0)
    # Verify treated a row as padded whose bookkeeping is wrong: there are no records of it.
    valid = valid & (bank >= 0) & (bank <= 1) & (records >= 0) & (records <= length)
    if not (usable & valid & (accept > 0)):
        count_slot_error(errors, slot, num_slots, first, COUNT)
        if starts is not None:
            count_length_error(errors, range_usable, first, COUNT)
        count_accept_error(errors, usable & (not valid), first, COUNT)
        return
    tl.debug_barrier()  # all threads have loaded what one of them stores
    tl.store(parity + slot, 1 - bank)
    tl.store(pending + slot, accept.to(tl.int32))
    tl.store(epoch + slot, now + 1)
    if HAS_TRACK:
        track_slot, _, track = load_track(track_slots, track_steps, i_n, accept, num_slots, errors, first, COUNT)
        if track:
            tl.store(pending + track_slot, 0)
