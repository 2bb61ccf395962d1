"""Commit the accepted prefix of a verify for all layers at once: fold the ring, or copy snapshots; copy windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
import triton

from kda_kernels import _replay, commit_checks
from kda_kernels._gluon.commit import fold_gluon_kernel
from kda_kernels._launch import Launched, launch, pitch
from kda_kernels._triton.commit import fold_kernel, scatter_kernel
from kda_kernels.buffers import Ring, Snapshots
from kda_kernels.defaults import default_fold_config
from kda_kernels.shapes import KdaShape, LaunchConfig

SCATTER_BYTES = 8192
"""Per program."""

SCATTER_NUM_WARPS = 4


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
    tensors = _given(
        ssm_state=ssm_state, slots=slots, accept_lens=accept_lens, track_slots=track_slots, track_steps=track_steps,
        errors=errors, starts=starts,
    )  # fmt: skip

    def recognised_by() -> _replay.Ticket:
        return (
            ("fold", ref(ring), slots.shape, draft_tokens),
            (shape, config, draft_tokens.__class__, *tensors),
            (ring.raw_v, ring.raw_k, ring.g, ring.beta),
        )

    def reason() -> str | None:
        return commit_checks.fold_reason(
            ssm_state, ring, shape=shape, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens,
            track_slots=track_slots, track_steps=track_steps, config=config, errors=errors, starts=starts,
        )  # fmt: skip

    def launched() -> Launched | None:
        batch, limit = slots.shape[0], min(draft_tokens, ring.length)
        chosen = config or default_fold_config(limit, ssm_state.device)
        block_v = min(chosen.block_v, shape.head_v_dim)
        kernel: Any = fold_kernel
        layout: dict[str, Any] = {}
        if chosen.rows_per_thread is not None:
            kernel, layout = fold_gluon_kernel, {
                "TOKENS": max(2, triton.next_power_of_2(limit)), "ROWS_PER_THREAD": chosen.rows_per_thread,
                "WARPS": chosen.num_warps,
            }  # fmt: skip
        return launch(
            kernel,
            ssm_state.shape[0] * batch * shape.num_v_heads * (shape.head_v_dim // block_v),
            (
                *_pitched(ssm_state), *_pitched(ring.raw_v), *_pitched(ring.raw_k),
                *_pitched(ring.g), *_pitched(ring.beta),
                slots, accept_lens, track_slots, track_steps, errors,
                ssm_state.shape[1], batch, limit, starts, None if starts is None else draft_tokens,
            ),
            device=ssm_state.device, num_warps=chosen.num_warps, pdl=chosen.pdl, max_registers=chosen.max_registers,
            L=ring.length, H=shape.num_heads, HV=shape.num_v_heads, K=shape.head_k_dim, V=shape.head_v_dim,
            BLOCK_V=block_v, HAS_TRACK=track_slots is not None, COUNT=errors is not None, **layout,
        )  # fmt: skip

    return _replay.prepared(tensors, recognised_by, reason, launched)


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
) -> None:
    """Copy each row's window after its last accepted token into its slot's conv state, all layers in one launch.

    A chain's last accepted token is number ``accept_lens[b] - 1``, a tree's is named by ``last_steps``: exactly one of
    the two is given.

    Args:
        conv_state: [layers, slots, 3, D], updated in place.
        conv_window: [layers, rows, steps, 3, D] of the same dtype, as verify wrote it.
        last_steps: [B] int32 or int64, 0-based step of the last accepted token: -1..draft_tokens - 1. -1 leaves the
            slot untouched. Out of range as for ``accept_lens``. Any track step up to it is written: that such a step
            lies on the accepted path is for the caller to see to.
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
        last_steps=last_steps, starts=starts,
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
        last_steps=last_steps, starts=starts,
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
) -> Callable[[], None]:
    """What `prepare_fold` is of `fold`, of either scatter. Arguments as `commit_checks.scatter_reason`."""
    ends = accept_lens if last_steps is None else last_steps
    tensors = _given(
        dst=dst, src=src, slots=slots, rows=rows, accept_lens=ends, track_slots=track_slots,
        track_steps=track_steps, errors=errors, starts=starts,
    )  # fmt: skip

    def recognised_by() -> _replay.Ticket:
        return (
            (names, dst.shape, slots.shape, draft_tokens),
            (pdl, pdl.__class__, draft_tokens.__class__, accept_lens is None, last_steps is None, *tensors),
            (),
        )

    def reason() -> str | None:
        return commit_checks.scatter_reason(
            dst, src, names=names, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens, rows=rows,
            track_slots=track_slots, track_steps=track_steps, errors=errors, pdl=pdl,
            last_steps=last_steps, starts=starts,
        )  # fmt: skip

    def launched() -> Launched | None:
        entry, batch = math.prod(dst.shape[2:]), slots.shape[0]
        block = SCATTER_BYTES // dst.element_size()
        return launch(
            scatter_kernel,
            dst.shape[0] * batch * -(-entry // block),
            (
                *_pitched(dst), *_pitched(src),
                slots, rows, ends, track_slots, track_steps, errors,
                dst.shape[1], src.shape[1], batch, draft_tokens, starts,
            ),
            device=dst.device, num_warps=SCATTER_NUM_WARPS, pdl=pdl,
            N=entry, BLOCK_N=block, LAST_STEPS=last_steps is not None, HAS_ROWS=rows is not None,
            HAS_TRACK=track_slots is not None, COUNT=errors is not None,
        )  # fmt: skip

    return _replay.prepared(tensors, recognised_by, reason, launched)


def _given(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Those that are not None, by the names of the kernel's parameters."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _pitched(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A tensor of all layers with its layer and slot (or row) pitch, as kernels take it."""
    return tensor, pitch(tensor, 0), pitch(tensor, 1)
