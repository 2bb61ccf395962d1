"""The commit of fold on verify: `advance` records what was accepted, `flush` brings the state up to date.

`PendingFold` says what is kept. A round is verify (``pending=``), `scatter_conv`, `advance`: the state is read and
written once, by verify. Whoever reads a slot's recurrent state otherwise (to copy or export it, or to decode with other
kernels) calls `flush` before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch

from kda_kernels import flush_checks
from kda_kernels._launch import Launched, current_target, launch, pitch
from kda_kernels._replay import Ticket, recall, remember
from kda_kernels._triton.pending import advance_kernel, flush_kernel
from kda_kernels.buffers import PendingFold, Ring
from kda_kernels.checking import refuse
from kda_kernels.defaults import PORTABLE, WHOLE_HEAD
from kda_kernels.shapes import KdaShape


def flush(
    ssm_state: torch.Tensor,
    ring: Ring,
    pending: PendingFold,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> None:
    """Replay what is pending in ``slots`` into their state, all layers in one launch; nothing is replayed twice.

    The state is then what `fold` would have left after the last accepted round, bit for bit. What is pending is not
    cleared but marked as replayed: a verify or flush after this one leaves the state alone.

    Args:
        ssm_state: [layers, slots, HV, V, K] fp32, updated in place; layer and slot pitch free, inner dims packed.
        ring: a ring with a leading [layers, 2 * slots].
        pending: with ``folded`` [layers, slots, HV, V/8].
        shape: head layout.
        slots: [B] int32 or int64; -1 is padding. A live slot may appear once.
        track_slots: [B] a second slot that receives the state after pending record ``track_steps[b]``; -1 for none. It
            must not be one of ``slots``. Not written where the records were replayed before: track right after
            `advance`, which also clears what is pending in the second slot. A request that had no tokens in a ragged
            verify may still have older records pending: flush before that `advance`, or they are tracked.
        track_steps: [B] 0-based record; one outside the pending ones is not written.
        errors: counters from `new_error_counts`, or None to not count. A slot whose bookkeeping is out of range is left
            untouched and counted as an accept length.

    Raises:
        ValueError: an argument is refused; the message is that of `flush_checks.flush_reason`.
        TypeError: an argument is of the wrong class.
    """
    prepare_flush(
        ssm_state, ring, pending, shape=shape, slots=slots, track_slots=track_slots, track_steps=track_steps,
        errors=errors,
    )()  # fmt: skip


def prepare_flush(
    ssm_state: torch.Tensor,
    ring: Ring,
    pending: PendingFold,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> Callable[[], Any]:
    """Check a flush and return what launches it. Arguments and errors as `flush`."""
    tensors = _given(ssm_state=ssm_state, slots=slots, track_slots=track_slots, track_steps=track_steps, errors=errors)

    def recognised_by() -> _Recognised:
        return (
            ("flush", ref(ring), ref(pending), slots.shape),
            (shape, *tensors),
            (ring.raw_v, ring.raw_k, ring.g, ring.beta, *vars(pending).values()),
        )

    def reason() -> str | None:
        return flush_checks.flush_reason(
            ssm_state, ring, pending, shape=shape, slots=slots, track_slots=track_slots, track_steps=track_steps,
            errors=errors,
        )  # fmt: skip

    def launched() -> Launched | None:
        config = WHOLE_HEAD if current_target(ssm_state.device)[0] == "interpreter" else PORTABLE
        block_v, batch = min(config.block_v, shape.head_v_dim), slots.shape[0]
        return launch(
            flush_kernel,
            ssm_state.shape[0] * batch * shape.num_v_heads * (shape.head_v_dim // block_v),
            (
                *_pitched(ssm_state), *_pitched(ring.raw_v), *_pitched(ring.raw_k),
                *_pitched(ring.g), *_pitched(ring.beta),
                pending.parity, pending.pending, pending.epoch, *_pitched(pending.folded),
                slots, track_slots, track_steps, errors, ssm_state.shape[1], batch,
            ),
            device=ssm_state.device, num_warps=config.num_warps, pdl=None,
            L=ring.length, H=shape.num_heads, HV=shape.num_v_heads, K=shape.head_k_dim, V=shape.head_v_dim,
            BLOCK_V=block_v, HAS_TRACK=track_slots is not None, COUNT=errors is not None,
        )  # fmt: skip

    return _prepared(tensors, recognised_by, reason, launched)


def advance(
    pending: PendingFold,
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    ring_length: int,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """Commit a verify's accepted prefixes by writing down how long they are, for all layers: one small launch.

    Every layer's verify must have run since the last advance that accepted tokens of the slot.

    Args:
        pending: as verify took it; ``folded`` is not looked at.
        slots: [B] int32 or int64; -1 is padding. A live slot may appear once.
        accept_lens: [B] int32 or int64, tokens accepted, the root included: 0..min(draft_tokens, ring_length). 0 leaves
            the slot untouched: what was pending stays so. Out of range: refused if the tensor is on the CPU; met on the
            device, the slot is left untouched and the row counted in ``errors``. So is a slot whose bookkeeping is out
            of range, which verify has treated as padded (only its conv state moves: no other commit looks at that).
        draft_tokens: T of the verify.
        ring_length: L of the ring.
        track_slots, track_steps: as for the `flush` that follows; nothing is pending any more in a second slot that it
            will write.
        errors: counters from `new_error_counts`, or None to not count.
        starts: [B+1] of a ragged verify: as for `fold`.

    Raises:
        ValueError: an argument is refused; the message is that of `flush_checks.advance_reason`.
        TypeError: an argument is of the wrong class.
    """
    prepare_advance(
        pending, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens, ring_length=ring_length,
        track_slots=track_slots, track_steps=track_steps, errors=errors, starts=starts,
    )()  # fmt: skip


def prepare_advance(
    pending: PendingFold,
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    ring_length: int,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> Callable[[], Any]:
    """Check an advance and return what launches it. Arguments and errors as `advance`."""
    tensors = _given(
        slots=slots, accept_lens=accept_lens, track_slots=track_slots, track_steps=track_steps, errors=errors,
        starts=starts,
    )  # fmt: skip

    def recognised_by() -> _Recognised:
        return (
            ("advance", ref(pending), slots.shape, draft_tokens),
            (ring_length, draft_tokens.__class__, ring_length.__class__, *tensors),
            (pending.parity, pending.pending, pending.epoch),
        )

    def reason() -> str | None:
        return flush_checks.advance_reason(
            pending, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens, ring_length=ring_length,
            track_slots=track_slots, track_steps=track_steps, errors=errors, starts=starts,
        )  # fmt: skip

    def launched() -> Launched | None:
        return launch(
            advance_kernel,
            slots.shape[0],
            (
                pending.parity, pending.pending, pending.epoch,
                slots, accept_lens, track_slots, track_steps, errors,
                pending.parity.shape[0], min(draft_tokens, ring_length), ring_length,
                starts, None if starts is None else draft_tokens,
            ),
            device=slots.device, num_warps=1, pdl=None,
            HAS_TRACK=track_slots is not None, COUNT=errors is not None,
        )  # fmt: skip

    return _prepared(tensors, recognised_by, reason, launched)


_Recognised = tuple[Hashable, tuple[Any, ...], tuple[torch.Tensor, ...]]
"""Key and facts of a call (see `kda_kernels._replay.recall`), and the tensors of its groups."""


def _prepared(
    tensors: Mapping[str, torch.Tensor],
    recognised_by: Callable[[], _Recognised],
    reason: Callable[[], str | None],
    launched: Callable[[], Launched | None],
) -> Callable[[], Any]:
    """What launches a call that is known, or accepted by ``reason``; it is then remembered.

    ``tensors`` are those that vary from call to call, by the names of the kernel's parameters.
    """
    ticket: Ticket | None = None
    known = None
    try:
        key, facts, held = recognised_by()
        every = [*tensors.values(), *held]
        known, addresses = recall(key, facts, every)
        ticket = key, facts, len(tensors), every
    except Exception:  # launches are watched, or an argument is not what it should be: the checks name it
        known = None
    if known is not None:
        return partial(known.launch, addresses)
    refuse(reason())

    def launch_and_remember() -> None:
        one = launched()
        if ticket is not None:
            remember(ticket, list(tensors), [(one, {})])

    return launch_and_remember


def _given(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Those that are not None, by the names of the kernels' parameters."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _pitched(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A tensor of all layers with its layer and slot pitch, as kernels take it."""
    return tensor, pitch(tensor, 0), pitch(tensor, 1)
