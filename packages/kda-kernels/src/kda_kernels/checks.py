"""Validity predicates, one per op: each returns the reason why the op cannot take its arguments, or None.

Ops, gate, tuner, tests and error messages all use these. A reason names the argument, what was given and what is
allowed. Values of index tensors are looked at only where that costs no device sync: when the tensor is on the CPU.
Those of fold and the scatters are in `kda_kernels.commit_checks`.
"""

from __future__ import annotations

from typing import cast

import torch

from kda_kernels._launch import current_target, device_reason, pdl_reason
from kda_kernels.batch_checks import lane_reason, parents_reason, starts_reason
from kda_kernels.buffers import (
    KEPT_INPUTS,
    LayerParams,
    LayerState,
    PendingFold,
    Ring,
    Snapshots,
    common_rows,
)
from kda_kernels.checking import (
    errors_reason,
    index_reason,
    pitch_reason,
    tensor_reason,
    typed,
    typed_number,
)
from kda_kernels.overlap import overlap_reason, same_memory_reason
from kda_kernels.pending_checks import BANKS, pending_reason, pending_record_reason
from kda_kernels.shapes import (
    ACTIVATION_DTYPES,
    CONV_WIDTH,
    FORMS,
    MAX_CHUNKED_TOKENS,
    MAX_GLUON_CHUNKED_TOKENS,
    KdaShape,
    LaunchConfig,
)

FLOAT32_MAX = torch.finfo(torch.float32).max


def ring_reason(
    ring: Ring, shape: KdaShape, dtype: torch.dtype, device: torch.device, lead: tuple[int, ...]
) -> str | None:
    """Why ``ring`` is not one of ``shape`` with leading dimensions ``lead`` ([slots] or [layers, slots]), or None."""
    for name in ("raw_v", "raw_k", "g", "beta"):
        if not isinstance(getattr(ring, name), torch.Tensor):
            return f"ring.{name} must be a Tensor, got {type(getattr(ring, name)).__name__}"
    if ring.beta.ndim != len(lead) + 2:
        return f"ring.beta must have {len(lead) + 2} dimensions, got shape {list(ring.beta.shape)}"
    h, hv, k, v, length = shape.num_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim, ring.length
    if length < 1:
        return f"ring.beta must have at least 1 record per slot, got shape {list(ring.beta.shape)}"
    return (
        tensor_reason("ring.raw_v", ring.raw_v, (*lead, hv, length, v), (dtype,), device, packed=3)
        or tensor_reason("ring.raw_k", ring.raw_k, (*lead, h, length, k), (dtype,), device, packed=3)
        or tensor_reason("ring.g", ring.g, (*lead, hv, length, k), (torch.float32,), device, packed=3)
        or tensor_reason("ring.beta", ring.beta, (*lead, hv, length), (torch.float32,), device, packed=2)
    )


def _ring_pitch_reason(ring: Ring) -> str | None:
    """Verify writes the ring: its slots must not overlap. (Fold only reads it.)"""
    for name in ("raw_v", "raw_k", "g", "beta"):
        if reason := pitch_reason(f"ring.{name}", getattr(ring, name), 1):
            return reason
    return None


def _params_reason(params: LayerParams, shape: KdaShape, dtype: torch.dtype, device: torch.device) -> str | None:
    typed("params", params, LayerParams)
    weight_dtypes = (dtype, torch.float32)
    d, hv, k = shape.conv_dim, shape.num_v_heads, shape.head_k_dim
    reason = (
        tensor_reason("params.conv_weight", params.conv_weight, (d, CONV_WIDTH), weight_dtypes, device, packed=2)
        or tensor_reason("params.A_log", params.A_log, (hv,), (torch.float32,), device, packed=1)
        or tensor_reason("params.dt_bias", params.dt_bias, (hv * k,), (torch.float32,), device, packed=1)
    )
    if reason is None and params.conv_bias is not None:
        reason = tensor_reason(
            "params.conv_bias", params.conv_bias, (d,), (params.conv_weight.dtype,), device, packed=1
        )
    if reason is None and params.lower_bound is not None:
        typed_number("params.lower_bound", params.lower_bound)
        if not -FLOAT32_MAX <= params.lower_bound < 0:
            reason = (
                "params.lower_bound must be a finite number below 0 (or None for the standard gate), "
                f"got {params.lower_bound}"
            )
    if reason is None and params.scale is not None:
        typed_number("params.scale", params.scale)
        if not abs(params.scale) <= FLOAT32_MAX:
            reason = f"params.scale must be a finite number, or None for K ** -0.5, got {params.scale}"
    return reason


