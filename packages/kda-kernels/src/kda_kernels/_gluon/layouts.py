"""Layouts that Gluon kernels share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def row_layout(rows, columns, warps, least):
    """Layout of a [rows, columns] tile of inputs: lanes along the columns, up to 4 values each, warps along the rows.

    Fewer values, down to ``least``, where the tile would leave threads idle.
    """
    values = 4
    while values > least and values * 32 * warps > rows * columns:
        values //= 2
    lanes = min(32, columns // values)
    warps_by_row = min(warps, max(1, rows // (32 // lanes)))
    return gl.BlockedLayout([1, values], [32 // lanes, lanes], [warps_by_row, warps // warps_by_row], [1, 0])


@gluon.constexpr_function
def state_layout(rows, warps):
    """Layout of a [tile of V, K] tile of the state: 8 lanes along K, ``rows`` consecutive rows per thread."""
    return gl.BlockedLayout([rows, 4], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def packed(rank):
    """Shared memory without swizzle, last dimension contiguous."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))
