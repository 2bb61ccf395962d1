"""Our groups for the raw tensors that SGLang passes, built once per layer and found again on every later call.

Kernels recognise a repeated call by the identity of its groups, so a group must be the same object each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from kda_kernels import KdaShape, LayerParams, LayerState, Ring, Snapshots

LIMIT = 1024
"""Owners remembered before all are forgotten: more than any model has KDA layers."""

T = TypeVar("T")


class OwnedCache(Generic[T]):
    """One value per owner, an object of SGLang's; it goes when the owner goes, or when its key changes.

    So views that a value holds keep no memory of a model or pool that SGLang has dropped.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Hashable, T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, owner: object, key: Hashable, build: Callable[[], T]) -> T:
        """The owner's value if it was built for an equal ``key``, else a new one.

        The value must not hold the owner. That of an owner which cannot be referenced weakly is built every time.
        """
        place = id(owner)
        entry = self._entries.get(place)
        if entry is not None and entry[0]() is owner and entry[1] == key:
            return entry[2]
        value = build()
        try:
            watch = weakref.ref(owner, lambda _: self._entries.pop(place, None))
        except TypeError:
            return value
        if len(self._entries) >= LIMIT:
            self._entries.clear()
        self._entries[place] = (watch, key, value)
        return value


@dataclass(frozen=True, eq=False)
class LayerGroups:
    """What a verify takes beside its inputs.

    ``verdicts`` maps how a call's inputs look to why such a call is refused, or None.
    """

    shape: KdaShape
    params: LayerParams
    state: LayerState
    record: Ring | Snapshots
    verdicts: dict[Hashable, str | None] = field(default_factory=dict)


_layers: OwnedCache[LayerGroups] = OwnedCache()


def layer_groups(
    *,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    scale: float | None,
    heads: tuple[int, int, int, int],
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    conv_window: torch.Tensor,
    ring: tuple[torch.Tensor, ...] | None,
    snapshots: torch.Tensor | None,
) -> LayerGroups:
    """The groups of one layer.

    Args:
        conv_weight: [D, 4], the very tensor that SGLang's layer holds: the groups live as long as it does.
        conv_bias, A_log, dt_bias: the layer's, in any shape of the right size.
        lower_bound, scale: as `LayerParams`.
        heads: H, HV, K, V.
        conv_state, ssm_state, conv_window: as `LayerState`, for this layer.
        ring: raw_v, raw_k, g, beta of this layer, or None where ``snapshots`` [rows, steps, HV, V, K] are given.

    Raises:
        ValueError: the head sizes are not supported, or neither ring nor snapshots is given.
    """
    record = (snapshots,) if ring is None else ring
    tensors = (conv_weight, conv_bias, A_log, dt_bias, conv_state, ssm_state, conv_window, *record)
    key = (*map(_look, tensors), lower_bound, scale, heads, ring is None)

    def build() -> LayerGroups:
        if ring is None and snapshots is None:
            raise ValueError("verify needs ring tensors or a snapshot buffer, got neither")
        return LayerGroups(
            shape=KdaShape(*heads),
            params=LayerParams(
                # A second object for the same memory: the group must not keep its own owner alive.
                conv_weight=conv_weight.detach(),
                conv_bias=None if conv_bias is None else conv_bias.detach(),
                A_log=A_log.detach().reshape(-1),
                dt_bias=dt_bias.detach().reshape(-1),
                lower_bound=lower_bound,
                scale=scale,
            ),
            state=LayerState(conv_state, ssm_state, conv_window),
            record=Snapshots(snapshots) if ring is None and snapshots is not None else Ring(*ring or ()),
        )

    return _layers.get(conv_weight, key, build)


def _look(tensor: torch.Tensor | None) -> Hashable:
    """All that tells one tensor's memory and layout from another's."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def inputs_look(*tensors: torch.Tensor) -> Hashable:
    """Shape, strides, dtype and device of a call's inputs, without their addresses."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
