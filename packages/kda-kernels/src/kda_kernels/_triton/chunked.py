"""The chunked form of verify: the outputs of T tokens from the state as it was before them, read once.

With d_t = exp(g_t), P_t = d_0 d_1 .. d_t and the normalised q and k of a token (q times scale):

* ``kd(s, t)``, key s decayed to token t: ``kd(t, t) = k_t``, ``kd(s, t) = kd(s, t - 1) * d_t``
* ``A[t, s] = beta_t * dot_k(kd(s, t), k_t)`` for s < t; ``B[t, s] = dot_k(kd(s, t), q_t)`` for s <= t
* ``M (I + A) = B``, then ``C[t, s] = M[t, s] * beta_s``
* ``w_t = q_t P_t - sum over s <= t of C[t, s] k_s P_s``
* ``o_t = dot_k(S, w_t) + sum over s <= t of C[t, s] v_s``

Decays are products of exp(g) in token order, not exp of a sum: as exact, cheaper, and nothing overflows because no
factor is above 1. Order decides bits here as in `arithmetic`, whose rules hold: every sum over tokens runs in one fixed
order by fused multiply-adds, what a token does not take part in is left out by a select and not multiplied by 0, and no
loop's outcome for token t depends on later tokens or on how far T is padded. docs/arithmetic.md has the derivation.

The helpers hold no pointers and make no layouts, so Gluon kernels can call them too. Rows of a tile [TP, ..] are
tokens; TP is T rounded up to a power of two, and rows from T on are never read. ``t_index`` [TP, 1] and ``s_index``
[1, TP] number the rows or columns of the tile they go with, in its layout.
"""

import triton
import triton.language as tl

from kda_kernels._triton.arithmetic import dot_k, in_layout


