"""Validity predicates of the commit without conv windows; see `kda_kernels.checks`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kda_kernels._launch import device_reason, pdl_reason
from kda_kernels.buffers import KEPT_INPUTS
from kda_kernels.checking import errors_reason, pitch_reason, tensor_reason, typed
from kda_kernels.commit_checks import commit_index_reason
from kda_kernels.overlap import overlap_reason
from kda_kernels.shapes import ACTIVATION_DTYPES, CONV_WIDTH

CHANNELS = 64
"""D, which is a sum of head sizes, is a multiple of it."""


def gather_reason(
    conv_state: torch.Tensor,
    kept_inputs: torch.Tensor,
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    starts: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    pdl: bool | None = None,
    needs_kernels: bool = True,
) -> str | None:
    """Why a gather of these arguments is refused, or None. Arguments as `kda_kernels.gather_conv`."""
    typed("conv_state", conv_state, torch.Tensor)
    typed("kept_inputs", kept_inputs, torch.Tensor)
    device = conv_state.device
    if pdl is not None:
        typed("pdl", pdl, bool)
    return (
        (device_reason(device) if needs_kernels else None)
        or _state_reason(conv_state)
        or tensor_reason(
            "kept_inputs", kept_inputs, (conv_state.shape[0], KEPT_INPUTS), (torch.int64,), device, packed=2
        )
        or overlap_reason({"kept_inputs": kept_inputs}, {"conv_state": conv_state})
        or commit_index_reason(
            slots, accept_lens, draft_tokens, conv_state.shape[1], draft_tokens, device, track_slots, track_steps,
            starts,
        )
        or errors_reason(errors, device)
        or (pdl_reason(pdl, device, "pdl") if needs_kernels else None)
    )  # fmt: skip


def gather_inputs_reason(
    conv_state: torch.Tensor,
    mixed_qkv: Sequence[torch.Tensor],
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    starts: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> str | None:
    """Why `kda_kernels.gather_conv_reference` refuses these arguments, or None."""
    typed("conv_state", conv_state, torch.Tensor)
    if reason := _state_reason(conv_state):
        return reason
    if not isinstance(mixed_qkv, (list, tuple)):
        raise TypeError(f"mixed_qkv must be a list or tuple of Tensors, got {type(mixed_qkv).__name__}")
    layers, num_slots, _, d = conv_state.shape
    if len(mixed_qkv) != layers:
        return f"mixed_qkv must hold a tensor for each of the {layers} layers, got {len(mixed_qkv)}"
    for layer, x in enumerate(mixed_qkv):
        if reason := tensor_reason(
            f"mixed_qkv[{layer}]", x, (None, d), (conv_state.dtype,), conv_state.device, packed=1
        ):
            return reason
    return commit_index_reason(
        slots, accept_lens, draft_tokens, num_slots, draft_tokens, conv_state.device, track_slots, track_steps, starts
    ) or errors_reason(errors, conv_state.device)


def _state_reason(conv_state: torch.Tensor) -> str | None:
    """Why a tensor is none of conv states of all layers, or None."""
    sizes = (None, None, CONV_WIDTH - 1, None)
    if reason := tensor_reason("conv_state", conv_state, sizes, ACTIVATION_DTYPES, conv_state.device, packed=2):
        return reason
    if not conv_state.shape[-1] or conv_state.shape[-1] % CHANNELS:
        return f"conv_state must have a multiple of {CHANNELS} channels, got {conv_state.shape[-1]}"
    return pitch_reason("conv_state", conv_state, 2)
