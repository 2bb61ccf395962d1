"""Every load and store that kernels make in Triton's interpreter, and the order in which programs run.

Values alone cannot show that two programs write the same thing to the same place, or that a row was read for nothing;
addresses can. On CPU tensors the interpreter works on the tensors' own memory, so addresses are theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from kda_kernels.interpreter import is_interpreted


@dataclass
class Accesses:
    """Addresses of the elements that were loaded and stored, masked-off ones left out, in program order."""

    loads: list[np.ndarray] = field(default_factory=list)
    stores: list[np.ndarray] = field(default_factory=list)

    def loaded(self, tensor: torch.Tensor) -> np.ndarray:
        """How often each element of ``tensor`` was loaded, in its shape."""
        return _counts(self.loads, tensor)

    def stored(self, tensor: torch.Tensor) -> np.ndarray:
        """How often each element of ``tensor`` was stored, in its shape."""
        return _counts(self.stores, tensor)

    def outside(self, tensors: list[torch.Tensor]) -> int:
        """Loads and stores that hit none of ``tensors`` (gaps between a strided view's entries count as outside)."""
        total = sum(a.size for a in (*self.loads, *self.stores))
        return total - sum(int(self.loaded(t).sum() + self.stored(t).sum()) for t in tensors)


def _taken(addresses: np.ndarray, mask: np.ndarray) -> np.ndarray:
    addresses, taken = np.broadcast_arrays(addresses, np.asarray(mask, dtype=bool))
    return addresses[taken].ravel()


def _counts(accesses: list[np.ndarray], tensor: torch.Tensor) -> np.ndarray:
    if not accesses or tensor.numel() == 0:
        return np.zeros(tuple(tensor.shape), dtype=np.int64)
    addresses = np.concatenate(accesses).astype(np.int64)
    start, size = tensor.data_ptr(), tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    inside = addresses[(addresses >= start) & (addresses <= start + last * size)]
    by_offset = np.bincount((inside - start) // size, minlength=last + 1)
    strides = [s * by_offset.itemsize for s in tensor.stride()]
    return np.lib.stride_tricks.as_strided(by_offset, tuple(tensor.shape), strides).copy()


@contextlib.contextmanager
def record_accesses() -> Iterator[Accesses]:
    """Record the loads and stores of every kernel run inside the block; interpreter only."""
    assert is_interpreted(), "addresses are recorded in Triton's interpreter"
    found = Accesses()
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def recording_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        found.loads.append(_taken(ptrs.data, mask.data))
        return load(self, ptrs, mask, *rest)

    def recording_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found.stores.append(_taken(ptrs.data, mask.data))
        return store(self, ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = recording_load, recording_store
    try:
        yield found
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


@contextlib.contextmanager
def reversed_programs() -> Iterator[None]:
    """Run the programs of every grid in reversed order inside the block; interpreter only."""
    assert is_interpreted(), "program order is only ours in Triton's interpreter"
    builder = interpreter.InterpreterBuilder
    set_grid_idx = builder.set_grid_idx

    def from_the_end(self: Any, x: int, y: int, z: int) -> None:
        set_grid_idx(self, *(n - 1 - i for n, i in zip(self.grid_dim, (x, y, z), strict=True)))

    builder.set_grid_idx = from_the_end
    try:
        yield
    finally:
        builder.set_grid_idx = set_grid_idx
