"""Pieces that every kernel begins with: PDL, and the slot and row of a batch position with out-of-range counting."""

import triton
import triton.language as tl

from kda_kernels.errors import ErrorKind

SLOT_ERROR = tl.constexpr(int(ErrorKind.SLOT))
ROW_ERROR = tl.constexpr(int(ErrorKind.ROW))
ACCEPT_ERROR = tl.constexpr(int(ErrorKind.ACCEPT))
TRACK_SLOT_ERROR = tl.constexpr(int(ErrorKind.TRACK_SLOT))


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the preceding kernel, then let the next one launch. Nothing a kernel may write is read before this."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def count_error(errors, KIND: tl.constexpr, condition, COUNT: tl.constexpr):
    """Add one to ``errors[KIND]`` where ``condition`` holds."""
    if COUNT:
        # Relaxed: nothing is ordered by these counts, and the default order would put a fence into every program.
        tl.atomic_add(errors + KIND, 1, mask=condition, sem="relaxed")


@triton.jit
def load_slot(slots, i, num_slots, errors, first, COUNT: tl.constexpr):
    """(slot int64, usable) of batch position i. -1 is padding; any other outside the pool is counted by ``first``."""
    slot = tl.load(slots + i).to(tl.int64)
    usable = (slot >= 0) & (slot < num_slots)
    count_error(errors, SLOT_ERROR, first & ((slot < -1) | (slot >= num_slots)), COUNT)
    return slot, usable


@triton.jit
def load_row(rows, i, num_rows, errors, first, HAS_ROWS: tl.constexpr, COUNT: tl.constexpr):
    """(row int64, usable) of batch position i: ``rows[i]``, or i itself."""
    if HAS_ROWS:
        row = tl.load(rows + i).to(tl.int64)
        usable = (row >= 0) & (row < num_rows)
        count_error(errors, ROW_ERROR, first & ((row < 0) | (row >= num_rows)), COUNT)
    else:
        row = tl.cast(i, tl.int64)
        usable = row < num_rows
    return row, usable


@triton.jit
def load_accept(accept_lens, i, limit, usable, errors, first, COUNT: tl.constexpr):
    """Accepted prefix of batch position i: 0 if the row is unusable or the value is outside 0..limit (counted)."""
    accept = tl.load(accept_lens + i).to(tl.int64)
    out_of_range = (accept < 0) | (accept > limit)
    count_error(errors, ACCEPT_ERROR, first & usable & out_of_range, COUNT)
    return tl.where(usable & (accept >= 0) & (accept <= limit), accept, 0).to(tl.int32)


@triton.jit
def load_track(track_slots, track_steps, i, accept, num_slots, errors, first, COUNT: tl.constexpr):
    """(slot int64, step, wanted): a second slot that gets the state after ``step``, if in the accepted prefix."""
    slot = tl.load(track_slots + i).to(tl.int64)
    step = tl.load(track_steps + i).to(tl.int64)
    bad = (slot < -1) | (slot >= num_slots)
    count_error(errors, TRACK_SLOT_ERROR, first & (accept > 0) & bad, COUNT)
    return slot, step.to(tl.int32), (slot >= 0) & (slot < num_slots) & (step >= 0) & (step < accept)
