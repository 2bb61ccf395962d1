"""Calls that were accepted once are launched again without the checks and without Triton's argument binding.

Both look at the same few things: the call's flags, the objects it names and, of each tensor, shape, strides, dtype,
device and whether its address is a multiple of 16. A call that equals an earlier one in all of these gets the same
verdict and the same compiled kernel; only addresses are left to be filled in. What is compared, every time:

- ``facts``: flags, shapes and configurations by value, groups of tensors (`LayerState` and so on) by identity, through
  weak references. So a memory keeps no pool's tensors alive, and what is remembered of a dead group fits no other.
- tensors, those that vary from call to call and those of the groups, which are frozen but whose tensors are not
  (`resize_`, `set_`, ``.data = ...``): shape, strides, dtype and device, by `_torch_fast.likeness`.
- addresses. The groups' are the same. Where the others moved, alignment and how they lie to each other, as in overlap,
  are looked at anew.

Nothing is remembered on the CPU, where the host checks index values, nor on ROCm, where Triton also specialises on the
size of a tensor's storage. While someone watches launches (Triton's launch hooks, `_launch.LAUNCHER`) or compiles ahead
they are ordinary ones. Triton's knobs are read when a call is first met.

Every statement between the call of an op and the launch costs each of a model's layers: what is in this path is short
on purpose, and as much as can be is done when a call is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kda_kernels import _launch
from kda_kernels._relaunch import Relaunch, relaunch
from kda_kernels._torch_fast import allocation, likeness

LIMIT = 2048
"""Calls remembered, some 12 KB each, before all are forgotten: a model's layers times the batch sizes in use."""

DEVICE_TYPES = () if torch.version.hip else ("cuda",)

ALIGNMENT = 16
"""Bytes. Triton compiles one variant for addresses that are a multiple of it, another for those that are not."""

data_ptr = torch.Tensor.data_ptr  # as a function of a tensor: a TypeError for anything else
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@dataclass(slots=True)
class Known:
    """What is kept of an accepted call.

    Args:
        facts: as given to `recall`.
        varying: how many tensors vary from call to call; those of the groups follow.
        addresses: of the last call that was accepted, of all tensors.
        alignment: `alignment_of` those that vary.
        alike: whether tensors are like those of the call.
        allows: whether the op accepts other addresses.
        allocates: what allocates the op's own tensors for a call, on the device. Their addresses follow the others'.
        hooks: Triton's, of each kernel: lists that are empty unless someone watches.
        current_stream: gives the stream to launch on, of a device.
    """

    facts: tuple[Any, ...]
    varying: int
    addresses: list[int]
    alignment: int | list[int]
    alike: Callable[..., bool]
    allows: Callable[[Sequence[int]], bool] | None
    allocates: list[Callable[[], torch.Tensor]]
    hooks: list[list[Any]]
    device: int
    current_stream: Callable[[int], int]
    launches: list[Relaunch]

    def launch(self, addresses: list[int]) -> list[torch.Tensor] | None:
        """Launch for the tensors whose ``addresses`` `recall` gave, and return what was allocated.

        None, and nothing is launched, if something was allocated at no multiple of `ALIGNMENT`.
        """
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(addresses)
        allocated = []
        for allocate in self.allocates:
            tensor = allocate()
            address = data_ptr(tensor)
            if address % ALIGNMENT:
                return None
            allocated.append(tensor)
            addresses.append(address)
        stream = self.current_stream(self.device)
        for launch in self.launches:
            launch.make(stream, addresses)
        return allocated

    def accepts(self, addresses: list[int]) -> bool:
        """Whether the call is accepted at other addresses; they are then the last ones."""
        varying = addresses[: self.varying]
        if (
            addresses[self.varying :] != self.addresses[self.varying :]
            or alignment_of(varying) != self.alignment
            or (self.allows is not None and not self.allows(varying))
        ):
            return False
        self.addresses = addresses.copy()
        return True


Ticket = tuple[Hashable, tuple[Any, ...], int, Sequence[torch.Tensor]]
"""What a call is recognised by: key, facts, number of tensors that vary, and all tensors."""

_known: dict[Hashable, Known] = {}


class Watched(Exception):
    """Someone watches launches, or has them made elsewhere."""


def forget() -> None:
    """Forget every call."""
    _known.clear()


def replaying() -> bool:
    """Whether calls may be replayed now: nobody watches the launches or has them made elsewhere."""
    if _launch.LAUNCHER is not _launch.launch_kernel or _launch.TARGET_OVERRIDE is not None:
        return False
    runtime = triton.knobs.runtime
    try:  # chains of hooks, of which empty ones do nothing
        return not (runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:  # Triton also takes None or a function
        return runtime.launch_enter_hook is None and runtime.launch_exit_hook is None


def alignment_of(addresses: Sequence[int]) -> int | list[int]:
    """0 if all are multiples of `ALIGNMENT`, else the remainder of each."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT and [address % ALIGNMENT for address in addresses]


def recall(key: Hashable, facts: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> tuple[Known | None, list[int]]:
    """What is known of the call's equals, and the addresses of ``tensors``: those that vary, then those of the groups.

    Calls that alternate in practice should differ in ``key``: a call takes the place of an earlier one with its key.
    ``facts`` tell how many tensors there are, and which.

    Raises:
        Watched: calls are not replayed now.
        Exception: whatever is met where an argument is not a tensor or cannot be hashed.
    """
    if not replaying():
        raise Watched
    addresses = [*map(data_ptr, tensors)]
    known = _known.get(key)
    if (
        known is None
        or known.facts != facts
        or not known.alike(*tensors)
        or (known.addresses != addresses and not known.accepts(addresses))
    ):
        return None, addresses
    for hooks in known.hooks:
        if hooks:
            return None, addresses
    return known, addresses


def remember(
    ticket: Ticket,
    names: Sequence[str],
    launched: Sequence[tuple[_launch.Launched | None, Mapping[str, str]]],
    allocated: Mapping[str, torch.Tensor] | None = None,
    allows: Callable[[Sequence[int]], bool] | None = None,
) -> None:
    """Remember an accepted call and its launches, unless one of them was not made in the ordinary way.

    Args:
        ticket: what the call is recognised by.
        names: of the tensors that vary, in their order.
        launched: each launch, and the names of those kernel parameters that have another one.
        allocated: what the op allocated for the call, by name.
        allows: as `Known.allows`; takes the addresses of the tensors that vary.
    """
    key, facts, varying, tensors = ticket
    first, allocated = tensors[0], allocated or {}
    if first.device.type not in DEVICE_TYPES or not replaying() or any(one is None for one, _ in launched):
        return
    sources = {name: source for source, name in enumerate(names)}
    sources |= {name: source for source, name in enumerate(allocated, len(tensors))}
    held = {id(tensor): data_ptr(tensor) for tensor in tensors[varying:]}
    addresses = [*map(data_ptr, tensors)]
    if len(_known) >= LIMIT:
        forget()
    _known[key] = Known(
        facts=facts, varying=varying, addresses=addresses, alignment=alignment_of(addresses[:varying]),
        alike=likeness(tensors[:varying], tensors[varying:]), allows=allows,
        allocates=[*map(allocation, allocated.values())],
        hooks=[one.kernel.pre_run_hooks for one, _ in launched if one is not None],
        device=first.get_device(), current_stream=triton.runtime.driver.active.get_current_stream,
        launches=[relaunch(one, renamed, sources, held) for one, renamed in launched if one is not None],
    )  # fmt: skip
