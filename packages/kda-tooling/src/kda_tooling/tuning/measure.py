"""Time a group's candidates: a survey of all at every other batch size, then independent passes of the best few."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass

import torch

from kda_backend.gate.cells import OPTIONS, LaneFigures
from kda_kernels import LaunchConfig
from kda_kernels._replay import alignment_of
from kda_kernels.checking import verifies_unchecked
from kda_tooling.bench.arms import Arm, peer_arms
from kda_tooling.bench.bits import BitsCheck, BitsDifferError
from kda_tooling.bench.sweep import build_problems, calls_of, rotation_layers
from kda_tooling.bench.timing import Replayable, Timing, measure_interleaved, record, run_once
from kda_tooling.peers import Peer
from kda_tooling.problem import Problems
from kda_tooling.tuning.candidates import fits_heads
from kda_tooling.tuning.compiling import CHECK_BATCH, REFERENCE, Compiled, Failure, arm_of, in_a_line
from kda_tooling.tuning.loading import load_kernels
from kda_tooling.tuning.settings import Group, TuneSettings
from kda_tooling.tuning.sharing import gpu_turn

SURVEY_PASSES = 3
FINAL_PASSES = 5
SECONDS_PER_PASS = 1e-3
"""Time of an arm in a pass; three or five of them differ by tenths of a per cent."""

SAME = 0.005
"""Two configurations are the same speed within this share: then the one of the batch size before is kept, so that
fewer variants are compiled and a table's lines change less."""

Times = dict[str, tuple[float, float | None]]
"""Arm name -> microseconds per layer of a verify, and of a round where rounds decide."""


class ContextLostError(RuntimeError):
    """A failure on the GPU after which this process gets no more work done there."""


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

    A pass builds its own inputs from a seed of its own and captures its own graphs, all batch sizes before the next
    pass begins. A candidate that fails at a B is out there, one whose bits differ is out everywhere.

    Raises:
        ContextLostError: a candidate's failure left the GPU unusable.
    """
    candidates = [(lane, config) for lane in group.lanes for config in compiled.configs[lane]]
    used = [arm_of(settings, group, *one) for one in [(group.lanes[0], REFERENCE), *candidates]]
    load_kernels(settings, group, used, device)
    with gpu_turn(device):
        arms, failures = _checked(settings, group, compiled, device)
    by_name = {arm.name: arm for arm in arms}
    sizes = settings.batch_sizes
    wrong: set[str] = set()
    failed: set[tuple[int, str]] = set()

    def timed(batch: int, chosen: Sequence[Arm], seed: int, passes: int) -> Times:
        def leave_out(arm: Arm, error: Exception) -> None:
            failures.append(Failure(group, arm.lane, arm.config or LaunchConfig(), in_a_line(error), batch=batch))
            failed.add((batch, arm.name))
            if isinstance(error, BitsDifferError):
                wrong.add(arm.name)

        sound = [arm for arm in chosen if arm.name not in wrong and (batch, arm.name) not in failed]
        return time_arms(settings, group, batch, sound, l2_bytes, seed, passes, device, on_failure=leave_out)

    surveyed = sizes[::2] if len(sizes) % 2 else (*sizes[::2], sizes[-1])
    best: dict[int, list[str]] = {}
    for batch in surveyed:
        tried = _tried(settings, group, arms, batch)
        times = timed(batch, tried, settings.seed, SURVEY_PASSES)
        best[batch] = [name for lane in group.lanes for name in _fastest(times, tried, lane, settings.finalists)]
    finalists = {batch: _shortlist(best, batch) for batch in sizes}
    passes: list[dict[int, Times]] = []
    for number in range(settings.passes):
        found: dict[int, Times] = {}
        for batch in sizes:
            chosen = [by_name[name] for name in finalists[batch]]
            found[batch] = timed(batch, chosen, settings.seed + 1 + number, FINAL_PASSES)
        passes.append(found)
    arms = [arm for arm in arms if arm.name not in wrong]
    return Measured(_figures(group, sizes, passes, arms, compiled.failures + failures), failures)


def _tried(settings: TuneSettings, group: Group, arms: Sequence[Arm], batch: int) -> list[Arm]:
    """The arms that could be their lane's fastest at ``batch``: with snapshots, whose writes take longest, all."""
    if group.mode != "ring":
        return list(arms)
    shape, found = settings.shape, []
    for arm in arms:
        others = [other.config for other in arms if other.lane == arm.lane and other.config is not None]
        if arm.config is None or fits_heads(arm.config, others, batch * shape.num_v_heads, shape.head_v_dim):
            found.append(arm)
    return found


