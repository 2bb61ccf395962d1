"""Time a group's candidates: at every batch size a survey of those that could win, then passes of the best few."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from kda_backend.gate.cells import LaneFigures
from kda_kernels import LaunchConfig
from kda_tooling.bench.arms import Arm
from kda_tooling.bench.bits import BitsCheck, BitsDifferError
from kda_tooling.problem import Problems
from kda_tooling.terminal import in_a_line
from kda_tooling.tuning.candidates import fits_heads
from kda_tooling.tuning.capturing import Captured, Times, captured_arms, deciding, passing
from kda_tooling.tuning.compiling import CHECK_BATCH, REFERENCE, Compiled, Failure, arm_of, check_problems
from kda_tooling.tuning.loading import load_kernels
from kda_tooling.tuning.settings import Group, TuneSettings
from kda_tooling.tuning.sharing import gpu_shared

SURVEY_PASSES = 1
FINAL_PASSES = 5
NEAR = 0.3
"""What is slower than a lane's best by more than this share at both batch sizes around one is not surveyed there. Those
that won between were within 21 % at one of them (docs/measured-facts.md)."""

SAME = 0.005
"""Two configurations are the same speed within this share: then the one of the batch size before is kept, so that
fewer variants are compiled and a table's lines change less."""


@dataclass(frozen=True)
class Measured:
    """A group's figures.

    Args:
        lanes: B -> lane -> what a table holds of it.
        failures: candidates that were not timed, everywhere or at a B, since their bits differ or they could not run.
    """

    lanes: dict[int, dict[str, LaneFigures]]
    failures: list[Failure]


def measure_group(
    settings: TuneSettings,
    group: Group,
    compiled: Compiled,
    l2_bytes: int,
    device: str = "cuda",
) -> Measured:
    """Check every candidate's bits, survey them, and time the best of each lane in independent passes.

    A pass has inputs of a seed of its own and graphs of its own, all batch sizes before the next pass begins. The first
    pass's graphs are the survey's; what the survey timed only chooses what the pass times. A candidate that fails at a
    B is out there, one whose bits differ is out everywhere.

    Raises:
        ContextLostError: a candidate's failure left the GPU unusable.
    """
    candidates = [(lane, config) for lane in group.lanes for config in compiled.configs[lane]]
    used = [arm_of(settings, group, *one) for one in [(group.lanes[0], REFERENCE), *candidates]]
    load_kernels(settings, group, used, device)
    arms, failures = _checked(settings, group, compiled, device)
    wrong: set[str] = set()
    failed: set[tuple[int, str]] = set()

    def captured(batch: int, names: Iterable[str], number: int) -> AbstractContextManager[Captured]:
        """Those arms in pass ``number``, without what has failed."""

        def leave_out(arm: Arm, error: Exception) -> None:
            failures.append(Failure(group, arm.lane, arm.config or LaunchConfig(), in_a_line(error), batch=batch))
            failed.add((batch, arm.name))
            if isinstance(error, BitsDifferError):
                wrong.add(arm.name)

        sound = [a for a in arms if a.name in names and a.name not in wrong and (batch, a.name) not in failed]
        seed = settings.seed + number
        return captured_arms(settings, group, batch, sound, l2_bytes, seed, device, on_failure=leave_out)

    surveyed: dict[int, Times] = {}
    first: dict[int, Times] = {}
    for batch in _ends_first(settings.batch_sizes):
        tried = _tried(settings, group, [arm for arm in arms if arm.name not in wrong], surveyed, batch)
        with captured(batch, [arm.name for arm in tried], 0) as these:
            surveyed[batch] = these.times([arm.name for arm in these.arms], SURVEY_PASSES)
            best = [name for lane in group.lanes for name in _fastest(surveyed[batch], arms, lane, settings.finalists)]
            first[batch] = these.times(best, FINAL_PASSES)
    passes = [first]
    for number in range(1, settings.passes):
        found: dict[int, Times] = {}
        for batch in settings.batch_sizes:
            with captured(batch, first[batch], number) as these:
                found[batch] = these.times([arm.name for arm in these.arms], FINAL_PASSES)
        passes.append(found)
    arms = [arm for arm in arms if arm.name not in wrong]
    return Measured(_figures(group, settings.batch_sizes, passes, arms, compiled.failures + failures), failures)


def _ends_first(sizes: Sequence[int]) -> list[int]:
    """``sizes``, every other one and the last before those between."""
    coarse = dict.fromkeys([*sizes[::2], sizes[-1]])
    return [*coarse, *(size for size in sizes if size not in coarse)]


def _tried(
    settings: TuneSettings, group: Group, arms: Sequence[Arm], surveyed: Mapping[int, Times], batch: int
) -> list[Arm]:
    """The arms that could be their lane's fastest at ``batch``, by what is ``surveyed`` around it or by tiles."""
    below = max((size for size in surveyed if size < batch), default=None)
    above = min((size for size in surveyed if size > batch), default=None)
    if below is not None and above is not None:
        near = {name for size in (below, above) for name in _near(surveyed[size], arms, group)}
        return [arm for arm in arms if arm.name in near]
    if group.mode != "ring":  # writing snapshots takes longest: no tile is ruled out
        return list(arms)
    shape, found = settings.shape, []
    for arm in arms:
        others = [other.config for other in arms if other.lane == arm.lane and other.config is not None]
        if arm.config is None or fits_heads(arm.config, others, batch * shape.num_v_heads, shape.head_v_dim):
            found.append(arm)
    return found


