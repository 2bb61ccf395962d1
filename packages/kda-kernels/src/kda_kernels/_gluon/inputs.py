"""How a Gluon verify program gets its tokens' q, k and v, and how it gets the state on its way before them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._gluon.layouts import packed
from kda_kernels._triton.arithmetic import conv_silu, in_layout, split_last


@gluon.constexpr_function
def with_taps(layout):
    """``layout`` of a [R, C] tile extended by a third dimension of 4 values in one thread."""
    return gl.BlockedLayout(
        list(layout.size_per_thread) + [4],
        list(layout.threads_per_warp) + [1],
        list(layout.warps_per_cta) + [1],
        [2, 1, 0],
    )


@gluon.jit
def load_taps(conv_weight, conv_bias, channels, LAYOUT: gl.constexpr, HAS_BIAS: gl.constexpr):
    """(bias fp32, w0, w1, w2, w3) of ``channels`` [R, C]: the 4 taps of a channel are one 8- or 16-byte load."""
    TAPS: gl.constexpr = with_taps(LAYOUT)
    tap = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, TAPS)))
    offsets = gl.convert_layout(channels * 4, gl.SliceLayout(2, TAPS))
    w0, w1, w2, w3 = split_last(gl.load(conv_weight + offsets[:, :, None] + tap[None, None, :]))
    if HAS_BIAS:
        bias = gl.load(conv_bias + channels).to(gl.float32)
    else:
        bias = gl.zeros(channels.shape, gl.float32, LAYOUT)
    return bias, in_layout(w0, LAYOUT), in_layout(w1, LAYOUT), in_layout(w2, LAYOUT), in_layout(w3, LAYOUT)


@gluon.jit
def load_column(x, x_stride, history, token, TAP: gl.constexpr, channels, D: gl.constexpr):
    """Input column ``token - 3 + TAP`` of ``channels``: of the conv state (oldest first) where that is below 0."""
    column = (token - 3 + TAP).to(gl.int64)  # times a row stride it can pass 2^31
    return gl.load(gl.where(column >= 0, x + column * x_stride, history + (column + 3) * D) + channels)


@gluon.jit
def load_columns(x, x_stride, history, token, channels, D: gl.constexpr, FUSED: gl.constexpr):
    """The four input columns of each row's token, oldest first; unfused, only the last is loaded and meant."""
    x3 = load_column(x, x_stride, history, token, 3, channels, D)
    if FUSED:
        x0 = load_column(x, x_stride, history, token, 0, channels, D)
        x1 = load_column(x, x_stride, history, token, 1, channels, D)
        x2 = load_column(x, x_stride, history, token, 2, channels, D)
    else:
        x0 = x3
        x1 = x3
        x2 = x3
    return x0, x1, x2, x3


@gluon.jit
def value_of(columns, taps, FUSED: gl.constexpr, CONTRACT: gl.constexpr):
    """q, k or v of every row's token: its columns convolved, or what the conv kernel left."""
    if FUSED:
        value = conv_silu(
            taps[0], columns[0], columns[1], columns[2], columns[3], taps[1], taps[2], taps[3], taps[4], CONTRACT
        )
    else:
        value = columns[3]
    return value


@gluon.jit
def clamped(token, T: gl.constexpr, TP: gl.constexpr):
    """Token to load for a row of a tile: rows past the last token repeat it, so that no load needs a mask."""
    if T < TP:
        token = gl.minimum(token, T - 1)
    return token


@gluon.jit
def store_window(window, columns, channels, mask, D: gl.constexpr):
    """The conv state after each row's token; ``window`` points at its entry."""
    gl.store(window + channels, columns[1], mask=mask)
    gl.store(window + D + channels, columns[2], mask=mask)
    gl.store(window + 2 * D + channels, columns[3], mask=mask)


@gluon.jit
def prefetch_l2(pointer, wanted, BYTES: gl.constexpr):
    """Ask for BYTES from ``pointer`` on to be brought into L2 where ``wanted``. One thread asks, nothing waits.

    The instruction takes multiples of 16 bytes: an odd slot pitch starts within the first of them.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred first, asks; .reg .u32 thread; .reg .b64 start; and.b64 start, $1, -16; "
        "mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; setp.ne.and.s32 asks, $2, 0, first; "
        "@asks cp.async.bulk.prefetch.L2.global [start], $3; mov.b32 $0, 0; }",
        "=r,l,r,r", [pointer.to(gl.int64), wanted.to(gl.int32), BYTES], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def qk_rows(shared, PAIRED: gl.constexpr):
    """(q, k) of a staged q | k tile [2 TP, K], [TP, 1, K] each; paired: in turn, else q's tokens first."""
    TP: gl.constexpr = shared.shape[0] // 2
    K: gl.constexpr = shared.shape[1]
    if PAIRED:
        rows = shared._reinterpret(gl.float32, [TP, 1, 2 * K], packed(3))
        q = rows.slice(0, K, 2)
        k = rows.slice(K, K, 2)
    else:
        rows = shared._reinterpret(gl.float32, [2 * TP, 1, K], packed(3))
        q = rows.slice(0, TP)
        k = rows.slice(TP, TP)
    return q, k
