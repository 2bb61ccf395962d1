"""The tensors that verify and commit work on, grouped: parameters, slot state, ring, snapshots, pending folds.

Layouts are those of SGLang 0.5.x, byte for byte, so that a ring or state of either side can be read by the other.
Every class here is a frozen group of tensors, compared by identity. Of those that a pool holds, `allocate` builds the
right layout, and `layer(i)` slices one layer off a group that was allocated with a leading [layers] dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch

from kda_kernels.shapes import CONV_WIDTH, KdaShape

KEPT_INPUTS = 3
"""What `LayerState.kept_inputs` holds of a layer's mixed_qkv: address, row pitch in elements, rows."""

ANY_ROWS = 2**31 - 1
"""Batch rows where no buffer is indexed by them."""

FOLDED_ROWS = 8
"""Rows of the state for each entry of `PendingFold.folded`: the smallest tile of a program."""


class TensorGroup:
    """Shared behaviour of the frozen tensor groups below."""

    _layered_ndim: ClassVar[int]
    """Dimensions of the first tensor in a group with a leading [layers]."""

    def layer(self, index: int) -> Self:
        """The views of layer ``index`` of a group whose tensors have a leading [layers] dimension.

        Raises:
            ValueError: the group has no such dimension.
        """
        first = self._tensors()[0]
        if first.ndim != self._layered_ndim:
            raise ValueError(
                f"layer() needs tensors with a leading [layers], got shape {list(first.shape)}: "
                "allocate with num_layers, or use the group as it is"
            )
        members = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return type(self)(**{name: None if tensor is None else tensor[index] for name, tensor in members.items()})

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the group."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        members = [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]
        return [tensor for tensor in members if tensor is not None]


def _lead(num_layers: int | None) -> tuple[int, ...]:
    return () if num_layers is None else (num_layers,)


@dataclass(frozen=True, eq=False)
class LayerParams:
    """Parameters of one KDA layer.

    Args:
        conv_weight: [D, 4], activation dtype or fp32; tap 3 multiplies the newest token.
        conv_bias: [D] of the weight's dtype, or None.
        A_log: [HV] fp32, log of the gate's per-head rate.
        dt_bias: [HV*K] fp32, added to the raw gate input.
        lower_bound: None for the standard gate ``-exp(A_log) * softplus(a + dt_bias)``; a negative number (-5 in the
            field) for the safe gate ``lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``.
        scale: factor on the normalised query; None means ``K ** -0.5``.
    """

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None = None
    scale: float | None = None

    def scale_for(self, shape: KdaShape) -> float:
        """The query scale, ``K ** -0.5`` unless given."""
        return shape.head_k_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, eq=False)
class LayerState(TensorGroup):
    """Per-slot state of one layer and the conv windows that verify writes, or in their place a note of its inputs.

    The window after token t is columns t + 1 to t + 3 of the slot's three committed columns followed by the request's
    rows of mixed_qkv. Where those rows stay as they are until the commit, `gather_conv` takes it from there and verify
    need not write it: give ``kept_inputs`` and no ``conv_window``. Exactly one of the two is given.

    Args:
        conv_state: [slots, 3, D] activation dtype, oldest column first. Verify only reads it.
        ssm_state: [slots, HV, V, K] fp32, K contiguous. Verify only reads it.
        conv_window: [rows, steps, 3, D] activation dtype; entry t is the conv state after token t. Rows are batch
            positions, not slots; ``steps`` is at least the number of draft tokens. Or None.
        kept_inputs: [3] int64, packed, or None: verify notes in it, on the device, its mixed_qkv's address, row pitch
            in elements and number of rows.
    """

    _layered_ndim: ClassVar[int] = 4
    conv_state: torch.Tensor
    ssm_state: torch.Tensor
    conv_window: torch.Tensor | None
    kept_inputs: torch.Tensor | None = None

    @property
    def windows(self) -> torch.Tensor:
        """``conv_window``. Raises ValueError where there are ``kept_inputs`` in its place."""
        if self.conv_window is None:
            raise ValueError("this state has kept_inputs and no conv_window: commit it with gather_conv")
        return self.conv_window

    @classmethod
    def allocate(
        cls,
        shape: KdaShape,
        *,
        slots: int,
        rows: int,
        steps: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_layers: int | None = None,
        compact_window: bool = False,
    ) -> LayerState:
        """Zeroed state for ``slots`` slots and windows for ``rows`` batch rows of ``steps`` tokens.

        With ``compact_window`` no windows (``rows`` and ``steps`` are not looked at) but ``kept_inputs``.
        """
        lead, columns = _lead(num_layers), CONV_WIDTH - 1
        heads = (shape.num_v_heads, shape.head_v_dim, shape.head_k_dim)
        return cls(
            conv_state=torch.zeros(*lead, slots, columns, shape.conv_dim, dtype=dtype, device=device),
            ssm_state=torch.zeros(*lead, slots, *heads, dtype=torch.float32, device=device),
            conv_window=None
            if compact_window
            else torch.zeros(*lead, rows, steps, columns, shape.conv_dim, dtype=dtype, device=device),
            kept_inputs=torch.zeros(*lead, KEPT_INPUTS, dtype=torch.int64, device=device) if compact_window else None,
        )


