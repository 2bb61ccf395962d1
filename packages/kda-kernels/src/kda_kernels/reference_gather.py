"""Plain-torch reference of the commit without conv windows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kda_kernels import gather_checks
from kda_kernels.checking import refuse
from kda_kernels.errors import ErrorKind
from kda_kernels.reference import commits


@torch.no_grad()
def gather_conv_reference(
    conv_state: torch.Tensor,
    mixed_qkv: Sequence[torch.Tensor],
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    starts: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> None:
    """`kda_kernels.gather_conv` in plain torch, given what verify was given.

    Args:
        mixed_qkv: of each layer, [rows, D].

    Other arguments and errors as for `kda_kernels.gather_conv`.
    """
    refuse(
        gather_checks.gather_inputs_reason(
            conv_state, mixed_qkv, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens, starts=starts,
            track_slots=track_slots, track_steps=track_steps, errors=errors,
        )
    )  # fmt: skip
    positions = torch.arange(len(slots) + 1)
    offsets = (positions * draft_tokens if starts is None else starts).tolist()
    for layer, x in enumerate(mixed_qkv):
        counted = errors if layer == 0 else None  # every layer sees the same indices
        accepted = accept_lens.clone()
        for i, (begin, end) in enumerate(pairwise(offsets)):
            if 0 <= begin <= end <= begin + draft_tokens and end > x.shape[0]:
                accepted[i] = 0
                if counted is not None:
                    counted[ErrorKind.LENGTH] += 1
        for i, slot, accept, track, step in commits(
            slots, accepted, conv_state.shape[1], draft_tokens, counted, track_slots, track_steps, starts, draft_tokens,
            positions[:-1],
        ):  # fmt: skip
            columns = torch.cat([conv_state[layer, slot], x[offsets[i] : offsets[i + 1]]])
            conv_state[layer, slot] = columns[accept : accept + 3]
            if track >= 0:
                conv_state[layer, track] = columns[step + 1 : step + 4]
