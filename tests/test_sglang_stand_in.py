"""On the GPU: the SGLang plugin's adapters in the place of SGLang's own functions, given the very same keywords.

Rings and windows must have SGLang's bits. Outputs and committed state cannot (sums over K have another order): they
must be at least as near to an fp64 oracle as SGLang's. Where SGLang's wheel is looked for: tests/test_sglang_peer.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_backend.sglang.commit import commit_kda_replayssm_after_verify
from kda_backend.sglang.verify import fused_kda_conv_gating_verify
from kda_kernels import KdaShape, Ring, verify_unfused
from kda_kernels.reference import delta_step, l2_normalise
from kda_tooling.bench.accuracy import Errors, after_record, spacing
from kda_tooling.peers import load_peer
from kda_tooling.problem import Problems, VerifyProblem, random_problems
from tests.support.bits import as_bits
from tests.support.ops import RING

SGLANG = Path(os.environ.get("KDA_SGLANG", Path(__file__).parents[1] / "peer"))
needs_sglang = pytest.mark.skipif(
    not (SGLANG / "sglang").is_dir(), reason=f"no SGLang at {SGLANG}: unpack its wheel there or set KDA_SGLANG"
)

RING_LENGTH = 16  # SGLang's default
LEAST_WITHIN_ULP, MOST_OVER_SGLANG = 0.9999, 1.01

# shape, B, T, activation dtype, weight dtype (None: the same), lower bound, bias
CASES = {
    "B5-T4-H8-HV8-K128-bf16-safe-bias": (KdaShape(8, 8), 5, 4, torch.bfloat16, None, -5.0, True),
    "B3-T3-H4-HV8-K128-bf16-fp32weights": (KdaShape(4, 8), 3, 3, torch.bfloat16, torch.float32, None, True),
    "B3-T6-H16-HV16-K128-fp16-safe": (KdaShape(16, 16), 3, 6, torch.float16, None, -5.0, False),
    "B2-T8-H1-HV16-K128-bf16-standard": (KdaShape(1, 16), 2, 8, torch.bfloat16, None, None, True),
    "B2-T4-H4-HV4-K64-bf16-safe": (KdaShape(4, 4, 64, 64), 2, 4, torch.bfloat16, None, -5.0, True),
    "B100-T4-H8-HV8-K128-bf16-safe-bias": (KdaShape(8, 8), 100, 4, torch.bfloat16, None, -5.0, True),
}

# Enough outputs that one or two near zero, many ulps off in anybody's arithmetic, do not decide: 262,144 each.
ACCURACY = {
    "T4-bf16-safe": (KdaShape(8, 8), 64, 4, torch.bfloat16, None, -5.0, True),
    "T8-bf16-standard": (KdaShape(4, 8), 32, 8, torch.bfloat16, None, None, False),
    "T4-fp16-safe": (KdaShape(8, 8), 64, 4, torch.float16, torch.float32, -5.0, True),
}


def sglang_function(module: str, name: str) -> Callable[..., Any]:
    """A function of SGLang's kernels, as its wheel defines it."""
    load_peer(f"sglang={SGLANG}")
    found: Callable[..., Any] = getattr(importlib.import_module(f"sglang.kernels.ops.{module}"), name)
    return found


def sglang_verify() -> Callable[..., torch.Tensor]:
    return sglang_function("attention.linear.fused_kda_conv_recurrent_verify", "fused_kda_conv_gating_verify")


def build(case: tuple[Any, ...], layers: int = 1, device: str = "cuda") -> Problems:
    """Random problems whose ring is as long as SGLang's."""
    shape, batch, tokens, dtype, weight_dtype, lower_bound, bias = case
    problems = random_problems(
        shape, layers=layers, batch=batch, draft_tokens=tokens, dtype=dtype, device=device, lower_bound=lower_bound,
        bias=bias, weight_dtype=weight_dtype,
    )  # fmt: skip
    slots = problems.state.ssm_state.shape[1]
    ring = Ring.allocate(shape, slots=slots, length=RING_LENGTH, dtype=dtype, device=device, num_layers=layers)
    each = [dataclasses.replace(p, ring=ring.layer(i)) for i, p in enumerate(problems.layers)]
    return dataclasses.replace(problems, ring=ring, layers=each)


