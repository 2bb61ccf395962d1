"""SGLang's fused verify function, done by `kda_kernels.verify_fused`."""

from __future__ import annotations

from typing import Any

import torch

from kda_backend.sglang.layers import layer_groups
from kda_backend.sglang.originals import UNUSABLE, describe, original
from kda_backend.sglang.reports import reports
from kda_backend.sglang.rule import choose
from kda_kernels import verify_fused

MODULE = "sglang.kernels.ops.attention.linear.fused_kda_conv_recurrent_verify"
NAME = "fused_kda_conv_gating_verify"


def fused_kda_conv_gating_verify(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    conv_state_indices: torch.Tensor,
    intermediate_conv_window: torch.Tensor | None,
    intermediate_state_indices: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    intermediate_states_buffer: torch.Tensor | None,
    scale: float,
    T: int,
    num_q_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    lower_bound: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    use_qk_l2norm_in_kernel: bool = True,
    num_warps: int | None = None,
    cache_ring: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
) -> torch.Tensor:
    """Verify T draft tokens of B requests in one kernel. Parameters and layouts are SGLang's.

    Args:
        mixed_qkv: [B*T, D] bf16 or fp16, row stride free.
        conv_weight, conv_bias: [D, 4], [D] or None.
        conv_state: [slots, D, 3], a transposed view of [slots, 3, D]; read only.
        conv_state_indices, cache_indices: [B] int32, one and the same tensor; -1 is padding.
        intermediate_conv_window: [rows, steps, D, 3], a transposed view of [rows, steps, 3, D]; written.
        intermediate_state_indices: [B] int32 rows of the windows and snapshots.
        a, b: any shape of B*T*HV*K and B*T*HV elements, dtype of mixed_qkv.
        A_log, dt_bias: HV and HV*K elements, fp32.
        ssm_states: [slots, HV, V, K] fp32; read only.
        intermediate_states_buffer: [rows, steps, HV, V, K] fp32, written if ``cache_ring`` is off.
        scale: factor on the normalised query.
        T: draft tokens, the root included; 1 and 2 are taken too.
        num_q_heads, num_v_heads, head_k_dim, head_v_dim: H, HV, K, V.
        lower_bound: of the safe gate; None for the standard gate.
        softplus_beta, softplus_threshold, use_qk_l2norm_in_kernel: their defaults are what is supported.
        num_warps: SGLang's launch knob; unused, any launch gives the same bits.
        cache_ring: write the ring instead of snapshots.
        replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta: the ring, as `kda_kernels.Ring`.

    Returns:
        [1, B*T, HV, V] in mixed_qkv's dtype; rows of padded positions are 0 (SGLang leaves them unset).

    Raises:
        ValueError: the arguments are refused and SGLang's own function is not there to take them.
    """
    arguments = dict(locals())
    reports.hook_runs()
    try:
        return _verify(**arguments).unsqueeze(0)
    except UNUSABLE as refusal:  # raised by checks; and what a verify writes can be written again
        theirs = original(MODULE, NAME)
        if theirs is None:
            raise
        reports.not_taken(f"fused verify: {describe(refusal)}")
        out: torch.Tensor = theirs(**arguments)
        return out


def options_reason(
    *, softplus_beta: float = 1.0, softplus_threshold: float = 20.0, use_qk_l2norm_in_kernel: bool = True
) -> str | None:
    """Why these settings of the step are refused, or None: the arithmetic is fixed (docs/arithmetic.md)."""
    if (softplus_beta, softplus_threshold) != (1, 20):
        return (
            "softplus_beta and softplus_threshold must be 1 and 20 (the gate is log(1 + exp(x)) up to x = 20), "
            f"got {softplus_beta} and {softplus_threshold}"
        )
    if not use_qk_l2norm_in_kernel:
        return "use_qk_l2norm_in_kernel must be True: queries and keys are normalised in the kernel, got False"
    return None


def _verify(
    *,
    mixed_qkv: torch.Tensor,
    conv_state: torch.Tensor,
    conv_state_indices: torch.Tensor,
    intermediate_conv_window: torch.Tensor | None,
    intermediate_state_indices: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    cache_indices: torch.Tensor,
    T: int,
    **others: Any,
) -> torch.Tensor:
    """[B*T, HV, V]; raises ValueError or TypeError where the arguments are refused."""
    options = {name: others[name] for name in ("softplus_beta", "softplus_threshold", "use_qk_l2norm_in_kernel")}
    reason = options_reason(**options) or _indices_reason(conv_state_indices, cache_indices)
    if reason is None and (intermediate_conv_window is None or intermediate_state_indices is None):
        reason = "intermediate_conv_window and intermediate_state_indices must be given, got None"
    ring = ring_tensors(*(others[f"replayssm_{name}"] for name in ("rawv", "rawk", "g", "beta")))
    if reason is None and others["cache_ring"] != (ring is not None):
        reason = "cache_ring must go with all four replayssm tensors, and they with it"
    if reason is None and ring is not None and others["intermediate_states_buffer"] is not None:
        reason = "intermediate_states_buffer must be None with cache_ring: a verify records one of the two"
    if reason is not None or intermediate_conv_window is None:
        raise ValueError(reason)
    groups = layer_groups(
        conv_weight=others["conv_weight"], conv_bias=others["conv_bias"], A_log=others["A_log"],
        dt_bias=others["dt_bias"], lower_bound=others["lower_bound"], scale=others["scale"],
        heads=(others["num_q_heads"], others["num_v_heads"], others["head_k_dim"], others["head_v_dim"]),
        conv_state=conv_state.transpose(-1, -2), ssm_state=others["ssm_states"],
        conv_window=intermediate_conv_window.transpose(-1, -2), ring=ring,
        snapshots=others["intermediate_states_buffer"],
    )  # fmt: skip
    mode = "snapshots" if ring is None else "ring"
    return verify_fused(
        mixed_qkv, *flat_gates(a, b, mixed_qkv.shape[0], groups.shape.num_v_heads, groups.shape.head_k_dim),
        shape=groups.shape, params=groups.params, state=groups.state, record=groups.record, slots=cache_indices,
        draft_tokens=T, rows=intermediate_state_indices,
        config=choose(
            groups.shape, mode, cache_indices.shape[0], T, mixed_qkv.device, dtype=mixed_qkv.dtype,
            safe_gate=groups.params.lower_bound is not None,
        ).config,
    )  # fmt: skip


def _indices_reason(conv_state_indices: torch.Tensor, cache_indices: torch.Tensor) -> str | None:
    same = conv_state_indices is cache_indices or (
        conv_state_indices.data_ptr() == cache_indices.data_ptr() and conv_state_indices.shape == cache_indices.shape
    )
    return None if same else "conv_state_indices and cache_indices must be the same tensor: a slot has one index"


def ring_tensors(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    """raw_v, raw_k, g and beta, or None where one is missing."""
    given = tuple(tensor for tensor in tensors if tensor is not None)
    return given if len(given) == 4 else None


def flat_gates(
    a: torch.Tensor, b: torch.Tensor, tokens: int, num_v_heads: int, head_k_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``a`` as [tokens, HV*K] and ``b`` as [tokens, HV]; views wherever their strides allow.

    Raises:
        ValueError: one has another number of elements.
    """
    flat = []
    for name, tensor, width in (("a", a, num_v_heads * head_k_dim), ("b", b, num_v_heads)):
        if tensor.numel() != tokens * width:
            raise ValueError(f"{name} must have {tokens} x {width} elements, got shape {list(tensor.shape)}")
        flat.append(tensor.reshape(tokens, width))
    return flat[0], flat[1]
