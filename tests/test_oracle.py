"""Kernels and torch reference against the fp64 oracle, and the oracle against flash-linear-attention's naive KDA.

Tolerances are running error bounds (tests/support/bounds.py); a 16-bit record must equal the oracle's exactly unless
fp32 error could have carried it over a rounding tie.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from kda_kernels import fold, fold_reference, verify_unfused
from tests.support import oracle
from tests.support.bits import assert_close
from tests.support.bounds import verify_bounds
from tests.support.cases import Case, Problem, dtype_name, make_problem, oracle_layer, to_numpy
from tests.support.commits import fold_problem
from tests.support.grids import GPU_CASES, INTERPRETER_CASES, params
from tests.support.ops import RING, WITH_REFERENCE


def check_against_oracle(problem: Problem, ring: Problem, snapshots: Problem) -> None:
    """``ring`` and ``snapshots``: what an op wrote for ``problem`` in the two modes."""
    case = problem.case
    layer = oracle_layer(problem.params, problem.shape, case.dtype)
    for i in range(case.B):
        slot = int(problem.slots[i])
        tokens = slice(i * case.T, (i + 1) * case.T)
        if slot < 0:
            assert not ring["out"][tokens].any(), "output rows of padded positions are 0"
            continue
        trace = problem.oracle_trace(i)
        bounds = verify_bounds(layer, trace)
        what = f"{{}} of request {i}".format
        assert_close(ring["out"][tokens], trace.out, bounds.out, what("output"))
        assert_close(ring["conv_window"][i], trace.window, 0.0, what("window"))
        for name in RING:
            record = ring[name][slot, :, : case.T].transpose(0, 1)
            assert_close(record, getattr(trace, name), getattr(bounds, name), what(name))
        assert_close(snapshots["snapshots"][i], trace.states, bounds.states, what("snapshots"))
        # Bounds that cannot fail prove nothing: at least 97 % of the records must be equal (fp16 has 2^13 fp32 steps
        # between two values, and a bound of some 30 each side of a tie), states good to 4 digits, outputs to 3.
        assert np.mean(bounds.y_rounded > 0) < 0.03
        assert np.median(bounds.states) < 1e-4 * np.abs(trace.states).max()
        assert np.median(bounds.out_unrounded) < 1e-3 * np.abs(trace.out).max()


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("case", params(INTERPRETER_CASES, GPU_CASES[::3]))
def test_verify_stays_within_fp32_error_of_the_oracle(case: Case, op: Callable[..., torch.Tensor], device: str) -> None:
    problem = make_problem(case, device)
    check_against_oracle(problem, problem.run(op, "ring"), problem.run(op, "snapshots"))


@pytest.mark.parametrize("op", [pytest.param(fold_reference, id="reference"), pytest.param(fold, id="kernel")])
@pytest.mark.parametrize("case", params(INTERPRETER_CASES[:2], GPU_CASES[1::9]))
def test_fold_stays_within_fp32_error_of_the_oracle(case: Case, op: Callable[..., None], device: str) -> None:
    """The oracle folds the records that were written, so conv and gate errors are no part of this bound."""
    problem = make_problem(case, device).run(verify_unfused, "ring")
    layer = oracle_layer(problem.params, problem.shape, case.dtype)
    lengths = [case.T - i % case.T for i in range(case.B)]
    folded = fold_problem(problem, torch.tensor(lengths, device=device), op)
    for i in problem.live():
        slot, n = int(problem.slots[i]), lengths[i]
        raw_k, raw_v, g, beta = (
            to_numpy(problem[name][slot, :, :n].transpose(0, 1)) for name in ("raw_k", "raw_v", "g", "beta")
        )
        expected = oracle.fold(layer, to_numpy(problem["ssm_state"][slot]), raw_k, raw_v, g, beta, n)
        bounds = verify_bounds(layer, problem.oracle_trace(i))
        assert_close(folded["ssm_state"][slot], expected, bounds.states[n - 1], f"state of request {i}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_oracle_rounds_as_ieee_does(dtype: torch.dtype) -> None:
    """Every 16-bit value is a fixed point; ties and neighbours of ties go where torch's fp32 conversion sends them."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).float()
    values = values[values.isfinite()]
    name = dtype_name(dtype)
    assert np.array_equal(oracle.round_to(to_numpy(values), name), to_numpy(values))
    half = oracle.ulp(to_numpy(values), name) / 2
    for offset in (half, half * (1 + 2.0**-10), half * (1 - 2.0**-10), -half):
        x = to_numpy(values) + offset
        as_fp32 = torch.from_numpy(x).float()
        exact = torch.from_numpy(x) == as_fp32.double()  # where fp32 holds x, torch rounds once
        expected = to_numpy(as_fp32.to(dtype))
        got = oracle.round_to(x, name)
        assert np.array_equal(got[exact.numpy()], expected[exact.numpy()])
        assert exact.double().mean() > 0.4