@triton.jit
def _nothing():
    """-0.0, the one value that changes no other when added. A literal would not do: Triton makes 0.0 of it."""
    return tl.cast(-2147483648, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def row_of(tile, t_index, t):
    """Row t of a tile [R, N] -> [N], exactly."""
    return tl.sum(tl.where(t_index == t, tile, _nothing()), 0)


@triton.jit
def column_of(tile, s_index, s):
    """Column s of a tile [R, N] -> [R], exactly."""
    return tl.sum(tl.where(s_index == s, tile, _nothing()), 1)


@triton.jit
def cumulative_decays(decay, t_index, T: tl.constexpr):
    """P from d: row t is ``d_0 * d_1 * .. * d_t``, multiplied in that order. decay: [TP, K] fp32."""
    product = decay
    for t in tl.static_range(1, T):
        before = row_of(product, t_index, t - 1)
        product = tl.where(t_index == t, before[None, :] * decay, product)
    return product


@triton.jit
def decay_keys(keys, k, decay, is_new):
    """kd(., t) from kd(., t - 1): every row fades by token t's decay, row t becomes its k.

    keys: [TP, K]; k, decay: [1, K]; is_new: [TP, 1], true in row t.
    """
    return tl.where(is_new, k, keys * decay)


@triton.jit
def coupling(keys, k, q, beta):
    """Row t of A and of B, over s: [TP] each, of which A's s < t and B's s <= t mean something.

    keys: kd(., t) [TP, K]; k, q: [1, K]; beta: that of token t.
    """
    return dot_k(keys, k) * beta, dot_k(keys, q)


@triton.jit
def add_scaled(X, factor, row, where):
    """``X + factor * row`` where ``where`` holds, X elsewhere, whatever ``factor`` and ``row`` are there."""
    return tl.where(where, tl.fma(factor, row, X), X)


@triton.jit
def eliminate(M, a_row, r, t_index, s_index):
    """One step of `solve_chunk`: column r of M is final, take its share out of the columns before. a_row: [1, TP]."""
    return add_scaled(M, -column_of(M, s_index, r)[:, None], a_row, (t_index >= r) & (s_index < r))


@triton.jit
def solve_chunk(A, B, t_index, s_index, T: tl.constexpr):
    """M of ``M (I + A) = B``, by columns from the last. A: [TP, TP], below its diagonal; B: with its diagonal.

    Token t's row takes r = t, t - 1, .., 1 in turn, whatever T is. Where the select leaves an element alone, a value
    that is not finite in a later token's row cannot reach it. What stands above the diagonal is neither read nor kept.
    """
    for r in tl.static_range(T - 1, 0, -1):
        B = eliminate(B, row_of(A, t_index, r)[None, :], r, t_index, s_index)
    return B


@triton.jit
def add_earlier(X, C, Y, t_index, s_index, T: tl.constexpr, ROWS: tl.constexpr = None):
    """``X[t] += C[t, s] * Y[s]`` for s = 0, 1, .., t in turn. X, Y: [TP, N]; C: [TP, TP]; all fp32.

    ``t_index`` goes with X and Y, ``s_index`` with C. ``ROWS`` is the layout of X's rows in a Gluon kernel whose C has
    another.
    """
    for s in tl.static_range(T):
        factor = in_layout(column_of(C, s_index, s), ROWS)
        X = add_scaled(X, factor[:, None], row_of(Y, t_index, s)[None, :], t_index >= s)
    return X


@triton.jit
def combine_queries(Q, K, C, t_index, s_index, T: tl.constexpr, ROWS: tl.constexpr = None):
    """w from decayed q and k, both [TP, K]: ``w_t = q_t - C[t, 0] k_0 - .. - C[t, t] k_t``."""
    return add_earlier(Q, -C, K, t_index, s_index, T, ROWS)


@triton.jit
def begin_chunk(TP: tl.constexpr, K: tl.constexpr, BLOCK_V: tl.constexpr):
    """What a kernel that walks the tokens keeps of them: (kd, P, decayed q and k, v, A, B, beta), nothing yet."""
    tokens_k = tl.zeros([TP, K], tl.float32)
    pairs = tl.zeros([TP, TP], tl.float32)
    return (
        tokens_k, tl.full([1, K], 1.0, tl.float32), tokens_k, tokens_k, tl.zeros([TP, BLOCK_V], tl.float32),
        pairs, pairs, tl.zeros([1, TP], tl.float32),
    )  # fmt: skip


@triton.jit
def extend_chunk(chunk, q, k, v, decay, beta, t, t_index, s_index):
    """``chunk`` with token t. q, k, decay: [1, K]; v: [1, BLOCK_V]; all fp32. For plain Triton."""
    keys, product, decayed_q, decayed_k, values, A, B, betas = chunk
    is_new = t_index == t
    keys = decay_keys(keys, k, decay, is_new)
    product = product * decay
    decayed_q = tl.where(is_new, q * product, decayed_q)
    decayed_k = tl.where(is_new, k * product, decayed_k)
    values = tl.where(is_new, v, values)
    a, b = coupling(keys, k, q, beta)
    A = tl.where(is_new, a[None, :], A)
    B = tl.where(is_new, b[None, :], B)
    betas = tl.where(s_index == t, beta, betas)
    return keys, product, decayed_q, decayed_k, values, A, B, betas


@triton.jit
def chunk_outputs(S, chunk, t_index, s_index, T: tl.constexpr):
    """o [TP, BLOCK_V] fp32 of all tokens of ``chunk``. S: [BLOCK_V, K], the state before them. For plain Triton."""
    _, _, decayed_q, decayed_k, values, A, B, betas = chunk
    C = solve_chunk(A, B, t_index, s_index, T) * betas
    w = combine_queries(decayed_q, decayed_k, C, t_index, s_index, T)
    out = values
    for t in range(T):  # a real loop: unrolled, T = 16 compiles in twice the time
        out = tl.where(t_index == t, dot_k(S, row_of(w, t_index, t)[None, :])[None, :], out)
    return add_earlier(out, C, values, t_index, s_index, T)