def keywords(p: VerifyProblem) -> dict[str, Any]:
    """What SGLang's KDA backend passes to its fused verify."""
    ring, shape, tokens = p.record("ring"), p.shape, p.mixed_qkv.shape[0]
    return {
        "mixed_qkv": p.mixed_qkv, "conv_weight": p.params.conv_weight, "conv_bias": p.params.conv_bias,
        "conv_state": p.state.conv_state.transpose(-1, -2), "conv_state_indices": p.slots,
        "intermediate_conv_window": p.state.conv_window.transpose(-1, -2),
        "intermediate_state_indices": torch.arange(p.batch, dtype=torch.int32, device=p.slots.device),
        "a": p.a.view(1, tokens, shape.num_v_heads, shape.head_k_dim), "b": p.b.unsqueeze(0),
        "A_log": p.params.A_log.view(1, 1, -1, 1), "dt_bias": p.params.dt_bias, "ssm_states": p.state.ssm_state,
        "cache_indices": p.slots, "intermediate_states_buffer": None, "scale": shape.head_k_dim**-0.5,
        "T": p.draft_tokens, "num_q_heads": shape.num_heads, "num_v_heads": shape.num_v_heads,
        "head_k_dim": shape.head_k_dim, "head_v_dim": shape.head_v_dim, "lower_bound": p.params.lower_bound,
        "cache_ring": True, "replayssm_rawv": ring.raw_v, "replayssm_rawk": ring.raw_k, "replayssm_g": ring.g,
        "replayssm_beta": ring.beta,
    }  # fmt: skip


def records(p: VerifyProblem, fill: float | None = None) -> list[torch.Tensor]:
    """Ring and windows: copies, or, with ``fill``, the buffers themselves, poisoned."""
    buffers = [getattr(p.record("ring"), name) for name in RING] + [p.state.conv_window]
    return [b.clone() if fill is None else b.fill_(fill) for b in buffers]


def check_records(problem: VerifyProblem, padded: bool) -> None:
    """Run SGLang's function and ours with the same keywords: equal records, state untouched."""
    if padded:  # as graph replay with fewer requests
        problem.slots[-1] = -1
    given = keywords(problem)
    untouched = [problem.state.conv_state.clone(), problem.state.ssm_state.clone()]
    found, outputs = [], []
    for function in (sglang_verify(), fused_kda_conv_gating_verify):
        records(problem, fill=3.0)
        outputs.append(function(**given))
        found.append(records(problem))
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(as_bits(theirs), as_bits(ours))
    for before, after in zip(untouched, (problem.state.conv_state, problem.state.ssm_state), strict=True):
        assert torch.equal(as_bits(before), as_bits(after))
    assert outputs[0].shape == outputs[1].shape
    assert outputs[0].dtype == outputs[1].dtype
    if padded:
        assert not outputs[1][0, -problem.draft_tokens :].any()


@needs_sglang
@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_rings_and_windows_have_sglangs_bits(case: str, padded: bool) -> None:
    check_records(build(CASES[case]).layers[0], padded)


@needs_sglang
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_rings_and_windows_have_sglangs_bits_on_any_device(device: str) -> None:
    """A small case for machines without a GPU. fp16: in Triton's interpreter SGLang's kernel cannot multiply bf16."""
    case = KdaShape(1, 2, 64, 64), 4, 3, torch.float16, None, -5.0, True
    check_records(build(case, device=device).layers[0], padded=True)


@needs_sglang
@pytest.mark.gpu
@pytest.mark.parametrize("case", ACCURACY)
def test_outputs_are_as_near_to_exact_as_sglangs(case: str) -> None:
    (problem,) = build(ACCURACY[case]).layers
    verify_unfused(
        problem.mixed_qkv, problem.a, problem.b, shape=problem.shape, params=problem.params, state=problem.state,
        record=problem.record("ring"), slots=problem.slots, draft_tokens=problem.draft_tokens,
        workspace=problem.workspace,
    )  # fmt: skip
    exact = after_record(problem, "recurrent", torch.float64)
    ulp = spacing(exact, problem.mixed_qkv.dtype)
    errors = {}
    for name, function in (("sglang", sglang_verify()), ("ours", fused_kda_conv_gating_verify)):
        errors[name] = Errors()
        errors[name].add(function(**keywords(problem))[0], exact, ulp)
    within = errors["ours"].within / errors["ours"].outputs
    assert within >= LEAST_WITHIN_ULP, f"{within:.4%} of outputs within 1 ulp"
    ratio = errors["ours"].norm / errors["sglang"].norm
    assert ratio <= MOST_OVER_SGLANG, f"error norm {ratio:.4f} x SGLang's"


def exact_state(problem: VerifyProblem, accept: list[int]) -> torch.Tensor:
    """[B, HV, V, K] fp64: each request's state after its accepted prefix, from the ring's records."""
    shape, ring, states = problem.shape, problem.record("ring"), []
    group = shape.num_v_heads // shape.num_heads
    for slot, length in zip(problem.slots.tolist(), accept, strict=True):
        S = problem.state.ssm_state[slot].double()
        for t in range(length):
            k = l2_normalise(ring.raw_k[slot, :, t].double()).repeat_interleave(group, 0)
            rest = (x[slot, :, t].double() for x in (ring.raw_v, ring.g, ring.beta))
            S = delta_step(S, k, *rest)
        states.append(S)
    return torch.stack(states)


