"""Commit conv states without conv windows: from the old states and the inputs that verify was given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kda_kernels import gather_checks
from kda_kernels._commit_call import GatherCall
from kda_kernels._replay import Ticket, recall
from kda_kernels.checking import refuse


def gather_conv(
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
) -> None:
    """What `scatter_conv` does, for a verify that noted its inputs and wrote no windows; all layers in one launch.

    The conv state after n >= 1 tokens is columns n, n + 1 and n + 2 of the three committed columns followed by the
    request's rows of mixed_qkv. So every layer's mixed_qkv, as verify was given it, must be there unchanged: keep the
    tensors, each in memory of its own, until this call is made. Only chains: a tree's windows follow its paths.

    Args:
        conv_state: [layers, slots, 3, D] bf16 or fp16, the dtype of mixed_qkv; updated in place. D is a multiple of 64.
        kept_inputs: [layers, 3] int64, packed, as verify wrote it to ``LayerState.kept_inputs``.
        draft_tokens: T of the verify.
        starts: [B+1] of a ragged verify; see `fold`. A request whose rows are not all among those that the layer's
            verify was given is left untouched and counted in ``errors`` as one of a wrong length.
        pdl: programmatic dependent launch, as `LaunchConfig.pdl`.
        slots, accept_lens, track_slots, track_steps, errors: as for `scatter_conv`. A tracked state, too, is taken from
            the conv state before this commit.

    Raises:
        ValueError: an argument is refused; the message is that of `gather_checks.gather_reason`.
        TypeError: an argument is of the wrong class.
    """
    prepare_gather(
        conv_state, kept_inputs, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens, starts=starts,
        track_slots=track_slots, track_steps=track_steps, errors=errors, pdl=pdl,
    )()  # fmt: skip


def prepare_gather(
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
) -> Callable[[], None]:
    """The first half of `gather_conv`, which refuses or accepts its arguments; the result does the second half."""
    tensors = [conv_state, kept_inputs, slots, accept_lens]
    if starts is not None:
        tensors.append(starts)
    if track_slots is not None:
        tensors.append(track_slots)
    if track_steps is not None:
        tensors.append(track_steps)
    if errors is not None:
        tensors.append(errors)
    try:
        key = ("gather", conv_state.shape, slots.shape, draft_tokens)
        facts = (
            pdl, pdl.__class__, draft_tokens.__class__,  # True equals 1
            starts is None, track_slots is None, track_steps is None, errors is None,
        )  # fmt: skip
        known, addresses = recall(key, facts, tensors)
        ticket: Ticket | None = (key, facts, len(tensors), tensors)
    except Exception:  # launches are watched, or an argument is not what it should be: the checks name it
        known = ticket = None
    if known is not None:
        again: Callable[[], Any] = partial(known.launch, addresses)
        return again
    call = GatherCall(
        conv_state, kept_inputs, slots, accept_lens, draft_tokens, starts, track_slots, track_steps, errors, pdl
    )
    refuse(gather_checks.gather_reason(**call._asdict()))
    return partial(call.launch, ticket)
