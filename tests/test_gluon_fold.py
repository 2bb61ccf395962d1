"""The Gluon fold beside the portable one: the same bits, the same faults counted, and where it is refused.

Every nameable configuration is folded in `test_fold.py`; here are the shapes and prefixes that only its layouts could
get wrong, and what its compiled code must look like.
"""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from kda_kernels import (
    ErrorKind,
    LaunchConfig,
    Ring,
    _launch,
    fold,
    fold_reason,
    host_checks,
    new_error_counts,
    verify_unfused,
)
from kda_kernels.defaults import FOLD_SHORT, PORTABLE
from kda_tooling.compiling.report import compile_all, compiled_kernels
from kda_tooling.compiling.specs import FOLD_TILE, CompileSpec, Selection
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.commits import fold_problem, with_layers
from tests.support.grids import config_id
from tests.support.marks import interpreter_only
from tests.support.ops import RING

CONFIGS = [
    LaunchConfig(block_v=16, num_warps=1, rows_per_thread=4),
    LaunchConfig(block_v=32, num_warps=4, rows_per_thread=2),
    LaunchConfig(block_v=64, num_warps=4, rows_per_thread=4, max_registers=96),
    LaunchConfig(block_v=128, num_warps=8, rows_per_thread=4),
]

# Token counts and ring lengths that are no power of two, odd and even pitches, V other than K, GQA, one head.
GPU_CASES = [
    Case(B=3, T=1, H=1, HV=1, K=128, padded=(0,)),
    Case(B=4, T=2, H=2, HV=4, K=64, pitch=3, dtype=torch.float16),
    Case(B=6, T=5, H=4, HV=4, K=128, V=64, pitch=8, lower_bound=-5.0),
    Case(B=5, T=7, H=1, HV=3, K=64, V=128, length=9, padded=(1,)),
    Case(B=3, T=16, H=2, HV=2, K=128, length=16, pitch=1),
]
SMALL = Case(B=3, T=4, H=2, HV=4, K=128, pitch=4)


def ring_of(case: Case, device: str) -> Problem:
    """A problem whose ring holds a verify."""
    return make_problem(case, device).run(verify_unfused)


