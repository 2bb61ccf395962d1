"""The chunked form in Gluon: T vectors and a triangle of factors from the tokens, then T sums over the state.

Everything between two barriers is laid out for what it does: decays and vectors with one channel per thread and all
tokens in its registers, sums over K with 8 lanes a pair of tokens, the triangular system with one token per lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._gluon.layouts import packed
from kda_kernels._triton.arithmetic import dot_k, in_layout
from kda_kernels._triton.chunked import add_scaled, column_of, coupling, cumulative_decays, eliminate, row_of
from kda_kernels.shapes import BLOCK_TOKENS


@gluon.constexpr_function
def blocks_of(T, TP, in_blocks):
    """(first token, rows, columns) of every block of [TP, TP] pairs: rows are tokens, columns those up to them.

    What a token would see of tokens after its block is not computed at all.
    """
    if not in_blocks:
        return ((0, TP, TP),)
    found = []
    for first in range(0, T, BLOCK_TOKENS):
        left = T - first
        rows = BLOCK_TOKENS if left > 2 else left if first else 2
        columns = 1
        while columns < first + rows:
            columns *= 2
        found.append((first, rows, columns))
    return tuple(found)


@gluon.constexpr_function
def channels_layout(shape, K, warps):
    """Of [rows, K] or [rows, columns, K]: K over lanes, then warps; warps left over along the rows of the latter."""
    along_k = min(warps, K // 32)
    along_t = min(warps // along_k, shape[0]) if len(shape) == 2 else 1
    ones = [1] * (len(shape) - 1)
    return gl.BlockedLayout(
        [shape[0] // along_t, *shape[1:], 1], [1, *ones, 32], [along_t, *ones, warps // along_t],
        list(range(len(shape), -1, -1)),
    )  # fmt: skip


@gluon.constexpr_function
def couples_layout(rows, columns, warps):
    """Of [rows, columns, K], summed over K: 8 lanes along K as everywhere, then lanes and warps over the pairs."""
    lanes_s = min(4, columns)
    lanes_t = 4 // lanes_s
    warps_t = min(warps, max(1, rows // lanes_t))
    return gl.BlockedLayout([1, 1, 4], [lanes_t, lanes_s, 8], [warps_t, warps // warps_t, 1], [2, 1, 0])


@gluon.jit
def _all_pairs(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, 1, K] or [1, COLUMNS, K] -> [ROWS, COLUMNS, K]."""
    x, _ = gl.broadcast(x, gl.zeros((ROWS, COLUMNS, K), gl.float32, LAYOUT))
    return x


@gluon.jit
def _decayed_keys(k_rows, decay_rows, FIRST: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr,
                  K: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """kd(s, t) of a block's pairs in shared memory, [ROWS, COLUMNS, K]."""
    CHANNELS: gl.constexpr = channels_layout((ROWS, COLUMNS), K, WARPS)
    t = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, CHANNELS)))[:, None, None]
    s = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, CHANNELS)))[None, :, None]
    keys = _all_pairs(k_rows.slice(0, COLUMNS).permute([1, 0, 2]).load(CHANNELS), ROWS, COLUMNS, K, CHANNELS)
    for r in gl.static_range(1, min(T, FIRST + ROWS)):
        keys = gl.where((s < r) & (t >= r), keys * decay_rows.slice(r, 1).load(CHANNELS), keys)
    return gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS, K], packed(3), keys)


@gluon.jit
def _couple(keys_shared, q_rows, k_rows, beta_shared, a_shared, b_shared, FIRST: gl.constexpr, WARPS: gl.constexpr):
    """A and B of a block's pairs into their places."""
    ROWS: gl.constexpr = keys_shared.shape[0]
    COLUMNS: gl.constexpr = keys_shared.shape[1]
    K: gl.constexpr = keys_shared.shape[2]
    COUPLES: gl.constexpr = couples_layout(ROWS, COLUMNS, WARPS)
    PLANE: gl.constexpr = gl.SliceLayout(2, COUPLES)
    TP: gl.constexpr = beta_shared.shape[0]
    keys = gl.reshape(keys_shared.load(COUPLES), (ROWS * COLUMNS, K))
    k = _all_pairs(k_rows.slice(FIRST, ROWS).load(COUPLES), ROWS, COLUMNS, K, COUPLES)
    q = _all_pairs(q_rows.slice(FIRST, ROWS).load(COUPLES), ROWS, COLUMNS, K, COUPLES)
    beta = beta_shared._reinterpret(gl.float32, [TP, 1], packed(2)).slice(FIRST, ROWS).load(PLANE)
    beta, _ = gl.broadcast(beta, gl.zeros((ROWS, COLUMNS), gl.float32, PLANE))
    a, b = coupling(keys, gl.reshape(k, (ROWS * COLUMNS, K)), gl.reshape(q, (ROWS * COLUMNS, K)), 1.0)
    a = gl.convert_layout(gl.reshape(a, (ROWS, COLUMNS)), PLANE) * beta
    b = gl.convert_layout(gl.reshape(b, (ROWS, COLUMNS)), PLANE)
    a_shared.slice(FIRST, ROWS).slice(0, COLUMNS, 1).store(a)
    b_shared.slice(FIRST, ROWS).slice(0, COLUMNS, 1).store(b)


