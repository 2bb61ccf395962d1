"""What a state pool takes in bytes, from its sizes alone: the memory plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda_backend.lanes import MODES
from kda_backend.slots import check_int
from kda_kernels import ErrorKind, KdaShape
from kda_kernels.buffers import FOLDED_ROWS, KEPT_INPUTS
from kda_kernels.pending_checks import BANKS

ERROR_COUNTERS = 2
"""Error tensors of a pool: the one that is read, and one for launches that see the same faults again."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a `kda_backend.StatePool` of these sizes: equal to the sum of its tensors.

    An allocator may round each tensor up (torch's, on a GPU, to 512 bytes and its blocks); that is not in here.
    Build it with `memory_plan`.

    Args:
        shape, num_layers, mode, dtype, num_slots, max_batch, draft_tokens: as `kda_backend.StatePool`.
        ring_length: L, records per slot; 0 in snapshot mode.
        fold_on_verify, compact_window: as `kda_backend.StatePool`.
    """

    shape: KdaShape
    num_layers: int
    mode: str
    dtype: torch.dtype
    num_slots: int
    max_batch: int
    draft_tokens: int
    ring_length: int
    fold_on_verify: bool = False
    compact_window: bool = False

    @property
    def state_bytes_per_slot(self) -> int:
        """Recurrent and conv state of one slot, all layers."""
        return self.num_layers * self.shape.state_bytes_per_slot(self.dtype)

    @property
    def ring_bytes_per_slot(self) -> int:
        """Ring records of one slot, all layers, in both banks where there are two; 0 in snapshot mode."""
        banks = BANKS if self.fold_on_verify else 1
        return banks * self.num_layers * self.ring_length * self.shape.ring_bytes_per_token(self.dtype)

    @property
    def pending_bytes_per_slot(self) -> int:
        """What fold on verify keeps of one slot beside its records; 0 without it."""
        if not self.fold_on_verify:
            return 0
        entries = self.shape.num_v_heads * self.shape.head_v_dim // FOLDED_ROWS
        return (len(("parity", "pending", "epoch")) + self.num_layers * entries) * torch.int32.itemsize

    @property
    def bytes_per_slot(self) -> int:
        """What every slot takes, whether its request is in a round or waits: state, and the ring where there is one."""
        return self.state_bytes_per_slot + self.ring_bytes_per_slot + self.pending_bytes_per_slot

    @property
    def snapshot_bytes_per_row(self) -> int:
        """State snapshots of one batch row, all layers; 0 in ring mode."""
        if self.mode == "ring":
            return 0
        return self.num_layers * self.draft_tokens * self.shape.snapshot_bytes_per_token()

    @property
    def window_bytes_per_row(self) -> int:
        """Conv windows of one batch row, all layers; 0 with compact windows."""
        if self.compact_window:
            return 0
        return self.num_layers * self.draft_tokens * self.shape.window_bytes_per_token(self.dtype)

    @property
    def workspace_bytes_per_row(self) -> int:
        """Conv output of one batch row, which the layers share."""
        return self.draft_tokens * self.shape.conv_dim * self.dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        """What every row of the largest batch takes."""
        return self.snapshot_bytes_per_row + self.window_bytes_per_row + self.workspace_bytes_per_row

    @property
    def bytes_per_request(self) -> int:
        """What one more request that is in every round takes: a slot and a row."""
        return self.bytes_per_slot + self.bytes_per_row

    @property
    def scratch_bytes(self) -> int:
        """What undoing drafts takes in the whole pool: ring or snapshots."""
        per_slot = self.ring_bytes_per_slot + self.pending_bytes_per_slot
        return self.num_slots * per_slot + self.max_batch * self.snapshot_bytes_per_row

    @property
    def kept_input_bytes(self) -> int:
        """With compact windows, where each layer's inputs lie; 0 without."""
        return self.num_layers * KEPT_INPUTS * torch.int64.itemsize if self.compact_window else 0

    @property
    def error_bytes(self) -> int:
        """The error counters."""
        return ERROR_COUNTERS * len(ErrorKind) * torch.int32.itemsize

    @property
    def total_bytes(self) -> int:
        """All tensors of the pool."""
        per_request = self.num_slots * self.bytes_per_slot + self.max_batch * self.bytes_per_row
        return per_request + self.error_bytes + self.kept_input_bytes

    def max_requests(self, budget_bytes: int, *, spare_slots: int = 0) -> int:
        """Most requests that verify together in a pool of at most ``budget_bytes``, each with a slot and a row.

        Args:
            budget_bytes: bytes for the pool.
            spare_slots: further slots, for a prefix cache or tracking.

        Raises:
            TypeError: an argument is not an int.
            ValueError: ``budget_bytes`` is below 1, or ``spare_slots`` below 0.

        ``num_slots`` and ``max_batch`` of this plan are not looked at.
        """
        budget_bytes, spare_slots = check_int("budget_bytes", budget_bytes, 1), check_int("spare_slots", spare_slots, 0)
        left = budget_bytes - self.error_bytes - self.kept_input_bytes - spare_slots * self.bytes_per_slot
        return max(0, left // self.bytes_per_request)


def memory_plan(
    shape: KdaShape,
    num_layers: int,
    mode: str,
    dtype: torch.dtype,
    num_slots: int,
    max_batch: int,
    draft_tokens: int,
    ring_length: int | None = None,
    fold_on_verify: bool = False,
    compact_window: bool = False,
) -> MemoryPlan:
    """The bytes of a pool of these sizes. Allocates nothing; arguments and errors as `kda_backend.StatePool`.

    Raises:
        TypeError: ``shape`` is not a KdaShape, a size not an int, or ``fold_on_verify`` or ``compact_window`` not a
            bool.
        ValueError: a size is below 1, the mode or dtype is unknown, the ring is shorter than the drafts, or
            ``fold_on_verify`` is asked for without one.
    """
    if not isinstance(shape, KdaShape):
        raise TypeError(f"shape must be a KdaShape, got {type(shape).__name__}")
    num_layers, num_slots = check_int("num_layers", num_layers, 1), check_int("num_slots", num_slots, 1)
    max_batch, draft_tokens = check_int("max_batch", max_batch, 1), check_int("draft_tokens", draft_tokens, 1)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {dtype}")
    if ring_length is not None:
        if mode != "ring":
            raise ValueError(f"ring_length goes with mode='ring', got ring_length={ring_length} with mode={mode!r}")
        ring_length = check_int("ring_length", ring_length, 1)
        if ring_length < draft_tokens:
            raise ValueError(
                f"ring_length must be at least draft_tokens={draft_tokens}, got {ring_length}: "
                "records past the ring are dropped and their tokens could not be committed"
            )
    for name, option in (("fold_on_verify", fold_on_verify), ("compact_window", compact_window)):
        if not isinstance(option, bool):
            raise TypeError(f"{name} must be True or False, got {type(option).__name__}")
    if fold_on_verify and mode != "ring":
        raise ValueError(f"fold_on_verify goes with mode='ring', whose records it replays; got mode={mode!r}")
    length = (draft_tokens if ring_length is None else ring_length) if mode == "ring" else 0
    return MemoryPlan(
        shape, num_layers, mode, dtype, num_slots, max_batch, draft_tokens, length, fold_on_verify, compact_window
    )
