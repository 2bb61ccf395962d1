"""The arithmetic of KDA verify and fold, each piece once: every kernel calls these, so equal bits need no luck.

Order decides bits. Three rules hold here:

* A sum over K is the fixed tree of `dot_k`, spelled out as size-2 sums, so that no layout, tile or warp count that a
  compiler picks can change it: 4 contiguous elements in order with fused multiply-adds, then halves at distance
  K/2, K/4, ..., 4.
* Multiply-adds are explicit (`tl.fma`), and kernels are compiled with ``enable_fp_fusion=False``: nothing is contracted
  behind our back.
* Elementwise forms (``exp``, ``x / (1 + exp(-x))``, ``1 / (1 + exp(-b))``) are the field's, because ring records must
  equal SGLang's bit for bit.

The helpers hold no pointers and no layouts; Gluon kernels can call them too.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl


@triton.jit
def in_layout(x, LAYOUT: tl.constexpr):
    """``x`` in a Gluon layout; as it is where ``LAYOUT`` is None (plain Triton, which has none to name)."""
    if LAYOUT is not None:
        x = gl.convert_layout(x, LAYOUT)
    return x


@triton.jit
def _sum_of_quads(p, N: tl.constexpr):
    """[R, N] partial sums (one per 4 elements of K) -> [R], added pairwise at distance N/2, N/4, ..., 1."""
    R: tl.constexpr = p.shape[0]
    tl.static_assert(N == 16 or N == 32, "the reduction tree is defined for K of 64 and 128")
    if N == 32:
        p = tl.sum(tl.reshape(p, (R, 2, 16)), 1)
    p = tl.sum(tl.reshape(p, (R, 2, 8)), 1)
    p = tl.sum(tl.reshape(p, (R, 2, 4)), 1)
    p = tl.sum(tl.reshape(p, (R, 2, 2)), 1)
    return tl.sum(p, 1)


@triton.jit
def split_last(x):
    """[R, N, 4] -> four [R, N]."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, (R, N, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _quads(x):
    """[R, K] -> four [R, K/4]: elements 0, 1, 2 and 3 of every group of 4 contiguous ones."""
    R: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return split_last(tl.reshape(x, (R, K // 4, 4)))


@triton.jit
def dot_k(x, y):
    """Sum over K of x * y in the canonical tree. x: [R, K] fp32; y: [R, K] or [1, K] fp32 -> [R] fp32."""
    K: tl.constexpr = x.shape[1]
    x, y = tl.broadcast(x, y)
    x0, x1, x2, x3 = _quads(x)
    y0, y1, y2, y3 = _quads(y)
    p = x0 * y0
    p = tl.fma(x1, y1, p)
    p = tl.fma(x2, y2, p)
    p = tl.fma(x3, y3, p)
    return _sum_of_quads(p, K // 4)


@triton.jit
def conv_tap(acc, x, w, CONTRACT: tl.constexpr):
    """``acc + x * w`` of one conv tap. acc: fp32; x: activation dtype; w: activation dtype or fp32.

    A 16-bit weight: the product is rounded to that type, then added in fp32. An fp32 weight: one fused multiply-add
    (``CONTRACT``), separately rounded on ROCm. Both are what SGLang's kernels compile to.
    """
    product = x.to(tl.float32) * w.to(tl.float32)
    if w.dtype == tl.float32:
        if CONTRACT:
            acc = tl.fma(x.to(tl.float32), w, acc)
        else:
            acc = acc + product
    else:
        acc = acc + product.to(w.dtype).to(tl.float32)
    return acc


@triton.jit
def silu(acc, ACT: tl.constexpr):
    """``acc / (1 + exp(-acc))`` rounded to the activation dtype."""
    return (acc / (1 + tl.exp(-acc))).to(ACT)


@triton.jit
def conv_silu(bias, x0, x1, x2, x3, w0, w1, w2, w3, CONTRACT: tl.constexpr):
    """Causal conv of width 4 and SiLU for one token: x0 is the oldest column; bias fp32 -> activation dtype."""
    acc = conv_tap(bias, x0, w0, CONTRACT)
    acc = conv_tap(acc, x1, w1, CONTRACT)
    acc = conv_tap(acc, x2, w2, CONTRACT)
    acc = conv_tap(acc, x3, w3, CONTRACT)
    return silu(acc, x0.dtype)


@triton.jit
def log_decay(a, dt_bias, A_log, lower_bound, SAFE_GATE: tl.constexpr):
    """KDA's per-channel log-decay g (<= 0), fp32. a, dt_bias: fp32 [1, K]; A_log: fp32 scalar.

    Safe gate: ``lower_bound * sigmoid(exp(A_log) * x)``; standard: ``-exp(A_log) * softplus(x)``, x = a + dt_bias, with
    softplus as ``log(1 + exp(x))`` up to 20 and x beyond. That form, not log1p: it is the field's contract, and loses
    relative accuracy below x = -10.
    """
    x = a + dt_bias
    if SAFE_GATE:
        g = lower_bound * (1 / (1 + tl.exp(-(tl.exp(A_log) * x))))
    else:
        g = -tl.exp(A_log) * tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
    return g


@triton.jit
def beta_of(b):
    """``sigmoid(b)``, fp32."""
    return 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def inverse_norm(sum_of_squares):
    """``1 / sqrt(sum(x^2) + 1e-6)``."""
    return 1.0 / tl.sqrt(sum_of_squares + 1e-6)


@triton.jit
def l2_normalise(x):
    """``x * (1 / sqrt(sum(x^2) + 1e-6))`` over K. x: [R, K] fp32."""
    return x * inverse_norm(dot_k(x, x))[:, None]


@triton.jit
def delta_step(S, k, v, decay, beta, ROWS: tl.constexpr = None):
    """One step of the gated delta rule. S: [BV, K] fp32 rows of the state; k (normalised), decay: [1, K]; v: [BV].

    ``S *= decay; u = beta * (v - S k); S += u k^T`` with decay = exp(g). ``ROWS`` is v's layout in a Gluon kernel.
    """
    S = S * decay
    u = (v - in_layout(dot_k(S, k), ROWS)) * beta
    return tl.fma(u[:, None], k, S)
