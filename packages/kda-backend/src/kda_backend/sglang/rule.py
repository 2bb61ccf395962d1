"""Whether a verify that our fused kernel could take is given to it, and how it is launched."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

from kda_backend.lanes import FUSED_ARCHS, LaneChoice, Target, choose_lane
from kda_kernels import KdaShape, LaunchConfig

OVERRIDE = "KDA_SGLANG_FUSED"
"""Environment variable: always (wherever the kernel takes the arguments), never, or auto (the rule)."""

VALUES = ("auto", "always", "never")


class Choice(NamedTuple):
    """Fused or not, why, and the fused kernel's launch configuration (None: its own default)."""

    fused: bool
    reason: str
    config: LaunchConfig | None = None


def override() -> str:
    """The value of `OVERRIDE`; auto where it is not set or not one of `VALUES`."""
    value = os.environ.get(OVERRIDE, "").strip().lower()
    return value if value in VALUES else "auto"


def describe_rule() -> str:
    """What decides, for the log."""
    if override() != "auto":
        return f"{OVERRIDE}={override()}"
    given = os.environ.get(OVERRIDE, "")
    ignored = (
        "" if given.strip().lower() in ("", *VALUES) else f" ({OVERRIDE}={given!r} is none of {', '.join(VALUES)})"
    )
    archs = ", ".join(f"sm{arch}" for arch in FUSED_ARCHS)
    return f"the conservative rule: fused with a ring, for one request, on {archs}{ignored}"


def choose(shape: KdaShape, mode: str, batch: int, draft_tokens: int, device: torch.device) -> Choice:
    """Fused or unfused verify; under CUDA graphs ``batch`` is the one that a graph is captured for.

    Args:
        shape: head layout.
        mode: "ring" or "snapshots".
        batch: B, batch positions, padded ones included.
        draft_tokens: T.
        device: where the tensors are.
    """
    lane = _lane(shape, mode, batch, draft_tokens, device)
    fused, value = lane.lane.startswith("fused"), override()
    config = lane.config if fused else None
    if value == "auto":
        return Choice(fused, lane.reason, config)
    return Choice(value == "always", f"{OVERRIDE}={value}", config)


@functools.lru_cache(maxsize=1024)
def _lane(shape: KdaShape, mode: str, batch: int, draft_tokens: int, device: torch.device) -> LaneChoice:
    return choose_lane(shape, mode=mode, batch=batch, draft_tokens=draft_tokens, target=Target.of(device))
