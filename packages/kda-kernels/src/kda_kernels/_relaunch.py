"""A launch that was made, kept to be made again for tensors at other addresses."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from kda_kernels._launch import Launched

STREAM = 3
"""Position of the stream among what is passed for a launch, after the grid."""


@dataclass(slots=True)
class Relaunch:
    """A function of Triton's, and what it is given.

    Args:
        function: takes ``before`` and then the kernel's arguments, one by one or ``together`` in a list.
        before: the grid, the stream (to be filled in at `STREAM`), the compiled kernel and Triton's own.
        arguments: the kernel's; tensors as addresses.
        places: pairs positions in ``arguments`` with positions among the addresses given to `make`.
    """

    function: Any
    before: list[Any]
    together: bool
    arguments: list[Any]
    places: list[tuple[int, int]]

    def make(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on ``stream``, on the current device."""
        arguments = self.arguments.copy()
        for place, source in self.places:
            arguments[place] = addresses[source]
        passed = [*self.before, arguments] if self.together else self.before + arguments
        passed[STREAM] = stream
        self.function(*passed)


def relaunch(
    launched: Launched, renamed: Mapping[str, str], sources: Mapping[str, int], held: Mapping[int, int]
) -> Relaunch:
    """What makes a launch again.

    Args:
        launched: the launch.
        renamed: names of those parameters of the kernel that have another one in ``sources``.
        sources: position among the addresses of each tensor whose address is to be filled in.
        held: id and address of each tensor that stays where it is.
    """
    compiled = launched.compiled
    before = [launched.grid, 1, 1, None, compiled.function, compiled.packed_metadata, None, None, None]
    arguments: list[Any] = []
    places = []
    for place, (parameter, value) in enumerate(launched.arguments()):
        if isinstance(value, torch.Tensor):
            source = sources.get(renamed.get(parameter, parameter))
            if source is not None:
                places.append((place, source))
            elif id(value) not in held:
                raise RuntimeError(f"kernel argument {parameter} is neither a tensor of the call nor of its groups")
            value = held.get(id(value), 0)
        arguments.append(value)
    return Relaunch(*_passed_on(compiled.run, before, arguments), arguments, places)


def _passed_on(run: Any, before: list[Any], arguments: list[Any]) -> tuple[Any, list[Any], bool]:
    """What ``run(*before, *arguments)`` ends in: `Relaunch.function`, `Relaunch.before` and `Relaunch.together`.

    Triton's launcher is written in Python, which costs a microsecond: it allocates scratch memory, where a kernel needs
    any, and passes all else on to ``run.launch``, written in C. What it passes on is seen by a copy of it whose
    ``launch`` only looks. Whatever is not as expected, in another version of Triton say, leaves ``run`` as it is.
    """
    as_it_is = run, before, False
    seen: list[tuple[Any, ...]] = []
    stream = object()  # no stream: should the copy launch all the same, C refuses it
    try:
        function, look = run.launch, copy.copy(run)
        look.launch = lambda *passed: seen.append(passed)
        look(*before[:STREAM], stream, *before[STREAM + 1 :], *arguments)
        (passed,) = seen
        together = isinstance(passed[-1], tuple | list)
    except Exception:
        return as_it_is
    kernels, rest = (passed[-1], passed[:-1]) if together else (passed[-len(arguments) :], passed[: -len(arguments)])
    if len(kernels) != len(arguments) or not all(map(is_, kernels, arguments)):
        return as_it_is
    if len(rest) <= STREAM or rest[STREAM] is not stream:
        return as_it_is
    constants = [*rest[:STREAM], *rest[STREAM + 1 :]]
    if not all(value is None or isinstance(value, int | str | bytes | tuple | list) for value in constants):
        return as_it_is  # scratch memory, allocated for every launch
    return function, list(rest), together
