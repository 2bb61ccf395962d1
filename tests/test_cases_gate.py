"""Gate arithmetic: lower_bound honoured, the softplus threshold, head sizes, beta sigmoided once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kda_kernels import KdaShape
from tests.support import oracle
from tests.support.bits import assert_close
from tests.support.bounds import verify_bounds
from tests.support.cases import Case, Problem, make_problem, oracle_layer, to_numpy
from tests.support.commits import fold_problem
from tests.support.grids import params
from tests.support.ops import RING, WITH_REFERENCE, Verify

SMALL, LARGE = Case(B=1, T=2, H=1, HV=2, K=64), Case(B=2, T=3, H=4, HV=8, K=128)


def record(problem: Problem, name: str) -> torch.Tensor:
    """[T, ...]: request 0's ring record, by token."""
    return problem[name][int(problem.slots[0]), :, : problem.case.T].transpose(0, 1)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("case", params([SMALL], [LARGE]))
def test_G1_both_gates_from_raw_inputs(case: Case, op: Verify, device: str) -> None:
    """From raw a, b, A_log and dt_bias on both sides; None and -5 and -2 differ, and each equals the oracle."""
    problem = make_problem(case, device)
    outputs = []
    for lower_bound in (None, -5.0, -2.0):
        gated = problem.fork(params=replace(problem.params, lower_bound=lower_bound))
        outcome, snapshots = gated.run(op, "ring"), gated.run(op, "snapshots")
        trace = gated.oracle_trace(0)
        bounds = verify_bounds(oracle_layer(gated.params, gated.shape, case.dtype), trace)
        assert_close(record(outcome, "g"), trace.g, bounds.g, f"g with lower_bound={lower_bound}")
        assert_close(record(outcome, "beta"), trace.beta, bounds.beta, "beta")
        assert_close(outcome["out"][: case.T], trace.out, bounds.out, f"output with lower_bound={lower_bound}")
        assert_close(snapshots["snapshots"][0], trace.states, bounds.states, "snapshots")
        if lower_bound is not None:
            assert float(record(outcome, "g").min()) >= lower_bound
        outputs.append(outcome["out"])
    for one in range(3):
        for two in range(one):
            assert not torch.equal(outputs[one], outputs[two]), "lower_bound made no difference"


# numpy, in the interpreter, says so; exp(x) = inf is part of both forms and must not reach a result
OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

# a + dt_bias, with a = 0: values around the threshold 20, where exp(x) overflows fp32 (> 88.7), and far below 0
GATE_INPUTS = (19.9, 20.0, 20.1, 88.0, 100.0, 1e4, -100.0, -10.0, -20.0, 0.0)


@OVERFLOWS
@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("case", params([SMALL], [LARGE]))
def test_G2_softplus_threshold(case: Case, op: Verify, device: str) -> None:
    """g = -log(1 + exp(x)), x itself above 20, at A_log = 0, within 4 fp32 ulps of 1 absolute and 4 ulps relative.

    The contract's form is log(1 + exp(x)), not log1p: 1 + exp(x) is rounded to a multiple of 2^-23, so below x = -10
    the *relative* accuracy is lost (at -20 the result is 0), while the absolute error stays a few ulps of 1.
    """
    problem = make_problem(case, device)
    K, HV = problem.shape.head_k_dim, problem.shape.num_v_heads
    x = torch.tensor(GATE_INPUTS, device=device).repeat(HV * K)[: HV * K].contiguous()
    problem.a.zero_()
    zero = torch.zeros(HV, device=device)
    problem.params = replace(problem.params, dt_bias=x, A_log=zero, lower_bound=None)
    outcome = problem.run(op)
    g = record(outcome, "g")
    assert g.isfinite().all()
    assert (g <= 0).all()
    expected = -oracle.softplus(to_numpy(x)).reshape(HV, K)
    # 4 ulps of 1, and 4 ulps of the result where it is larger
    bound = 4 * 2.0**-23 * np.maximum(1.0, np.abs(expected))
    for t in range(case.T):
        assert_close(g[t], expected, bound, f"g of token {t}")
    assert outcome["out"].isfinite().all()


