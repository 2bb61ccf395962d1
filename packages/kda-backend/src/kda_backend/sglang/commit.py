"""SGLang's commit after a verify with the ring, done by our fold and window scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kda_backend.sglang.layers import OwnedCache
from kda_backend.sglang.originals import UNUSABLE, describe, original
from kda_backend.sglang.reports import reports
from kda_kernels import KdaShape, Ring
from kda_kernels.commit import prepare_fold, prepare_scatter

MODULE = "sglang.kernels.ops.attention.linear.kda_replayssm_spec_decode"
NAME = "commit_kda_replayssm_after_verify"

_rings: OwnedCache[Ring] = OwnedCache()


def commit_kda_replayssm_after_verify(
    *,
    spec_state: Any,
    state_batch_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None = None,
    mamba_steps_to_track: torch.Tensor | None = None,
    src_indices_raw: torch.Tensor | None = None,
    null_block_id: int = -1,
) -> None:
    """Advance every layer's recurrent and conv state by each request's accepted prefix. Parameters are SGLang's.

    Args:
        spec_state: SGLang's MambaPool.SpeculativeState of all layers: ``temporal`` [layers, slots, HV, V, K] fp32, the
            four ``replayssm_`` ring tensors, and lists ``conv`` [layers, slots, 3, D] and ``intermediate_conv_window``
            [layers, rows, steps, 3, D].
        state_batch_indices: [B] slot of each request; ``null_block_id`` and less are skipped.
        accept_lens: [B] tokens accepted, the root included; 0 and less, and more than the ring or the windows hold,
            leave the request's state untouched.
        last_correct_step_indices: [B] 0-based step whose conv window is kept; negative leaves the conv state untouched.
        mamba_track_indices, mamba_steps_to_track: [B] a second slot, and the accepted step whose state it receives (-1:
            none). Only both together have an effect.
        src_indices_raw: [B] window row of each request; None means 0..B-1.
        null_block_id: the largest slot that is no slot.

    Raises:
        ValueError: the arguments are refused and SGLang's own function is not there to take them.
    """
    arguments = dict(locals())
    reports.hook_runs()
    try:
        launches = _prepare(**arguments)
    except UNUSABLE as refusal:  # nothing has been launched
        theirs = original(MODULE, NAME)
        if theirs is None:
            raise
        reports.not_taken(f"commit: {describe(refusal)}")
        theirs(**arguments)
        return
    for launch in launches:
        launch()


def _prepare(
    *,
    spec_state: Any,
    state_batch_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None,
    null_block_id: int,
) -> list[Callable[[], None]]:
    """The launches of a commit, all of them checked."""
    ring = _ring(spec_state)
    slots, track_slots, track_steps = state_batch_indices.contiguous(), None, None
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        track_slots, track_steps = mamba_track_indices.contiguous(), mamba_steps_to_track.contiguous()
    if len(spec_state.conv) != len(spec_state.intermediate_conv_window):
        raise ValueError(
            "spec_state.conv and spec_state.intermediate_conv_window must be of one length, got "
            f"{len(spec_state.conv)} and {len(spec_state.intermediate_conv_window)}"
        )
    # SGLang does not say how many tokens were verified: at most as many as the windows have steps.
    steps = min([ring.length, *(window.shape[2] for window in spec_state.intermediate_conv_window)])
    conv_lens = last_correct_step_indices + 1
    if any(window.shape[2] > steps for window in spec_state.intermediate_conv_window):
        conv_lens = conv_lens.masked_fill(accept_lens > steps, 0)  # the fold leaves such a state, and so must this
    windows = [
        prepare_scatter(
            conv, window, names=("spec_state.conv", "spec_state.intermediate_conv_window"), slots=slots,
            accept_lens=conv_lens, draft_tokens=window.shape[2],
            rows=None if src_indices_raw is None else src_indices_raw.contiguous(),
            track_slots=track_slots, track_steps=track_steps,
        )
        for conv, window in zip(spec_state.conv, spec_state.intermediate_conv_window, strict=True)
    ]  # fmt: skip
    _, _, num_v_heads, head_v_dim, head_k_dim = spec_state.temporal.shape
    states = prepare_fold(
        spec_state.temporal, ring, shape=KdaShape(ring.raw_k.shape[2], num_v_heads, head_k_dim, head_v_dim),
        slots=_without_null(slots, null_block_id), accept_lens=accept_lens.contiguous(), draft_tokens=steps,
        track_slots=None if track_slots is None else _without_null(track_slots, null_block_id),
        track_steps=track_steps,
    )  # fmt: skip
    return [*windows, states]  # windows first: copying them again does no harm, a second fold would


def _without_null(slots: torch.Tensor, null_block_id: int) -> torch.Tensor:
    """``slots`` with -1, which our kernels skip, for what the engine counts as no slot."""
    return slots if null_block_id <= -1 else slots.masked_fill(slots <= null_block_id, -1)


def _ring(spec_state: Any) -> Ring:
    """The pool's ring of all layers: the same group for as long as the pool's state is the same object."""
    tensors = tuple(getattr(spec_state, f"replayssm_{name}") for name in ("rawv", "rawk", "g", "beta"))
    if any(not isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ValueError("spec_state must hold all four replayssm tensors, got None for one")
    return _rings.get(spec_state, tuple(map(id, tensors)), lambda: Ring(*tensors))
