"""Commit the accepted prefix of a verify for all layers at once: fold the ring, or copy snapshots; copy windows.

Without windows, `kda_kernels.gather.gather_conv` takes the conv states from the verified inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch

from kda_kernels import commit_checks
from kda_kernels._commit_call import FoldCall, ScatterCall
from kda_kernels._replay import Ticket, recall
from kda_kernels.buffers import Ring, Snapshots
from kda_kernels.checking import refuse
from kda_kernels.shapes import KdaShape, LaunchConfig


def fold(
    ssm_state: torch.Tensor,
    ring: Ring,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
    errors: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """Replay each slot's first ``accept_lens[b]`` ring records into its state, in place, all layers in one launch.

    The committed state equals, bit for bit, the snapshot that snapshot mode would have taken of that step. Records are
    replayed as a chain; trees are committed from snapshots.

    Args:
        ssm_state: [layers, slots, HV, V, K] fp32, updated in place; layer and slot pitch free, inner dims packed.
        ring: a ring with the same leading [layers, slots].
        shape: head layout.
        slots: [B] int32 or int64; -1 is padding. A live slot may appear once.
        accept_lens: [B] int32 or int64, tokens accepted, the root included: 0..min(draft_tokens, ring length). 0 leaves
            the slot untouched. Out of range: refused if the tensor is on the CPU; met on the device, the slot is left
            untouched and the row counted in ``errors``.
        draft_tokens: T of the verify that wrote the ring.
        track_slots: [B] a second slot that receives the state after step ``track_steps[b]``; -1 for none. It must not
            be a slot that this commit updates.
        track_steps: [B] 0-based step; one outside the accepted prefix is not written.
        config: launch configuration; any gives the same bits.
        errors: counters from `new_error_counts`, or None to not count.
        starts: [B+1] of a ragged verify: accept lengths are then limited by each request's own length too, because
            records past it are older ones. A length outside 0..draft_tokens is handled like an accept length that is
            out of range. (A range that ends past the batch cannot be seen here; verify has counted it.)

    Raises:
        ValueError: an argument is refused; the message is that of `commit_checks.fold_reason`.
        TypeError: an argument is of the wrong class.
    """
    prepare_fold(
        ssm_state, ring, shape=shape, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens,
        track_slots=track_slots, track_steps=track_steps, config=config, errors=errors, starts=starts,
    )()  # fmt: skip


def prepare_fold(
    ssm_state: torch.Tensor,
    ring: Ring,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
    errors: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> Callable[[], None]:
    """The first half of `fold`, which refuses or accepts its arguments; the result does the second half, the launch."""
    tensors = [ssm_state, slots, accept_lens]
    if track_slots is not None:
        tensors.append(track_slots)
    if track_steps is not None:
        tensors.append(track_steps)
    if errors is not None:
        tensors.append(errors)
    if starts is not None:
        tensors.append(starts)
    varying = len(tensors)
    try:
        tensors += ring.raw_v, ring.raw_k, ring.g, ring.beta
        key = ("fold", ref(ring), slots.shape, draft_tokens)
        facts = (
            shape, config, draft_tokens.__class__,  # True equals 1
            track_slots is None, track_steps is None, errors is None, starts is None,
        )  # fmt: skip
        known, addresses = recall(key, facts, tensors)
        ticket: Ticket | None = (key, facts, varying, tensors)
    except Exception:  # launches are watched, or an argument is not what it should be: the checks name it
        known = ticket = None
    if known is not None:
        again: Callable[[], Any] = partial(known.launch, addresses)
        return again
    call = FoldCall(
        ssm_state, ring, shape, slots, accept_lens, draft_tokens, track_slots, track_steps, config, errors, starts
    )  # fmt: skip
    refuse(commit_checks.fold_reason(**call._asdict()))
    return partial(call.launch, ticket)


def scatter_conv(
    conv_state: torch.Tensor,
    conv_window: torch.Tensor,
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor | None = None,
    draft_tokens: int,
    rows: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    pdl: bool | None = None,
    last_steps: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> None:
    """Copy each row's window after its last accepted token into its slot's conv state, all layers in one launch.

    A chain's last accepted token is number ``accept_lens[b] - 1``, a tree's is named by ``last_steps``: exactly one of
    the two is given.

    Args:
        conv_state: [layers, slots, 3, D], updated in place.
        conv_window: [layers, rows, steps, 3, D] of the same dtype, as verify wrote it.
        last_steps: [B] int32 or int64, 0-based step of the last accepted token: -1..draft_tokens - 1. -1 leaves the
            slot untouched. Out of range as for ``accept_lens``.
        parents: [B, T] of a verify of trees, with ``last_steps``; as `verify_unfused`. The accepted prefix, whose steps
            may be tracked, is then the path to the last step; without them it is every step up to that one. A request
            whose parents are no tree is left untouched and counted in ``errors``.
        rows: [B] window row of each batch position; None means 0..B-1.
        pdl: programmatic dependent launch, as `LaunchConfig.pdl`.
        slots, accept_lens, draft_tokens, track_slots, track_steps, errors, starts: as for `fold`; there is no ring
            here whose length would limit accept lengths.

    Raises:
        ValueError: an argument is refused; the message is that of `commit_checks.scatter_reason`.
        TypeError: an argument is of the wrong class.
    """
    prepare_scatter(
        conv_state, conv_window, names=("conv_state", "conv_window"), slots=slots, accept_lens=accept_lens,
        draft_tokens=draft_tokens, rows=rows, track_slots=track_slots, track_steps=track_steps, errors=errors, pdl=pdl,
        last_steps=last_steps, starts=starts, parents=parents,
    )()  # fmt: skip


def scatter_snapshots(
    ssm_state: torch.Tensor,
    snapshots: Snapshots,
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor | None = None,
    draft_tokens: int,
    rows: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    pdl: bool | None = None,
    last_steps: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> None:
    """Copy each row's snapshot after its last accepted token into its slot's state, all layers in one launch.

    Args:
        ssm_state: [layers, slots, HV, V, K] fp32, updated in place.
        snapshots: snapshots with a leading [layers], as verify wrote them.

    Other arguments and errors as for `scatter_conv`.
    """
    if not isinstance(snapshots, Snapshots):
        raise TypeError(f"snapshots must be Snapshots, got {type(snapshots).__name__}")
    prepare_scatter(
        ssm_state, snapshots.states, names=("ssm_state", "snapshots.states"), slots=slots, accept_lens=accept_lens,
        draft_tokens=draft_tokens, rows=rows, track_slots=track_slots, track_steps=track_steps, errors=errors, pdl=pdl,
        last_steps=last_steps, starts=starts, parents=parents,
    )()  # fmt: skip


def prepare_scatter(
    dst: torch.Tensor,
    src: torch.Tensor,
    *,
    names: tuple[str, str],
    slots: torch.Tensor,
    accept_lens: torch.Tensor | None = None,
    draft_tokens: int,
    rows: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    pdl: bool | None = None,
    last_steps: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> Callable[[], None]:
    """What `prepare_fold` is of `fold`, of either scatter. Arguments as `commit_checks.scatter_reason`."""
    ends = accept_lens if last_steps is None else last_steps
    tensors: list[Any] = [dst, src, slots, ends]
    if rows is not None:
        tensors.append(rows)
    if track_slots is not None:
        tensors.append(track_slots)
    if track_steps is not None:
        tensors.append(track_steps)
    if errors is not None:
        tensors.append(errors)
    if starts is not None:
        tensors.append(starts)
    if parents is not None:
        tensors.append(parents)
    try:
        key = (names, dst.shape, slots.shape, draft_tokens)
        facts = (
            pdl, pdl.__class__, draft_tokens.__class__,  # True equals 1
            accept_lens is None, last_steps is None,
            rows is None, track_slots is None, track_steps is None, errors is None, starts is None,
            parents is None,
        )  # fmt: skip
        known, addresses = recall(key, facts, tensors)
        ticket: Ticket | None = (key, facts, len(tensors), tensors)
    except Exception:  # launches are watched, or an argument is not what it should be: the checks name it
        known = ticket = None
    if known is not None:
        again: Callable[[], Any] = partial(known.launch, addresses)
        return again
    call = ScatterCall(
        dst, src, names, slots, accept_lens, draft_tokens, rows, track_slots, track_steps, errors, pdl, last_steps,
        starts, parents,
    )  # fmt: skip
    refuse(commit_checks.scatter_reason(**call._asdict()))
    return partial(call.launch, ticket)
