"""What a pool with compact windows keeps from verify to commit: each layer's mixed_qkv, in memory of its own."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch

from kda_kernels.overlap import byte_span


def own_version(tensor: torch.Tensor) -> int | None:
    """How often ``tensor`` was changed in place, or None if that cannot be told.

    torch counts per storage: what has a storage to itself has a count to itself, and a view's goes up with writes
    beside it too. Tensors made in inference mode are not counted.
    """
    if tensor.is_inference() or tensor.nbytes != tensor.untyped_storage().nbytes():
        return None
    return tensor._version


class KeptInputs:
    """The mixed_qkv of the layers verified so far in a round.

    Holding the tensors keeps torch's allocator, a CUDA graph's private pool too, from handing their memory out again.
    Whoever else writes there is seen here as far as `own_version` tells.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int | None] = {}
        self._spans: list[tuple[int, int, int]] = []  # start, end, layer; in order, none overlaps another
        self._seen: tuple[torch.Tensor | None, tuple[int, int]] = None, (0, 0)

    def reason(self, layer: int, name: str, tensor: torch.Tensor | None) -> str | None:
        """Why ``tensor``, the argument called ``name`` of a verify of ``layer``, takes what another layer needs."""
        if not isinstance(tensor, torch.Tensor):  # None, or what verify's checks name
            return None
        start, end = span = byte_span(tensor)
        if name == "mixed_qkv":
            self._seen = tensor, span
        if start == end:
            return None
        place = bisect_left(self._spans, (end,))  # those before it begin below `end`
        for _, other_end, other in reversed(self._spans[max(0, place - 2) : place]):  # one of them may be this layer's
            if other != layer and other_end > start:
                return (
                    f"{name} of layer {layer} must not share memory with mixed_qkv of layer {other}, which commit "
                    "still reads in a pool with compact_window: give each layer tensors of its own until commit; an "
                    "engine that reuses one buffer for all layers needs compact_window=False"
                )
        return None

    def keep(self, layer: int, mixed_qkv: torch.Tensor) -> None:
        """Hold what a verify of ``layer`` was given, in place of what an earlier one was."""
        self._spans = [span for span in self._spans if span[2] != layer] if layer in self._tensors else self._spans
        self._tensors[layer], self._versions[layer] = mixed_qkv, own_version(mixed_qkv)
        seen, span = self._seen
        start, end = span if seen is mixed_qkv else byte_span(mixed_qkv)
        self._seen = None, (0, 0)
        if end > start:
            insort(self._spans, (start, end, layer))

    def changed(self) -> int | None:
        """A layer whose tensor was changed in place since it was kept, or None."""
        kept = self._tensors.items()
        return next((layer for layer, tensor in kept if own_version(tensor) != self._versions[layer]), None)

    def of_layers(self, num_layers: int) -> list[torch.Tensor]:
        """The tensors of all layers, each of which was verified."""
        return [self._tensors[layer] for layer in range(num_layers)]