@gluon.jit
def prepare_chunk(q_rows, k_rows, decay_shared, beta_shared, T: gl.constexpr, TP: gl.constexpr, K: gl.constexpr,
                  WARPS: gl.constexpr, IN_BLOCKS: gl.constexpr):  # fmt: skip
    """(w [TP, K], C [TP, TP]) in shared memory, as `kda_kernels._triton.chunked` defines them.

    q_rows, k_rows: [TP, 1, K], normalised; decay_shared: [TP, K]; beta_shared: [TP]; fp32. IN_BLOCKS: the pairs of
    tokens in blocks of `BLOCK_TOKENS` rows, which takes less shared memory and fewer registers, and more barriers.
    """
    CHANNELS: gl.constexpr = channels_layout((TP,), K, WARPS)
    TOKENS3: gl.constexpr = gl.BlockedLayout([TP, 1, 1], [1, 1, 32], [1, 1, WARPS], [2, 1, 0])
    SOLVE: gl.constexpr = gl.BlockedLayout([1, TP], [32, 1], [WARPS, 1], [1, 0])
    BLOCKS: gl.constexpr = blocks_of(T, TP, IN_BLOCKS)

    # Outside the blocks stands whatever the memory held: nothing reads it into a result.
    a_shared = gl.allocate_shared_memory(gl.float32, [TP, TP], packed(2))
    b_shared = gl.allocate_shared_memory(gl.float32, [TP, TP], packed(2))
    decay_rows = decay_shared._reinterpret(gl.float32, [TP, 1, K], packed(3))
    keys = ()
    for i in gl.static_range(len(BLOCKS)):
        keys = keys + (_decayed_keys(k_rows, decay_rows, BLOCKS[i][0], BLOCKS[i][1], BLOCKS[i][2], T, K, WARPS),)
    for i in gl.static_range(len(BLOCKS)):
        _couple(keys[i], q_rows, k_rows, beta_shared, a_shared, b_shared, BLOCKS[i][0], WARPS)

    t_index = gl.arange(0, TP, gl.SliceLayout(1, SOLVE))[:, None]
    s_index = gl.arange(0, TP, gl.SliceLayout(0, SOLVE))[None, :]
    m = b_shared.load(SOLVE)
    for r in gl.static_range(T - 1, 0, -1):
        m = eliminate(m, a_shared.slice(r, 1).load(SOLVE), r, t_index, s_index)
    beta = beta_shared._reinterpret(gl.float32, [1, TP], packed(2)).load(SOLVE)
    c_shared = gl.allocate_shared_memory(gl.float32, [TP, TP], packed(2), m * beta)

    token = gl.arange(0, TP, gl.SliceLayout(1, CHANNELS))[:, None]
    product = cumulative_decays(decay_shared.load(CHANNELS), token, T)
    w = gl.convert_layout(gl.reshape(q_rows.load(TOKENS3), (TP, K)), CHANNELS, assert_trivial=True) * product
    k = gl.convert_layout(gl.reshape(k_rows.load(TOKENS3), (TP, K)), CHANNELS, assert_trivial=True) * product
    for s in gl.static_range(T):
        w = add_scaled(w, -c_shared.slice(s, 1, 1).load(CHANNELS), row_of(k, token, s)[None, :], token >= s)
    return gl.allocate_shared_memory(gl.float32, [TP, K], packed(2), w), c_shared


@gluon.jit
def store_chunk(S, w_shared, c_shared, v_shared, p_out, stride, T: gl.constexpr, TP: gl.constexpr, STATE: gl.constexpr,
                WARPS: gl.constexpr):  # fmt: skip
    """Outputs of all T tokens, ``stride`` apart: ``dot_k(S, w_t)`` and shares of the v's. v_shared: [TP, rows]."""
    ROWS: gl.constexpr = gl.SliceLayout(1, STATE)
    FACTORS: gl.constexpr = gl.BlockedLayout([1, TP], [32, 1], [WARPS, 1], [1, 0])
    s_index = gl.arange(0, TP, gl.SliceLayout(0, FACTORS))[None, :]
    values = ()
    for t in gl.static_range(T):
        values = values + (gl.sum(v_shared.slice(t, 1).permute([1, 0]).load(STATE), 1),)
        out = in_layout(dot_k(S, w_shared.slice(t, 1).load(STATE)), ROWS)
        factors = c_shared.slice(t, 1).load(FACTORS)
        for s in gl.static_range(t + 1):
            factor, _ = gl.broadcast(gl.convert_layout(column_of(factors, s_index, s), ROWS), out)
            out = gl.fma(factor, values[s], out)
        gl.store(p_out + t * stride, out.to(p_out.dtype.element_ty))
