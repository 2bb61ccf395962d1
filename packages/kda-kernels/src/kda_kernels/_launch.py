"""The one place where kernels are launched: options that decide bits, PDL, and a hook for compiling only."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from triton.compiler import CompiledKernel

from kda_kernels.interpreter import is_interpreted
from kda_kernels.shapes import PDL_ARCH


def launch_kernel(kernel: Any, grid: tuple[int], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Launch in the ordinary way; the compiled kernel, or None where kernels are interpreted."""
    return kernel[grid](*args, **options)


LAUNCHER: Callable[[Any, tuple[int], tuple[Any, ...], dict[str, Any]], Any] = launch_kernel
"""Called for every launch; `kda_kernels.aot` puts a compile-only one here."""

TARGET_OVERRIDE: tuple[str, int] | None = None
"""(backend, arch) to launch for instead of the current device, e.g. ("cuda", 100); set while compiling ahead."""


@functools.cache
def _device_target(index: int) -> tuple[str, int]:
    if torch.version.hip is not None:
        return "hip", 0
    major, minor = torch.cuda.get_device_capability(index)
    return "cuda", major * 10 + minor


def current_target(device: torch.device) -> tuple[str, int]:
    """(backend, arch) that kernels on ``device`` run on: ("cuda", 90), ("hip", 0) or ("interpreter", 0)."""
    if TARGET_OVERRIDE is not None:
        return TARGET_OVERRIDE
    if is_interpreted():
        return "interpreter", 0
    return _device_target(torch.cuda.current_device() if device.index is None else device.index)


def device_reason(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of ``device``, or None."""
    if TARGET_OVERRIDE is not None or device.type == "cuda":
        return None
    if device.type == "cpu" and is_interpreted():
        return None
    return (
        f"tensors are on device {str(device)!r}, kernels run on CUDA and ROCm devices: move them to a GPU, set "
        "TRITON_INTERPRET=1 before importing triton to interpret the kernels on the CPU, or call the torch reference"
    )


def pdl_reason(pdl: bool | None, device: torch.device, name: str = "config.pdl") -> str | None:
    """Why ``pdl=True``, the argument called ``name``, cannot be honoured on ``device``, or None."""
    backend, arch = current_target(device)
    if pdl and not (backend == "cuda" and arch >= PDL_ARCH):
        target = f"sm{arch}" if backend == "cuda" else backend
        return f"{name}=True needs an NVIDIA GPU of sm{PDL_ARCH} or later, this is {target}: use pdl=None or False"
    return None


class Launched(NamedTuple):
    """A launch that was made, and the compiled kernel."""

    kernel: Any
    compiled: CompiledKernel
    grid: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """Each of the kernel's parameters and its value, constants included, in order."""
        yield from zip(self.kernel.arg_names, self.args, strict=False)
        for name in self.kernel.arg_names[len(self.args) :]:
            yield name, self.options[name]


def launch(
    kernel: Any, grid: int, args: tuple[Any, ...], *, device: torch.device, num_warps: int, pdl: bool | None,
    max_registers: int | None = None, **constexprs: Any,
) -> Launched | None:  # fmt: skip
    """Launch ``kernel`` on a 1-D grid of ``grid`` programs; nothing for an empty grid.

    A 1-D grid on purpose: its limit is 2^31 - 1 programs, that of the other axes 65,535. Contraction is switched off,
    so that multiply-adds are fused where the kernels say so and nowhere else.

    Returns:
        The launch, or None if no compiled kernel was launched.
    """
    if grid == 0:
        return None
    backend, arch = current_target(device)
    use_pdl = backend == "cuda" and arch >= PDL_ARCH and pdl is not False
    options: dict[str, Any] = dict(constexprs, PDL=use_pdl, num_warps=num_warps, enable_fp_fusion=False)
    if use_pdl:
        options["launch_pdl"] = True
    if max_registers is not None and backend == "cuda":
        options["maxnreg"] = max_registers
    elsewhere = TARGET_OVERRIDE is None and device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        compiled = LAUNCHER(kernel, (grid,), args, options)
    if not isinstance(compiled, CompiledKernel):
        return None
    return Launched(kernel, compiled, grid, args, options)


def pitch(tensor: torch.Tensor, dim: int = 0) -> int:
    """``tensor.stride(dim)``; of a dimension of one entry, where strides are arbitrary, what packed entries would have.

    Triton compiles further variants for integers that are 1 or a multiple of 16.
    """
    return tensor.stride(dim) if tensor.shape[dim] != 1 else math.prod(tensor.shape[dim + 1 :])


def contracts_conv(device: torch.device) -> bool:
    """Whether fp32 conv taps are fused multiply-adds (everywhere but on ROCm, where SGLang rounds separately)."""
    return current_target(device)[0] != "hip"