def check_problems(settings: TuneSettings, group: Group, device: str) -> Problems:
    """What bits are checked on: one layer of `CHECK_BATCH` requests."""
    return build_problems(settings.sweep_settings(group), group.draft_tokens, CHECK_BATCH, 1, device)


def _checked(settings: TuneSettings, group: Group, compiled: Compiled, device: str) -> tuple[list[Arm], list[Failure]]:
    """The candidates whose bits are the reference's, and the others."""
    problems = check_problems(settings, group, device)
    reference = arm_of(settings, group, group.lanes[0], REFERENCE)
    accept_lens = torch.full((CHECK_BATCH,), max(1, group.draft_tokens - 1), dtype=torch.int32, device=device)
    expected = two_rounds(problems, reference, accept_lens)
    bits = BitsCheck(problems.layers[0], reference)
    good, failures = [], []
    for lane in group.lanes:
        for config in compiled.configs[lane]:
            arm = arm_of(settings, group, lane, config)
            try:
                check(problems, bits, expected, arm, accept_lens)
            except Exception as error:
                ensure_alive(device, arm, error)
                failures.append(Failure(group, lane, config, in_a_line(error)))
            else:
                good.append(arm)
    return good, failures


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


def time_arms(
    settings: TuneSettings,
    group: Group,
    batch: int,
    arms: Sequence[Arm],
    l2_bytes: int,
    seed: int,
    passes: int,
    device: str = "cuda",
    peers: Sequence[Peer] = (),
    on_failure: Callable[[Arm, Exception], None] | None = None,
) -> Times:
    """Median times of ``arms`` and of ``peers``' arms, interleaved in one run on inputs of ``seed``, L2-cold.

    Args:
        on_failure: called with an arm that does not write what `REFERENCE` writes on these inputs, or cannot run; the
            others are timed without it. None: bits are not compared, and what fails is raised.

    Raises:
        ContextLostError: an arm's failure left the GPU unusable.
    """
    sweep = settings.sweep_settings(group, seed)
    layers, _ = rotation_layers(sweep, group.draft_tokens, batch, l2_bytes)
    plain = group.option == OPTIONS[0]
    kinds = ("verify",) if plain else ("verify", "round")
    calls: dict[str, dict[str, list[Callable[[], object]]]] = {}
    graphs: dict[str, Replayable] = {}

    with gpu_turn(device):
        problems = build_problems(sweep, group.draft_tokens, batch, layers, device)
        unlike = one_of_each_alignment(problems)
        written = BitsCheck(problems.layers[0], arm_of(settings, group, group.lanes[0], REFERENCE))
        accept = sweep.accept_for(group.draft_tokens)
        accept_lens = torch.full((batch,), accept, dtype=torch.int32, device=device)

        def bits(arm: Arm) -> None:
            check_written(problems, written, arm)

        def first_run(arm: Arm) -> None:
            own = {f"{arm.name}|{kind}": calls_of(kind, arm, problems, accept_lens) for kind in kinds}
            for these in own.values():
                run_once([these[index] for index in unlike] if plain else these)  # rounds replay what others recorded
            if device == "cuda":
                torch.cuda.synchronize()  # what fails on the device fails here, and not under another arm's name
            calls[arm.name] = own

        def graph(arm: Arm) -> None:
            with verifies_unchecked():  # `first_run` has had one of each kind checked
                graphs.update({name: record(these) for name, these in calls[arm.name].items()})

        arms = [*arms, *(arm for peer in peers for arm in peer_arms(peer, problems.layers[0]))]
        if on_failure is not None:
            arms = [arm for arm in arms if _succeeds(bits, arm, device, on_failure)]
            _free(device)
        arms = [arm for arm in arms if _succeeds(first_run, arm, device, on_failure)]
    arms = [arm for arm in arms if _succeeds(graph, arm, device, on_failure)]
    with gpu_turn(device):
        timed: dict[str, Timing] = {}
        # Kinds apart: a round right after verifies of what its first one would fold has less to do.
        for kind in reversed(kinds):
            of_kind = {name: graphs[name] for name in (f"{arm.name}|{kind}" for arm in arms)}
            timed |= measure_interleaved(of_kind, layers, passes=passes, seconds_per_pass=SECONDS_PER_PASS)
    found = {}
    for arm in arms:
        us = [timed[f"{arm.name}|{kind}"].median_us for kind in kinds]
        found[arm.name] = (us[0], us[1] if len(us) > 1 else None)
    graphs.clear()
    _free(device)
    return found


