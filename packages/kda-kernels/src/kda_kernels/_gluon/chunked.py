"""The chunked form in Gluon: T vectors and a triangle of factors from the tokens, then T sums over the state.

Everything between two barriers is laid out for what it does: decays and vectors with one channel per thread and all
tokens in its registers, sums over K with 8 lanes a pair of tokens, the triangular system with one token per lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._gluon.layouts import packed
from kda_kernels._triton.arithmetic import dot_k, in_layout
from kda_kernels._triton.chunked import add_scaled, column_of, coupling, cumulative_decays, eliminate, row_of


@gluon.constexpr_function
def channels_layout(rank, tokens, K, warps):
    """Of [TP, K] or [TP, TP, K]: the last dimension over lanes, then warps; warps left over along the first."""
    along_k = min(warps, K // 32)
    along_t = min(warps // along_k, tokens) if rank == 3 else 1
    size = [tokens // along_t] + [tokens] * (rank - 2) + [1]
    return gl.BlockedLayout(
        size, [1] * (rank - 1) + [32], [along_t] + [1] * (rank - 2) + [warps // along_t], list(range(rank - 1, -1, -1))
    )


@gluon.constexpr_function
def couples_layout(tokens, warps):
    """Of [TP, TP, K], summed over K: 8 lanes along K as everywhere, then lanes and warps over the pairs."""
    lanes_s = min(4, tokens)
    lanes_t = 4 // lanes_s
    warps_t = min(warps, tokens // lanes_t)
    return gl.BlockedLayout([1, 1, 4], [lanes_t, lanes_s, 8], [warps_t, warps // warps_t, 1], [2, 1, 0])


@gluon.jit
def _all_pairs(x, TP: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr):
    """[TP, 1, K] or [1, TP, K] -> [TP, TP, K]."""
    x, _ = gl.broadcast(x, gl.zeros((TP, TP, K), gl.float32, LAYOUT))
    return x


@gluon.jit
def prepare_chunk(q_rows, k_rows, decay_shared, beta_shared, T: gl.constexpr, TP: gl.constexpr, K: gl.constexpr,
                  WARPS: gl.constexpr):  # fmt: skip
    """(w [TP, K], C [TP, TP]) in shared memory, as `kda_kernels._triton.chunked` defines them.

    q_rows, k_rows: [TP, 1, K], normalised; decay_shared: [TP, K]; beta_shared: [TP]; fp32.
    """
    CHANNELS: gl.constexpr = channels_layout(2, TP, K, WARPS)
    CHANNELS3: gl.constexpr = channels_layout(3, TP, K, WARPS)
    TOKENS3: gl.constexpr = gl.BlockedLayout([TP, 1, 1], [1, 1, 32], [1, 1, WARPS], [2, 1, 0])
    COUPLES: gl.constexpr = couples_layout(TP, WARPS)
    SOLVE: gl.constexpr = gl.BlockedLayout([1, TP], [32, 1], [WARPS, 1], [1, 0])

    decay_rows = decay_shared._reinterpret(gl.float32, [TP, 1, K], packed(3))

    t3 = gl.arange(0, TP, gl.SliceLayout(1, gl.SliceLayout(2, CHANNELS3)))[:, None, None]
    s3 = gl.arange(0, TP, gl.SliceLayout(0, gl.SliceLayout(2, CHANNELS3)))[None, :, None]
    keys = _all_pairs(k_rows.permute([1, 0, 2]).load(CHANNELS3), TP, K, CHANNELS3)
    for r in gl.static_range(1, T):
        keys = gl.where((s3 < r) & (t3 >= r), keys * decay_rows.slice(r, 1).load(CHANNELS3), keys)
    keys_shared = gl.allocate_shared_memory(gl.float32, [TP, TP, K], packed(3), keys)

    keys = gl.reshape(keys_shared.load(COUPLES), (TP * TP, K))
    k = gl.reshape(_all_pairs(k_rows.load(COUPLES), TP, K, COUPLES), (TP * TP, K))
    q = gl.reshape(_all_pairs(q_rows.load(COUPLES), TP, K, COUPLES), (TP * TP, K))
    PLANE: gl.constexpr = gl.SliceLayout(2, COUPLES)
    beta = beta_shared._reinterpret(gl.float32, [TP, 1], packed(2)).load(PLANE)
    beta, _ = gl.broadcast(beta, gl.zeros((TP, TP), gl.float32, PLANE))
    a, b = coupling(keys, k, q, 1.0)
    a = gl.convert_layout(gl.reshape(a, (TP, TP)), PLANE) * beta
    b = gl.convert_layout(gl.reshape(b, (TP, TP)), PLANE)
    a_shared = gl.allocate_shared_memory(gl.float32, [TP, TP], packed(2), a)
    b_shared = gl.allocate_shared_memory(gl.float32, [TP, TP], packed(2), b)

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
