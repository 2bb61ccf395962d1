"""Kernels that record their launches instead of running, so that replays can be watched without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.compiler import CompiledKernel

from kda_kernels import (
    KdaShape,
    LaunchConfig,
    LayerParams,
    LayerState,
    Ring,
    Snapshots,
    _commit_call,
    _replay,
    host_checks,
    new_error_counts,
    pending,
    verify,
)

STREAM = 7
SHAPE = KdaShape(1, 2, 64, 64)
SLOTS, ROWS, STEPS = 7, 6, 3
CONFIG = LaunchConfig(block_v=32, num_warps=2)


@dataclass(frozen=True)
class Recorded:
    """A launch. ``arguments``: all of the kernel's by name, tensors as addresses; ``variant``: the specialisation."""

    kernel: str
    replayed: bool
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    variant: tuple[Any, ...]

    @property
    def what(self) -> tuple[Any, ...]:
        """All but how it was launched."""
        return self.kernel, self.grid, self.arguments, self.variant


class _Compiled(CompiledKernel):
    """One variant of a kernel; its ``run`` takes what Triton's does."""

    function = "function"
    packed_metadata = "metadata"

    def __init__(self, kernel: RecordingKernel, variant: tuple[Any, ...]) -> None:
        self.kernel, self.variant = kernel, variant

    @property
    def run(self) -> Any:
        def run(x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *hooks_and_arguments: Any) -> None:
            assert (y, z, stream, function, metadata) == (1, 1, STREAM, self.function, self.packed_metadata)
            launch_metadata, enter, leave, *arguments = hooks_and_arguments
            assert launch_metadata is enter is leave is None
            assert not any(isinstance(value, torch.Tensor) for value in arguments)
            named = dict(zip(self.kernel.arg_names, arguments, strict=True))
            self.kernel.log.append(Recorded(self.kernel.name, True, (x,), named, self.variant))

        return run


class RecordingKernel:
    """In place of a Triton function: one variant per specialisation of its arguments, launches go to ``log``."""

    def __init__(self, real: Any, log: list[Recorded]) -> None:
        self.name, self.log = real.fn.__name__, log
        self.signature = inspect.signature(real.fn)
        self.arg_names = list(self.signature.parameters)
        self.pre_run_hooks: list[Any] = []
        self.variants: dict[tuple[Any, ...], _Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> _Compiled:
            bound = self.signature.bind(*args, **{name: options[name] for name in options if name in self.arg_names})
            variant = tuple(_specialised(value) for value in bound.arguments.values())
            compiled = self.variants.setdefault(variant, _Compiled(self, variant))
            named = {name: _address(value) for name, value in bound.arguments.items()}
            self.log.append(Recorded(self.name, False, grid, named, variant))
            return compiled

        return launch


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _specialised(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value == 1 else value % 16 == 0
    return type(value)


class _Driver:
    def get_current_stream(self, device: int) -> int:
        return STREAM


@contextmanager
def recorded_launches() -> Iterator[list[Recorded]]:
    """Let CPU tensors count as a GPU's whose index values the host cannot see, and record every launch."""
    log: list[Recorded] = []
    _replay.forget()
    with ExitStack() as stack:
        stack.enter_context(host_checks(False))
        stack.enter_context(mock.patch.object(_replay, "DEVICE_TYPES", ("cpu",)))
        stack.enter_context(mock.patch.object(_replay, "current_device", return_value=-1))  # of tensors on the CPU
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _Driver()))
        for module, names in (
            (verify, ("verify_kernel", "conv_kernel")),
            (_commit_call, ("fold_kernel", "scatter_kernel", "gather_kernel")),
            (pending, ("flush_kernel", "advance_kernel")),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(module, name, RecordingKernel(getattr(module, name), log)))
        yield log
    _replay.forget()


def taken(log: list[Recorded]) -> list[Recorded]:
    """The launches since the last look."""
    launches = log.copy()
    log.clear()
    return launches


class Layer:
    """One layer's groups, and calls on them with tensors of their own."""

    def __init__(self, mode: str = "ring", bias: bool = True, compact: bool = False) -> None:
        d = SHAPE.conv_dim
        self.params = LayerParams(
            torch.randn(d, 4).bfloat16(), torch.randn(d).bfloat16() if bias else None,
            torch.randn(2), torch.randn(128), -5.0,
        )  # fmt: skip
        self.state = LayerState.allocate(
            SHAPE, slots=SLOTS, rows=ROWS, steps=STEPS, dtype=torch.bfloat16, device="cpu", compact_window=compact
        )
        self.record: Ring | Snapshots = (
            Ring.allocate(SHAPE, slots=SLOTS, length=STEPS, dtype=torch.bfloat16, device="cpu")
            if mode == "ring"
            else Snapshots.allocate(SHAPE, rows=ROWS, steps=STEPS, device="cpu")
        )

    def call(self, batch: int = 2, tokens: int = 3, **changes: Any) -> dict[str, Any]:
        """Arguments of a verify, by name; tensors are new ones."""
        n = batch * tokens
        return {
            "mixed_qkv": torch.randn(n, SHAPE.conv_dim).bfloat16(), "a": torch.randn(n, 128).bfloat16(),
            "b": torch.randn(n, 2).bfloat16(), "shape": SHAPE, "params": self.params, "state": self.state,
            "record": self.record, "slots": torch.arange(batch, dtype=torch.int32), "draft_tokens": tokens,
            "config": CONFIG, **changes,
        }  # fmt: skip

    def full(self, **changes: Any) -> dict[str, Any]:
        """A call that gives every optional tensor."""
        return self.call(
            rows=torch.arange(2, dtype=torch.int32), errors=new_error_counts("cpu"),
            out=torch.empty(6, 2, 64).bfloat16(), workspace=torch.empty(6, SHAPE.conv_dim).bfloat16(),
        ) | changes  # fmt: skip
