"""Commit of conv states without windows: the new state's columns are among the old ones and the verified inputs."""

import triton
import triton.language as tl

from kda_kernels._triton.batches import count_length_error, load_column, load_range
from kda_kernels._triton.common import (
    count_accept_error,
    count_slot_error,
    load_accept,
    load_slot,
    load_track,
    pdl_wait,
)


@triton.jit
def columns_after(history, address, x_stride, tokens, channels, D: tl.constexpr, ALIGNED: tl.constexpr):
    """The conv state after ``tokens`` >= 1 tokens whose inputs lie at ``address``: the last three columns before the
    next token's. ``ALIGNED``: every row begins at a multiple of 16 bytes."""
    x = address.to(history.dtype)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        x_stride = x_stride // 8 * 8  # what it is already; says so
    x1 = load_column(history, x, x_stride, tokens, channels, D)
    x2 = load_column(history, x, x_stride, tokens + 1, channels, D)
    x3 = load_column(history, x, x_stride, tokens + 2, channels, D)
    return x1, x2, x3


@triton.jit
def store_columns(p_state, x1, x2, x3, D: tl.constexpr):
    """A slot's three columns."""
    tl.store(p_state, x1)
    tl.store(p_state + D, x2)
    tl.store(p_state + 2 * D, x3)


@triton.jit(
    do_not_specialize=["num_slots", "batch", "limit"],
    do_not_specialize_on_alignment=[
        "kept_inputs", "slots", "accept_lens", "track_slots", "track_steps", "errors", "starts"
    ],
)
def gather_kernel(
    conv_state, conv_layer_pitch, conv_pitch,  # [layers, slots, 3, D], updated in place
    kept_inputs,  # [layers, 3] int64: address, row pitch and rows of each layer's mixed_qkv [rows, D]
    slots, accept_lens, track_slots, track_steps, errors,
    num_slots, batch, limit,
    starts,  # [B+1] or None
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_TRACK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``conv_state[layer, slots[b]] = concat(conv_state[layer, slots[b]], inputs of b)[accept : accept + 3]``, and the
    same for the tracked step, from the old state too."""
    NUM_D: tl.constexpr = D // BLOCK_D
    pid = tl.program_id(0)
    i_n = (pid // NUM_D) % batch
    i_layer = tl.cast(pid // NUM_D // batch, tl.int64)
    pdl_wait(PDL)

    first = pid == i_n * NUM_D
    slot, usable = load_slot(slots, i_n, num_slots)
    accept, valid = load_accept(accept_lens, i_n, limit)
    kept_inputs += i_layer * 3
    address = tl.load(kept_inputs)
    x_stride = tl.load(kept_inputs + 1)
    rows = tl.load(kept_inputs + 2)
    # Verify has read these rows, and no others may be read here.
    if starts is not None:
        token, length, in_range = load_range(starts, i_n, limit)
        in_range = in_range & (token + length <= rows)
        valid = valid & (accept <= length)
    else:
        token = tl.cast(i_n, tl.int64) * limit
        in_range = token + limit <= rows
    usable = usable & in_range
    if not (usable & valid & (accept > 0)):
        count_slot_error(errors, slot, num_slots, first, COUNT)
        count_length_error(errors, in_range, first, COUNT)
        count_accept_error(errors, usable & (not valid), first, COUNT)
        return
    tracked = accept
    if HAS_TRACK:
        track_slot, track_step, track = load_track(
            track_slots, track_steps, i_n, accept, num_slots, errors, first, COUNT
        )
        tracked = tl.where(track, track_step + 1, accept)

    ITEM: tl.constexpr = conv_state.dtype.element_ty.primitive_bitwidth // 8
    channels = (pid % NUM_D) * BLOCK_D + tl.arange(0, BLOCK_D)
    address += token * x_stride * ITEM
    p_layer = conv_state + i_layer * conv_layer_pitch
    history = p_layer + slot * conv_pitch
    # Everything is read before anything is written: here, and by all threads of the program.
    if (address | x_stride * ITEM) % 16 == 0:
        x1, x2, x3 = columns_after(history, address, x_stride, accept, channels, D, True)
    else:
        x1, x2, x3 = columns_after(history, address, x_stride, accept, channels, D, False)
    if HAS_TRACK:
        y1, y2, y3 = columns_after(history, address, x_stride, tracked, channels, D, False)
    tl.debug_barrier()
    store_columns(history + channels, x1, x2, x3, D)
    if HAS_TRACK:
        if track:
            store_columns(p_layer + track_slot * conv_pitch + channels, y1, y2, y3, D)
