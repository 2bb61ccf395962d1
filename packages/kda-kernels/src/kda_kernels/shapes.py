"""Sizes of a KDA layer and the launch knobs of its kernels: plain frozen data, checked when built."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CONV_WIDTH = 4
"""Taps of the causal convolution. The conv state holds the last ``CONV_WIDTH - 1`` input columns."""

SUPPORTED_HEAD_DIMS = (64, 128)
SUPPORTED_BLOCK_V = (8, 16, 32, 64, 128)
SUPPORTED_NUM_WARPS = (1, 2, 4, 8)
SUPPORTED_ROWS_PER_THREAD = (1, 2, 4)
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16)

FORMS = ("recurrent", "chunked")
"""Forms of a verify's output, each a bit class of its own (docs/arithmetic.md)."""

PDL_ARCH = 90
"""First NVIDIA architecture, sm90, that launches kernels before those ahead have ended, and prefetches in bulk."""

MAX_CHUNKED_TOKENS = 16
"""Most draft tokens of the chunked form, whose work within a chunk grows with T squared."""

BLOCK_TOKENS = 4
"""Tokens of a block of the chunked form's pairs, where those are taken in blocks (`LaunchConfig.token_blocks`).

No part of Triton's cache key: empty its cache after a change."""

MAX_GLUON_CHUNKED_TOKENS = 8
"""Most of them that the Gluon kernel takes: it keeps every key as each later token sees it in shared memory."""


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


@dataclass(frozen=True)
class KdaShape:
    """Head layout of one KDA layer (or of one tensor-parallel shard of it).

    Args:
        num_heads: H, query/key heads.
        num_v_heads: HV, value heads; a multiple of H. Value head j reads query/key head ``j // (HV // H)``.
        head_k_dim: K, 64 or 128. The canonical reduction tree over K is defined for these (docs/arithmetic.md).
        head_v_dim: V, 64 or 128.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is out of range, or HV is not a multiple of H.
    """

    num_heads: int
    num_v_heads: int
    head_k_dim: int = 128
    head_v_dim: int = 128

    def __post_init__(self) -> None:
        _check_int("num_heads", self.num_heads, 1)
        _check_int("num_v_heads", self.num_v_heads, 1)
        if self.num_v_heads % self.num_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_heads, got num_v_heads={self.num_v_heads} "
                f"and num_heads={self.num_heads}"
            )
        for name, value in (("head_k_dim", self.head_k_dim), ("head_v_dim", self.head_v_dim)):
            _check_int(name, value, 1)
            if value not in SUPPORTED_HEAD_DIMS:
                raise ValueError(
                    f"{name} must be one of {SUPPORTED_HEAD_DIMS}, got {value}: the reduction order that makes all "
                    "lanes equal bit for bit is defined for these sizes only"
                )

    @property
    def conv_dim(self) -> int:
        """D = 2*H*K + HV*V, the packed q | k | v channels."""
        return 2 * self.num_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def state_numel(self) -> int:
        """Elements of one slot's recurrent state, HV*V*K."""
        return self.num_v_heads * self.head_v_dim * self.head_k_dim

    def ring_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token's ring record takes per slot and layer; ``dtype`` is the activation dtype."""
        raw = self.num_v_heads * self.head_v_dim + self.num_heads * self.head_k_dim
        return raw * dtype.itemsize + 4 * self.num_v_heads * (self.head_k_dim + 1)

    def snapshot_bytes_per_token(self) -> int:
        """Bytes that one token's fp32 state snapshot takes per batch row and layer."""
        return 4 * self.state_numel

    def window_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of the conv window after one token, per batch row and layer."""
        return (CONV_WIDTH - 1) * self.conv_dim * dtype.itemsize

    def state_bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Bytes of the recurrent state (fp32) and the conv state (``dtype``) of one slot and layer."""
        return 4 * self.state_numel + self.window_bytes_per_token(dtype)


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched. No field changes a result bit: every value that can be named here is safe.

    The default is the portable kernels': one warp of 16 rows, measured best or near it from B = 1 to 64, because with
    more warps the l2-norms need barriers (docs/measured-facts.md).

    Args:
        block_v: rows of V (of the [V, K] state) per program; capped at V.
        num_warps: warps per program.
        pdl: programmatic dependent launch. None: on where the device has it (sm90 and later); False: off;
            True: required, and refused with a reason on a device without it.
        rows_per_thread: None: the portable Triton kernel. 1, 2 or 4: verify's or fold's Gluon kernel (NVIDIA,
            compiled), whose state tile has 8 lanes along K and this many consecutive rows per thread; ``block_v`` must
            then be a multiple of ``4 * num_warps * rows_per_thread``.
        max_registers: registers per thread that the compiler may use (spilling beyond); None: its own choice.
        state_first: Gluon verify only: load the state before the convolution starts, not when the compiler sees fit.
            Shortens the way of a lone program, at the price of one more barrier.
        prefetch: Gluon verify only, and only where ``indices_ready`` is declared: ask for the state to be brought into
            L2 before the wait of programmatic dependent launch.
        token_blocks: Gluon verify, chunked form only: take the pairs of tokens in blocks of `BLOCK_TOKENS` tokens and,
            on sm90 and later, load the state after them unless ``state_first`` (or a pending fold) asks for it before.
            Fewer registers and less shared memory, so more programs on an SM, at the price of more barriers.
    """

    block_v: int = 16
    num_warps: int = 1
    pdl: bool | None = None
    rows_per_thread: int | None = None
    max_registers: int | None = None
    state_first: bool = False
    prefetch: bool = False
    token_blocks: bool = False

    def __post_init__(self) -> None:
        _check_int("block_v", self.block_v, 1)
        _check_int("num_warps", self.num_warps, 1)
        if self.block_v not in SUPPORTED_BLOCK_V:
            raise ValueError(f"block_v must be one of {SUPPORTED_BLOCK_V}, got {self.block_v}")
        if self.num_warps not in SUPPORTED_NUM_WARPS:
            raise ValueError(f"num_warps must be one of {SUPPORTED_NUM_WARPS}, got {self.num_warps}")
        if self.rows_per_thread is not None:
            _check_int("rows_per_thread", self.rows_per_thread, 1)
            if self.rows_per_thread not in SUPPORTED_ROWS_PER_THREAD:
                raise ValueError(
                    f"rows_per_thread must be None or one of {SUPPORTED_ROWS_PER_THREAD}, got {self.rows_per_thread}"
                )
            tile = 4 * self.num_warps * self.rows_per_thread
            if self.block_v % tile:
                raise ValueError(
                    f"block_v must be a multiple of 4 * num_warps * rows_per_thread = {tile}, got {self.block_v}"
                )
        if self.max_registers is not None:
            _check_int("max_registers", self.max_registers, 1)
            if not 32 <= self.max_registers <= 255:
                raise ValueError(f"max_registers must be None or within 32..255, got {self.max_registers}")
        for name in ("state_first", "prefetch", "token_blocks"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
            if value and self.rows_per_thread is None:
                raise ValueError(f"{name} needs rows_per_thread: the portable kernel (None) has no such choice")
        if self.pdl is not None and not isinstance(self.pdl, bool):
            raise TypeError(f"pdl must be True, False or None, got {self.pdl!r}")
