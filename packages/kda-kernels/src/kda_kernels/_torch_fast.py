"""Two questions that a replayed call asks torch, answered by functions private to it where they do what they must.

Both functions are there for what torch.compile generates: its guards, and its allocations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch


def likeness(varying: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """What tells whether tensors, given one by one, are like ``varying`` and then ``held``. It holds none of them.

    torch's guards compare shapes, strides, dtypes, devices, classes, requires_grad and the modes that torch is in, such
    as inference mode, of all tensors in one call. Without them ``varying`` are compared in the first four, and
    ``held``, whose addresses stay, in the number of elements: that is dearer, and misses a new layout of as many.
    """
    tensors = [*varying, *held]
    if GUARDS is not None and len(set(map(id, tensors))) == len(tensors):  # guards refuse one tensor in two places
        return _guard(GUARDS, tensors)
    count, facts = len(varying), _facts(varying)
    sizes = [tensor.numel() for tensor in held]

    def alike(*others: torch.Tensor) -> bool:
        return facts == _facts(others[:count]) and sizes == [tensor.numel() for tensor in others[count:]]

    return alike


def allocation(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What allocates a tensor like ``like``, which is packed and on the current device, and does not hold it."""
    shape, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    fast = _empty_strided(device.type)
    if fast is None:
        return partial(torch.empty, shape, dtype=dtype, device=device)
    return partial(fast, shape, strides, dtype)


@cache
def _empty_strided(device_type: str) -> Any:
    """torch's allocation for generated code if it is there and does what it must, tried once, else None."""
    size, strides, dtype = (2, 3), (3, 1), torch.bfloat16
    try:
        fast: Any = getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}")
        like = torch.empty(size, dtype=dtype, device=device_type)
        return fast if _facts([fast(size, strides, dtype)]) == _facts([like]) else None
    except Exception:  # another signature, say
        return None


def _facts(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]


def _guard(guards: Any, tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def working_guards() -> Any:
    """torch's guards if they are there and tell apart what they must, else None."""
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        one, other = (torch.empty(2, 3, dtype=torch.bfloat16, device="cpu") for _ in range(2))
        alike = _guard(guards, [one])
        unlike = [other[:1], other[:, :2], other.view(3, 2), other.view(6), other.t(), other.half(), other.float()]
        unlike += [other.to("meta"), torch.empty(2, 6, dtype=one.dtype, device="cpu")[:, ::2]]
        works = alike(other) and not any(alike(tensor) for tensor in unlike)
    except Exception:  # another signature, say
        return None
    return guards if works else None


GUARDS = working_guards()
