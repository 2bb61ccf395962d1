"""Commit of all layers: the pool's, and what a benchmark of it times."""

from __future__ import annotations

import torch

from kda_kernels import (
    KdaShape,
    LayerState,
    Ring,
    Snapshots,
    fold,
    fold_reference,
    scatter_conv,
    scatter_conv_reference,
    scatter_snapshots,
    scatter_snapshots_reference,
)


def commit_layers(
    state: LayerState,
    record: Ring | Snapshots,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    uncounted: torch.Tensor | None = None,
    reference: bool = False,
) -> None:
    """Advance every layer's recurrent and conv state by each request's accepted prefix: two launches.

    Args:
        state, record: with a leading [layers]; ``state`` is updated in place.
        shape, slots, accept_lens, draft_tokens, track_slots, track_steps: as `kda_kernels.fold`.
        errors: counters; each fault is counted once.
        uncounted: counters that the second launch, which sees the same faults, writes to instead.
        reference: plain torch instead of kernels.

    Raises:
        ValueError: an argument is refused; nothing was written.
    """
    common = {
        "slots": slots, "accept_lens": accept_lens, "draft_tokens": draft_tokens,
        "track_slots": track_slots, "track_steps": track_steps,
    }  # fmt: skip
    # Each op refuses before it writes, and the second is given no index that the first did not check.
    if isinstance(record, Ring):
        fold_op = fold_reference if reference else fold
        fold_op(state.ssm_state, record, shape=shape, errors=errors, **common)  # type: ignore[arg-type]
    else:
        snapshots_op = scatter_snapshots_reference if reference else scatter_snapshots
        snapshots_op(state.ssm_state, record, errors=errors, **common)  # type: ignore[arg-type]
    conv_op = scatter_conv_reference if reference else scatter_conv
    conv_op(state.conv_state, state.conv_window, errors=uncounted, **common)  # type: ignore[arg-type]
