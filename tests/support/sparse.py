"""Tensors of many GiB of which only a few pages are ever touched: offsets past 2^31 without the memory."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

MAP_NORESERVE = 0x4000  # Linux; not in the mmap module before Python 3.13


def vast_tensor(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A zeroed tensor of the given strides. On the CPU its untouched pages cost nothing; on a GPU it is real memory.

    Skips the test, with the figures, where a GPU has too little memory left.
    """
    numel = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    num_bytes = numel * dtype.itemsize
    if device == "cpu":
        pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        base = torch.frombuffer(pages, dtype=dtype)
    else:
        free, _ = torch.cuda.mem_get_info()
        if free < num_bytes + 2**30:
            pytest.skip(f"needs {num_bytes / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} GiB are free")
        base = torch.zeros(numel, dtype=dtype, device=device)
    return torch.as_strided(base, size, stride)


def vast_pool(size: tuple[int, ...], pitch: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """``size[0]`` packed entries, ``pitch`` elements from one to the next."""
    inner = [math.prod(size[dim + 1 :]) for dim in range(1, len(size))]
    return vast_tensor(size, (pitch, *inner), dtype, device)
