"""The byte floor: every byte that verify, commit or a whole round must move, counted once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda_kernels import CONV_WIDTH, KdaShape
from kda_kernels.buffers import FOLDED_ROWS, KEPT_INPUTS

NOTE = 8 * KEPT_INPUTS
"""Bytes of a layer's kept inputs."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that must be read and written; ``microseconds`` turns them into the floor of a latency."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)

    def microseconds(self, bytes_per_second: float) -> float:
        """Time at a bandwidth that counts reads and writes alike, as a device copy's does."""
        return self.total / bytes_per_second * 1e6


def verify_traffic(
    shape: KdaShape,
    batch: int,
    draft_tokens: int,
    dtype: torch.dtype,
    mode: str,
    bias: bool = True,
    compact_window: bool = False,
) -> Traffic:
    """One layer's verify of ``batch`` requests.

    Read: recurrent and conv state, mixed_qkv, a, b, indices, and the layer's parameters (with a conv ``bias`` or
    without) once. Written: output, conv
    windows (with ``compact_window`` only where the inputs lie), and the ring records or snapshots (``mode``).
    """
    size, d, hv, k = dtype.itemsize, shape.conv_dim, shape.num_v_heads, shape.head_k_dim
    tokens = batch * draft_tokens
    parameters = d * (CONV_WIDTH + bias) * size + 4 * hv * (k + 1)
    inputs = tokens * (d + hv * k + hv) * size + 4 * batch
    state = batch * shape.state_bytes_per_slot(dtype)
    record = shape.ring_bytes_per_token(dtype) if mode == "ring" else shape.snapshot_bytes_per_token()
    output = hv * shape.head_v_dim * size
    windows = NOTE if compact_window else tokens * shape.window_bytes_per_token(dtype)
    return Traffic(read=parameters + inputs + state, written=tokens * (output + record) + windows)


def fold_on_verify_traffic(
    shape: KdaShape,
    batch: int,
    draft_tokens: int,
    accept: int,
    dtype: torch.dtype,
    bias: bool = True,
    compact_window: bool = False,
) -> Traffic:
    """One layer's share of a round that folds on verify, of ``accept`` tokens per request in each round.

    The bytes of a ring's verify; the state written and ``accept`` records read by it too, with what is kept of each
    slot; the conv window of one step (or the input columns that make it) read and the conv state written at commit.
    """
    verify = verify_traffic(shape, batch, draft_tokens, dtype, "ring", bias, compact_window)
    window, folded = shape.window_bytes_per_token(dtype), 4 * (shape.num_v_heads * shape.head_v_dim // FOLDED_ROWS)
    return verify + Traffic(
        read=batch * (accept * shape.ring_bytes_per_token(dtype) + folded + window + 8) + NOTE * compact_window,
        written=batch * (4 * shape.state_numel + folded + window),
    )


def commit_traffic(
    shape: KdaShape, batch: int, accept: int, dtype: torch.dtype, mode: str, compact_window: bool = False
) -> Traffic:
    """One layer's share of an all-layer commit of ``accept`` tokens per request.

    Ring: state read and written, ``accept`` records read. Snapshots: one snapshot read, the state written. Both: the
    conv window of one step read, the conv state written. With ``compact_window`` the three columns that are read are
    the old state's and the inputs', and where these lie is read too.
    """
    window, state = shape.window_bytes_per_token(dtype), 4 * shape.state_numel
    read = state + accept * shape.ring_bytes_per_token(dtype) if mode == "ring" else shape.snapshot_bytes_per_token()
    return Traffic(read=batch * (read + window + 8) + NOTE * compact_window, written=batch * (state + window))
