"""Who owns which slot, and what a slot holds when it leaves the pool."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch


class PoolExhausted(RuntimeError):
    """More slots were asked for than are free. Nothing was allocated: queue the request and ask again after a free."""


@dataclass(frozen=True, eq=False)
class SlotState:
    """The committed state of one slot on all layers, as `StatePool.export_slot` copies it out.

    Args:
        conv_state: [layers, 3, D] activation dtype, oldest column first.
        ssm_state: [layers, HV, V, K] fp32.
    """

    conv_state: torch.Tensor
    ssm_state: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.conv_state.nbytes + self.ssm_state.nbytes


class SlotAllocator:
    """Hands out slot numbers. Pure bookkeeping on the host: it touches no tensor.

    Slots are handed out lowest number first, later the one freed last first.

    Args:
        num_slots: slots 0..num_slots-1, all free at first.

    Attributes:
        in_use: whether slots were ever allocated; if not, whoever uses them numbers them himself.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots = check_int("num_slots", num_slots, 1)
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: set[int] = set()
        self.in_use = False

    @property
    def free_slots(self) -> int:
        """How many slots may still be allocated."""
        return len(self._free)

    def is_allocated(self, slot: int) -> bool:
        """Whether ``slot`` was allocated and not freed since."""
        return slot in self._taken

    def allocate(self, n: int = 1, held: Collection[int] = ()) -> list[int]:
        """Take ``n`` free slots, all or none, and none of those that are ``held`` by someone though they are free.

        Raises:
            PoolExhausted: fewer than ``n`` are there; none was taken.
            TypeError: ``n`` is not an int.
            ValueError: ``n`` is below 1.
        """
        n = check_int("n", n, 1)
        free = [slot for slot in self._free if slot not in held]
        if n > len(free):
            waiting = len(self._free) - len(free)
            raise PoolExhausted(
                f"asked for {n} slot(s), {len(free)} of {self._num_slots} are free"
                f"{f' and {waiting} more once the open round is over' if waiting else ''}: "
                "queue the request until others are freed, or build a larger pool"
            )
        taken = free[: -n - 1 : -1]
        self._taken.update(taken)
        self._free = [slot for slot in self._free if slot not in self._taken]
        self.in_use = True
        return taken

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back, all or none.

        Raises:
            TypeError: ``slots`` holds something else than ints.
            ValueError: a slot is not in the pool, is not allocated (freed before, or never allocated), or is named
                twice; none was freed.
        """
        given = slot_numbers(slots, self._num_slots)
        unknown = sorted(slot for slot in set(given) if slot not in self._taken)
        if unknown:
            raise ValueError(f"slots must name allocated slots, got {unknown}, which are free: freed twice?")
        if len(set(given)) != len(given):
            raise ValueError(f"slots must name each slot once, got {given}")
        self._taken.difference_update(given)
        self._free.extend(reversed(given))


def slot_numbers(slots: Iterable[int], num_slots: int) -> list[int]:
    """``slots`` as a list, refused by name unless it holds ints within 0..num_slots-1."""
    if not isinstance(slots, Iterable):
        raise TypeError(f"slots must be slot numbers in a list or the like, got {type(slots).__name__}")
    return [check_int("slots", slot, 0, num_slots - 1) for slot in slots]


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value``, an int or numpy's, as an int within ``low``..``high``.

    A bool is none, nor is a tensor: reading one may wait for the device.

    Raises:
        TypeError, ValueError: it is not an int, or out of range.
    """
    if type(value) is not int:  # nearly always it is one, and each verify of a layer asks
        refused = TypeError(f"{name} must be an int, got {type(value).__name__}")
        if isinstance(value, (bool, torch.Tensor)):
            raise refused
        try:
            value = operator.index(value)
        except TypeError:
            raise refused from None
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"within {low}..{high}"
        raise ValueError(f"{name} must be {allowed}, got {value}")
    return value
