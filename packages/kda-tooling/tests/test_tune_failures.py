"""`kda tune`: candidates that do not compile, whose bits differ or that fail while they are timed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, ClassVar

import pytest
import torch

from kda_backend.gate import load_table
from kda_kernels import KdaShape, LaunchConfig
from kda_tooling.bench.arms import Arm, config_name
from kda_tooling.bench.bits import BitsCheck, BitsDifferError
from kda_tooling.tuning import capturing, compiling, measure
from kda_tooling.tuning.candidates import Figures
from kda_tooling.tuning.settings import TuneSettings
from tests.support.tuning import (
    CONFIGS,
    ONE_HEAD,
    REAL_BITS,
    REAL_CHECK,
    REAL_ROUNDS,
    SMALL,
    usual,
    verdicts,
)


def broken_at(
    monkeypatch: pytest.MonkeyPatch, batch: int, verify: Callable[[Arm, Any], torch.Tensor], lane: str = "fused+ring"
) -> None:
    """``lane`` with tiles of 32 runs ``verify`` where the batch has ``batch`` requests."""
    own_arm = measure.arm_of

    def arm_of(settings: TuneSettings, group: Any, of: str, config: LaunchConfig) -> Arm:
        arm = own_arm(settings, group, of, config)
        if (of, config) != (lane, LaunchConfig(32, 1)):
            return arm
        return dataclasses.replace(arm, verify=lambda p: verify(arm, p) if p.batch == batch else arm.verify(p))

    monkeypatch.setattr(measure, "arm_of", arm_of)
    monkeypatch.setattr(capturing, "rotation_layers", lambda *_: (1, True))


def fails_when_run(monkeypatch: pytest.MonkeyPatch, batch: int, error: Exception, lane: str = "fused+ring") -> None:
    """``lane`` with tiles of 32 raises ``error`` where the batch has ``batch`` requests; nothing else is run."""

    def run_once(calls: list[Any]) -> None:
        arm, problem = calls[0].args
        if (arm, problem.batch) == ((lane, LaunchConfig(32, 1)), batch):
            raise error

    def calls_of(kind: str, arm: Arm, problems: Any, accept_lens: torch.Tensor) -> list[Any]:
        return [functools.partial(print, (arm.lane, arm.config), problem) for problem in problems.layers]

    monkeypatch.setattr(capturing, "calls_of", calls_of)
    monkeypatch.setattr(capturing, "run_once", run_once)


def test_other_bits_are_a_failure_that_is_told_and_never_timed(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_arm, wrong = measure.arm_of, LaunchConfig(32, 1)

    def arm_of(settings: TuneSettings, group: Any, lane: str, config: LaunchConfig) -> Arm:
        arm = own_arm(settings, group, lane, config)

        def last_place(problem: Any) -> torch.Tensor:
            out = arm.verify(problem)
            out.view(torch.int16).flatten()[0] ^= 1
            return out

        return dataclasses.replace(arm, verify=last_place) if (lane, config) == ("fused+ring", wrong) else arm

    monkeypatch.setattr(measure, "arm_of", arm_of)
    monkeypatch.setattr(measure, "check", REAL_CHECK)
    monkeypatch.setattr(measure, "two_rounds", REAL_ROUNDS)
    monkeypatch.setattr(compiling, "candidates", lambda *args: CONFIGS[1:] if "fused+ring" in args else CONFIGS[2:])
    timed: set[str] = set()
    settings = dataclasses.replace(SMALL, shape=KdaShape(1, 1, 64, 64), batch_sizes=(1,))
    result = tuned(lambda name, number: timed.add(name) or usual(name, number), settings)
    (failure,) = result.failures
    assert (failure.lane, failure.config, failure.broken) == ("fused+ring", wrong, True)
    assert not any("kda fused+ring bv32" in name for name in timed)
    assert "output" in failure.error
    assert [cell.config("fused+ring") for cell in result.table.cells] == [CONFIGS[2]]


@pytest.mark.parametrize("batch", [1, 2], ids=["an end", "between ends"])
def test_a_candidate_that_fails_while_it_is_timed_is_left_out_there(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    fails_when_run(monkeypatch, batch, torch.OutOfMemoryError("CUDA out of memory"))
    result = tuned(usual, ONE_HEAD)
    (failure,) = result.failures
    assert (failure.lane, failure.config, failure.batch) == ("fused+ring", LaunchConfig(32, 1), batch)
    assert failure.error == "OutOfMemoryError: CUDA out of memory"
    chosen = {cell.key.batch: config_name(cell.config("fused+ring")) for cell in result.table.cells}
    assert {b: name == "bv32.w1" for b, name in chosen.items()} == {b: b != batch for b in (1, 2, 3)}
    assert all(config_name(cell.config("unfused+ring")) == "bv32.w1" for cell in result.table.cells)
    assert load_table(result.path) == result.table


def test_a_lane_that_fails_at_both_ends_is_tried_between_them(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "candidates", lambda *_: CONFIGS[1:2])

    def run_once(calls: list[Any]) -> None:
        (lane, _), problem = calls[0].args
        if lane == "fused+ring" and problem.batch != 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    fails_when_run(monkeypatch, 1, RuntimeError("not used"))
    monkeypatch.setattr(capturing, "run_once", run_once)
    table = tuned(usual, ONE_HEAD).table
    assert [cell.lanes["fused+ring"].why is None for cell in table.cells] == [False, True, False]


def test_a_wrong_candidate_that_is_fast_pushes_no_other_out(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits differ at B = 1 only; at B = 3 it has no times either, and B = 2 tries the right ones."""

    def nothing(arm: Arm, problem: Any) -> torch.Tensor:
        return torch.zeros_like(arm.verify(problem))

    broken_at(monkeypatch, 1, nothing)
    monkeypatch.setattr(capturing, "BitsCheck", REAL_BITS)
    monkeypatch.setattr(compiling, "candidates", lambda *args: CONFIGS[1:] if "fused+ring" in args else CONFIGS[2:])

    def us(name: str, number: int) -> float:
        return 1.0 if "kda fused+ring bv32" in name else usual(name, number)

    settings = dataclasses.replace(ONE_HEAD, finalists=1)
    table = tuned(us, settings).table
    assert [cell.config("fused+ring") for cell in table.cells] == [CONFIGS[2]] * 3