def test_oracle_commits_by_slot() -> None:
    conv_state = np.arange(4 * 3 * 2, dtype=float).reshape(4, 3, 2)
    window = 100 + np.arange(3 * 2 * 3 * 2, dtype=float).reshape(3, 2, 3, 2)
    committed = oracle.commit_conv(conv_state, window, slots=[3, -1, 0], accept_lens=[2, 2, 0])
    assert np.array_equal(committed[3], window[0, 1])
    assert np.array_equal(committed[:3], conv_state[:3])


def fla_module(name: str) -> ModuleType:
    """A module of flash-linear-attention, without its warning that there is no GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "fla.ops.kda",
            reason="flash-linear-attention is not installed: pip install fla-core==0.6.0 (dependency group `oracle`)",
        )
        return importlib.import_module(name)


FLA_CASES = params(
    [
        Case(B=1, T=4, H=2, HV=4, K=64),
        Case(B=1, T=3, H=1, HV=2, K=64, V=128, lower_bound=-5.0, dtype=torch.float16),
    ]
)


@pytest.mark.parametrize("case", FLA_CASES)
def test_oracle_agrees_with_flash_linear_attention(case: Case) -> None:
    """A second opinion on gates, norm and delta rule by other authors; theirs is fp32 and K-first [B, HV, K, V].

    It takes convolved q, k, v, so the conv is not covered by it.
    """
    naive, gates = fla_module("fla.ops.kda.naive"), fla_module("fla.ops.kda.gate")
    problem = make_problem(case, "cpu")
    layer = oracle_layer(problem.params, problem.shape, case.dtype)
    trace = problem.oracle_trace(0)
    bounds = verify_bounds(layer, trace)
    p, shape = problem.params, problem.shape

    raw_gate = problem.a.float().view(1, case.T, shape.num_v_heads, shape.head_k_dim)
    if p.lower_bound is None:
        g = gates.naive_kda_gate(raw_gate, p.A_log, p.dt_bias)
    else:
        g = gates.naive_kda_lowerbound_gate(raw_gate, p.A_log, p.dt_bias, p.lower_bound)
    assert_close(g[0], trace.g, bounds.g, "gate")

    def normalised(x: np.ndarray) -> torch.Tensor:
        # their kernels' l2-norm has the 1e-6 under the root as ours has
        t = torch.from_numpy(x).float()
        return (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6))[None]

    out, state = naive.naive_recurrent_kda(
        normalised(trace.raw_q), normalised(trace.raw_k), torch.from_numpy(trace.raw_v).float()[None], g,
        torch.sigmoid(problem.b.float())[None],
        initial_state=problem["ssm_state"][int(problem.slots[0])].transpose(-1, -2)[None], output_final_state=True,
    )  # fmt: skip
    assert_close(state[0].transpose(-1, -2), trace.states[-1], bounds.states[-1], "state")
    assert_close(out[0], trace.out, bounds.out_unrounded, "output")
