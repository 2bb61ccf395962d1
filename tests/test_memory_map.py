"""`MemoryMap` answers as the two reasons do, for any way in which tensors can lie in memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install hypothesis (dependency group `test`)"
)

from hypothesis import given
from hypothesis import strategies as st

from kda_kernels.overlap import MemoryMap, overlap_reason, same_memory_reason

SIZE = 60
WHOLE = torch.zeros(SIZE, dtype=torch.bfloat16)
NAMES = ["mixed_qkv", "a", "b", "out", "workspace"]

offsets = st.integers(0, SIZE - 16)
row_strides = st.integers(0, 6)
lengths = st.integers(0, 12)


def rows(offset: int, stride: int) -> torch.Tensor:
    """[3, 3], rows ``stride`` apart: apart, interleaved or on top of each other."""
    return WHOLE.as_strided((3, 3), (stride, 1), offset)


def reason(tensors: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], kept: torch.Tensor | None) -> str | None:
    """What verify's checks say."""
    inputs = {name: tensors[name] for name in ("mixed_qkv", "a", "b")}
    written = {name: tensors[name] for name in ("out", "workspace") if name in tensors}
    if kept is not None:
        written["kept"] = kept
    return same_memory_reason(inputs | buffers) or overlap_reason(written, inputs | buffers)


@given(
    held=st.lists(st.tuples(offsets, lengths), max_size=4),
    strides=st.tuples(row_strides, row_strides, row_strides),
    sizes=st.tuples(st.integers(1, 12), st.none() | st.integers(1, 12)),
    moved=st.tuples(offsets, offsets, offsets, offsets, offsets),
    kept_at=st.none() | offsets,
)
def test_the_map_agrees_with_the_checks(
    held: list[tuple[int, int]],
    strides: tuple[int, int, int],
    sizes: tuple[int, int | None],
    moved: tuple[int, int, int, int, int],
    kept_at: int | None,
) -> None:
    buffers = {f"buffer {i}": WHOLE[start : start + size] for i, (start, size) in enumerate(held)}
    kept = None if kept_at is None else WHOLE[kept_at : kept_at + 3]
    if same_memory_reason(buffers) or (kept is not None and overlap_reason({"kept": kept}, buffers)):
        return  # never accepted

    def call(places: tuple[int, int, int, int, int]) -> dict[str, torch.Tensor]:
        tensors = {name: rows(place, stride) for name, place, stride in zip(NAMES, places, strides, strict=False)}
        for name, place, size in zip(NAMES[3:], places[3:], sizes, strict=True):
            if size is not None:
                tensors[name] = WHOLE[place : place + size]
        return tensors

    # The map knows sizes and strides from one call, addresses from another.
    seen = list(call((0, 0, 0, 0, 0)).values())
    held = [*buffers.values(), *([] if kept is None else [kept])]
    memory = MemoryMap(held, seen[:3], {place: seen[place] for place in range(3, len(seen))}, kept=kept)
    tensors = call(moved)
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    assert memory.allows(addresses) == (reason(tensors, buffers, kept) is None)
