"""How a configuration is asked for: calls of the public ops on small CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kda_kernels import (
    CONV_WIDTH,
    KdaShape,
    LaunchConfig,
    LayerParams,
    LayerState,
    PendingFold,
    Ring,
    Snapshots,
    advance,
    flush,
    fold,
    gather_conv,
    new_error_counts,
    scatter_conv,
    scatter_snapshots,
    verify_fused,
    verify_unfused,
)
from kda_kernels.buffers import KEPT_INPUTS
from kda_kernels.defaults import PORTABLE
from kda_kernels.pending_checks import BANKS
from kda_tooling.bench.settings import DTYPES

if TYPE_CHECKING:
    from kda_tooling.compiling.specs import CompileSpec

_SLOTS, _BATCH, _LAYERS = 4, 2, 2


def call(spec: CompileSpec) -> None:
    """Call the op that ``spec`` names as it says."""
    calls = {
        "fold": _call_fold, "scatter_conv": _call_scatter, "scatter_snapshots": _call_scatter,
        "advance": _call_advance, "flush": _call_flush, "gather_conv": _call_gather,
    }  # fmt: skip
    calls.get(spec.op, _call_verify)(spec)


def _shape(spec: CompileSpec) -> KdaShape:
    return KdaShape(*spec.heads, spec.head_dim, spec.head_v_dim or spec.head_dim)


def _config(spec: CompileSpec) -> LaunchConfig:
    return replace(spec.config or PORTABLE, pdl=spec.pdl)


def _call_verify(spec: CompileSpec) -> None:
    shape, dtype, steps = _shape(spec), DTYPES[spec.dtype], spec.draft_tokens
    tokens, (_, hv), k = _BATCH * steps, spec.heads, spec.head_dim
    weight = torch.float32 if spec.fp32_weight else dtype
    params = LayerParams(
        conv_weight=torch.zeros(shape.conv_dim, 4, dtype=weight),
        conv_bias=torch.zeros(shape.conv_dim, dtype=weight) if spec.bias else None,
        A_log=torch.zeros(hv),
        dt_bias=torch.zeros(hv * k),
        lower_bound=-5.0 if spec.safe_gate else None,
    )
    record: Ring | Snapshots
    if spec.record == "ring":
        banks = BANKS if spec.pending else 1
        record = Ring.allocate(shape, slots=banks * _SLOTS, length=steps, dtype=dtype, device="cpu")
    else:
        record = Snapshots.allocate(shape, rows=_BATCH, steps=steps, device="cpu")
    op = verify_fused if spec.op == "verify_fused" else verify_unfused
    op(
        torch.zeros(tokens, shape.conv_dim, dtype=dtype),
        torch.zeros(tokens, hv * k, dtype=dtype),
        torch.zeros(tokens, hv, dtype=dtype),
        shape=shape,
        params=params,
        state=LayerState.allocate(
            shape, slots=_SLOTS, rows=_BATCH, steps=steps, dtype=dtype, device="cpu", compact_window=spec.compact
        ),
        record=record,
        slots=torch.arange(_BATCH, dtype=torch.int32),
        draft_tokens=steps,
        rows=_rows(spec),
        config=_config(spec),
        errors=new_error_counts("cpu"),
        form="chunked" if spec.chunked else "recurrent",
        indices_ready=spec.indices_ready,
        pending=PendingFold.allocate(shape, slots=_SLOTS, device="cpu") if spec.pending else None,
        **_batch(spec),
    )


def _batch(spec: CompileSpec) -> dict[str, Any]:
    """``starts`` and ``parents`` of a batch that is no chains of one length."""
    found = {}
    if spec.ragged:
        found["starts"] = torch.arange(_BATCH + 1, dtype=torch.int32) * spec.draft_tokens
    if spec.tree:
        found["parents"] = (torch.arange(spec.draft_tokens, dtype=torch.int32) - 1).repeat(_BATCH, 1)
    return found


def _rows(spec: CompileSpec) -> torch.Tensor | None:
    return torch.arange(_BATCH, dtype=torch.int32) if spec.rows else None


def _tracking(spec: CompileSpec) -> dict[str, torch.Tensor]:
    if not spec.track:
        return {}
    return {
        "track_slots": torch.full((_BATCH,), -1, dtype=torch.int32),
        "track_steps": torch.zeros(_BATCH, dtype=torch.int32),
    }


def _call_fold(spec: CompileSpec) -> None:
    shape, steps = _shape(spec), spec.draft_tokens
    ring = Ring.allocate(shape, slots=_SLOTS, length=steps, dtype=DTYPES[spec.dtype], device="cpu", num_layers=_LAYERS)
    fold(
        torch.zeros(_LAYERS, _SLOTS, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim),
        ring,
        shape=shape,
        slots=torch.arange(_BATCH, dtype=torch.int32),
        accept_lens=torch.ones(_BATCH, dtype=torch.int32),
        draft_tokens=steps,
        config=_config(spec),
        errors=new_error_counts("cpu"),
        starts=_batch(spec).get("starts"),
        **_tracking(spec),
    )


def _call_scatter(spec: CompileSpec) -> None:
    shape, steps = _shape(spec), spec.draft_tokens
    state = LayerState.allocate(
        shape, slots=_SLOTS, rows=_BATCH, steps=steps, dtype=DTYPES[spec.dtype], device="cpu", num_layers=_LAYERS
    )
    common: dict[str, Any] = {
        "slots": torch.arange(_BATCH, dtype=torch.int32),
        "last_steps" if spec.tree else "accept_lens": torch.ones(_BATCH, dtype=torch.int32),
        "draft_tokens": steps,
        "rows": _rows(spec),
        "errors": new_error_counts("cpu"),
        "pdl": spec.pdl,
        **_batch(spec),
        **_tracking(spec),
    }
    if spec.op == "scatter_conv":
        scatter_conv(state.conv_state, state.windows, **common)
    else:
        snapshots = Snapshots.allocate(shape, rows=_BATCH, steps=steps, device="cpu", num_layers=_LAYERS)
        scatter_snapshots(state.ssm_state, snapshots, **common)


def _call_gather(spec: CompileSpec) -> None:
    dtype = DTYPES[spec.dtype]
    gather_conv(
        torch.zeros(_LAYERS, _SLOTS, CONV_WIDTH - 1, _shape(spec).conv_dim, dtype=dtype),
        torch.zeros(_LAYERS, KEPT_INPUTS, dtype=torch.int64),
        slots=torch.arange(_BATCH, dtype=torch.int32),
        accept_lens=torch.ones(_BATCH, dtype=torch.int32),
        draft_tokens=spec.draft_tokens,
        starts=_batch(spec).get("starts"),
        errors=new_error_counts("cpu"),
        pdl=spec.pdl,
        **_tracking(spec),
    )


def _call_advance(spec: CompileSpec) -> None:
    advance(
        PendingFold.allocate(_shape(spec), slots=_SLOTS, device="cpu"),
        slots=torch.arange(_BATCH, dtype=torch.int32),
        accept_lens=torch.ones(_BATCH, dtype=torch.int32),
        draft_tokens=spec.draft_tokens,
        ring_length=spec.draft_tokens,
        errors=new_error_counts("cpu"),
        starts=_batch(spec).get("starts"),
        **_tracking(spec),
    )


def _call_flush(spec: CompileSpec) -> None:
    shape, slots = _shape(spec), BANKS * _SLOTS
    flush(
        torch.zeros(_LAYERS, _SLOTS, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim),
        Ring.allocate(
            shape, slots=slots, length=spec.draft_tokens, dtype=DTYPES[spec.dtype], device="cpu", num_layers=_LAYERS
        ),
        PendingFold.allocate(shape, slots=_SLOTS, device="cpu", num_layers=_LAYERS),
        shape=shape,
        slots=torch.arange(_BATCH, dtype=torch.int32),
        errors=new_error_counts("cpu"),
        **_tracking(spec),
    )