@OVERFLOWS
@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("case", params([SMALL], [LARGE]))
def test_G2_safe_gate_at_extremes(case: Case, op: Verify, device: str) -> None:
    """Saturates at lower_bound and at 0 without overflow."""
    problem = make_problem(case, device)
    numel = problem.params.dt_bias.numel()
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=device).repeat(numel)[:numel].contiguous()
    problem.a.zero_()
    problem.params = replace(problem.params, dt_bias=x, A_log=torch.zeros_like(problem.params.A_log), lower_bound=-5.0)
    outcome = problem.run(op)
    g = record(outcome, "g")
    expected = -5.0 / (1.0 + np.exp(-np.clip(to_numpy(x), -700, 700))).reshape(g.shape[1:])
    for t in range(case.T):
        assert_close(g[t], expected, 16 * 2.0**-23, f"g of token {t}")
    assert outcome["out"].isfinite().all()


@pytest.mark.parametrize(("K", "V", "name"), [(96, 64, "head_k_dim"), (64, 80, "head_v_dim"), (256, 64, "head_k_dim")])
def test_G3_other_head_sizes_are_refused_with_the_reason(K: int, V: int, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be one of \(64, 128\), got .*reduction"):
        KdaShape(1, 1, K, V)


@pytest.mark.parametrize("op", WITH_REFERENCE)
def test_G3_nan_right_behind_every_input_is_not_read(op: Verify, device: str) -> None:
    """Rows of a and parameters end at a NaN; ring rows at the builder's canaries."""
    problem = make_problem(SMALL, device)
    plain = problem.run(op)

    def fenced(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((x.shape[0], x[0].numel() + 16), float("nan"), dtype=x.dtype, device=x.device)
        buffer[:, : x[0].numel()] = x.reshape(x.shape[0], -1)
        return buffer[:, : x[0].numel()].view(x.shape) if x.ndim == 2 else buffer

    def ended(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((x.numel() + 16,), float("nan"), dtype=x.dtype, device=x.device)
        buffer[: x.numel()] = x
        return buffer[: x.numel()]

    p = problem.params
    poisoned = problem.fork(
        mixed_qkv=fenced(problem.mixed_qkv), a=fenced(problem.a), b=fenced(problem.b),
        params=replace(p, A_log=ended(p.A_log), dt_bias=ended(p.dt_bias)),
    )  # fmt: skip
    outcome = poisoned.run(op)
    for name in ("out", "conv_window", *RING):
        assert torch.equal(outcome.whole(name).nan_to_num(), plain.whole(name).nan_to_num()), name


@pytest.mark.parametrize("op", WITH_REFERENCE)
def test_G4_unknown_keyword(op: Callable[..., object], device: str) -> None:
    """A gate switch that nobody reads would silently be the other gate."""
    problem = make_problem(SMALL, device)
    with pytest.raises(TypeError, match="use_lower_bound"):
        problem.run(op, use_lower_bound=True)
    with pytest.raises(TypeError, match="accept_length"):
        fold_problem(problem, torch.ones(1, device=device), accept_length=1)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("b", [8.0, -8.0, 0.0])
@pytest.mark.parametrize("case", params([SMALL], [LARGE]))
def test_G4_beta_is_sigmoided_exactly_once(case: Case, b: float, op: Verify, device: str) -> None:
    """sigmoid(8) = 0.99966, sigmoid(sigmoid(8)) = 0.731, and b itself is 8: no two of them are close."""
    problem = make_problem(case, device)
    problem.b.fill_(b)
    outcome = problem.run(op)
    expected = 1 / (1 + np.exp(-b))
    assert_close(record(outcome, "beta"), np.full((case.T, case.HV), expected), 8 * 2.0**-24, "beta")
    trace = problem.oracle_trace(0)
    bounds = verify_bounds(oracle_layer(problem.params, problem.shape, case.dtype), trace)
    assert_close(outcome["out"][: case.T], trace.out, bounds.out, "output")
