"""More than halves the time of Triton's interpreter by remembering what it computes anew for every operation.

The interpreter spends its time on types: each operation builds block types, constexpr shapes and a table of numpy
types, and compares and casts types that are the same object. Nothing here changes a result; what is remembered is
immutable (shapes, numpy types), what is skipped would have returned its arguments.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KNOWN_VERSIONS = ((3, 6), (3, 7))
"""Triton versions whose interpreter this was read against and tested with; others are left as they are."""

_installed = False


def install() -> bool:
    """Apply once, if kernels are interpreted by a known version of Triton; returns whether it is applied."""
    global _installed
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not _installed and triton.knobs.runtime.interpret and version in KNOWN_VERSIONS:
        _remember_numpy_types()
        _remember_block_types()
        _remember_tensor_shapes()
        _skip_what_changes_nothing()
        _installed = True
    return _installed


def _remember_numpy_types() -> None:
    plain = interpreter._get_np_dtype
    pointer = np.dtype(np.uint64)
    known: dict[str, np.dtype[Any]] = {}

    def get_np_dtype(dtype: Any) -> np.dtype[Any]:
        scalar = dtype.scalar
        if isinstance(dtype, tl.pointer_type) or isinstance(scalar, tl.pointer_type):
            return pointer
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = plain(scalar)
        return found

    interpreter._get_np_dtype = get_np_dtype


def _remember_block_types() -> None:
    plain = core.block_type.__init__
    known: dict[tuple[Any, ...], tuple[Any, int, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = (element_ty.name, *[s.value if isinstance(s, core.constexpr) else s for s in sizes])
        found = known.get(key)
        if found is None:
            plain(self, element_ty, shape)
            known[key] = (self.shape, self.numel, self.name)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found

    core.block_type.__init__ = init


def _remember_tensor_shapes() -> None:
    def constants(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    known: dict[tuple[int, ...], tuple[Any, Any]] = {(): constants(())}

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        found = known.get(sizes)
        if found is None:
            found = known[sizes] = constants(sizes)
        self.numel, self.shape = found

    core.tensor.__init__ = init


def _skip_what_changes_nothing() -> None:
    plain_cast, plain_broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value

    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        if input.dtype is dst_ty:
            return input
        return plain_cast(self, input, dst_ty, fp_downcast_rounding)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return plain_broadcast(self, lhs, rhs)

    TritonSemantic.cast = cast
    TritonSemantic.broadcast_impl_value = broadcast_impl_value
    plain_check, plain_overflow = (
        TritonSemantic.binary_op_type_checking_impl, TritonSemantic.binary_op_sanitize_overflow_impl,
    )  # fmt: skip

    def binary_op_type_checking_impl(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        # Two tensors of one arithmetic type are computed in it, so nothing is cast; only / and % widen half floats.
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor) and not div_or_mod:
            scalar = lhs.type.scalar
            if scalar is rhs.type.scalar and not isinstance(scalar, core.pointer_type):
                return self.broadcast_impl_value(lhs, rhs)
        return plain_check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def binary_op_sanitize_overflow_impl(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        # The operation again in 64 bits, for an assertion that only debugging makes.
        if self.builder.options.debug:
            plain_overflow(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    TritonSemantic.binary_op_sanitize_overflow_impl = binary_op_sanitize_overflow_impl
