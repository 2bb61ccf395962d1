"""Whether a verify that our fused kernel could take is given to it, and how it is launched: by the dispatch gate."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

from kda_backend.gate import Decision, decide, device_name_of
from kda_backend.gate.env import LANE, process_settings
from kda_backend.lanes import FUSED_ARCHS, Target, lanes_of
from kda_kernels import KdaShape, LaunchConfig

OVERRIDE = "KDA_SGLANG_FUSED"
"""Environment variable: always (wherever the kernel takes the arguments), never, or auto (the gate)."""

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
    rule = f"the conservative rule: fused with a ring, for one request, on {archs}{ignored}"
    try:
        settings = process_settings()
    except ValueError as problem:  # every decision will say so, and SGLang's own kernels run
        return f"nothing: {problem}"
    if settings.lane is not None:
        return f"{LANE}={settings.lane}{ignored}"
    return rule if settings.off else f"the measured tables of its gate, or where they say nothing by {rule}"


def choose(
    shape: KdaShape,
    mode: str,
    batch: int,
    draft_tokens: int,
    device: torch.device,
    *,
    dtype: torch.dtype,
    safe_gate: bool,
) -> Choice:
    """Fused or unfused verify; under CUDA graphs ``batch`` is the one that a graph is captured for.

    Args:
        shape: head layout.
        mode: "ring" or "snapshots".
        batch: B, batch positions, padded ones included.
        draft_tokens: T.
        device: where the tensors are.
        dtype: activation dtype.
        safe_gate: whether the layer has a lower bound.

    Raises:
        ValueError: the environment forces a lane that this verify cannot take.
    """
    value = override()
    if value == "never":
        return Choice(False, f"{OVERRIDE}={value}")
    decision = _decision(shape, mode, batch, draft_tokens, device, dtype, safe_gate, value == "always")
    fused = decision.lane.startswith("fused")
    reason = decision.reason if value == "auto" else f"{OVERRIDE}={value}"
    return Choice(fused, reason, decision.launch if fused else None)


@functools.lru_cache(maxsize=1024)
def _decision(
    shape: KdaShape,
    mode: str,
    batch: int,
    draft_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    safe_gate: bool,
    always: bool,
) -> Decision:
    """The gate's decision, once per set of arguments; ``always`` forces the fused lane."""
    environ = dict(os.environ) | {LANE: lanes_of(mode)[1]} if always else None
    return decide(
        shape, mode=mode, batch=batch, draft_tokens=draft_tokens, device_name=device_name_of(device),
        target=Target.of(device), dtype=dtype, safe_gate=safe_gate, environ=environ,
    )  # fmt: skip
