"""Exact comparison: two tensors are equal when their bit patterns are, so -0.0, NaN payloads and canaries count."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same width."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fail with the number of differing elements and the first one."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.numel() == 0:
        return
    different = as_bits(actual) != as_bits(expected)
    count = int(different.sum())
    if count:
        index = tuple(int(i) for i in different.nonzero()[0])
        raise AssertionError(
            f"{what}: {count} of {different.numel()} elements differ in their bits, the first at {index}: "
            f"{actual[index].item()!r}, expected {expected[index].item()!r}"
        )


def assert_close(actual: torch.Tensor, expected: object, bound: object, what: str) -> None:
    """Fail unless |actual - expected| <= bound everywhere, in fp64. ``expected`` and ``bound``: fp64 numpy arrays."""
    import numpy as np

    got = actual.detach().double().cpu().numpy()
    want, limit = np.asarray(expected), np.broadcast_to(np.asarray(bound), got.shape)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    excess = np.abs(got - want) - limit
    wrong = ~(excess <= 0)  # NaN is wrong too
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} elements are out of bounds, the first at {index}: "
            f"{got[index]!r}, expected {want[index]!r} within {limit[index]:.3g}; worst ratio "
            f"{float(np.nanmax(np.abs(got - want) / np.maximum(limit, 1e-300))):.3g}"
        )
