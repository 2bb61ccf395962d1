"""The gate as one state pool asks it: what never changes in the pool is given once, and answers are kept."""

from __future__ import annotations

import torch

from kda_backend.gate.decisions import Decision, decide, device_name_of
from kda_backend.lanes import Target
from kda_kernels import KdaShape


class PoolGate:
    """Decisions for verifies of one pool.

    Args:
        shape: head layout.
        mode: "ring" or "snapshots".
        dtype: activation dtype.
        device: where the pool is; its name is read here, once.
        option: one of `kda_backend.gate.OPTIONS`.
    """

    def __init__(self, shape: KdaShape, mode: str, dtype: torch.dtype, device: torch.device, option: str) -> None:
        self.shape, self.mode, self.dtype, self.option = shape, mode, dtype, option
        self.target, self.device_name = Target.of(device), device_name_of(device)
        self._answers: dict[object, Decision] = {}

    def decision(
        self, batch: int, draft_tokens: int, form: str, *, safe_gate: bool, ragged: bool, tree: bool
    ) -> Decision:
        """The decision for a verify of ``batch`` requests; arguments and errors as `kda_backend.gate.decide`."""
        key = (batch, draft_tokens, form, safe_gate, ragged, tree)
        try:
            known = self._answers.get(key)
        except TypeError:  # what cannot be hashed is refused by name
            known = None
        if known is None:
            known = decide(
                self.shape, mode=self.mode, batch=batch, draft_tokens=draft_tokens, device_name=self.device_name,
                target=self.target, form=form, safe_gate=safe_gate, option=self.option, dtype=self.dtype,
                ragged=ragged, tree=tree,
            )  # fmt: skip
            self._answers[key] = known
        return known
