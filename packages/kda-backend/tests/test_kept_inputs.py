"""What shares memory with the inputs of another layer is found, wherever the layers' inputs lie."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install hypothesis (dependency group `test`)"
)

from hypothesis import given
from hypothesis import strategies as st

from kda_backend.kept import KeptInputs

WHOLE = torch.zeros(40, dtype=torch.bfloat16)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(0, 3), st.integers(0, 6), st.integers(1, 3)),
        max_size=12,
    )
)
def test_overlaps_are_found(calls: list[tuple[int, int, int, int, int]]) -> None:
    """Layer, first element, rows, row pitch and columns of one verify after another."""
    kept, elements = KeptInputs(), dict[int, set[int]]()
    for layer, start, rows, pitch, columns in calls:
        x = WHOLE.as_strided((rows, columns), (min(pitch, 3), 1), start)
        own = set(range(start, start + (rows - 1) * min(pitch, 3) + columns)) if rows else set()
        shared = {other for other, taken in elements.items() if other != layer and own & taken}
        reason = kept.reason(layer, "mixed_qkv", x)
        assert (reason is None) == (not shared)
        if reason is None:
            kept.keep(layer, x)
            elements[layer] = own
        else:
            assert any(f"mixed_qkv of layer {other}," in reason for other in shared)
