"""Whether a verify that our fused kernel could take is given to it: the one place that decides."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

OVERRIDE = "KDA_SGLANG_FUSED"
"""Environment variable: always (wherever the kernel takes the arguments), never, or auto (the rule)."""

FUSED_ALONE = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities on which a fused verify of one request was measured faster than the unfused one."""


class Choice(NamedTuple):
    """Fused or not, and why."""

    fused: bool
    reason: str


def override() -> str:
    """The value of `OVERRIDE`; auto where it is not set or not one of its values."""
    value = os.environ.get(OVERRIDE, "auto").strip().lower()
    return value if value in ("always", "never") else "auto"


def describe_rule() -> str:
    """What decides, for the log."""
    value = override()
    if value != "auto":
        return f"{OVERRIDE}={value}"
    given = os.environ.get(OVERRIDE, "auto")
    ignored = "" if given.strip().lower() == "auto" else f" ({OVERRIDE}={given!r} is none of always, never, auto)"
    return f"the built-in rule (fused for one request, on sm90, sm100 and sm103){ignored}"


def choose(batch: int, device: torch.device) -> Choice:
    """Fused or unfused verify of ``batch`` requests; under CUDA graphs that is the batch a graph is captured for."""
    value = override()
    if value != "auto":
        return Choice(value == "always", f"{OVERRIDE}={value}")
    if batch != 1:
        return Choice(False, f"B={batch}: fused verify is the default for one request only")
    capability = _capability(device)
    if capability not in FUSED_ALONE:
        name = "this device" if capability is None else f"sm{capability[0]}{capability[1]}"
        return Choice(False, f"fused verify was not measured on {name}")
    return Choice(True, "one request")


def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)
