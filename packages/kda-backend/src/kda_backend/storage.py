"""The tensors of a state pool, the slots in them, and what may be done with a slot between rounds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kda_backend.devices import usable_device
from kda_backend.plan import memory_plan
from kda_backend.rounds import Round, slots_reason
from kda_backend.slots import SlotAllocator, SlotState, check_int, slot_numbers
from kda_kernels import (
    KdaShape,
    LayerState,
    PendingFold,
    Ring,
    Snapshots,
    describe_errors,
    flush,
    flush_reference,
    new_error_counts,
)
from kda_kernels._launch import device_reason
from kda_kernels.checking import host_values, refuse
from kda_kernels.pending_checks import BANKS


class SlotStorage:
    """Conv and recurrent states of all layers and slots, the record and scratch of a round; see `StatePool`."""

    def __init__(
        self,
        shape: KdaShape,
        *,
        num_layers: int,
        num_slots: int,
        max_batch: int,
        draft_tokens: int,
        mode: str,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        ring_length: int | None = None,
        fold_on_verify: bool = False,
        compact_window: bool = False,
    ) -> None:
        self.plan = memory_plan(
            shape, num_layers, mode, dtype, num_slots, max_batch, draft_tokens, ring_length, fold_on_verify,
            compact_window,
        )  # fmt: skip
        self.shape, self.mode, self.dtype = shape, mode, dtype
        self.num_layers, self.num_slots = num_layers, num_slots = self.plan.num_layers, self.plan.num_slots
        self.max_batch, self.draft_tokens = max_batch, draft_tokens = self.plan.max_batch, self.plan.draft_tokens
        device = usable_device(device)
        # Ordinary tensors, also where the engine builds its pool in inference mode: those can be updated in any mode.
        with torch.inference_mode(False):
            self.state = LayerState.allocate(
                shape, slots=num_slots, rows=max_batch, steps=draft_tokens, dtype=dtype, device=device,
                num_layers=num_layers, compact_window=compact_window,
            )  # fmt: skip
            self.record: Ring | Snapshots
            if mode == "ring":
                self.record = Ring.allocate(
                    shape,
                    slots=BANKS * num_slots if fold_on_verify else num_slots,
                    length=self.plan.ring_length,
                    dtype=dtype,
                    device=device,
                    num_layers=num_layers,
                )
            else:
                self.record = Snapshots.allocate(
                    shape, rows=max_batch, steps=draft_tokens, device=device, num_layers=num_layers
                )
            self.pending: PendingFold | None = None
            if fold_on_verify:
                self.pending = PendingFold.allocate(shape, slots=num_slots, device=device, num_layers=num_layers)
            self.errors = new_error_counts(device)
            self._uncounted = new_error_counts(device)
            self._workspace = torch.empty(max_batch * draft_tokens, shape.conv_dim, dtype=dtype, device=device)
        self.device = self.state.ssm_state.device
        self._allocator = SlotAllocator(num_slots)
        self._layers = [
            (self.state.layer(i), self.record.layer(i), None if self.pending is None else self.pending.layer(i))
            for i in range(num_layers)
        ]
        self._round: Round | None = None
        self._replaying = False

    @property
    def conv_state(self) -> torch.Tensor:
        """[layers, slots, 3, D], activation dtype."""
        return self.state.conv_state

    @property
    def ssm_state(self) -> torch.Tensor:
        """[layers, slots, HV, V, K] fp32. With fold on verify, a slot's last accepted round may be missing: `flush`."""
        return self.state.ssm_state

    @property
    def conv_window(self) -> torch.Tensor | None:
        """[layers, max_batch, draft_tokens, 3, D], activation dtype; None with compact windows."""
        return self.state.conv_window

    @property
    def compact_window(self) -> bool:
        """Whether verify writes no conv windows."""
        return self.plan.compact_window

    @property
    def ring(self) -> Ring | None:
        """The ring of all layers, or None in snapshot mode. With fold on verify, of ``2 * num_slots`` slots."""
        return self.record if isinstance(self.record, Ring) else None

    @property
    def snapshots(self) -> Snapshots | None:
        """The snapshots of all layers, or None in ring mode."""
        return self.record if isinstance(self.record, Snapshots) else None

    @property
    def free_slots(self) -> int:
        """How many slots `allocate` may still hand out."""
        return self._allocator.free_slots

    @property
    def scratch_bytes(self) -> int:
        """Bytes that undoing drafts costs: ring or snapshots, and what fold on verify keeps beside them."""
        return self.record.num_bytes + (0 if self.pending is None else self.pending.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all the pool's tensors."""
        own = (self.errors, self._uncounted, self._workspace)
        return self.state.num_bytes + self.scratch_bytes + sum(t.numel() * t.element_size() for t in own)

    def allocate(self, n: int = 1) -> list[int]:
        """Take ``n`` free slots, all or none, their recurrent and conv state zeroed on every layer.

        Raises:
            PoolExhausted: fewer than ``n`` are free. Nothing changed; queue the request until `free` was called.
            RuntimeError: a round is open whose slots are on a device (one of them might have been freed meanwhile, and
                its commit would write it), or being replayed. Slots of a round on the CPU are not handed out.
            TypeError, ValueError: ``n`` is not an int of at least 1.
        """
        slots = self._allocator.allocate(n, self._slots_of_round("allocate"))
        try:
            index = torch.tensor(slots, device=self.device)
            self.conv_state.index_fill_(1, index, 0)
            self.ssm_state.index_fill_(1, index, 0)
            if self.pending is not None:
                self.pending.pending.index_fill_(0, index, 0)
        except BaseException:
            self._allocator.free(slots)
            raise
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Give allocated slots back, all or none. Costs the device nothing: `allocate` resets.

        A slot of the open round may be freed; nothing allocates it before that round is over.

        Raises:
            TypeError: ``slots`` holds something else than ints.
            ValueError: a slot is not in the pool, not allocated (a second free, say), or named twice.
        """
        self._allocator.free(slots)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy a slot's committed state to another slot, all layers (prefix cache). Records are not copied or needed.

        Raises:
            RuntimeError: either slot is of the open round, or may be: its drafts are not committed.
            TypeError, ValueError: a slot is not an int, not in the pool, or not allocated where others were.
        """
        src, dst = self._checked_slots("copy_slot", src=src, dst=dst)
        self.flush([src])
        for own in (self.conv_state, self.ssm_state):
            own[:, dst] = own[:, src]
        self._nothing_pending(dst)

    def export_slot(self, slot: int) -> SlotState:
        """A copy of a slot's committed state, all layers, on the pool's device.

        Raises:
            RuntimeError: the slot is of the open round, or may be: its drafts are not committed.
            TypeError, ValueError: the slot is not an int, not in the pool, or not allocated where others were.
        """
        (slot,) = self._checked_slots("export_slot", slot=slot)
        self.flush([slot])
        return SlotState(self.conv_state[:, slot].clone(), self.ssm_state[:, slot].clone())

    def import_slot(self, slot: int, state: SlotState) -> None:
        """`load_slot` of what `export_slot` gave, of this pool or another; from any device.

        Raises:
            RuntimeError, ValueError: as `load_slot`: layers, heads and dtype of the state must be the pool's.
            TypeError: the slot is not an int, or ``state`` not a SlotState.
        """
        if not isinstance(state, SlotState):
            raise TypeError(f"state must be a SlotState, got {type(state).__name__}")
        self.load_slot(slot, state.conv_state, state.ssm_state)

    def load_slot(self, slot: int, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> None:
        """Copy a request's state (after prefill, say) into a slot of every layer.

        Args:
            slot: 0..num_slots-1.
            conv_state: [layers, 3, D], activation dtype, oldest column first.
            ssm_state: [layers, HV, V, K] fp32.

        Raises:
            RuntimeError: the slot is of the open round, or may be: commit would fold drafts onto the new state; see
                `abandon`.
            ValueError: the slot is not in the pool, or not allocated where others were; or a tensor's shape or dtype
                differs, or it has no values.
            TypeError: the slot is not an int, or a state is not a tensor.

        The pool is unchanged by a refused call.
        """
        (slot,) = self._checked_slots("load_slot", slot=slot)
        pairs = (("conv_state", conv_state, self.conv_state), ("ssm_state", ssm_state, self.ssm_state))
        for name, given, own in pairs:
            if not isinstance(given, torch.Tensor):
                raise TypeError(f"{name} must be a Tensor, got {type(given).__name__}")
            wanted = [self.num_layers, *own.shape[2:]]
            if list(given.shape) != wanted:
                raise ValueError(f"{name} must have shape {wanted}, got {list(given.shape)}")
            if given.dtype != own.dtype:
                raise ValueError(f"{name} must be {own.dtype}, got {given.dtype}")
            if given.layout != torch.strided:
                raise ValueError(f"{name} must be dense, got layout {given.layout}: pass its to_dense()")
            if given.is_meta and not own.is_meta:
                raise ValueError(f"{name} must have values, got a tensor on device 'meta': pass one on a real device")
        moved = [given.detach().to(self.device) for _, given, _ in pairs]
        for (_, _, own), given in zip(pairs, moved, strict=True):
            own[:, slot] = given
        self._nothing_pending(slot)

    def flush(self, slots: Iterable[int] | torch.Tensor | None = None) -> None:
        """Bring the recurrent state of ``slots`` up to date, on all layers; only checks them without fold on verify.

        Needed before something else than the pool reads `ssm_state`: prefill that goes on from a slot, an engine's own
        decode kernel, a snapshot. The pool's methods see to it themselves. May be called at any time, and again.

        Args:
            slots: numbers, or an int32 or int64 tensor on the pool's device (which costs no copy to it; -1 is padding);
                None: all slots.

        Raises:
            TypeError, ValueError: a slot is not an int, is not in the pool, is named twice, or is not allocated where
                others were (of a tensor, where its values are on the host).
        """
        numbers: list[int] | None = None
        if isinstance(slots, torch.Tensor):
            refuse(slots_reason(slots, self.num_slots, self.device))
            self._check_allocated("slots", slots)
        elif slots is not None:
            numbers = slot_numbers(slots, self.num_slots)
            if len(set(numbers)) != len(numbers):
                raise ValueError(f"slots must name each slot once, got {numbers}")
            self._check_allocated("slots", numbers)
        if self.pending is None or not isinstance(self.record, Ring):
            return
        if not isinstance(slots, torch.Tensor):
            given = range(self.num_slots) if numbers is None else numbers
            slots = torch.tensor(given, dtype=torch.int32, device=self.device)
        op = flush if device_reason(self.device) is None else flush_reference
        op(self.ssm_state, self.record, self.pending, shape=self.shape, slots=slots, errors=self.errors)

    def _nothing_pending(self, slot: int) -> None:
        """What a slot's state was before is of no interest any more: it has just been set."""
        if self.pending is not None:
            self.pending.pending[slot] = 0

    def error_summary(self) -> str | None:
        """What the device has counted so far (see `kda_kernels.ErrorKind`), or None. Waits for the device.

        A faulty row is counted by the round's verify (on layer 0) and again by its commit.
        """
        return describe_errors(self.errors)

    def _refuse_in_replay(self, method: str) -> None:
        if self._replaying:
            raise RuntimeError(f"{method} needs the replayed round to be over: leave `with replayed_round()` first")

    def _slots_of_round(self, method: str) -> frozenset[int]:
        """The slots that ``method`` must leave alone; refused where it is not known which."""
        self._refuse_in_replay(method)
        if self._round is None:
            return frozenset()
        if self._round.host_slots is None:
            raise RuntimeError(f"{method} needs the round to be over: commit it, or abandon() it")
        return self._round.host_slots

    def _checked_slots(self, method: str, **slots: int) -> list[int]:
        """The numbers as ints; refused if one is none of the pool, is not allocated, or of a round under way."""
        numbers = [check_int(name, slot, 0, self.num_slots - 1) for name, slot in slots.items()]
        for name, number in zip(slots, numbers, strict=True):
            self._check_allocated(name, [number])
        if not self._slots_of_round(method).isdisjoint(numbers):
            raise RuntimeError(f"{method} needs the round to be over: commit it, or abandon() it")
        return numbers

    def _check_allocated(self, name: str, slots: Iterable[int] | torch.Tensor) -> None:
        """Refuse slots that the host sees to be free, once `allocate` was called; -1 is padding."""
        if not self._allocator.in_use:
            return
        numbers = host_values(slots) or [] if isinstance(slots, torch.Tensor) else slots
        free = sorted({slot for slot in numbers if slot >= 0 and not self._allocator.is_allocated(slot)})
        if free:
            raise ValueError(
                f"{name} must name allocated slots, got {free}, which are free: freed too early? (An engine that "
                "numbers slots itself never calls allocate.)"
            )