def test_a_lane_that_fails_at_one_batch_size_is_measured_at_the_others(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "candidates", lambda *_: CONFIGS[1:2])
    fails_when_run(monkeypatch, 3, RuntimeError("out of resources"))
    table = tuned(usual, ONE_HEAD).table
    assert verdicts(table) == ["fused+ring"] * 2 + ["unfused+ring"]
    assert [cell.lanes["fused+ring"].why is None for cell in table.cells] == [True, True, False]
    assert "RuntimeError: out of resources" in str(table.cells[2].lanes["fused+ring"].why)


@pytest.mark.parametrize("batch", [1, 2], ids=["at the first size", "after figures of others"])
def test_a_candidate_whose_bits_differ_at_a_timed_batch_size_is_in_no_cell(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    def last_place(arm: Arm, problem: Any) -> torch.Tensor:
        out = arm.verify(problem)
        out.view(torch.int16).flatten()[-1] ^= 1
        return out

    broken_at(monkeypatch, batch, last_place)
    monkeypatch.setattr(capturing, "BitsCheck", REAL_BITS)
    monkeypatch.setattr(compiling, "candidates", lambda *args: CONFIGS[1:] if "fused+ring" in args else CONFIGS[2:])
    result = tuned(usual, ONE_HEAD)
    (failure,) = result.failures
    assert (failure.lane, failure.config, failure.batch) == ("fused+ring", LaunchConfig(32, 1), batch)
    assert "output differs from that of" in failure.error
    assert [cell.config("fused+ring") for cell in result.table.cells] == [CONFIGS[2]] * 3


def test_a_gpu_that_is_lost_ends_the_run_with_the_table_so_far(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, own_alive = dataclasses.replace(ONE_HEAD, draft_tokens=(2, 3)), capturing.ensure_alive

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    first = tuned(usual, ONE_HEAD)
    fails_when_run(monkeypatch, 3, RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(capturing, "ensure_alive", lambda device, *rest: own_alive("cuda", *rest))
    monkeypatch.setattr("torch.cuda.synchronize", lost)
    with pytest.raises(
        capturing.ContextLostError, match=r"fused\+ring bv32\.w1 left the GPU unusable .*illegal memory"
    ):
        tuned(usual, both, resume=True)
    kept = load_table(first.path)
    assert kept.cells == first.table.cells


def test_a_gpu_that_is_lost_while_it_times_is_named(tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is done on the way out may hide it."""

    def lost(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def us(name: str, number: int) -> float:
        monkeypatch.setattr(capturing, "_free", lost)
        raise capturing.ContextLostError("the GPU is unusable")

    with pytest.raises(capturing.ContextLostError, match="unusable"):
        tuned(us)


def test_a_failure_that_leaves_the_gpu_usable_is_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = SMALL.groups()
    arm = measure.arm_of(SMALL, group, "fused+ring", CONFIGS[0])
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    capturing.ensure_alive("cuda", arm, RuntimeError("too many resources requested for launch"))
    capturing.ensure_alive("cpu", arm, RuntimeError("any"))


class DyingPool(ThreadPoolExecutor):
    """Stands in for processes: ``killers`` end the process that compiles them, and with it their pool."""

    killers: tuple[LaunchConfig, ...] = ()
    submitted: ClassVar[list[LaunchConfig]] = []

    def __init__(self, count: int, mp_context: object) -> None:
        super().__init__(1)
        self.broken = False

    def submit(self, fn: Any, *job: Any) -> Any:
        self.submitted.append(job[3])

        def run() -> Any:
            self.broken = self.broken or job[3] in self.killers
            if self.broken:
                raise BrokenProcessPool("a process was terminated abruptly")
            return fn(*job)

        return super().submit(run)


def test_a_compiler_that_dies_is_that_candidate_s_failure_alone(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", DyingPool)
    monkeypatch.setattr(DyingPool, "killers", (LaunchConfig(32, 1),))
    monkeypatch.setattr(DyingPool, "submitted", [])
    done: list[tuple[int, int]] = []
    result = tuned(usual, on_compiled=lambda *count: done.append(count))
    assert {(one.lane, one.config) for one in result.failures} == {
        (lane, LaunchConfig(32, 1)) for lane in ("fused+ring", "unfused+ring")
    }
    assert {one.error for one in result.failures} == {"RuntimeError: its compiler died"}
    assert len(result.table.cells) == 3
    assert done == [(number, 6) for number in range(1, 7)]
    assert sorted(map(config_name, DyingPool.submitted)) == sorted(map(config_name, 2 * CONFIGS)), (
        "one that dies costs no other candidate a second run"
    )


def test_compilers_that_keep_dying_end_the_run(tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", DyingPool)
    monkeypatch.setattr(DyingPool, "killers", tuple(CONFIGS))
    monkeypatch.setattr(compiling, "MOST_DEATHS", 4)
    with pytest.raises(BrokenProcessPool, match="more than 4 compilers died"):
        tuned(usual)


def test_a_fold_on_verify_that_replays_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(SMALL, shape=KdaShape(1, 1, 64, 64), options=("fold-on-verify",), batch_sizes=(1,))
    (group,) = settings.groups()
    problems = measure.check_problems(settings, group, "cpu")
    accept_lens = torch.full((measure.CHECK_BATCH,), 1, dtype=torch.int32)
    reference, arm = (measure.arm_of(settings, group, lane, CONFIGS[2]) for lane in group.lanes)
    expected = measure.two_rounds(problems, reference, accept_lens)
    bits = BitsCheck(problems.layers[0], reference)
    measure.check(problems, bits, expected, arm, accept_lens)

    def commit(problems: Any, accept_lens: torch.Tensor) -> None:  # one record more is pending
        arm.commit(problems, accept_lens + 1)

    with pytest.raises(BitsDifferError, match="differs from the reference configuration's"):
        measure.check(problems, bits, expected, dataclasses.replace(arm, commit=commit), accept_lens)


def test_what_cannot_be_compiled_is_told_and_the_lane_says_why(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_one(settings: TuneSettings, group: Any, lane: str, config: LaunchConfig, target: str | None) -> Any:
        if lane == "fused+ring":
            raise RuntimeError("out of\nregisters")
        return [(config, Figures(64, 0))]

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    result = tuned(usual)
    assert verdicts(result.table) == ["unfused+ring"] * 3
    assert {one.error for one in result.failures} == {"RuntimeError: out of registers"}
    assert "out of registers" in result.table.cells[0].lanes["fused+ring"].why


@pytest.mark.gpu
def test_on_a_gpu_what_fails_is_left_out_and_the_rest_is_timed() -> None:
    (group,) = ONE_HEAD.groups()
    good, stops, differs = (measure.arm_of(ONE_HEAD, group, "fused+ring", config) for config in CONFIGS)

    def stop(problem: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not under capture")
        return stops.verify(problem)

    def last_place(problem: Any) -> torch.Tensor:
        out = differs.verify(problem)
        out.view(torch.int16).flatten()[-1] ^= 1
        return out

    arms = [dataclasses.replace(stops, verify=stop), dataclasses.replace(differs, verify=last_place), good]
    errors: dict[str, str] = {}
    with capturing.captured_arms(
        ONE_HEAD, group, 5, arms, 1 << 20, 0, on_failure=lambda arm, error: errors.update({arm.name: str(error)})
    ) as captured:
        times = captured.times([arm.name for arm in captured.arms], 1)
    assert set(times) == {good.name}
    assert times[good.name][0] > 0
    assert set(errors) == {stops.name, differs.name}
    assert errors[stops.name] == "not under capture"
    assert "output differs" in errors[differs.name]
