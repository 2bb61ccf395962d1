"""Pieces that every kernel begins with: PDL, the slot, row and accept length of a batch position, counting bad ones.

Constants that helpers need are defaults of parameters, not globals: a global constant in a helper makes Triton's cache
key of the kernel depend on which kernel was compiled first, and a warm disk cache miss.
"""

import triton
import triton.language as tl

from kda_kernels.errors import ErrorKind


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the preceding kernel, then let the next one launch. Nothing a kernel may write is read before this."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def count_error(errors, KIND: tl.constexpr, condition, COUNT: tl.constexpr):
    """Add one to ``errors[KIND]`` where ``condition`` holds.

    Called only where a row turned out unusable: on every row's way, even a masked atomic holds up the loads after it.
    """
    if COUNT:
        # Relaxed: nothing is ordered by these counts, and the default order would put a fence into every program.
        tl.atomic_add(errors + KIND, 1, mask=condition, sem="relaxed")


@triton.jit
def load_slot(slots, i, num_slots):
    """(slot int64, usable) of batch position i."""
    slot = tl.load(slots + i).to(tl.int64)
    return slot, (slot >= 0) & (slot < num_slots)


@triton.jit
def load_row(rows, i, num_rows, HAS_ROWS: tl.constexpr):
    """(row int64, usable) of batch position i: ``rows[i]``, or i itself."""
    if HAS_ROWS:
        row = tl.load(rows + i).to(tl.int64)
    else:
        row = tl.cast(i, tl.int64)
    return row, (row >= 0) & (row < num_rows)


@triton.jit
def load_accept(accept_lens, i, limit, LAST_STEPS: tl.constexpr = False):
    """(accepted prefix of batch position i int64, whether it is within 0..limit); ``LAST_STEPS``: given less 1."""
    accept = tl.load(accept_lens + i).to(tl.int64)
    if LAST_STEPS:
        accept += 1
    return accept, (accept >= 0) & (accept <= limit)


@triton.jit
def note_inputs(kept_inputs, first, x, x_stride, rows):
    """Program ``first`` writes down where mixed_qkv ``x`` [rows, D] lies, for `gather_conv`. After the wait: an earlier
    commit may still be reading."""
    tl.store(kept_inputs, x.to(tl.int64), mask=first)
    tl.store(kept_inputs + 1, tl.cast(x_stride, tl.int64), mask=first)
    tl.store(kept_inputs + 2, tl.cast(rows, tl.int64), mask=first)


@triton.jit
def count_slot_error(
    errors, slot, num_slots, first, COUNT: tl.constexpr, KIND: tl.constexpr = int(ErrorKind.SLOT)
):  # fmt: skip
    """Count, by program ``first`` of the batch position, a slot outside the pool; -1 is padding, not an error."""
    count_error(errors, KIND, first & ((slot < -1) | (slot >= num_slots)), COUNT)


@triton.jit
def count_row_error(
    errors, row, num_rows, first, HAS_ROWS: tl.constexpr, COUNT: tl.constexpr,
    KIND: tl.constexpr = int(ErrorKind.ROW),
):  # fmt: skip
    """Count, by program ``first`` of the batch position, a given row outside the buffers."""
    if HAS_ROWS:
        count_error(errors, KIND, first & ((row < 0) | (row >= num_rows)), COUNT)


@triton.jit
def count_accept_error(errors, bad, first, COUNT: tl.constexpr, KIND: tl.constexpr = int(ErrorKind.ACCEPT)):
    """Count, by program ``first`` of the batch position, an accept length outside its range."""
    count_error(errors, KIND, first & bad, COUNT)


@triton.jit
def load_track(
    track_slots, track_steps, i, accept, num_slots, errors, first, COUNT: tl.constexpr,
    KIND: tl.constexpr = int(ErrorKind.TRACK_SLOT),
):  # fmt: skip
    """(slot int64, step, wanted): a second slot that gets the state after ``step``, if in the accepted prefix."""
    slot = tl.load(track_slots + i).to(tl.int64)
    step = tl.load(track_steps + i).to(tl.int64)
    bad = (slot < -1) | (slot >= num_slots)
    count_error(errors, KIND, first & (accept > 0) & bad, COUNT)
    return slot, step.to(tl.int32), (slot >= 0) & (slot < num_slots) & (step >= 0) & (step < accept)
