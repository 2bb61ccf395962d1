"""Run as a program, without the interpreter: are candidates that `kda tune` compiles ahead found by their launches?

Triton's cache must be empty at first. For some candidates, one JSON line each: kernels compiled ahead, and how many
more an ordinary launch compiled, with Triton's own binding and only the driver a stand-in.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
import triton

from kda_kernels import KdaShape, LaunchConfig, _launch, host_checks
from kda_tooling.bench.sweep import build_problems
from kda_tooling.tuning.compiling import arm_of, compile_one
from kda_tooling.tuning.settings import TuneSettings
from tests.support.compiled_replays import CompilingDriver

SETTINGS = TuneSettings(
    shape=KdaShape(2, 4, 64, 64),
    draft_tokens=(3,),
    batch_sizes=(1,),
    forms=("recurrent",),
    modes=("ring",),
    options=("plain", "fold-on-verify"),
)
GLUON = LaunchConfig(32, 4, rows_per_thread=2, state_first=True)
CASES = (("unfused+ring", LaunchConfig()), ("fused+ring", GLUON))


def main() -> None:
    """Compile ahead, launch, and count what Triton did not find."""
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda src, metadata, metadata_group, times, cache_hit: (
        None if cache_hit else compiled.append(src.name)
    )
    for group in SETTINGS.groups():
        for lane, config in CASES:
            if lane not in group.lanes:
                continue
            ((_, figures),) = compile_one(SETTINGS, group, lane, config, "sm90")
            ahead = compiled.copy()
            compiled.clear()
            problem = build_problems(SETTINGS.sweep_settings(group), group.draft_tokens, 5, 1, "cpu").layers[0]
            before = triton.runtime.driver._active
            triton.runtime.driver.set_active(CompilingDriver())
            try:
                with host_checks(False), mock.patch.object(_launch, "TARGET_OVERRIDE", ("cuda", 90)):
                    arm_of(SETTINGS, group, lane, config).verify(problem)
            finally:
                triton.runtime.driver._active = before
            row = {"what": f"{group} {lane}", "registers": figures.registers}
            sys.stdout.write(json.dumps(row | {"ahead": len(ahead), "again": len(compiled)}) + "\n")
            compiled.clear()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