@needs_sglang
@pytest.mark.gpu
@pytest.mark.parametrize("case", ACCURACY)
def test_committed_state_is_as_near_to_exact_as_sglangs(case: str) -> None:
    problems = build(ACCURACY[case], layers=2)
    for problem in problems.layers:
        fused_kda_conv_gating_verify(**keywords(problem))
    tokens, batch = problems.layers[0].draft_tokens, problems.layers[0].batch
    accept = [b % (tokens + 1) for b in range(batch)]
    accept_lens = torch.tensor(accept, dtype=torch.int32, device="cuda")
    exact = torch.stack([exact_state(p, accept) for p in problems.layers])
    slots, errors, committed = problems.layers[0].slots, {}, {}
    theirs = sglang_function("attention.linear.kda_replayssm_spec_decode", "commit_kda_replayssm_after_verify")
    ring = problems.record("ring")
    for name, function in (("sglang", theirs), ("ours", commit_kda_replayssm_after_verify)):
        state = types.SimpleNamespace(
            temporal=problems.state.ssm_state.clone(), conv=[problems.state.conv_state.clone()],
            intermediate_conv_window=[problems.state.conv_window],
            replayssm_rawv=ring.raw_v, replayssm_rawk=ring.raw_k, replayssm_g=ring.g, replayssm_beta=ring.beta,
        )  # fmt: skip
        function(
            spec_state=state, state_batch_indices=slots, accept_lens=accept_lens,
            last_correct_step_indices=(accept_lens - 1).long(),
        )  # fmt: skip
        committed[name] = state
        errors[name] = Errors()
        errors[name].add(state.temporal[:, slots.long()], exact)
    assert torch.equal(as_bits(committed["ours"].conv[0]), as_bits(committed["sglang"].conv[0]))
    ratio = errors["ours"].norm / errors["sglang"].norm
    assert ratio <= MOST_OVER_SGLANG, f"error norm of the states {ratio:.4f} x SGLang's ({errors['ours'].norm:.2e})"


@needs_sglang
@pytest.mark.gpu
def test_tracked_slots_and_stable_rows_are_sglangs() -> None:
    """A second slot gets an accepted step's state; windows come from the rows that SGLang names."""
    problems = build(CASES["B5-T4-H8-HV8-K128-bf16-safe-bias"], layers=2)
    rows = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32, device="cuda")
    for problem in problems.layers:
        fused_kda_conv_gating_verify(**keywords(problem) | {"intermediate_state_indices": rows})
    # Four requests are committed: the fifth one's slot and a spare slot are free to receive tracked states.
    slots, every = problems.layers[0].slots, range(problems.state.ssm_state.shape[1])
    spare = next(s for s in every if s not in slots.tolist())
    free = [spare, int(slots[4])]
    accept = torch.tensor([4, 0, 2, 3], dtype=torch.int32, device="cuda")
    track = {
        "mamba_track_indices": torch.tensor([free[0], -1, free[1], -1], device="cuda"),
        "mamba_steps_to_track": torch.tensor([1, -1, 0, -1], device="cuda"),
        "src_indices_raw": rows[:4].long(),
    }
    theirs = sglang_function("attention.linear.kda_replayssm_spec_decode", "commit_kda_replayssm_after_verify")
    ring, committed = problems.record("ring"), []
    for function in (theirs, commit_kda_replayssm_after_verify):
        state = types.SimpleNamespace(
            temporal=problems.state.ssm_state.clone(), conv=[problems.state.conv_state.clone()],
            intermediate_conv_window=[problems.state.conv_window],
            replayssm_rawv=ring.raw_v, replayssm_rawk=ring.raw_k, replayssm_g=ring.g, replayssm_beta=ring.beta,
        )  # fmt: skip
        function(
            spec_state=state, state_batch_indices=slots[:4], accept_lens=accept,
            last_correct_step_indices=(accept - 1).long(), **track,
        )  # fmt: skip
        committed.append(state)
    assert torch.equal(as_bits(committed[0].conv[0]), as_bits(committed[1].conv[0]))
    for slot in every:
        one, other = (state.temporal[:, slot] for state in committed)
        assert (one - other).norm() <= 1e-6 * one.norm(), f"slot {slot}"
    for slot in free:
        assert not torch.equal(committed[1].temporal[:, slot], problems.state.ssm_state[:, slot])
