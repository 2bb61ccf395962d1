"""Run as a program, without the interpreter: are candidates that `kda tune` compiles ahead found by their launches?

Triton's cache must be empty at first. For some candidates, one JSON line each: kernels compiled ahead, and how many
more an ordinary launch compiled, with Triton's own binding and only the driver a stand-in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import triton

from kda_kernels import KdaShape, LaunchConfig, _launch, host_checks
from kda_tooling.bench.arms import Arm
from kda_tooling.bench.sweep import build_problems
from kda_tooling.problem import Problems
from kda_tooling.tuning.candidates import Figures
from kda_tooling.tuning.compiling import REFERENCE, arm_of, compile_one, compile_reference
from kda_tooling.tuning.settings import Group, TuneSettings
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
CASES = (("unfused+ring", LaunchConfig(32, 2)), ("fused+ring", GLUON))


def main() -> None:
    """Compile ahead, launch, and count what Triton did not find."""
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda src, metadata, metadata_group, times, cache_hit: (
        None if cache_hit else compiled.append(src.name)
    )

    def report(what: str, ahead: Callable[[], int | None], launches: Callable[[], object]) -> None:
        """A line on what ``ahead``, whose registers it is given, compiles and on what ``launches`` compiles then."""
        registers = ahead()
        row = {"what": what, "registers": registers, "ahead": len(compiled)}
        compiled.clear()
        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(CompilingDriver())
        try:
            with host_checks(False), mock.patch.object(_launch, "TARGET_OVERRIDE", ("cuda", 90)):
                launches()
        finally:
            triton.runtime.driver._active = before
        sys.stdout.write(json.dumps(row | {"again": len(compiled)}) + "\n")
        compiled.clear()

    for group in SETTINGS.groups():
        problems = build_problems(SETTINGS.sweep_settings(group), group.draft_tokens, 5, 1, "cpu")

        reference = arm_of(SETTINGS, group, group.lanes[0], REFERENCE)

        def rounds(arm: Arm = reference, problems: Problems = problems) -> None:
            arm.verify(problems.layers[0])
            arm.commit(problems, torch.ones(5, dtype=torch.int32))
            if arm.fold_on_verify:
                problems.flush()

        report(f"{group} reference", partial(compile_reference, SETTINGS, group, "sm90"), rounds)

        for lane, config in CASES:
            if lane not in group.lanes:
                continue

            def candidate(group: Group = group, lane: str = lane, config: LaunchConfig = config) -> int:
                (_, figures), *_ = compile_one(SETTINGS, group, lane, config, "sm90")  # and with fewer registers
                assert isinstance(figures, Figures)
                return figures.registers

            arm = arm_of(SETTINGS, group, lane, config)
            report(f"{group} {lane}", candidate, partial(arm.verify, problems.layers[0]))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
