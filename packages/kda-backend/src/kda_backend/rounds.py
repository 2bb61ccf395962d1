"""What a state pool keeps of the round under way."""

from __future__ import annotations

import torch

from kda_backend.gate import Decision
from kda_backend.kept import KeptInputs


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

    def changed(self) -> str | None:
        """The name of a tensor given to `begin` that was changed in place since, or None."""
        return next((name for name, stamp in self._stamp().items() if stamp != self._stamps[name]), None)

    def _stamp(self) -> dict[str, object]:
        given = {"slots": self.slots, "starts": self.starts, "parents": self.parents}
        return {name: stamp_of(tensor) for name, tensor in given.items() if tensor is not None}


def stamp_of(indices: torch.Tensor) -> object:
    """Something that differs once ``indices`` was changed in place.

    Tensors made in inference mode count no versions: on the CPU their values are compared, on a device nothing is.
    """
    if not indices.is_inference():
        return indices._version
    return indices.tolist() if indices.device.type == "cpu" else None
