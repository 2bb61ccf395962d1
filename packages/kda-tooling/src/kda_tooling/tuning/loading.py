"""Have the driver load kernels before they are launched for the first time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from kda_kernels import _launch
from kda_tooling.bench.arms import Arm
from kda_tooling.tuning.compiling import check_problems
from kda_tooling.tuning.settings import Group, TuneSettings


def load_kernels(settings: TuneSettings, group: Group, arms: Iterable[Arm], device: str) -> None:
    """Compile, or find in Triton's disk cache, and load onto the current GPU what ``arms``' verifies launch.

    Nothing runs there, so it takes no turn. Who fails to load is left for the launch to name. On a device that is not
    "cuda", nothing is done.
    """
    if device != "cuda":
        return
    problem = check_problems(settings, group, "cpu").layers[0]
    before = _launch.LAUNCHER, _launch.TARGET_OVERRIDE
    _launch.LAUNCHER, _launch.TARGET_OVERRIDE = _load, _launch.current_target(torch.device(device))
    try:
        for arm in arms:
            with suppress(Exception):
                arm.verify(problem)
    finally:
        _launch.LAUNCHER, _launch.TARGET_OVERRIDE = before


def _load(kernel: Any, grid: tuple[int], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A launcher that stops before the launch: what Triton does with the arguments until then is the same."""
    return kernel.warmup(*args, grid=grid, **options).run  # asked for this attribute, it has the driver load
