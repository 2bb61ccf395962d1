"""Triton's CPU interpreter: is it in use, and two repairs that our kernels need in it.

The interpreter is chosen by ``TRITON_INTERPRET=1`` before ``import triton``. Its fp32 -> bf16 conversion truncates
(triton 3.6 to 3.7), where the hardware rounds to nearest even; ring records and outputs would be off by an ulp.
It also re-patches the whole `triton.language` module at every call of a device function, which makes small kernels
several times slower than their arithmetic. `install` mends both, and does nothing where kernels are compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton


def is_interpreted() -> bool:
    """True when kernels run in Triton's interpreter on CPU tensors.

    Asked of Triton's own functions, not of the environment: TRITON_INTERPRET set after ``import triton`` does nothing.
    """
    return not isinstance(triton.language.zeros, triton.JITFunction)


def round_to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """fp32 values -> bf16 bit patterns (uint16), rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    nan = (bits >> 16) | np.uint32(0x0040)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).astype(np.uint16)


def install() -> None:
    """Apply the repairs once, if the interpreter is in use."""
    if not is_interpreted():
        return
    import triton.language as tl
    from triton._C.libtriton import ir as _ir
    from triton.runtime import interpreter

    if getattr(interpreter, "_kda_kernels_installed", False):
        return
    convert = interpreter._convert_float

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16 and rounding_mode in (None, _ir.ROUNDING_MODE.RTNE):
            return round_to_bfloat16_bits(data).reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    # triton.language is patched once per launch and module that device functions come from, not once per call.
    patched: set[int] = set()
    launch_grid = interpreter.GridExecutor.__call__

    def call_grid(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch_grid(self, *args, **kwargs)

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter._convert_float = convert_float
    interpreter.GridExecutor.__call__ = call_grid
    interpreter.InterpretedFunction.__call__ = call_device_function
    interpreter._kda_kernels_installed = True
