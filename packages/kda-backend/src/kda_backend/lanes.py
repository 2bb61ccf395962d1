"""The lanes of verify, and which one to take while there are no measured tables: the conservative rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda_kernels import MAX_CHUNKED_TOKENS, KdaShape, Ring, Snapshots
from kda_kernels._launch import current_target, device_reason
from kda_kernels.checks import ring_reason

MODES = ("ring", "snapshots")
LANES = ("unfused", "unfused+ring", "fused", "fused+ring")
REFERENCE_LANE = "reference"

FUSED_ARCHS = (90, 100, 103)
"""Where the field measured a fused lane faster, with a ring and for a lone request."""

OLDEST_ARCH = 80
"""The first NVIDIA architecture with bf16 arithmetic."""


def lane_mode(lane: str) -> str:
    """The state mode that a lane of `LANES` needs: "ring" or "snapshots"."""
    if lane not in LANES:
        raise ValueError(f"lane must be one of {LANES}, got {lane!r}")
    return "ring" if lane.endswith("+ring") else "snapshots"


def lanes_of(mode: str) -> tuple[str, str]:
    """(unfused lane, fused lane) of a state mode of `MODES`."""
    unfused, fused = (lane for lane in LANES if lane_mode(lane) == mode)
    return unfused, fused


@dataclass(frozen=True)
class Target:
    """What kernels would run on.

    Args:
        backend: "cuda", "hip", "interpreter" (Triton's, on the CPU), or a device type that runs no kernels ("cpu").
        arch: 90 for sm90, and so on; 0 where the backend is not "cuda".
    """

    backend: str
    arch: int = 0

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target of tensors on ``device``, in this process."""
        if device_reason(device) is not None:
            return cls(device.type)
        return cls(*current_target(device))

    def __str__(self) -> str:
        return f"sm{self.arch}" if self.backend == "cuda" else self.backend


def conservative_lane(mode: str, batch: int, draft_tokens: int, target: Target) -> tuple[str, str]:
    """The lane where nothing was measured, and why: unfused, but fused+ring for one request on `FUSED_ARCHS`.

    For verifies that the fused lane can take, on targets that run kernels (`not_fused_reason`, `no_kernels_reason`);
    `kda_backend.gate.decide` asks those first. A function of its arguments alone.

    Args:
        mode: "ring" or "snapshots": which record the verify writes.
        batch: B, batch positions, padded ones included.
        draft_tokens: T, the root included.
        target: what it runs on; `Target.of(device)`.
    """
    unfused, fused = lanes_of(mode)
    if mode == "ring" and batch == 1 and target.backend == "cuda" and target.arch in FUSED_ARCHS:
        return fused, f"{fused}: no table gives a verdict; a lone request on {target} is faster fused"
    return (
        unfused,
        f"{unfused}: no table gives a verdict for B={batch}, T={draft_tokens} on {target}, so the conservative lane",
    )


def no_kernels_reason(target: Target) -> str | None:
    """Why no kernel can run on ``target``, or None."""
    if target.backend == "cuda":
        if target.arch < OLDEST_ARCH:
            return f"kernels need sm{OLDEST_ARCH} or later, this is {target}"
        return None
    if target.backend in ("hip", "interpreter"):
        return None
    return (
        f"kernels run on CUDA and ROCm devices, this is {target.backend!r} "
        "(TRITON_INTERPRET=1, set before triton is imported, interprets them on the CPU)"
    )


def not_fused_reason(mode: str, draft_tokens: int, form: str, ragged: bool, tree: bool) -> str | None:
    """Why the fused lane of ``mode`` cannot take such a verify, or None. Arguments as `kda_backend.gate.decide`."""
    if tree:
        return "its kernel takes chains, these tokens have parents (a tree)"
    if ragged:
        return "its kernel takes as many tokens of every request, these lengths differ (ragged)"
    if form == "chunked":
        if mode != "ring":
            return "form='chunked' never computes the states that snapshots hold"
        if draft_tokens > MAX_CHUNKED_TOKENS:
            return f"form='chunked' takes up to {MAX_CHUNKED_TOKENS} draft tokens, got {draft_tokens}"
    return None


def record_reason(record: Ring | Snapshots, shape: KdaShape, mode: str, draft_tokens: int) -> str | None:
    """What is wrong with a layer's ring or snapshots, or None."""
    if isinstance(record, Ring) != (mode == "ring"):
        return f"mode={mode!r} needs {'a Ring' if mode == 'ring' else 'Snapshots'}, got {type(record).__name__}"
    if isinstance(record, Snapshots):
        return None
    raw_v: object = record.raw_v
    if not isinstance(raw_v, torch.Tensor):
        return f"ring.raw_v must be a Tensor, got {type(raw_v).__name__}"
    if raw_v.dtype not in (torch.bfloat16, torch.float16):
        return f"ring.raw_v must be bfloat16 or float16, got {str(raw_v.dtype).removeprefix('torch.')}"
    if raw_v.ndim != 4:
        return f"ring.raw_v must have 4 dimensions, got shape {list(raw_v.shape)}"
    if reason := ring_reason(record, shape, raw_v.dtype, raw_v.device, (raw_v.shape[0],)):
        return reason
    if record.length < draft_tokens:
        return f"the ring holds {record.length} records per slot, fewer than draft_tokens={draft_tokens}"
    return None
