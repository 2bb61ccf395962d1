"""The chunked form against the fp64 oracle, at its extremes too, and what it refuses.

The oracle steps the state token by token; the bound (tests/support/bounds_chunked.py) is a running error analysis of
the chunked form's own steps. An output must lie between the roundings of both ends of [oracle - bound, oracle + bound]:
for most outputs these are the same 16-bit value.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kda_kernels import (
    MAX_CHUNKED_TOKENS,
    Ring,
    reference_precision,
    verify_fused,
    verify_reason,
    verify_reference,
)
from tests.support import oracle
from tests.support.bits import assert_close, assert_same_bits
from tests.support.bounds import verify_bounds
from tests.support.bounds_chunked import chunked_out
from tests.support.cases import Case, Problem, dtype_name, make_problem, oracle_layer, to_numpy
from tests.support.grids import GPU_CASES, INTERPRETER_CASES, params
from tests.support.ops import RING, WITH_REFERENCE, Verify
from tests.test_reference_precision import make_problem_off_ties

LONG = (
    Case(B=2, T=5, H=1, HV=2, K=64, dtype=torch.float16),
    Case(B=1, T=16, H=1, HV=2, K=128, lower_bound=-5.0),
)
GPU_LONG = (
    Case(B=4, T=16, H=4, HV=8, K=128),
    Case(B=4, T=11, H=4, HV=4, K=64, V=128, dtype=torch.float16, lower_bound=-5.0, padded=(3,)),
)
# in the interpreter numpy says so
RANGES = pytest.mark.filterwarnings("ignore:(overflow|invalid|underflow):RuntimeWarning")


def check_outputs(problem: Problem, outcome: Problem) -> None:
    """Every live row of ``outcome`` against the oracle."""
    case = problem.case
    layer = oracle_layer(problem.params, problem.shape, case.dtype)
    act = dtype_name(case.dtype)
    sure = []
    for i in range(case.B):
        out = outcome["out"][i * case.T : (i + 1) * case.T]
        if i not in problem.live():
            assert not out.any()
            assert not out.isnan().any(), "output rows of padded positions are 0"
            continue
        trace = problem.oracle_trace(i)
        value, bound = chunked_out(layer, trace)
        # The two forms are one function: in fp64 they differ by its rounding only.
        assert np.abs(value - trace.out).max() <= 2.0**-40 * np.abs(trace.out).max()
        low, high = (oracle.round_to(trace.out + side * bound, act) for side in (-1, 1))
        assert_close(out, (low + high) / 2, (high - low) / 2, f"output of request {i}")
        sure.append(low == high)
        assert np.median(bound) < 1e-4 * np.abs(trace.out).max()
    # Fewer where a SiLU output of the case lies near a rounding tie, which makes a token's bounds wide, and in fp16,
    # whose steps are 8 times finer than bf16's: 0.43 is the least of 36 cases.
    assert np.mean(sure) >= 1 / 3, "bounds that wide prove little"


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("case", params((*INTERPRETER_CASES, *LONG), (*GPU_CASES[::3], *GPU_LONG)))
def test_outputs_stay_within_fp32_error_of_the_oracle(case: Case, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    check_outputs(problem, problem.run(op, form="chunked"))


@pytest.mark.parametrize("case", params((*INTERPRETER_CASES, *LONG)))
def test_the_reference_in_fp64_is_the_oracle_rounded_once(case: Case) -> None:
    problem = make_problem_off_ties(case)
    with reference_precision(torch.float64):
        outcome = problem.run(verify_reference, form="chunked")
        recurrent = problem.run(verify_reference)
    for name in RING:
        assert torch.equal(outcome[name].nan_to_num(), recurrent[name].nan_to_num())
    act = dtype_name(case.dtype)
    for i in problem.live():
        trace = problem.oracle_trace(i)
        slack = 2.0**-40 * np.abs(trace.out).max() + oracle.ulp(trace.out, "float32") / 2  # rounded by way of fp32
        out = outcome["out"][i * case.T : (i + 1) * case.T]
        assert_close(out, trace.out, oracle.ulp(trace.out, act) / 2 + slack, "output")


def with_gate_input(problem: Problem, a: float, rate_log: float = 0.0) -> Problem:
    """Every token's gate input is ``a`` and no bias: the decay of all channels is that of ``a`` at this rate."""
    p = problem.params
    quiet = replace(p, A_log=torch.full_like(p.A_log, rate_log), dt_bias=torch.zeros_like(p.dt_bias))
    return problem.fork(params=quiet, a=torch.full_like(problem.a, a))


EXTREMES = {
    # softplus(-100) is 0 in fp32: the decay is exactly 1, and nothing fades over 16 tokens
    "no-decay": (-100.0, 0.0),
    # g = -148 * 8: every decay underflows to 0, only a token's own key and value are left of the chunk
    "all-decay": (8.0, 5.0),
    # g = -20: P passes through the subnormal numbers at token 4 and is 0 from token 5 on
    "decay-through-subnormals": (20.0, 0.0),
}


