"""SGLang's question whether a verify runs in one fused kernel, answered by our predicate and dispatch gate."""

from __future__ import annotations

import os
from typing import Any

import torch

from kda_backend.sglang.layers import LayerGroups, inputs_look, layer_groups
from kda_backend.sglang.reports import reports
from kda_backend.sglang.rule import choose
from kda_backend.sglang.switches import switched_on
from kda_backend.sglang.verify import flat_gates, fused_kda_conv_gating_verify, ring_tensors
from kda_kernels import KdaShape, Ring, verify_reason

SGLANG_SWITCH = "SGLANG_OPT_FUSED_KDA_VERIFY"
"""SGLang's own switch of fused verify. Set to a false value it is obeyed; where it is not set, the plugin decides."""

MOST_VERDICTS = 256
"""Kept per layer before they are forgotten: one per captured batch size and draft length."""


def can_run_fused_chain_verify(
    self: Any,
    *,
    layer: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    draft_token_num: int,
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    intermediate_state_cache: torch.Tensor | None,
    intermediate_conv_window_cache: torch.Tensor,
    cache_indices: torch.Tensor,
    intermediate_state_indices: torch.Tensor,
    retrieve_next_token: torch.Tensor | None,
    retrieve_next_sibling: torch.Tensor | None,
    retrieve_parent_token: torch.Tensor | None,
    replayssm_rawv: torch.Tensor | None,
    replayssm_rawk: torch.Tensor | None,
    replayssm_g: torch.Tensor | None,
    replayssm_beta: torch.Tensor | None,
) -> bool:
    """Whether our fused kernel takes this verify and the dispatch gate wants it to. Parameters are SGLang's method's.

    Args:
        self: SGLang's KDAAttnBackend; its fused function becomes ours if it has none.
        layer: SGLang's RadixLinearAttention, with weights and head sizes.
        mixed_qkv, a, b, cache_indices, intermediate_state_indices: as `fused_kda_conv_gating_verify`.
        draft_token_num: T.
        conv_states: [slots, 3, D]; ssm_states: [slots, HV, V, K].
        intermediate_state_cache: [rows, steps, HV, V, K] snapshots, or None with the ring.
        intermediate_conv_window_cache: [rows, steps, 3, D].
        retrieve_next_token, retrieve_next_sibling, retrieve_parent_token: a tree's links; None for a chain.
        replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta: the ring, or None.

    Returns:
        False sends SGLang to its own unfused kernels; the reason is in the log.
    """
    reports.hook_runs()
    if retrieve_next_token is not None or retrieve_next_sibling is not None or retrieve_parent_token is not None:
        reports.not_taken("fused verify takes chains, this is a tree (speculative_eagle_topk above 1)")
        return False
    try:
        tokens = mixed_qkv.shape[0]
        if draft_token_num < 1 or tokens % draft_token_num:
            raise ValueError(f"it takes whole chains, {tokens} tokens are not a multiple of T={draft_token_num}")
        ring = ring_tensors(replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
        heads = layer.num_q_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        mode = "snapshots" if replayssm_rawv is None else "ring"
        choice = choose(
            KdaShape(*heads), mode, tokens // draft_token_num, draft_token_num, mixed_qkv.device,
            dtype=mixed_qkv.dtype, safe_gate=layer.lower_bound is not None,
        )  # fmt: skip
        if not choice.fused:
            reports.not_chosen(choice.reason)
            return False
        reason = _heads_reason(layer) or _call_reason(
            layer_groups(
                conv_weight=layer.conv_weights, conv_bias=layer.bias, A_log=layer.A_log, dt_bias=layer.dt_bias,
                lower_bound=layer.lower_bound, scale=layer.head_k_dim**-0.5, heads=heads,
                conv_state=conv_states, ssm_state=ssm_states, conv_window=intermediate_conv_window_cache,
                ring=ring, snapshots=intermediate_state_cache if replayssm_rawv is None else None,
            ),
            mixed_qkv, a, b, draft_token_num, cache_indices, intermediate_state_indices,
        ) or _use_ours(self)  # fmt: skip
    except Exception as problem:  # whatever SGLang's tensors are, its unfused kernels remain
        reason = f"{type(problem).__name__}: {problem}"
    if reason is not None:
        reports.not_taken(f"fused verify: {reason}")
    return reason is None


def _heads_reason(layer: Any) -> str | None:
    if layer.num_q_heads != layer.num_k_heads or layer.head_q_dim != layer.head_k_dim:
        return (
            "queries and keys must have equal heads, got "
            f"{layer.num_q_heads} x {layer.head_q_dim} and {layer.num_k_heads} x {layer.head_k_dim}"
        )
    return None


def _call_reason(
    groups: LayerGroups,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    draft_tokens: int,
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> str | None:
    """Why `kda_kernels.verify_fused` would refuse the call; looked up for calls that look alike."""
    look = draft_tokens, inputs_look(mixed_qkv, a, b, slots, rows)
    if mixed_qkv.device.type != "cpu" and look in groups.verdicts:  # on the CPU the verdict depends on index values
        return groups.verdicts[look]
    if isinstance(groups.record, Ring) and groups.record.length < draft_tokens:
        reason: str | None = f"the ring holds {groups.record.length} records, fewer than the {draft_tokens} tokens"
    else:
        shape = groups.shape
        reason = verify_reason(
            mixed_qkv, *flat_gates(a, b, mixed_qkv.shape[0], shape.num_v_heads, shape.head_k_dim),
            shape=shape, params=groups.params, state=groups.state, record=groups.record, slots=slots,
            draft_tokens=draft_tokens, rows=rows,
        )  # fmt: skip
    if len(groups.verdicts) >= MOST_VERDICTS:
        groups.verdicts.clear()
    groups.verdicts[look] = reason
    return reason


def _use_ours(backend: Any) -> str | None:
    """Make sure that the backend calls our fused function; the reason if it must not."""
    function = getattr(backend, "_fused_chain_verify_fn", None)
    if function is None:
        if not switched_on(SGLANG_SWITCH):  # a word that it does not know is a reason as well, raised
            return f"{SGLANG_SWITCH}={os.environ[SGLANG_SWITCH]} switches fused verify off"
        dispatcher = backend.kernel_dispatcher
        if not (dispatcher.verify_backend.is_triton() and dispatcher.verify_kernel.supports_fused_chain_verify):
            return "SGLang's linear attention verify backend must be triton (--linear-attn-verify-backend)"
    # SGLang's hooks mark what they wrap; a function without the mark is SGLang's own, whose limits are narrower.
    if not hasattr(function, "__wrapped__") and function is not fused_kda_conv_gating_verify:
        backend._fused_chain_verify_fn = fused_kda_conv_gating_verify
    return None
