"""Ragged and tree batches: which tokens a batch position has, and what comes before a token.

Ragged, ``starts`` [B+1] holds cumulative token offsets: position i has rows ``starts[i]`` to ``starts[i + 1] - 1`` of
the packed tensors. In a tree, ``parents`` [B, T] holds each token's parent step, -1 for the committed state.
"""

import triton
import triton.language as tl

from kda_kernels._triton.common import count_error
from kda_kernels.errors import ErrorKind


@triton.jit
def load_range(starts, i, T):
    """(first row int64, length int64, whether the length is within 0..T) of batch position i."""
    start = tl.load(starts + i).to(tl.int64)
    end = tl.load(starts + i + 1).to(tl.int64)
    return start, end - start, (start >= 0) & (end >= start) & (end - start <= T)


@triton.jit
def count_length_error(errors, usable, first, COUNT: tl.constexpr, KIND: tl.constexpr = int(ErrorKind.LENGTH)):
    """Count, by program ``first`` of the batch position, a range of tokens that cannot be."""
    count_error(errors, KIND, first & (not usable), COUNT)


@triton.jit
def count_parent_error(errors, usable, first, COUNT: tl.constexpr, KIND: tl.constexpr = int(ErrorKind.PARENT)):
    """Count, by program ``first`` of the batch position, parents that are no tree."""
    count_error(errors, KIND, first & (not usable), COUNT)


@triton.jit
def parents_are_earlier(parents, length, T: tl.constexpr):
    """Whether each of a position's first ``length`` tokens has a parent from -1 to the token before it."""
    t = tl.arange(0, triton.next_power_of_2(T))
    parent = tl.load(parents + t, mask=(t < length) & (t < T), other=-1).to(tl.int64)  # a length met on the device
    return tl.min(((parent >= -1) & (parent < t)).to(tl.int32), 0) > 0


@triton.jit
def previous_column(parents, column):
    """The input column before ``column`` on its path: 0, 1, 2 are the conv state's, oldest first, 3 + t is token t's.

    The root's parent, -1, is column 2.
    """
    return tl.load(parents + (column - 3), mask=column >= 3, other=column - 4).to(tl.int32) + 3


@triton.jit
def load_column(history, x, x_stride, column, channels, D: tl.constexpr):
    """``channels`` of an input column as `previous_column` counts them, from a slot's conv state or the new tokens."""
    token = tl.cast(column - 3, tl.int64)  # times a row stride it can pass 2^31
    committed = tl.load(history + column * D + channels, mask=column < 3)
    return tl.where(column < 3, committed, tl.load(x + token * x_stride + channels, mask=column >= 3))


@triton.jit
def zero_unowned_rows(
    out, starts, program, programs, batch, num_tokens, T: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr = 16, POSITIONS: tl.constexpr = 64, COLUMNS: tl.constexpr = 64,
):  # fmt: skip
    """Zero, as one of ``programs``, those rows of ``out`` [num_tokens, WIDTH] that belong to no request.

    Looked up row by row and not taken from ``starts[B]``: offsets that are wrong must not wipe a neighbour's output.
    """
    columns = tl.arange(0, COLUMNS)[None, :]
    for first in range(program * ROWS, num_tokens, programs * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        owners = tl.zeros([ROWS], tl.int32)
        for i in range(0, batch, POSITIONS):
            position = i + tl.arange(0, POSITIONS)
            start = tl.load(starts + position, mask=position < batch, other=0).to(tl.int64)
            end = tl.load(starts + position + 1, mask=position < batch, other=0).to(tl.int64)
            usable = (start >= 0) & (end - start <= T) & (end <= num_tokens)
            inside = (row[:, None] >= start[None, :]) & (row[:, None] < end[None, :]) & usable[None, :]
            owners += tl.sum(inside.to(tl.int32), 1)
        unowned = (owners == 0) & (row < num_tokens)
        if tl.max(unowned.to(tl.int32), 0) > 0:
            for column in range(0, WIDTH, COLUMNS):
                p_out = out + row[:, None] * WIDTH + column + columns
                tl.store(p_out, tl.zeros([ROWS, COLUMNS], out.dtype.element_ty), mask=unowned[:, None] & (columns >= 0))


@triton.jit
def on_path(parents, last, step):
    """Whether ``step`` >= 0 is on the path from a root to the step ``last``. Parents are earlier steps: it ends."""
    while last > step:
        last = tl.load(parents + last).to(tl.int32)
    return last == step