@RANGES
@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("T", [3, 16])
def test_decays_of_one_and_of_zero(T: int, extreme: str, op: Verify, device: str) -> None:
    problem = with_gate_input(make_problem(Case(B=1, T=T, H=1, HV=2, K=64), device), *EXTREMES[extreme])
    outcome = problem.run(op, form="chunked")
    decay = torch.exp(outcome["g"][int(problem.slots[0]), :, :T])
    if extreme == "no-decay":
        assert bool((decay == 1).all())
    if extreme == "all-decay":
        assert bool((decay == 0).all())
    check_outputs(problem, outcome)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_the_same_token_over_and_over(dtype: torch.dtype, op: Verify, device: str) -> None:
    """beta 1, decay 1 and equal keys: all of A below the diagonal is 1, which no system can exceed.

    The running bound takes |A| and would double with every token. In truth (I + A)^-1 is bidiagonal here and nothing
    grows, so the recurrent form's bound must hold.
    """
    problem = with_gate_input(make_problem(Case(B=1, T=16, H=1, HV=1, K=64, dtype=dtype), device), -100.0)
    same = problem.mixed_qkv[:1].expand_as(problem.mixed_qkv).contiguous()
    problem = problem.fork(mixed_qkv=same, b=torch.full_like(problem.b, 30.0))
    trace = problem.oracle_trace(0)
    bounds = verify_bounds(oracle_layer(problem.params, problem.shape, dtype), trace)
    assert_close(problem.run(op, form="chunked")["out"], trace.out, bounds.out, "output")


@pytest.mark.parametrize("op", WITH_REFERENCE)
def test_a_chunk_of_one_token_is_the_recurrent_step(op: Verify, device: str) -> None:
    """Within rounding: o = S (q d - C k d) + C v, beside ((S d) + u k) q."""
    problem = make_problem(Case(B=2, T=1, H=2, HV=4, K=64), device)
    chunked, recurrent = problem.run(op, form="chunked"), problem.run(op)
    spacing = torch.tensor(oracle.ulp(to_numpy(recurrent["out"]), "bfloat16"), device=device)
    # one bf16 step, and what fp32 leaves of outputs that cancel to almost nothing
    distance = (chunked["out"].double() - recurrent["out"].double()).abs()
    assert bool((distance <= spacing + 2.0**-18 * recurrent["out"].abs().max()).all())


SMALL = Case(B=1, T=2, H=1, HV=1, K=64)


class TestRefusals:
    @pytest.mark.parametrize("op", WITH_REFERENCE)
    def test_snapshots_have_no_states_to_hold(self, op: Verify, device: str) -> None:
        problem = make_problem(SMALL, device)
        with pytest.raises(
            ValueError, match="form='chunked' never computes the states that snapshots hold: use a Ring"
        ):
            problem.run(op, "snapshots", form="chunked")

    @pytest.mark.parametrize("op", WITH_REFERENCE)
    def test_more_tokens_than_a_chunk_holds(self, op: Verify, device: str) -> None:
        T = MAX_CHUNKED_TOKENS + 1
        problem = make_problem(replace(SMALL, T=T), device)
        with pytest.raises(ValueError, match=rf"draft_tokens must be at most 16 with form='chunked', got {T}"):
            problem.run(op, form="chunked")
        positional, keywords = problem.arguments("ring")
        needs = dict(needs_kernels=op is not verify_reference)
        assert verify_reason(*positional, **keywords, **needs) is None, "the recurrent form takes them"

    @pytest.mark.parametrize("form", ["x", "", "Chunked", None])
    @pytest.mark.parametrize("op", WITH_REFERENCE)
    def test_other_names_of_forms(self, op: Verify, form: object, device: str) -> None:
        problem = make_problem(SMALL, device)
        with pytest.raises(ValueError, match=r"form must be one of \('recurrent', 'chunked'\), got"):
            problem.run(op, form=form)

    def test_a_refused_call_writes_nothing(self, device: str) -> None:
        problem = make_problem(SMALL, device)
        before = {name: problem.whole(name).clone() for name in problem.buffers}
        positional, keywords = problem.arguments("snapshots", form="chunked")
        with pytest.raises(ValueError, match="form"):
            verify_fused(*positional, **keywords)
        for name, old in before.items():
            assert torch.equal(problem.whole(name).view(torch.uint8), old.view(torch.uint8)), name


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("length", [1, 3])
def test_a_ring_shorter_than_the_chunk_only_drops_records(length: int, op: Verify, device: str) -> None:
    problem = make_problem(Case(B=1, T=4, H=1, HV=2, K=64), device)
    rings, outputs = [], []
    for L in (length, 4):
        like = Ring.allocate(
            problem.shape, slots=problem["beta"].shape[0], length=L, dtype=problem.case.dtype, device=device
        )
        rings.append(Ring(*(torch.full_like(getattr(like, name), 3.0) for name in RING)))
        outputs.append(problem.run(op, record=rings[-1], form="chunked")["out"])
    assert_same_bits(outputs[0], outputs[1], "output")
    for name in RING:
        kept = getattr(rings[1], name)[:, :, :length]
        assert_same_bits(getattr(rings[0], name), kept, name)
        assert bool((kept != 3.0).any())
