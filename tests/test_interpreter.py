"""The interpreter's repairs: fp32 -> bf16 as hardware does it, over every 16-bit pattern and around every tie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kda_kernels.interpreter import round_to_bfloat16_bits
from tests.support.bits import assert_same_bits


def fp32_values() -> torch.Tensor:
    """Every bf16 value, its ties with both neighbours, and the fp32 values next to those: 6 x 65,536."""
    high = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy((high[None] | low[:, None]).view(np.float32).ravel())


def test_rounding_equals_torch() -> None:
    values = fp32_values()
    ours = torch.from_numpy(round_to_bfloat16_bits(values.numpy()).view(np.int16)).view(torch.bfloat16)
    nan = values.isnan()
    assert_same_bits(ours[~nan], values[~nan].bfloat16(), "rounded values")
    assert ours[nan].isnan().all()


@triton.jit
def cast_kernel(x, y, z, N: tl.constexpr):
    offsets = tl.arange(0, N)
    value = tl.load(x + offsets)
    tl.store(y + offsets, value.to(tl.bfloat16))
    tl.store(z + offsets, value)


@pytest.mark.parametrize("target", [0, 1], ids=["explicit cast", "store converts"])
def test_a_kernel_casts_and_stores_bf16_rounded(target: int, device: str) -> None:
    values = fp32_values().to(device)
    values = values[~values.isnan()]
    size = 1 << 19
    padded = torch.zeros(size, device=device)
    padded[: values.numel()] = values
    results = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(2)]
    cast_kernel[(1,)](padded, *results, size)
    assert_same_bits(results[target], padded.bfloat16(), "bf16")
