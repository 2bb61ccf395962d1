"""Kernels are loaded before anything takes a turn on the GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from triton.compiler import CompiledKernel

from kda_kernels import LaunchConfig, _launch
from kda_tooling.bench.arms import Arm
from kda_tooling.bench.sweep import build_problems
from kda_tooling.tuning.compiling import arm_of
from kda_tooling.tuning.loading import load_kernels
from tests.support.tuning import CONFIGS, ONE_HEAD, SMALL

(GROUP,) = SMALL.groups()


def fails(problem: Any) -> torch.Tensor:
    raise RuntimeError("cannot be launched")


def arms_of(*configs: LaunchConfig) -> list[Arm]:
    return [arm_of(SMALL, GROUP, "fused+ring", config) for config in configs]


def test_who_fails_keeps_nobody_from_the_next_and_launches_are_launches_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "current_target", lambda device: ("cuda", 90))
    seen: list[torch.device] = []

    def verify(problem: Any) -> torch.Tensor:
        assert _launch.LAUNCHER is not _launch.launch_kernel
        seen.append(problem.slots.device)
        return problem.slots

    bad, good = (
        dataclasses.replace(arm, verify=how) for arm, how in zip(arms_of(*CONFIGS[:2]), (fails, verify), strict=True)
    )
    load_kernels(SMALL, GROUP, [bad, good], "cuda")
    assert seen == [torch.device("cpu")]
    assert _launch.LAUNCHER is _launch.launch_kernel
    assert _launch.TARGET_OVERRIDE is None


def test_without_a_gpu_there_is_nothing_to_load() -> None:
    load_kernels(SMALL, GROUP, [dataclasses.replace(*arms_of(CONFIGS[0]), verify=pytest.fail)], "cpu")


@pytest.mark.gpu
def test_what_is_loaded_is_what_a_launch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = CompiledKernel._init_handles

    def noting(self: CompiledKernel) -> None:
        if self.module is None:
            loaded.append(self.name)
        load(self)

    monkeypatch.setattr(CompiledKernel, "_init_handles", noting)
    settings = dataclasses.replace(ONE_HEAD, draft_tokens=(7,))  # which no other test of the process has loaded
    (group,) = settings.groups()
    arm = arm_of(settings, group, "fused+ring", LaunchConfig(32, 4, rows_per_thread=2, state_first=True))
    load_kernels(settings, group, [arm], "cuda")
    assert loaded
    loaded.clear()
    arm.verify(build_problems(settings.sweep_settings(group), group.draft_tokens, 5, 1, "cuda").layers[0])
    assert not loaded
