"""Microseconds of the host per call, outside CUDA graphs: the first call of its kind, and all that equal it."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from kda_backend import StatePool, Target, lane_mode
from kda_backend.gate import decide, device_name_of
from kda_kernels import KdaShape, _launch, fold, scatter_conv, scatter_snapshots, verify_fused, verify_unfused
from kda_tooling.problem import Problems, VerifyProblem, random_problems

LAYERS = 8
LANES_TIMED = ("fused+ring", "unfused+ring")
BURST = 32
"""Calls between two waits for the device: few enough that the launch queue never makes the host wait."""

Call = Callable[[], object]


@dataclass(frozen=True)
class HostTime:
    """Medians over bursts of calls, in us per call.

    Args:
        op: what was called.
        checked: with all checks and Triton's own binding of arguments, as in a first call.
        replayed: as in later calls.
    """

    op: str
    checked: float
    replayed: float


@contextmanager
def _every_call_checked() -> Iterator[None]:
    """Calls are not replayed while someone watches the launches."""
    before = _launch.LAUNCHER
    _launch.LAUNCHER = lambda *launch: before(*launch)
    try:
        yield
    finally:
        _launch.LAUNCHER = before


def processor() -> str:
    """The CPU's name, or "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _time(calls: Sequence[Call], number: int, before: Call | None = None) -> float:
    """Median us per call over bursts of at least ``number`` calls in all; ``before`` each, untimed, what it needs."""
    endless = cycle(calls)
    samples = []
    for _ in range(max(1, -(-number // BURST))):
        burst = list(islice(endless, BURST))
        torch.cuda.synchronize()
        spent = 0
        if before is None:
            start = time.perf_counter_ns()
            for call in burst:
                call()
            spent = time.perf_counter_ns() - start
        else:
            for call in burst:
                before()
                start = time.perf_counter_ns()
                call()
                spent += time.perf_counter_ns() - start
        samples.append(spent / BURST / 1e3)
    torch.cuda.synchronize()
    return statistics.median(samples)


def _calls(problems: Problems) -> dict[str, list[Call]]:
    """By name: the same call on every layer, or for commits the one of all layers."""
    first = problems.layers[0]

    def verify(op: Callable[..., torch.Tensor], mode: str, **more: Any) -> list[Call]:
        return [
            partial(
                op, p.mixed_qkv, p.a, p.b, shape=p.shape, params=p.params, state=p.state, record=p.record(mode),
                slots=p.slots, draft_tokens=p.draft_tokens, errors=p.errors, **more,
            )
            for p in problems.layers
        ]  # fmt: skip

    rows: dict[str, Any] = {
        "slots": first.slots, "accept_lens": torch.ones_like(first.slots), "draft_tokens": first.draft_tokens,
        "errors": first.errors,
    }  # fmt: skip
    state, ring, snapshots = problems.state, problems.record("ring"), problems.record("snapshots")
    out_shape = (first.mixed_qkv.shape[0], first.shape.num_v_heads, first.shape.head_v_dim)
    calls: dict[str, list[Call]] = {
        "verify_fused, ring": verify(verify_fused, "ring"),
        "verify_fused, snapshots": verify(verify_fused, "snapshots"),
        "verify_unfused, ring": verify(verify_unfused, "ring"),
        "verify_unfused, ring, workspace given": verify(verify_unfused, "ring", workspace=first.workspace),
        "fold": [partial(fold, state.ssm_state, ring, shape=first.shape, **rows)],
        "scatter_conv": [partial(scatter_conv, state.conv_state, state.windows, **rows)],
        "scatter_snapshots": [partial(scatter_snapshots, state.ssm_state, snapshots, **rows)],
        "(allocating the output)": [partial(first.mixed_qkv.new_empty, *out_shape)],
        "(a remembered gate decision)": [_decision(first)],
        "(a remembered gate decision, record given)": [_decision(first, record=first.record("ring"))],
    }
    whole = {lane: partial(_whole, *_round_of(problems, lane)) for lane in LANES_TIMED}
    return calls | {f"pool, {lane}: begin, {LAYERS} x verify, commit": [whole[lane]] for lane in LANES_TIMED}


def _commits(problems: Problems) -> dict[str, tuple[Call, Call]]:
    """By name: a pool's commit of all layers, and before it what it needs."""
    lanes = {"ring": "fused+ring", "snapshots": "fused"}
    return {f"pool, {mode}: commit of {LAYERS} layers": _round_of(problems, lane) for mode, lane in lanes.items()}


def _decision(problem: VerifyProblem, **more: Any) -> Call:
    """What the dispatch gate is asked before a verify."""
    device = problem.mixed_qkv.device
    return partial(
        decide, problem.shape, mode="ring", batch=problem.batch, draft_tokens=problem.draft_tokens,
        device_name=device_name_of(device), target=Target.of(device), **more,
    )  # fmt: skip


def _round_of(problems: Problems, lane: str) -> tuple[Call, Call]:
    """A pool's round in two calls: begin and verify on `LAYERS` layers; commit."""
    first = problems.layers[0]
    pool = StatePool(
        first.shape, num_layers=LAYERS, num_slots=first.state.ssm_state.shape[0], max_batch=first.batch,
        draft_tokens=first.draft_tokens, mode=lane_mode(lane), dtype=first.mixed_qkv.dtype,
        device=first.mixed_qkv.device,
    )  # fmt: skip

    def verify() -> None:
        pool.begin(first.slots, first.draft_tokens)
        for i, p in enumerate(problems.layers):
            pool.verify(i, p.mixed_qkv, p.a, p.b, p.params, lane=lane)

    return verify, partial(pool.commit, torch.ones_like(first.slots))


def _whole(verify: Call, commit: Call) -> None:
    verify()
    commit()


def measure(shape: KdaShape, *, batch: int, draft_tokens: int, calls: int, device: str = "cuda") -> list[HostTime]:
    """Time every op on the current CUDA device, ``calls`` times each way, and a pool's rounds and commits."""
    problems = random_problems(
        shape, layers=LAYERS, batch=batch, draft_tokens=draft_tokens, dtype=torch.bfloat16, device=device,
        snapshots=True,
    )  # fmt: skip
    timed: dict[str, tuple[list[Call], Call | None]] = {name: (each, None) for name, each in _calls(problems).items()}
    timed |= {name: ([commit], verify) for name, (verify, commit) in _commits(problems).items()}
    times = []
    for name, (each, before) in timed.items():
        _once(each, before)  # compiles
        with _every_call_checked():
            checked = _time(each, calls, before)
        _once(each, before)
        times.append(HostTime(name, checked, _time(each, calls, before)))
    return times


def _once(calls: Sequence[Call], before: Call | None) -> None:
    for call in calls:
        if before is not None:
            before()
        call()
