"""Calls that were accepted once are launched again without the checks and without Triton's argument binding.

Both look at the same few things: the call's flags, the objects it names and, of each tensor, shape, strides, dtype,
device and whether its address is a multiple of 16. A call that equals an earlier one in all of these gets the same
verdict and the same compiled kernel; only addresses are left to be filled in. What is compared, every time:

- ``facts``: flags, shapes and configurations by value, groups of tensors (`LayerState` and so on) by identity, through
  weak references. So a memory keeps no pool's tensors alive, and what is remembered of a dead group fits no other.
- ``tensors``, those that change from call to call: all of the above.
- ``held``, those of the groups: address and number of elements. A group is frozen but its tensors are not (`resize_`,
  `set_`, ``.data = ...``). The very same memory laid out anew in place, in as many elements, is not noticed.

How addresses lie to each other, as in overlap, is for the op to check, by what it keeps in `Known.extra`.

Nothing is remembered on the CPU, where the host checks index values, nor on ROCm, where Triton also specialises on the
size of a tensor's storage. While someone watches launches (Triton's launch hooks, `_launch.LAUNCHER`) or compiles ahead
they are ordinary ones. Triton's knobs are read when a call is first met.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton

from kda_kernels import _launch
from kda_kernels.checking import refuse

LIMIT = 2048
"""Calls remembered, some 6 KB each, before all are forgotten: a model's layers times the batch sizes in use."""

DEVICE_TYPES = () if torch.version.hip else ("cuda",)

ALIGNMENT = 16
"""Bytes. Triton compiles one variant for addresses that are a multiple of it, another for those that are not."""

data_ptr = torch.Tensor.data_ptr  # as a function of a tensor: a TypeError for anything else
_numel = torch.Tensor.numel
_stride = torch.Tensor.stride


class Launch(NamedTuple):
    """A compiled kernel and its arguments; ``places`` pairs positions in them with positions in a call's tensors."""

    run: Any
    grid: int
    function: Any
    metadata: Any
    arguments: list[Any]
    places: tuple[tuple[int, int], ...]
    hooks: list[Any]


class Known(NamedTuple):
    """What is kept of an accepted call."""

    facts: tuple[Any, ...]
    held_addresses: list[int]
    held_sizes: list[int]
    tensors: list[Any]
    alignment: list[int]
    device: int
    launches: tuple[Launch, ...]
    extra: Any

    def launch(self, addresses: Sequence[int]) -> None:
        """Launch for tensors at ``addresses``, in the order of the names given to `remember`."""
        driver = triton.runtime.driver.active
        device = self.device
        if driver.get_current_device() != device:
            with torch.cuda.device(device):
                self.launch(addresses)
            return
        stream = driver.get_current_stream(device)
        for run, grid, function, metadata, arguments, places, _ in self.launches:
            filled = arguments.copy()
            for place, source in places:
                filled[place] = addresses[source]
            run(grid, 1, 1, stream, function, metadata, None, None, None, *filled)


Ticket = tuple[Hashable, tuple[Any, ...], Sequence[torch.Tensor]]
"""What a call is recognised by: key, facts and held tensors."""

_known: dict[Hashable, Known] = {}


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


def recall(
    key: Hashable, facts: tuple[Any, ...], held: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[Known | None, list[int]]:
    """What is known of the call's equals, and the addresses of ``tensors``.

    Calls that alternate in practice should differ in ``key``: a call takes the place of an earlier one with its key.
    Raises whatever it meets where an argument is not a tensor or cannot be hashed.
    """
    addresses = [*map(data_ptr, tensors)]
    known = _known.get(key)
    if (
        known is None
        or known.facts != facts
        or known.held_addresses != [*map(data_ptr, held)]
        or known.held_sizes != [*map(_numel, held)]
        or known.tensors != [(t.shape, _stride(t), t.dtype, t.device) for t in tensors]
        or known.alignment != [address % ALIGNMENT for address in addresses]
    ):
        return None, addresses
    for launch in known.launches:
        if launch.hooks:
            return None, addresses
    return known, addresses


def remember(
    key: Hashable,
    facts: tuple[Any, ...],
    held: Sequence[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    allocated: Mapping[str, torch.Tensor],
    launched: Sequence[tuple[_launch.Launched | None, Mapping[str, str]]],
    extra: Any = None,
) -> None:
    """Remember an accepted call and its launches, unless one of them was not made in the ordinary way.

    Args:
        key, facts, held: as given to `recall`.
        tensors: those given to `recall`, in that order, by name.
        allocated: those that the op allocated for the call, by name. Their addresses follow the others'.
        launched: each launch, and the names in ``tensors`` of those kernel parameters that have another one.
        extra: the op's own; `Known.extra`.
    """
    given = list(tensors.values())
    if given[0].device.type not in DEVICE_TYPES or not replaying():
        return
    every = {**tensors, **allocated}
    launches = [_replayable(one, renamed, held, every) for one, renamed in launched if one is not None]
    if len(launches) < len(launched):
        return
    if len(_known) >= LIMIT:
        forget()
    _known[key] = Known(
        facts, [data_ptr(t) for t in held], [t.numel() for t in held],
        [(t.shape, t.stride(), t.dtype, t.device) for t in given], [data_ptr(t) % ALIGNMENT for t in given],
        given[0].get_device(), tuple(launches), extra,
    )  # fmt: skip


def prepared(
    tensors: Mapping[str, torch.Tensor],
    recognised_by: Callable[[], Ticket],
    reason: Callable[[], str | None],
    launched: Callable[[], _launch.Launched | None],
) -> Callable[[], None]:
    """What launches a call of one kernel that is known, or accepted by ``reason``; it is then remembered.

    Args:
        tensors: those that change from call to call, by the names of the kernel's parameters.
        recognised_by: gives the ticket; may raise anything where an argument is not what it should be.
        reason: why the call is refused, or None.
        launched: makes the ordinary launch.

    Raises:
        ValueError: the call is refused.
    """
    ticket = None
    if replaying():
        try:
            ticket = recognised_by()
            known, addresses = recall(*ticket, list(tensors.values()))
        except Exception:  # the checks name what is wrong
            ticket = None
        else:
            if known is not None:
                return functools.partial(known.launch, addresses)
    refuse(reason())

    def launch() -> None:
        one = launched()
        if ticket is not None:
            remember(*ticket, tensors, {}, [(one, {})])

    return launch


def _replayable(
    launched: _launch.Launched,
    renamed: Mapping[str, str],
    held: Sequence[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
) -> Launch:
    """The launch with every tensor as an address: those of ``held`` for good, those of ``tensors`` to be filled in."""
    sources = {name: source for source, name in enumerate(tensors)}
    kept = set(map(id, held))
    places, arguments = [], []
    for place, (parameter, value) in enumerate(launched.arguments()):
        if isinstance(value, torch.Tensor):
            name = renamed.get(parameter, parameter)
            if value is tensors.get(name):
                places.append((place, sources[name]))
            elif id(value) not in kept:
                raise RuntimeError(f"kernel argument {parameter} is neither a tensor of the call nor of its groups")
            value = data_ptr(value)
        arguments.append(value)
    kernel, compiled = launched.kernel, launched.compiled
    return Launch(
        compiled.run, launched.grid, compiled.function, compiled.packed_metadata, arguments, tuple(places),
        kernel.pre_run_hooks,
    )  # fmt: skip
