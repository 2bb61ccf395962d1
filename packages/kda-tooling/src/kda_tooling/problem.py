"""Argument sets for benchmarks and comparisons: one layer's verify with random inputs, built for several layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch

from kda_kernels import KdaShape, LayerParams, LayerState, PendingFold, Ring, Snapshots, flush, new_error_counts
from kda_kernels.buffers import KEPT_INPUTS


@dataclass(frozen=True)
class Records:
    """What verify may record; ``ring`` or ``snapshots`` is None where the lanes compared do not need it."""

    ring: Ring | None
    snapshots: Snapshots | None

    @overload
    def record(self, mode: Literal["ring"]) -> Ring: ...
    @overload
    def record(self, mode: Literal["snapshots"]) -> Snapshots: ...
    @overload
    def record(self, mode: str) -> Ring | Snapshots: ...
    def record(self, mode: str) -> Ring | Snapshots:
        """The record of ``mode``, "ring" or "snapshots".

        Raises:
            ValueError: the problem was built without it.
        """
        found = {"ring": self.ring, "snapshots": self.snapshots}[mode]
        if found is None:
            raise ValueError(f"the problem has no {mode}: build it with {mode}=True")
        return found


@dataclass(frozen=True)
class FoldOnVerify:
    """What fold on verify takes: a ring of two banks, and what is pending of each slot."""

    banks: Ring
    pending: PendingFold

    def layer(self, index: int) -> FoldOnVerify:
        """The views of layer ``index``."""
        return FoldOnVerify(self.banks.layer(index), self.pending.layer(index))

    def reset(self) -> None:
        """Nothing is pending, and the next verify writes the first bank."""
        for tensor in vars(self.pending).values():
            tensor.zero_()


def _compact(problem: VerifyProblem | Problems) -> LayerState:
    if problem.compact_state is None:
        raise ValueError("the problem has no state without windows: build it with compact_window=True")
    return problem.compact_state


def _folding(problem: VerifyProblem | Problems) -> FoldOnVerify:
    if problem.fold_on_verify is None:
        raise ValueError("the problem has no second bank: build it with fold_on_verify=True")
    return problem.fold_on_verify


@dataclass(frozen=True)
class VerifyProblem(Records):
    """Everything that one layer's verify takes, in the layouts of `kda_kernels.verify_fused`.

    ``errors`` and ``workspace`` are shared by all layers, as a `kda_backend.StatePool` shares its own.
    """

    shape: KdaShape
    draft_tokens: int
    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    params: LayerParams
    state: LayerState
    slots: torch.Tensor
    errors: torch.Tensor
    workspace: torch.Tensor
    fold_on_verify: FoldOnVerify | None = None
    compact_state: LayerState | None = None

    @property
    def folding(self) -> FoldOnVerify:
        """``fold_on_verify``; ValueError if the problem was built without it."""
        return _folding(self)

    @property
    def compact(self) -> LayerState:
        """``state`` with kept inputs in place of windows; ValueError if the problem was built without it."""
        return _compact(self)

    @property
    def batch(self) -> int:
        """B, requests."""
        return self.slots.shape[0]


@dataclass(frozen=True)
class Problems(Records):
    """The same verify for several layers: one problem a layer, all of them views of common [layers, ...] tensors."""

    layers: list[VerifyProblem]
    state: LayerState
    fold_on_verify: FoldOnVerify | None = None
    compact_state: LayerState | None = None

    @property
    def folding(self) -> FoldOnVerify:
        """``fold_on_verify``; ValueError if the problems were built without it."""
        return _folding(self)

    @property
    def compact(self) -> LayerState:
        """``state`` with kept inputs in place of windows; ValueError if the problems were built without it."""
        return _compact(self)

    def flush(self) -> None:
        """Fold what is pending into the states, and have nothing pending; ValueError as `folding`."""
        first, folding = self.layers[0], self.folding
        flush(self.state.ssm_state, folding.banks, folding.pending, shape=first.shape, slots=first.slots)
        folding.reset()


def random_params(
    shape: KdaShape,
    *,
    layers: int,
    dtype: torch.dtype,
    device: torch.device | str,
    lower_bound: float | None = -5.0,
    bias: bool = True,
    weight_dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> list[LayerParams]:
    """Parameters at the scale of trained layers: taps about 0.5, rates exp(A_log) in 1..16, dt_bias around -3.

    Those of all layers are made at once, and each layer's start at a multiple of 16 bytes as if allocated alone.
    """
    weight_dtype = dtype if weight_dtype is None else weight_dtype
    hv, k = shape.num_v_heads, shape.head_k_dim
    padded = -(-hv // 4) * 4

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(layers, *size, generator=generator, device=device)

    weights = (normal(shape.conv_dim, 4) * 0.5).to(weight_dtype)
    biases = (normal(shape.conv_dim) * 0.1).to(weight_dtype) if bias else None
    rates = torch.log(1 + 15 * torch.rand(layers, padded, generator=generator, device=device))
    dt_biases = normal(hv * k) - 3.0
    return [
        LayerParams(
            conv_weight=weights[i], conv_bias=None if biases is None else biases[i], A_log=rates[i, :hv],
            dt_bias=dt_biases[i], lower_bound=lower_bound,
        )
        for i in range(layers)
    ]  # fmt: skip


def slot_count(batch: int) -> int:
    """Slots of a problem's state: one more than the batch, rounded up to 4 so that every layer's ring is aligned."""
    return -(-(batch + 1) // 4) * 4


def random_problems(
    shape: KdaShape,
    *,
    layers: int,
    batch: int,
    draft_tokens: int,
    dtype: torch.dtype,
    device: torch.device | str,
    lower_bound: float | None = -5.0,
    bias: bool = True,
    weight_dtype: torch.dtype | None = None,
    ring: bool = True,
    snapshots: bool = False,
    fold_on_verify: bool = False,
    compact_window: bool = False,
    seed: int = 0,
) -> Problems:
    """Problems of ``layers`` layers with random inputs.

    Slots are a random permutation of ``batch`` out of `slot_count`, int32 (the engines' index type). Random normal
    inputs: never time on zeros, they hide faults and can run faster. Each layer's inputs, parameters, states and
    records begin at multiples of 16 bytes, as if allocated alone: for others Triton compiles once more.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    tokens, hv, k = batch * draft_tokens, shape.num_v_heads, shape.head_k_dim
    slots_total = slot_count(batch)
    state = LayerState.allocate(
        shape, slots=slots_total, rows=batch, steps=draft_tokens, dtype=dtype, device=device, num_layers=layers
    )
    state.ssm_state.normal_(std=0.1, generator=generator)
    state.conv_state.normal_(generator=generator)
    rings = (
        Ring.allocate(shape, slots=slots_total, length=draft_tokens, dtype=dtype, device=device, num_layers=layers)
        if ring
        else None
    )
    shots = (
        Snapshots.allocate(shape, rows=batch, steps=draft_tokens, device=device, num_layers=layers)
        if snapshots
        else None
    )
    folding = None
    if fold_on_verify:
        folding = FoldOnVerify(
            Ring.allocate(
                shape, slots=2 * slots_total, length=draft_tokens, dtype=dtype, device=device, num_layers=layers
            ),
            PendingFold.allocate(shape, slots=slots_total, device=device, num_layers=layers),
        )
    compact = None
    if compact_window:
        kept = torch.zeros(layers, KEPT_INPUTS, dtype=torch.int64, device=device)
        compact = LayerState(state.conv_state, state.ssm_state, None, kept)
    x = torch.empty(layers, tokens, shape.conv_dim, dtype=dtype, device=device).normal_(generator=generator)
    a = torch.empty(layers, tokens, hv * k, dtype=dtype, device=device).normal_(generator=generator)
    b = torch.empty(layers, -(-tokens * hv // 8) * 8, dtype=dtype, device=device).normal_(generator=generator)
    b = b[:, : tokens * hv].unflatten(1, (tokens, hv))
    permutation = torch.randperm(slots_total, generator=generator, device=device)
    slots = permutation[:batch].to(torch.int32)
    errors = new_error_counts(device)
    workspace = torch.empty(tokens, shape.conv_dim, dtype=dtype, device=device)
    params = random_params(
        shape, layers=layers, dtype=dtype, device=device, lower_bound=lower_bound, bias=bias,
        weight_dtype=weight_dtype, generator=generator,
    )  # fmt: skip
    problems = [
        VerifyProblem(
            shape=shape, draft_tokens=draft_tokens, mixed_qkv=x[i], a=a[i], b=b[i],
            params=params[i],
            state=state.layer(i), slots=slots, errors=errors, workspace=workspace,
            ring=rings.layer(i) if rings else None, snapshots=shots.layer(i) if shots else None,
            fold_on_verify=folding.layer(i) if folding else None,
            compact_state=compact.layer(i) if compact else None,
        )
        for i in range(layers)
    ]  # fmt: skip
    return Problems(
        ring=rings, snapshots=shots, layers=problems, state=state, fold_on_verify=folding, compact_state=compact
    )