def _window_reason(
    state: LayerState, d: int, dtype: torch.dtype, device: torch.device, parents: torch.Tensor | None
) -> str | None:
    """Why ``state`` holds neither conv windows nor, in their place, a note of the inputs that trees cannot have."""
    if (state.conv_window is None) == (state.kept_inputs is None):
        given = "neither" if state.conv_window is None else "both"
        return (
            f"exactly one of state.conv_window and state.kept_inputs must be given, got {given}: windows for "
            "scatter_conv, kept inputs for gather_conv"
        )
    if state.conv_window is not None:
        sizes = (None, None, CONV_WIDTH - 1, d)
        return tensor_reason("state.conv_window", state.conv_window, sizes, (dtype,), device, packed=3)
    if parents is not None:
        return (
            "parents must be None where state.kept_inputs takes the place of conv windows: a tree's windows follow its "
            "paths, gather_conv takes columns of a chain; give a conv_window"
        )
    kept = cast(torch.Tensor, state.kept_inputs)
    return tensor_reason("state.kept_inputs", kept, (KEPT_INPUTS,), (torch.int64,), device, packed=1)


def verify_reason(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    shape: KdaShape,
    params: LayerParams,
    state: LayerState,
    record: Ring | Snapshots,
    slots: torch.Tensor,
    draft_tokens: int,
    rows: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
    errors: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    form: str = "recurrent",
    indices_ready: bool = False,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    pending: PendingFold | None = None,
    needs_kernels: bool = True,
    fused: bool = False,
) -> str | None:
    """Why a verify of these arguments is refused, or None. Arguments as `kda_kernels.verify_fused`.

    ``needs_kernels=False`` leaves out what only kernels need (a device that can run them): the reference's check.
    ``fused=True`` adds what the fused lane cannot take.

    Raises:
        TypeError: an argument is not of the class it should be.
    """
    for name, value, kind in (
        ("mixed_qkv", mixed_qkv, torch.Tensor), ("shape", shape, KdaShape), ("state", state, LayerState),
        ("slots", slots, torch.Tensor), ("draft_tokens", draft_tokens, int),
    ):  # fmt: skip
        typed(name, value, kind)
    if not isinstance(record, (Ring, Snapshots)):
        raise TypeError(f"record must be a Ring or Snapshots, got {type(record).__name__}")
    if config is not None:
        typed("config", config, LaunchConfig)
    typed("indices_ready", indices_ready, bool)
    device, dtype = mixed_qkv.device, mixed_qkv.dtype
    if draft_tokens < 1:
        return f"draft_tokens must be at least 1, got {draft_tokens}"
    reason = _form_reason(form, record, draft_tokens) or lane_reason(starts, parents, record, form, config, fused)
    if pending is not None:
        typed("pending", pending, PendingFold)
        reason = reason or pending_record_reason(record)
    if reason:
        return reason
    if slots.ndim != 1:
        return f"slots must have shape [B], got {list(slots.shape)}"
    batch, hv, k, v = slots.shape[0], shape.num_v_heads, shape.head_k_dim, shape.head_v_dim
    tokens = batch * draft_tokens
    if starts is not None and mixed_qkv.ndim:
        tokens = mixed_qkv.shape[0]
    d = shape.conv_dim
    activation = (dtype,)
    reason = (
        (device_reason(device) if needs_kernels else None)
        or tensor_reason("mixed_qkv", mixed_qkv, (tokens, d), ACTIVATION_DTYPES, device, packed=1)
        or tensor_reason("a", a, (tokens, hv * k), activation, device, packed=1)
        or tensor_reason("b", b, (tokens, hv), activation, device, packed=1)
        or _params_reason(params, shape, dtype, device)
        or tensor_reason("state.conv_state", state.conv_state, (None, CONV_WIDTH - 1, d), activation, device, packed=2)
        or tensor_reason("state.ssm_state", state.ssm_state, (None, hv, v, k), (torch.float32,), device, packed=3)
        or _window_reason(state, d, dtype, device, parents)
    )
    if reason:
        return reason
    num_slots = state.ssm_state.shape[0]
    if state.conv_state.shape[0] != num_slots:
        return (
            f"state.conv_state must have as many slots as state.ssm_state ({num_slots}), "
            f"got {state.conv_state.shape[0]}"
        )
    row_buffers = [] if state.conv_window is None else [("state.conv_window", state.conv_window)]
    if isinstance(record, Ring):
        ring_slots = num_slots if pending is None else BANKS * num_slots
        reason = ring_reason(record, shape, dtype, device, (ring_slots,)) or _ring_pitch_reason(record)
    else:
        reason = tensor_reason(
            "record.states", record.states, (None, None, hv, v, k), (torch.float32,), device, packed=4
        )
        row_buffers.append(("record.states", record.states))
    if pending is not None:  # the state is written too
        reason = reason or (
            pending_reason(pending, shape, device, (num_slots,)) or pitch_reason("state.ssm_state", state.ssm_state, 1)
        )
    if reason:
        return reason
    for name, buffer in row_buffers:
        if buffer.shape[1] < draft_tokens:
            return f"{name} must hold at least draft_tokens={draft_tokens} steps, got shape {list(buffer.shape)}"
        if rows is None and buffer.shape[0] < batch:
            return f"{name} must have a row for each of the {batch} batch positions, got {buffer.shape[0]} rows"
        if overlap := pitch_reason(name, buffer, 1):
            return overlap
    num_rows = common_rows(state, record)
    return (
        index_reason("slots", slots, batch, device, -1, num_slots - 1, unique=True)
        or (None if rows is None else index_reason("rows", rows, batch, device, 0, num_rows - 1, unique=True))
        or (None if starts is None else starts_reason(starts, batch, draft_tokens, tokens, device))
        or (None if parents is None else parents_reason(parents, starts, slots, draft_tokens, device))
        or errors_reason(errors, device)
        or (None if out is None else tensor_reason("out", out, (tokens, hv, v), activation, device, packed=3))
        or (
            None
            if workspace is None
            else tensor_reason("workspace", workspace, (tokens, d), activation, device, packed=2)
        )
        or _memory_reason(mixed_qkv, a, b, state, record, out, workspace, pending)
        or (config_reason(config, device) if config is not None and needs_kernels else None)
        or (None if config is None else _chunk_config_reason(config, form, draft_tokens))
    )