def _near(times: Times, arms: Sequence[Arm], group: Group) -> list[str]:
    """The arms within `NEAR` of their lane's fastest; all of a lane that has no times."""
    found = []
    for lane in group.lanes:
        names = _fastest(times, arms, lane, len(arms))
        found += [name for name in names if deciding(times[name]) <= (1 + NEAR) * deciding(times[names[0]])]
        found += [arm.name for arm in arms if arm.lane == lane and not names]
    return found


def _checked(settings: TuneSettings, group: Group, compiled: Compiled, device: str) -> tuple[list[Arm], list[Failure]]:
    """The candidates whose bits are the reference's, and the others."""
    reference = arm_of(settings, group, group.lanes[0], REFERENCE)
    with gpu_shared(device):
        problems = check_problems(settings, group, device)
        accept_lens = torch.full((CHECK_BATCH,), max(1, group.draft_tokens - 1), dtype=torch.int32, device=device)
        expected = two_rounds(problems, reference, accept_lens)
        bits = BitsCheck(problems.layers[0], reference)

    def same(arm: Arm) -> None:
        check(problems, bits, expected, arm, accept_lens)

    failures: list[Failure] = []

    def differs(arm: Arm, error: Exception) -> None:
        failures.append(Failure(group, arm.lane, arm.config or LaunchConfig(), in_a_line(error)))

    arms = [arm_of(settings, group, lane, config) for lane in group.lanes for config in compiled.configs[lane]]
    return passing(same, arms, device, differs), failures


def check(
    problems: Problems, bits: BitsCheck, expected: Mapping[str, torch.Tensor], arm: Arm, accept_lens: torch.Tensor
) -> None:
    """Raise `BitsDifferError` unless ``arm`` writes the reference's records, and what it came to in `two_rounds`."""
    bits.run(arm)
    for name, tensor in two_rounds(problems, arm, accept_lens).items():
        if not torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)):
            raise BitsDifferError(f"{arm.name}: {name} differs from the reference configuration's")


def two_rounds(problems: Problems, arm: Arm, accept_lens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs and final states of two rounds of ``arm``; the problems' states are as before afterwards.

    In the second, verify starts from what the first committed: with fold on verify, it replays it.
    """
    state = problems.state
    before = state.conv_state.clone(), state.ssm_state.clone()
    if arm.fold_on_verify:
        problems.folding.reset()
    found = {}
    for number in (1, 2):
        for index, problem in enumerate(problems.layers):
            found[f"output of round {number}, layer {index}"] = arm.verify(problem).clone()
        arm.commit(problems, accept_lens)
    if arm.fold_on_verify:
        problems.flush()
    found |= {"conv_state": state.conv_state.clone(), "ssm_state": state.ssm_state.clone()}
    state.conv_state.copy_(before[0])
    state.ssm_state.copy_(before[1])
    return found


def _fastest(times: Times, arms: Sequence[Arm], lane: str, count: int) -> list[str]:
    of_lane = [arm.name for arm in arms if arm.lane == lane and arm.name in times]
    return sorted(of_lane, key=lambda name: deciding(times[name]))[:count]


def _figures(
    group: Group,
    sizes: Sequence[int],
    passes: Sequence[Mapping[int, Times]],
    arms: Sequence[Arm],
    failures: Sequence[Failure],
) -> dict[int, dict[str, LaneFigures]]:
    """B -> lane -> figures of the fastest of ``arms`` that every pass timed."""
    by_name = {arm.name: arm for arm in arms}
    lanes: dict[int, dict[str, LaneFigures]] = {}
    before: dict[str, str] = {}
    for batch in sizes:
        lanes[batch] = {}
        for lane in group.lanes:
            names = [
                name
                for name, arm in by_name.items()
                if arm.lane == lane and all(name in found[batch] for found in passes)
            ]
            if not names:
                lanes[batch][lane] = LaneFigures(why=_reason(failures, lane, batch))
                continue
            means = {name: statistics.fmean(deciding(found[batch][name]) for found in passes) for name in names}
            name = min(means, key=means.__getitem__)
            usual = before.get(lane)
            if usual in means and means[usual] <= (1 + SAME) * means[name]:
                name = usual
            before[lane] = name
            times = [found[batch][name] for found in passes]
            rounds = tuple(us for _, us in times if us is not None)
            lanes[batch][lane] = LaneFigures(tuple(us for us, _ in times), rounds, by_name[name].config)
    return lanes


def _reason(failures: Sequence[Failure], lane: str, batch: int) -> str:
    of_lane = [f for f in failures if f.lane == lane]
    errors = [f.error for f in of_lane if f.batch in (None, batch)] or [f.error for f in of_lane]
    return f"no configuration could be timed; the first said: {errors[0]}"[:390] if errors else "no configuration fits"
