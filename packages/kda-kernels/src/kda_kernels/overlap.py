"""Which of an op's buffers may share memory: the reasons of the checks, and the same question asked many times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import torch


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte address of a tensor's elements; (0, 0) if it has none."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def overlap_reason(written: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> str | None:
    """Refuse packed buffers that are ``written`` and share memory with another or with one of ``others``."""
    spans = {name: byte_span(tensor) for name, tensor in (written | others).items()}
    for name in written:
        start, end = spans[name]
        for other, (other_start, other_end) in spans.items():
            if other != name and start < other_end and other_start < end:
                return f"{name} must not share memory with {other}: pass a buffer of its own"
    return None


def same_memory_reason(tensors: dict[str, torch.Tensor]) -> str | None:
    """Refuse tensors that begin at one address. (Pools may interleave buffers, so spans say nothing here.)"""
    seen: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            other = seen.setdefault(tensor.data_ptr(), name)
            if other != name:
                return f"{name} must not share memory with {other}: pass a buffer of its own"
    return None


class MemoryMap:
    """Whether `same_memory_reason` and `overlap_reason` accept a verify, asked of addresses alone and in little time.

    Args:
        buffers: tensors that stay where they are, and were accepted beside each other.
        inputs: mixed_qkv, a and b of an accepted call; not empty. They may be views of one tensor.
        written: position among the call's addresses -> packed buffer that may overlap nothing.
        kept: the one of ``buffers`` that may overlap nothing either, if there is one.
    """

    __slots__ = ("_bounds", "_kept", "_starts", "_written")

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        written: Mapping[int, torch.Tensor],
        kept: torch.Tensor | None = None,
    ) -> None:
        held = [buffer for buffer in buffers if buffer.numel()]
        self._starts = frozenset(map(torch.Tensor.data_ptr, held))
        self._bounds: list[int] = []  # where memory of the buffers begins and ends, in turn
        self._written: list[tuple[int, int, list[tuple[int, int]]]] = []
        self._kept: list[tuple[int, int, int]] = []  # place of an input, and between which addresses it must not begin
        if kept is not None:
            start, end = byte_span(kept)
            for place, (begin, finish) in enumerate(map(byte_span, inputs)):
                if finish > begin:
                    self._kept.append((place, start - (finish - begin), end))
        if not written:
            return
        for start, end in sorted(map(byte_span, held)):
            if self._bounds and start <= self._bounds[-1]:
                self._bounds[-1] = max(self._bounds[-1], end)
            else:
                self._bounds += start, end
        spans = {place: byte_span(tensor) for place, tensor in [*enumerate(inputs), *written.items()]}
        sizes = {place: end - start for place, (start, end) in spans.items()}
        for place in written:
            others = [(other, size) for other, size in sizes.items() if other != place]
            self._written.append((place, sizes[place], others))

    def allows(self, addresses: Sequence[int]) -> bool:
        """Whether a call is accepted that is like the one given, but has its tensors at ``addresses``."""
        mixed_qkv, a, b = addresses[:3]
        starts = self._starts
        if mixed_qkv in (a, b) or a == b or mixed_qkv in starts or a in starts or b in starts:
            return False
        for place, below, above in self._kept:
            if below < addresses[place] < above:
                return False
        for place, size, others in self._written:
            start = addresses[place]
            end = start + size
            gap = bisect_right(self._bounds, start)  # even between two buffers, odd within one
            if gap % 2 or bisect_left(self._bounds, end) != gap:
                return False
            for other, other_size in others:
                if start < addresses[other] + other_size and addresses[other] < end:
                    return False
        return True
