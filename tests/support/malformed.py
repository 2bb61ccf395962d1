"""Hypothesis strategies that break the arguments of an op: a tensor's dtype, shape, strides or device, or its class.

Arguments are a flat dict with dotted names for members of groups (`params.A_log`, `ring.g`), so that one strategy
breaks any of them; `grouped` puts them together for the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from kda_kernels import KdaShape, LayerParams, LayerState, Ring, Snapshots


class Arguments(dict[str, Any]):
    """Arguments by dotted name; prints a tensor as shape, strides and dtype, so that a failing example can be read."""

    def __repr__(self) -> str:
        def short(x: Any) -> str:
            if isinstance(x, torch.Tensor):
                return f"{str(x.dtype)[6:]}{list(x.shape)} strides {x.stride()} {x.device}"
            return repr(x)

        return "{" + ", ".join(f"{name}: {short(x)}" for name, x in self.items()) + "}"


GROUPS = {"params": LayerParams, "state": LayerState, "ring": Ring, "snapshots": Snapshots}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int16, torch.int64, torch.bool)


def grouped(arguments: Arguments) -> dict[str, Any]:
    """Members of groups assembled into their dataclasses."""
    whole: dict[str, Any] = {}
    members: dict[str, dict[str, Any]] = {}
    for name, value in arguments.items():
        group, dot, member = name.partition(".")
        if dot:
            members.setdefault(group, {})[member] = value
        else:
            whole[name] = value
    return whole | {group: GROUPS[group](**values) for group, values in members.items()}


def _resized(x: torch.Tensor, dim: int, change: int) -> torch.Tensor:
    if change < 0:
        return x.narrow(dim, 0, max(0, x.shape[dim] + change)).contiguous()
    extra = torch.zeros_like(x.narrow(dim, 0, min(change, x.shape[dim])))
    return torch.cat([x, extra], dim)


def _with_gap(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values with another stride in front of ``dim``."""
    wide = x.new_zeros([n + (3 if i == dim else 0) for i, n in enumerate(x.shape)])
    view = wide.narrow(dim, 0, x.shape[dim])
    view.copy_(x)
    return view


def _transposed_in_memory(x: torch.Tensor, one: int, two: int) -> torch.Tensor:
    return x.transpose(one, two).contiguous().transpose(one, two)


def broken_tensors(x: torch.Tensor) -> st.SearchStrategy[Any]:
    """``x`` with one or two properties changed; some changes are harmless, and then the op has to be right."""
    dims = st.integers(0, x.ndim - 1)
    changes: st.SearchStrategy[Callable[[torch.Tensor], Any]] = st.one_of(
        st.sampled_from(DTYPES).map(lambda dtype: lambda t: t.to(dtype)),
        st.tuples(dims, st.sampled_from((-1, 1, 2))).map(lambda a: lambda t: _resized(t, min(a[0], t.ndim - 1), a[1])),
        dims.map(lambda dim: lambda t: t.unsqueeze(min(dim, t.ndim))),
        st.just(lambda t: t[0]),
        st.just(lambda t: t.reshape(-1)),
        dims.map(lambda dim: lambda t: _with_gap(t, min(dim, t.ndim - 1))),
        dims.map(lambda dim: lambda t: t.narrow(dim, 0, 1).expand(t.shape) if dim < t.ndim else t),
        st.tuples(dims, dims).map(
            lambda a: lambda t: _transposed_in_memory(t, min(a[0], t.ndim - 1), min(a[1], t.ndim - 1))
        ),
        st.just(lambda t: t.to("meta")),
        st.just(lambda t: t.clone()),
    )
    whole = st.sampled_from((None, 0, "tensor", [1, 2], 1.5)).map(lambda value: lambda _: value)
    return st.one_of(
        changes.map(lambda change: change(x)),
        whole.map(lambda change: change(x)),
    )


def broken_values(name: str, value: Any) -> st.SearchStrategy[Any]:
    """A replacement for argument ``name``."""
    if isinstance(value, torch.Tensor):
        return broken_tensors(value)
    choices: dict[str, tuple[Any, ...]] = {
        "draft_tokens": (0, -1, 3, 10**9, 1.0, "2", None, True),
        "shape": (None, (1, 2, 64, 64), KdaShape(1, 1, 64, 64), KdaShape(2, 2, 64, 64), KdaShape(1, 2, 128, 64)),
        "config": ("fast", {"block_v": 16}, 16),
        "params.lower_bound": (0.0, 1.0, float("nan"), "-5", True),
        "params.scale": ("0.1", [0.1], torch.tensor(0.1)),
        "pdl": ("yes", 1.5),
    }
    return st.sampled_from(choices[name])


@st.composite
def broken_arguments(draw: st.DrawFn, arguments: Arguments, most: int = 2) -> tuple[tuple[str, ...], Arguments]:
    """(names of what was changed, arguments): one to ``most`` of the arguments replaced."""
    names = draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=most, unique=True))
    changed = Arguments(arguments)
    for name in names:
        changed[name] = draw(broken_values(name, arguments[name]))
    return tuple(names), changed
