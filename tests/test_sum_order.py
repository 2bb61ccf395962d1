"""The order of the sum over K, in the interpreter too: with a vector of ones only the order decides bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kda_kernels._triton.arithmetic import dot_k
from tests.support.bits import assert_same_bits


@triton.jit
def row_sums(x, y, sums, ROWS: tl.constexpr, K: tl.constexpr):
    k = tl.arange(0, K)
    r = tl.arange(0, ROWS)
    rows = tl.load(x + r[:, None] * K + k[None, :])
    tl.store(sums + r, dot_k(rows, tl.load(y + k)[None, :]))


@pytest.mark.parametrize("K", [64, 128])
def test_sum_over_k_has_the_documented_order(K: int, device: str) -> None:
    """Groups of 4 contiguous elements in order, then groups pairwise at distance K/2, K/4, ..., 4."""
    rows = 64
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(K)) * torch.logspace(-3, 3, K)
    sums = torch.zeros(rows, device=device)
    row_sums[(1,)](x.to(device), torch.ones(K, device=device), sums, rows, K)

    groups = x.numpy().reshape(rows, K // 4, 4)
    partial = groups[:, :, 0]
    for i in range(1, 4):
        partial = groups[:, :, i] + partial  # numpy adds fp32 in fp32
    while partial.shape[1] > 1:
        half = partial.shape[1] // 2
        partial = partial[:, :half] + partial[:, half:]
    assert partial.dtype == np.float32
    assert_same_bits(sums.cpu(), torch.from_numpy(partial[:, 0].copy()), "sums")
    # the data must tell orders apart, or this test shows nothing
    assert not np.array_equal(x.numpy().sum(1, dtype=np.float32), partial[:, 0])
