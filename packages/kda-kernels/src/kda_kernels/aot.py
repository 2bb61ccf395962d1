"""Ahead-of-time compilation without a GPU: run the public ops on small CPU tensors, keep the code, launch nothing.

Inside `capture` a stand-in Triton driver claims to be the asked-for device, and every launch of this package becomes a
compilation. What is compiled is therefore what a launch with those arguments compiles: the same specialisation of
pointers and integers, the same constants and options. The process must not run Triton's interpreter.

    with capture("sm90") as compiled:
        verify_fused(...)          # CPU tensors; the returned output is uninitialised
    compiled[0].asm["ptx"]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from kda_kernels import _launch
from kda_kernels.interpreter import is_interpreted

TARGETS: dict[str, GPUTarget] = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "sm103": GPUTarget("cuda", 103, 32),
    "sm120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
"""Devices that every kernel must compile for, by the name used in reports and budgets."""


@dataclass(frozen=True)
class CompiledVariant:
    """One kernel compiled for one device.

    Args:
        kernel: name of the Triton function.
        target: key of `TARGETS`.
        arguments: run-time arguments in the order of the machine code's parameters, name -> Triton type (``*bf16``,
            ``i32``). Arguments that were specialised away (constexprs, None, integers equal to 1) are not among them.
        constexprs: the constants that the launch named.
        options: launch options (num_warps, launch_pdl, ...).
        grid: programs of the launch.
        shared: bytes of shared memory that the launch asks for.
        hash: of source, specialisation of arguments, constants, options and compiler: Triton compiles once for each.
        asm: stage -> text or binary, as Triton names them (ttir, ttgir, llir, ptx, cubin; amdgcn, hsaco).
    """

    kernel: str
    target: str
    arguments: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]
    shared: int
    hash: str
    asm: dict[str, Any]


def target_named(name: str) -> GPUTarget:
    """The device called ``name``. Raises ValueError, naming the known ones, for any other name."""
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; got {name!r}")
    return TARGETS[name]


class _CompileOnlyDriver(DriverBase):  # type: ignore[misc]
    """Answers what a JIT compilation asks of a driver; there is no device behind it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.target = target_named(name)

    @classmethod
    def is_active(cls) -> bool:
        return False  # never chosen by Triton's own search

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        # Triton caches compiled kernels per device: a name of its own keeps targets (and a real device 0) apart.
        return f"compile-only:{self.name}"

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("no device: kernels are only being compiled")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("no device to time on: kernels are only being compiled")


@contextmanager
def capture(target: str) -> Iterator[list[CompiledVariant]]:
    """Compile, for the device named ``target``, every kernel that this package would launch inside the block.

    Yields:
        The list that the compiled kernels are appended to, in launch order.

    Raises:
        ValueError: unknown target.
        RuntimeError: the process runs Triton's interpreter, in which kernels have no machine code.
    """
    driver = _CompileOnlyDriver(target)
    if is_interpreted():
        raise RuntimeError(
            "kernels cannot be compiled in a process that runs Triton's interpreter: unset TRITON_INTERPRET before "
            "triton is imported"
        )
    compiled: list[CompiledVariant] = []

    def compile_instead(kernel: Any, grid: tuple[int], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        code = kernel.warmup(*args, grid=grid, **options)
        compiled.append(
            CompiledVariant(
                kernel=kernel.fn.__name__,
                target=target,
                arguments={name: kind for name, kind in code.src.signature.items() if kind != "constexpr"},
                constexprs={name: value for name, value in options.items() if name in kernel.arg_names},
                options={name: value for name, value in options.items() if name not in kernel.arg_names},
                grid=tuple(grid),
                shared=int(code.metadata.shared),
                hash=str(code.hash),
                asm=dict(code.asm),
            )
        )

    triton_driver: Any = triton.runtime.driver
    before = triton_driver._active, _launch.LAUNCHER, _launch.TARGET_OVERRIDE
    triton_driver.set_active(driver)
    # AMD architectures have names, not numbers; the ops only ask whether the backend is ROCm.
    arch = driver.target.arch if isinstance(driver.target.arch, int) else 0
    _launch.LAUNCHER, _launch.TARGET_OVERRIDE = compile_instead, (driver.target.backend, arch)
    try:
        yield compiled
    finally:
        triton_driver._active, _launch.LAUNCHER, _launch.TARGET_OVERRIDE = before