def assert_folds_like_portable(
    problem: Problem, accept_lens: torch.Tensor, config: LaunchConfig, **options: Any
) -> None:
    """Same bits in the whole buffer, canaries and strangers' slots included; the ring is left alone."""
    ours = fold_problem(problem, accept_lens, config=config, **options)
    portable = fold_problem(problem, accept_lens, config=PORTABLE, **options)
    assert_same_bits(ours.whole("ssm_state"), portable.whole("ssm_state"), f"state, accept {accept_lens.tolist()}")
    for name in RING:
        assert_same_bits(ours.whole(name), problem.whole(name), f"{name} after fold")


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.id)
def test_every_prefix_equals_the_portable_fold(case: Case, config: LaunchConfig, device: str) -> None:
    problem = ring_of(case, device)
    for first in range(case.T + 1):
        lengths = [(first + i) % (case.T + 1) for i in range(case.B)]
        assert_folds_like_portable(problem, torch.tensor(lengths, device=device), config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_records_past_the_prefix_are_not_used(config: LaunchConfig, device: str) -> None:
    problem = ring_of(SMALL, device)
    lengths = [1, 3, 2]
    accept = torch.tensor(lengths, dtype=torch.int32, device=device)
    clean = fold_problem(problem, accept, config=PORTABLE)
    for slot, length in zip(problem.slots.tolist(), lengths, strict=True):
        for name in RING:
            problem[name][slot, :, length:] = float("nan")
    outcome = fold_problem(problem, accept, config=config)
    assert_same_bits(outcome.whole("ssm_state"), clean.whole("ssm_state"), "ssm_state")


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_a_ring_shorter_than_the_draft(config: LaunchConfig, device: str) -> None:
    problem = ring_of(Case(B=2, T=5, H=1, HV=2, K=128, length=3), device)
    errors = new_error_counts(device)
    with host_checks(False):
        outcome = fold_problem(problem, torch.tensor([3, 4], device=device), config=config, errors=errors)
    valid = fold_problem(problem, torch.tensor([3, 0], device=device), config=PORTABLE)
    assert_same_bits(outcome.whole("ssm_state"), valid.whole("ssm_state"), "ssm_state")
    assert errors.tolist() == [int(kind is ErrorKind.ACCEPT) for kind in ErrorKind]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_faults_met_on_the_device_are_counted_once_and_touch_nothing(config: LaunchConfig, device: str) -> None:
    problem = ring_of(Case(B=6, T=4, H=2, HV=4, K=128), device)
    slots, T = problem.slots.to(torch.int64), problem.case.T
    slots[0], slots[1] = 2**32, -2  # the lower half of the first is slot 0
    problem = problem.fork(slots=slots)
    accept = torch.tensor([2, 1, T + 1, -1, 2**32 + 1, 3], device=device)
    counts = {}
    for one in (PORTABLE, config):
        counts[one] = new_error_counts(device)
        with host_checks(False):
            outcome = fold_problem(problem, accept, config=one, errors=counts[one])
        expected = fold_problem(problem.fork(slots=torch.full_like(slots, -1)), torch.zeros_like(accept), config=one)
        expected["ssm_state"][slots[5]] = outcome["ssm_state"][slots[5]]
        assert_same_bits(outcome.whole("ssm_state"), expected.whole("ssm_state"), "ssm_state")
    found = {ErrorKind.SLOT: 2, ErrorKind.ACCEPT: 3}
    assert counts[config].tolist() == counts[PORTABLE].tolist() == [found.get(kind, 0) for kind in ErrorKind]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_tracked_steps_equal_the_portable_fold(config: LaunchConfig, device: str) -> None:
    """First and last step, one outside the prefix, none, a padded row; and a slot outside the pool, counted."""
    problem = ring_of(Case(B=6, T=4, H=2, HV=4, K=128, pitch=4, padded=(4,), spare_slots=6), device)
    used = set(problem.slots.tolist())
    free = [slot for slot in range(problem["ssm_state"].shape[0]) if slot not in used]
    accept = torch.tensor([4, 3, 2, 4, 4, 1], device=device)
    track_slots = torch.tensor([free[0], free[1], free[2], -1, free[3], free[4]], device=device)
    track_steps = torch.tensor([0, 2, 2, 1, 0, -1], device=device)
    assert_folds_like_portable(problem, accept, config, track_slots=track_slots, track_steps=track_steps)
    tracked = fold_problem(problem, accept, config=config, track_slots=track_slots, track_steps=track_steps)
    assert_same_bits(tracked["ssm_state"][free[1]], tracked["ssm_state"][problem.slots[1]], "state after the last step")

    errors = new_error_counts(device)
    track_slots[0] = 2**32
    with host_checks(False):
        fold_problem(problem, accept, config=config, track_slots=track_slots, track_steps=track_steps, errors=errors)
    assert errors.tolist() == [int(kind is ErrorKind.TRACK_SLOT) for kind in ErrorKind]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_layers_with_a_pitch_of_their_own(config: LaunchConfig, device: str) -> None:
    """Every other layer of a stack, of the ring too: the layers between stay untouched."""
    problem = ring_of(SMALL, device)
    accept = torch.tensor([4, 0, 2], device=device)
    states = torch.stack([problem["ssm_state"].nan_to_num() * scale for scale in (1, 2, 3, 4)])
    rings = [torch.stack([problem[name]] * 4) for name in RING]
    results = []
    for one in (PORTABLE, config):
        state = states.clone()
        fold(
            state[1::2], Ring(*(tensor[::2] for tensor in rings)), shape=problem.shape, slots=problem.slots,
            accept_lens=accept, draft_tokens=4, config=one,
        )  # fmt: skip
        results.append(state)
    assert_same_bits(results[1], results[0], "states")
    assert_same_bits(results[1][::2], states[::2], "layers between")
    assert not torch.equal(results[1], states)


# --- where it is refused -----------------------------------------------------------------------------------------


def refusal(config: LaunchConfig, device: str) -> str | None:
    problem = make_problem(Case(B=1, T=1, H=1, HV=1, K=64), device)
    return fold_reason(
        problem["ssm_state"][None], with_layers(problem.ring), shape=problem.shape, slots=problem.slots,
        accept_lens=torch.ones_like(problem.slots), draft_tokens=1, config=config,
    )  # fmt: skip


@interpreter_only
def test_refused_with_a_reason_in_the_interpreter(device: str) -> None:
    reason = refusal(CONFIGS[0], device)
    assert reason is not None
    assert "config.rows_per_thread=4" in reason
    assert "interpreter" in reason
    assert refusal(PORTABLE, device) is None


def test_refused_with_a_reason_on_amd(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "TARGET_OVERRIDE", ("hip", 0))
    reason = refusal(CONFIGS[0], device)
    assert reason is not None
    assert "config.rows_per_thread=4" in reason
    assert "hip" in reason


# --- its compiled code -------------------------------------------------------------------------------------------


def test_it_compiles_for_every_nvidia_target_without_spills() -> None:
    config = CompileSpec("fold", config=FOLD_SHORT).name
    selection = Selection(kernels=("fold",), configs=(config,))
    results = compile_all(selection)
    assert [f"{r.target}: {r.failure}" for r in results if r.failure] == []
    compiled = compiled_kernels(results, selection)
    assert [one.target for one in compiled] == ["sm80", "sm90", "sm100", "sm103", "sm120"]
    for one in compiled:
        assert one.broken == (), one.target
        assert one.stats.spills == 0, one.target
        assert one.stats.registers <= 128, f"{one.target}: {one.stats.registers} registers: fewer than 16 warps per SM"
        # One warp: the norms of 4 tokens over 32 lanes; in the loop 2 rows of a thread, each summed over 8 lanes.
        assert one.stats.shuffles == 4 * 5 + 2 * 3, one.target


def instructions_of(target: str) -> list[str]:
    """Machine code of `FOLD_TILE`; runs in a process without the interpreter."""
    from kda_kernels.aot import capture
    from kda_tooling.compiling.stats import sass_of, sass_opcodes

    with capture(target) as compiled:
        CompileSpec("fold", config=FOLD_TILE).call()
    return sass_opcodes(sass_of(compiled[0]))


def test_the_state_is_asked_for_before_anything_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No load may come after the first use of a loaded record: its latency would be paid twice."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        opcodes = pool.submit(instructions_of, "sm90").result()
    loads = [i for i, op in enumerate(opcodes) if op.startswith("LDG")]
    wide = [i for i in loads if ".128" in opcodes[i]]
    first_use = min(i for i, op in enumerate(opcodes) if re.match(r"SHFL|MUFU\.(EX2|SQRT)|STS", op))
    assert len(wide) >= FOLD_TILE.block_v // FOLD_TILE.num_warps, "the state is loaded 16 bytes at a time"
    assert max(loads) < first_use
    loop = opcodes[max(i for i, op in enumerate(opcodes) if op.startswith("BAR")) + 1 :]
    assert not [op for op in loop if op.startswith(("LDG", "BAR"))], "steps neither load nor wait for other warps"
