"""The order of the chunked form's operations, by an emulation that rounds once per operation as the document says.

On a GPU a multiply-add is fused; in the interpreter it is a product and a sum. The emulation takes either.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kda_kernels._triton.chunked import begin_chunk, chunk_outputs, cumulative_decays, extend_chunk
from kda_kernels.interpreter import is_interpreted
from tests.support.bits import assert_same_bits

Array = np.ndarray
Fma = Callable[[Array, Array, Array], Array]
V = 16


@triton.jit
def chunk_kernel(
    q, k, v, decay, beta, state, out, products,
    T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    t_index = tl.arange(0, TP)[:, None]
    s_index = tl.arange(0, TP)[None, :]
    k_range = tl.arange(0, K)[None, :]
    v_range = tl.arange(0, V)
    chunk = begin_chunk(TP, K, V)
    for t in range(T):
        rows = t * K + k_range
        chunk = extend_chunk(
            chunk, tl.load(q + rows), tl.load(k + rows), tl.load(v + t * V + v_range[None, :]),
            tl.load(decay + rows), tl.load(beta + t), t, t_index, s_index,
        )  # fmt: skip
    S = tl.load(state + v_range[:, None] * K + k_range)
    kept = t_index < T
    tl.store(out + t_index * V + v_range[None, :], chunk_outputs(S, chunk, t_index, s_index, T), mask=kept)
    decays = tl.load(decay + t_index * K + k_range, mask=kept, other=float("nan"))
    tl.store(products + t_index * K + k_range, cumulative_decays(decays, t_index, T), mask=kept)


def fused(x: Array, y: Array, z: Array) -> Array:
    """x * y + z rounded once: the product is exact in extended precision, whose sum is then rounded to fp32."""
    return (x.astype(np.longdouble) * y + z).astype(np.float32)


def separate(x: Array, y: Array, z: Array) -> Array:
    return x * y + z


def tree_dot(x: Array, y: Array, fma: Fma) -> Array:
    """The canonical tree over the last axis."""
    x, y = (a.reshape(*a.shape[:-1], -1, 4) for a in np.broadcast_arrays(x, y))
    p = x[..., 0] * y[..., 0]
    for i in range(1, 4):
        p = fma(x[..., i], y[..., i], p)
    while p.shape[-1] > 1:
        half = p.shape[-1] // 2
        p = p[..., :half] + p[..., half:]
    return p[..., 0]


def documented(q: Array, k: Array, v: Array, d: Array, beta: Array, S: Array, fma: Fma) -> tuple[Array, Array]:
    """(outputs [T, V], cumulative decays [T, K]) by docs/arithmetic.md, one token at a time."""
    keys: list[Array] = []
    decayed: list[Array] = []
    A: dict[tuple[int, int], Array] = {}
    products, outputs = [d[0]], []
    for t in range(len(q)):
        if t:
            products.append(products[-1] * d[t])
        keys = [key * d[t] for key in keys]
        for s, key in enumerate(keys):
            A[t, s] = beta[t] * tree_dot(key, k[t], fma)
        keys.append(k[t])
        decayed.append(k[t] * products[t])
        M = [tree_dot(key, q[t], fma) for key in keys]
        for r in range(t, 0, -1):
            for s in range(r):
                M[s] = fma(-M[r], A[r, s], M[s])
        C = [M[s] * beta[s] for s in range(t + 1)]
        w = q[t] * products[t]
        for s in range(t + 1):
            w = fma(-C[s], decayed[s], w)
        o = tree_dot(S, w, fma)
        for s in range(t + 1):
            o = fma(C[s], v[s], o)
        outputs.append(o)
    return np.stack(outputs), np.stack(products)


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("T", [1, 2, 3, 5, 8, 16])
def test_every_operation_is_in_the_documented_order(T: int, K: int, device: str) -> None:
    generator = torch.Generator().manual_seed(T * K)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(T, K), dim=1) for _ in range(2))
    k = torch.nn.functional.normalize(k + k[:1], dim=1)  # keys alike, so that A is not small
    v, decay = normal(T, V), torch.exp(-0.3 * torch.rand(T, K, generator=generator))
    beta, S = 0.5 + 0.5 * torch.rand(T, generator=generator), normal(V, K)
    out, products = torch.zeros(T, V, device=device), torch.zeros(T, K, device=device)
    inputs = (q, k, v, decay, beta, S)
    chunk_kernel[(1,)](
        *(x.to(device) for x in inputs), out, products,
        T=T, TP=max(2, triton.next_power_of_2(T)), K=K, V=V, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    fma = separate if is_interpreted() else fused
    expected, expected_products = documented(*(x.numpy() for x in inputs), fma=fma)
    assert expected.dtype == np.float32
    assert_same_bits(products.cpu(), torch.from_numpy(expected_products), "cumulative decays")
    assert_same_bits(out.cpu(), torch.from_numpy(expected), "outputs")
    # The data must tell the two kinds of multiply-add, hence orders, apart.
    other, _ = documented(*(x.numpy() for x in inputs), fma=fused if fma is separate else separate)
    assert not np.array_equal(other, expected)
