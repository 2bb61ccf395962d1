"""What the predicates of `kda_kernels.checks` are built from: types, shapes, strides, index values, overlap."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from kda_kernels.errors import ErrorKind

INDEX_DTYPES = (torch.int32, torch.int64)

_host_value_checks: ContextVar[bool] = ContextVar("host_value_checks", default=True)
_calls_checked: ContextVar[bool] = ContextVar("calls_checked", default=True)


@contextlib.contextmanager
def _held(switch: ContextVar[bool], value: bool) -> Iterator[None]:
    token = switch.set(value)
    try:
        yield
    finally:
        switch.reset(token)


def host_checks(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Switch the host-side checks of index *values* on or off, so that a CPU test can meet them on the device."""
    return _held(_host_value_checks, enabled)


def verifies_unchecked() -> contextlib.AbstractContextManager[None]:
    """Launch verifies without looking at their arguments, and without remembering them.

    For a benchmark that captures one after checking its like: a first call's checks take longer than its launch, and a
    graph of hundreds of layers has hundreds of first calls. A wrong argument is undefined behaviour in here.
    """
    return _held(_calls_checked, False)


def checks_calls() -> bool:
    """Whether a verify looks at its arguments."""
    return _calls_checked.get()


def typed(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless ``value`` is a ``kind``; a bool is not an int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def typed_number(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a float or an int."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float or None, got {type(value).__name__}")


def refuse(reason: str | None) -> None:
    """Raise ValueError with a predicate's ``reason``, if it gave one."""
    if reason is not None:
        raise ValueError(reason)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def tensor_reason(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    packed: int,
) -> str | None:
    """Check shape (None = any size), dtype, device and that the last ``packed`` dimensions are contiguous."""
    typed(name, tensor, torch.Tensor)
    given = tuple(tensor.shape)
    if len(given) != len(shape) or any(w is not None and g != w for g, w in zip(given, shape, strict=True)):
        wanted = ", ".join("*" if w is None else str(w) for w in shape)
        return f"{name} must have shape [{wanted}], got {list(given)}"
    if tensor.dtype not in dtypes:
        return f"{name} must be {' or '.join(map(dtype_name, dtypes))}, got {dtype_name(tensor.dtype)}"
    if tensor.device != device:
        return f"{name} must be on {device} like mixed_qkv or the state, got {tensor.device}"
    expected = 1
    for dim in reversed(range(len(given) - packed, len(given))):
        if given[dim] > 1 and tensor.stride(dim) != expected:
            return (
                f"{name} must be packed in its last {packed} dimension(s), got strides {tensor.stride()}: "
                "pass a contiguous copy"
            )
        expected *= given[dim]
    return None


def pitch_reason(name: str, tensor: torch.Tensor, lead: int) -> str | None:
    """Refuse a written buffer that overlaps itself: its ``lead`` outer strides must clear each other, in any order."""
    extent = math.prod(tensor.shape[lead:])
    for dim in sorted(range(lead), key=tensor.stride):
        if tensor.shape[dim] > 1:
            if tensor.stride(dim) < extent:
                return (
                    f"{name} must not overlap itself: dimension {dim} has stride {tensor.stride(dim)}, what lies "
                    f"within takes {extent} elements"
                )
            extent += (tensor.shape[dim] - 1) * tensor.stride(dim)
    return None


def host_values(index: torch.Tensor) -> list[int] | None:
    """The values of an index tensor where reading them costs no device sync and checks are on, else None."""
    if not _host_value_checks.get() or index.device.type != "cpu":
        return None
    return index.tolist()


def index_reason(
    name: str, index: torch.Tensor, batch: int, device: torch.device, low: int, high: int, unique: bool = False
) -> str | None:
    """Check an index vector; its values too, where they are on the host. ``unique``: values from 0 on occur once."""
    if reason := tensor_reason(name, index, (batch,), INDEX_DTYPES, device, packed=1):
        return reason
    values = host_values(index)
    if not values:
        return None
    worst = next((value for value in values if not low <= value <= high), None)
    if worst is not None:
        return f"{name} must be within {low}..{high}, got {worst}"
    live = [value for value in values if value >= 0]
    if unique and len(set(live)) != len(live):
        return f"{name} must name each of its values once (-1, padding, aside), got {values}"
    return None


def disjoint_reason(name: str, index: torch.Tensor, other_name: str, other: torch.Tensor) -> str | None:
    """Refuse an index vector that shares a value from 0 on with ``other``, where both are on the host."""
    values, others = host_values(index), host_values(other)
    shared = {value for value in values or [] if value >= 0} & set(others or [])
    if shared:
        return f"{name} must name no slot of {other_name}, got {sorted(shared)} in both"
    return None


def errors_reason(errors: torch.Tensor | None, device: torch.device) -> str | None:
    """Check the error counters, which may be None."""
    if errors is None:
        return None
    return tensor_reason("errors", errors, (len(ErrorKind),), (torch.int32,), device, packed=1)
