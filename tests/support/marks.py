"""Marks for tests that need one way of running kernels."""

from __future__ import annotations

import pytest

from kda_kernels.interpreter import is_interpreted

interpreter_only = pytest.mark.skipif(
    not is_interpreted(),
    reason="kernels are compiled here, and this test looks into Triton's interpreter or hands kernels CPU tensors",
)
