"""Commit of all layers: the pool's, and what a benchmark of it times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kda_kernels import (
    KdaShape,
    LayerState,
    PendingFold,
    Ring,
    Snapshots,
    advance_reason,
    advance_reference,
    flush_reason,
    flush_reference,
    fold_reason,
    fold_reference,
    gather_conv_reference,
    scatter_conv_reference,
    scatter_reason,
    scatter_snapshots_reference,
)
from kda_kernels.checking import refuse
from kda_kernels.commit import prepare_fold, prepare_scatter
from kda_kernels.gather import prepare_gather
from kda_kernels.gather_checks import gather_inputs_reason
from kda_kernels.pending import prepare_advance, prepare_flush

_WINDOWS = ("conv_state", "conv_window")
_SNAPSHOTS = ("ssm_state", "snapshots.states")


def commit_layers(
    state: LayerState,
    record: Ring | Snapshots,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    accept_lens: torch.Tensor | None,
    draft_tokens: int,
    last_steps: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    uncounted: torch.Tensor | None = None,
    reference: bool = False,
    on_launch: Callable[[], None] = lambda: None,
    pending: PendingFold | None = None,
    mixed_qkv: Sequence[torch.Tensor] | None = None,
) -> None:
    """Advance every layer's recurrent and conv state by each request's accepted prefix: two launches.

    With ``pending`` the second launch only records the accepted prefixes, as `kda_kernels.advance`; where a state is
    tracked, a third replays them. One more comes first if the batch is ragged: a request without tokens still has its
    last round pending, which is none of this round's to track.

    Args:
        state, record: with a leading [layers]; ``state`` is updated in place.
        shape, slots, accept_lens, draft_tokens, starts, track_slots, track_steps: as `kda_kernels.fold`.
        last_steps, parents: of trees, in place of accept_lens, with snapshots; as `kda_kernels.scatter_snapshots`.
        errors: counters of the state's launch.
        uncounted: counters of the windows' launch, which sees the same faults.
        reference: plain torch instead of kernels.
        on_launch: called once everything was checked, before the first launch.
        pending: what verify was given; ``record`` is then its two-bank ring.
        mixed_qkv: of each layer, what verify was given, where ``state`` has kept inputs and no windows; held by the
            caller until this returns. Only the reference looks into it.

    Raises:
        ValueError: an argument is refused; nothing was written.
    """
    common: dict[str, Any] = {
        "slots": slots, "accept_lens": accept_lens, "draft_tokens": draft_tokens,
        "track_slots": track_slots, "track_steps": track_steps,
    }  # fmt: skip
    if starts is not None:
        common["starts"] = starts
    if last_steps is not None:
        common |= {"accept_lens": None, "last_steps": last_steps, "parents": parents}
    states = state.ssm_state
    conv = _conv_commit(state, mixed_qkv, common, uncounted, reference)
    if pending is not None:
        if not isinstance(record, Ring):
            raise TypeError(f"record must be a Ring where pending is given, got {type(record).__name__}")
        advancing: dict[str, Any] = {**common, "ring_length": record.length, "errors": errors}
        flushing: dict[str, Any] = {
            "shape": shape, "slots": slots, "track_slots": track_slots, "track_steps": track_steps
        }  # fmt: skip
        if reference:
            refuse(
                advance_reason(pending, **advancing, needs_kernels=False)
                or flush_reason(states, record, pending, **flushing, needs_kernels=False)
            )
            on_launch()
            conv()
            if track_slots is not None and starts is not None:
                flush_reference(states, record, pending, shape=shape, slots=slots, errors=uncounted)
            advance_reference(pending, **advancing)
            if track_slots is not None:
                flush_reference(states, record, pending, errors=uncounted, **flushing)
            return
        launches = [conv, prepare_advance(pending, **advancing)]
        if track_slots is not None:
            launches.append(prepare_flush(states, record, pending, errors=uncounted, **flushing))
            if starts is not None:
                launches.insert(0, prepare_flush(states, record, pending, shape=shape, slots=slots, errors=uncounted))
        on_launch()
        for launch in launches:
            launch()
        return
    # Conv states first. Windows can be copied again if the second launch never happens, a fold cannot be repeated.
    if reference:
        if isinstance(record, Ring):
            reason = fold_reason(states, record, shape=shape, **common, errors=errors, needs_kernels=False)
        else:
            reason = scatter_reason(
                states, record.states, names=_SNAPSHOTS, **common, errors=errors, needs_kernels=False
            )
        refuse(reason)
        on_launch()
        conv()
        if isinstance(record, Ring):
            fold_reference(states, record, shape=shape, errors=errors, **common)
        else:
            scatter_snapshots_reference(states, record, errors=errors, **common)
        return
    if isinstance(record, Ring):
        launch_states = prepare_fold(states, record, shape=shape, errors=errors, **common)
    else:
        launch_states = prepare_scatter(states, record.states, names=_SNAPSHOTS, errors=errors, **common)
    on_launch()
    conv()
    launch_states()


def _conv_commit(
    state: LayerState,
    mixed_qkv: Sequence[torch.Tensor] | None,
    common: dict[str, Any],
    uncounted: torch.Tensor | None,
    reference: bool,
) -> Callable[[], None]:
    """What commits the conv states, from windows or kept inputs; its arguments are accepted."""
    if state.kept_inputs is None:
        windows = state.conv_state, state.windows
        if not reference:
            return prepare_scatter(*windows, names=_WINDOWS, errors=uncounted, **common)
        refuse(scatter_reason(*windows, names=_WINDOWS, **common, needs_kernels=False))
        return partial(scatter_conv_reference, *windows, errors=uncounted, **common)
    if "last_steps" in common:
        raise ValueError(
            "last_steps must be None where the state has kept inputs and no conv windows: a tree's windows follow its "
            "paths; commit chains, by accept_lens"
        )
    if not reference:
        return prepare_gather(state.conv_state, state.kept_inputs, errors=uncounted, **common)
    if mixed_qkv is None:
        raise TypeError("mixed_qkv must be given to the reference where the state has kept inputs and no conv windows")
    refuse(gather_inputs_reason(state.conv_state, mixed_qkv, **common, errors=uncounted))
    return partial(gather_conv_reference, state.conv_state, mixed_qkv, errors=uncounted, **common)
