"""What a state pool keeps of the round under way."""

from __future__ import annotations

import torch

from kda_backend.gate import Decision
from kda_backend.kept import KeptInputs, own_version
from kda_kernels.batch_checks import parents_reason, starts_reason
from kda_kernels.checking import INDEX_DTYPES, index_reason


class Round:
    """Slots, draft tokens and shape of the batch of the round under way, and the layers verified so far.

    ``starts`` and ``parents`` are those of `kda_kernels.verify_unfused`: None for chains of one length.
    """

    def __init__(
        self, slots: torch.Tensor, draft_tokens: int, starts: torch.Tensor | None, parents: torch.Tensor | None
    ) -> None:
        self.slots, self.draft_tokens, self.starts, self.parents = slots, draft_tokens, starts, parents
        self._stamps = self._stamp()
        self.verified: set[int] = set()
        self.choices: dict[tuple[str, bool], Decision] = {}
        self.reference = False
        self.kept = KeptInputs()
        # As they were: who changes them meanwhile is refused by commit.
        self.host_slots: frozenset[int] | None = frozenset(slots.tolist()) if slots.device.type == "cpu" else None

    def changed(self) -> str | None:
        """The name of a tensor given to `begin` that was changed in place since, or None."""
        return next((name for name, stamp in self._stamp().items() if stamp != self._stamps[name]), None)

    def _stamp(self) -> dict[str, object]:
        given = {"slots": self.slots, "starts": self.starts, "parents": self.parents}
        return {name: stamp_of(tensor) for name, tensor in given.items() if tensor is not None}


def stamp_of(indices: torch.Tensor) -> object:
    """Something that differs once ``indices`` was changed in place: its values, or on a device its `own_version`."""
    return indices.tolist() if indices.device.type == "cpu" else own_version(indices)


def slots_reason(slots: torch.Tensor, num_slots: int, device: torch.device) -> str | None:
    """Why ``slots`` are none of a pool, or None."""
    if slots.ndim != 1 or slots.dtype not in INDEX_DTYPES:
        return f"slots must be a 1-D int32 or int64 tensor, got {slots.dtype} of {list(slots.shape)}"
    if slots.device == device and device.type != "cpu" and slots.is_contiguous():
        return None  # what the next line finds, in a tenth of the time; `begin` is called every round
    return index_reason("slots", slots, slots.shape[0], device, -1, num_slots - 1, unique=True)


def batch_reason(
    slots: torch.Tensor, draft_tokens: int, starts: torch.Tensor | None, parents: torch.Tensor | None, num_slots: int,
    device: torch.device,
) -> str | None:  # fmt: skip
    """Why these index tensors are no batch of a pool, or None. Values are looked at where they are on the host."""
    return (
        slots_reason(slots, num_slots, device)
        or (None if starts is None else starts_reason(starts, slots.shape[0], draft_tokens, None, device))
        or (None if parents is None else parents_reason(parents, starts, slots, draft_tokens, device))
    )