def one_of_each_alignment(problems: Problems) -> list[int]:
    """Layers, one for every way in which their tensors are aligned: by that Triton compiles."""
    ways = [alignment_of([t.data_ptr() for t in _tensors(problem)]) for problem in problems.layers]
    return [index for index, way in enumerate(ways) if way not in ways[:index]]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Those of a dataclass, and of the dataclasses in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for part in vars(value).values():
            yield from _tensors(part)


def check_written(problems: Problems, written: BitsCheck, arm: Arm) -> None:
    """Raise `BitsDifferError` unless ``arm`` writes what `REFERENCE` writes on the first layer, outputs and records."""
    written.run(arm)
    if arm.fold_on_verify:
        problems.folding.reset()


def _succeeds(
    do: Callable[[Arm], None], arm: Arm, device: str, on_failure: Callable[[Arm, Exception], None] | None
) -> bool:
    """Whether ``do(arm)`` does; a failure goes to ``on_failure``, or is raised where there is none."""
    try:
        do(arm)
    except Exception as error:
        ensure_alive(device, arm, error)
        if on_failure is None:
            raise
        _free(device)
        on_failure(arm, error)
        return False
    return True


def _free(device: str) -> None:
    """Give back memory that is only kept for reuse: a graph cannot take it, its memory is its own."""
    if device == "cuda":
        torch.cuda.empty_cache()


def ensure_alive(device: str, arm: Arm, failed: Exception) -> None:
    """Raise `ContextLostError` if the GPU takes no more work of this process since ``arm`` has ``failed``."""
    if device != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise ContextLostError(
            f"{arm.name} left the GPU unusable for this process ({in_a_line(failed)}). What was measured before is in "
            "the table: --resume in a new process goes on from there"
        ) from failed


def deciding(times: tuple[float, float | None]) -> float:
    """The figure that counts: the round's where there is one."""
    return times[0] if times[1] is None else times[1]


def _fastest(times: Times, arms: Sequence[Arm], lane: str, count: int) -> list[str]:
    of_lane = [arm.name for arm in arms if arm.lane == lane and arm.name in times]
    return sorted(of_lane, key=lambda name: deciding(times[name]))[:count]


def _shortlist(best: Mapping[int, list[str]], batch: int) -> list[str]:
    """What to time at ``batch``: its own best, or those of the surveyed sizes around it."""
    if batch in best:
        return best[batch]
    below = max(size for size in best if size < batch)
    above = min(size for size in best if size > batch)
    return list(dict.fromkeys(best[below] + best[above]))


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