@dataclass(frozen=True, eq=False)
class Ring(TensorGroup):
    """ReplaySSM ring: each draft token's raw inputs, from which `fold` replays the accepted prefix.

    Token t of a verify is record t; records past ``length`` are dropped. The slot pitch (``stride(0)``) is free, the
    inner dimensions are packed.

    Args:
        raw_v: [slots, HV, L, V] activation dtype, after conv and SiLU, before the delta rule.
        raw_k: [slots, H, L, K] activation dtype, after conv and SiLU, before the l2-norm.
        g: [slots, HV, L, K] fp32 log-decay (<= 0).
        beta: [slots, HV, L] fp32, ``sigmoid(b)``.
    """

    _layered_ndim: ClassVar[int] = 5
    raw_v: torch.Tensor
    raw_k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def allocate(
        cls,
        shape: KdaShape,
        *,
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_layers: int | None = None,
    ) -> Ring:
        """A zeroed ring of ``length`` records for each of ``slots`` slots."""
        lead = _lead(num_layers)
        h, hv, k, v = shape.num_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim
        return cls(
            raw_v=torch.zeros(*lead, slots, hv, length, v, dtype=dtype, device=device),
            raw_k=torch.zeros(*lead, slots, h, length, k, dtype=dtype, device=device),
            g=torch.zeros(*lead, slots, hv, length, k, dtype=torch.float32, device=device),
            beta=torch.zeros(*lead, slots, hv, length, dtype=torch.float32, device=device),
        )

    @property
    def length(self) -> int:
        """L, records per slot."""
        return self.beta.shape[-1]


@dataclass(frozen=True, eq=False)
class Snapshots(TensorGroup):
    """State snapshots: the whole recurrent state after every draft token.

    Args:
        states: [rows, steps, HV, V, K] fp32; rows are batch positions, not slots. The row pitch is free.
    """

    _layered_ndim: ClassVar[int] = 6
    states: torch.Tensor

    @classmethod
    def allocate(
        cls, shape: KdaShape, *, rows: int, steps: int, device: torch.device | str, num_layers: int | None = None
    ) -> Snapshots:
        """Zeroed snapshots of ``steps`` tokens for each of ``rows`` batch rows."""
        heads = (shape.num_v_heads, shape.head_v_dim, shape.head_k_dim)
        return cls(torch.zeros(*_lead(num_layers), rows, steps, *heads, dtype=torch.float32, device=device))


@dataclass(frozen=True, eq=False)
class PendingFold(TensorGroup):
    """What *fold on verify* keeps of each slot: accepted records that are not in the recurrent state yet.

    The ring that goes with it has two banks: ``Ring.allocate(slots=2 * slots)``, bank p of slot s is its slot
    ``s + p * slots``. A verify writes one bank and replays the accepted records of the other into the state first, so
    no program reads what another one writes. `advance` swaps the banks; `flush` replays without a verify.

    A slot is reset by ``pending[slot] = 0``, whatever else it holds.

    Args:
        parity: [slots] int32, 0 or 1: the bank that the next verify writes.
        pending: [slots] int32, 0..L: accepted records of the other bank, those of the last `advance` that accepted any.
        epoch: [slots] int32, one more after each `advance` that accepts records.
        folded: [slots, HV, V/8] int32: the epoch whose pending records rows ``8i`` to ``8i + 7`` of the state hold
            already, so that nothing is replayed twice. A launch brings all rows of a slot up to date or none: the
            entries of a head differ only while one runs, and are many so that its programs share none.
    """

    _layered_ndim: ClassVar[int] = 4
    parity: torch.Tensor
    pending: torch.Tensor
    epoch: torch.Tensor
    folded: torch.Tensor

    @classmethod
    def allocate(
        cls, shape: KdaShape, *, slots: int, device: torch.device | str, num_layers: int | None = None
    ) -> PendingFold:
        """Nothing pending in ``slots`` slots. With ``num_layers`` only ``folded`` has a leading [layers]."""
        groups = shape.head_v_dim // FOLDED_ROWS

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(*size, dtype=torch.int32, device=device)

        folded = zeros(*_lead(num_layers), slots, shape.num_v_heads, groups)
        return cls(zeros(slots), zeros(slots), zeros(slots), folded)

    def layer(self, index: int) -> PendingFold:
        """The group of layer ``index``: its ``folded``, and what all layers share."""
        if self.folded.ndim != self._layered_ndim:
            raise ValueError(
                f"layer() needs folded with a leading [layers], got shape {list(self.folded.shape)}: "
                "allocate with num_layers, or use the group as it is"
            )
        return PendingFold(self.parity, self.pending, self.epoch, self.folded[index])


def common_rows(state: LayerState, record: Ring | Snapshots) -> int:
    """Batch rows that every row-indexed buffer of a verify has: conv windows and snapshots, where they are kept."""
    rows = ANY_ROWS if state.conv_window is None else state.conv_window.shape[0]
    return rows if isinstance(record, Ring) else min(rows, record.states.shape[0])
