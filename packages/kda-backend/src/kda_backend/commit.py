"""Commit of all layers: the pool's, and what a benchmark of it times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kda_kernels import (
    KdaShape,
    LayerState,
    Ring,
    Snapshots,
    fold,
    fold_reason,
    fold_reference,
    scatter_conv,
    scatter_conv_reference,
    scatter_reason,
    scatter_snapshots,
    scatter_snapshots_reference,
)
from kda_kernels.checking import refuse


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
    on_launch: Callable[[], None] = lambda: None,
) -> None:
    """Advance every layer's recurrent and conv state by each request's accepted prefix: two launches.

    Args:
        state, record: with a leading [layers]; ``state`` is updated in place.
        shape, slots, accept_lens, draft_tokens, track_slots, track_steps: as `kda_kernels.fold`.
        errors: counters of the state's launch.
        uncounted: counters of the windows' launch, which sees the same faults.
        reference: plain torch instead of kernels.
        on_launch: called once everything was checked, before the first launch.

    Raises:
        ValueError: an argument is refused; nothing was written.
    """
    common: dict[str, Any] = {
        "slots": slots, "accept_lens": accept_lens, "draft_tokens": draft_tokens,
        "track_slots": track_slots, "track_steps": track_steps,
    }  # fmt: skip
    kernels = not reference
    windows = (state.conv_state, state.conv_window)
    reason = scatter_reason(*windows, names=("conv_state", "conv_window"), **common, needs_kernels=kernels)
    if isinstance(record, Ring):
        reason = reason or fold_reason(
            state.ssm_state, record, shape=shape, **common, errors=errors, needs_kernels=kernels
        )
    else:
        names = ("ssm_state", "snapshots.states")
        reason = reason or scatter_reason(
            state.ssm_state, record.states, names=names, **common, errors=errors, needs_kernels=kernels
        )
    refuse(reason)
    on_launch()
    # Windows first: that copy can be repeated if the second launch never happens, a fold cannot.
    (scatter_conv_reference if reference else scatter_conv)(*windows, errors=uncounted, **common)
    if isinstance(record, Ring):
        (fold_reference if reference else fold)(state.ssm_state, record, shape=shape, errors=errors, **common)
    else:
        (scatter_snapshots_reference if reference else scatter_snapshots)(
            state.ssm_state, record, errors=errors, **common
        )