def _form_reason(form: str, record: Ring | Snapshots, draft_tokens: int) -> str | None:
    """Why a verify cannot be done in ``form``, or None."""
    if form not in FORMS:
        return f"form must be one of {FORMS}, got {form!r}"
    if form == "recurrent":
        return None
    if not isinstance(record, Ring):
        return "form='chunked' never computes the states that snapshots hold: use a Ring, or form='recurrent'"
    if draft_tokens > MAX_CHUNKED_TOKENS:
        return f"draft_tokens must be at most {MAX_CHUNKED_TOKENS} with form='chunked', got {draft_tokens}"
    return None


def _memory_reason(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    state: LayerState,
    record: Ring | Snapshots,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    pending: PendingFold | None,
) -> str | None:
    """Why a buffer that verify writes shares memory with another argument, or None."""
    names = ("raw_v", "raw_k", "g", "beta") if isinstance(record, Ring) else ("states",)
    buffers = {f"record.{name}": getattr(record, name) for name in names} | {
        "state.conv_state": state.conv_state, "state.ssm_state": state.ssm_state,
    }  # fmt: skip
    if state.conv_window is not None:
        buffers["state.conv_window"] = state.conv_window
    if pending is not None:
        buffers |= {f"pending.{name}": tensor for name, tensor in vars(pending).items()}
    written = (("out", out), ("workspace", workspace), ("state.kept_inputs", state.kept_inputs))
    packed = {name: tensor for name, tensor in written if tensor is not None}
    inputs = {"mixed_qkv": mixed_qkv, "a": a, "b": b}
    return same_memory_reason(inputs | buffers) or (overlap_reason(packed, inputs | buffers) if packed else None)


def _chunk_config_reason(config: LaunchConfig, form: str, draft_tokens: int) -> str | None:
    """Why verify's Gluon kernel cannot take that many tokens in ``form``, or None."""
    if config.rows_per_thread is None or form == "recurrent" or draft_tokens <= MAX_GLUON_CHUNKED_TOKENS:
        return None
    return (
        f"config.rows_per_thread={config.rows_per_thread} names a kernel that takes up to {MAX_GLUON_CHUNKED_TOKENS} "
        f"draft tokens with form='chunked', got draft_tokens={draft_tokens}: use rows_per_thread=None"
    )


def config_reason(config: LaunchConfig, device: torch.device) -> str | None:
    """Why kernels cannot be launched as ``config`` says on ``device``, or None."""
    backend, _ = current_target(device)
    if config.rows_per_thread is not None and backend != "cuda":
        return (
            f"config.rows_per_thread={config.rows_per_thread} names the kernel for NVIDIA GPUs, this is {backend}: "
            "use rows_per_thread=None"
        )
    return pdl_reason(config.pdl, device)
