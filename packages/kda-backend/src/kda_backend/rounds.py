"""What a state pool keeps of the round under way."""

from __future__ import annotations

import torch

from kda_backend.lanes import LaneChoice


class Round:
    """Slots and draft tokens of the round under way, the workspace for them, and the layers verified so far."""

    def __init__(self, slots: torch.Tensor, draft_tokens: int, workspace: torch.Tensor) -> None:
        self.slots, self.draft_tokens, self.stamp = slots, draft_tokens, stamp_of(slots)
        self.workspace = workspace
        self.verified: set[int] = set()
        self.choices: dict[str, LaneChoice] = {}
        self.reference = False


def stamp_of(slots: torch.Tensor) -> object:
    """Something that differs once ``slots`` was changed in place.

    Tensors made in inference mode count no versions: on the CPU their values are compared, on a device nothing is.
    """
    if not slots.is_inference():
        return slots._version
    return slots.tolist() if slots.device.type == "cpu" else None
