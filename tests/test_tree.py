"""Trees: each path from a root to a leaf has the bits of a chain of its own, and commits go along the accepted path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kda_kernels import (
    ErrorKind,
    LaunchConfig,
    Snapshots,
    host_checks,
    new_error_counts,
    scatter_conv,
    scatter_conv_reference,
    scatter_snapshots,
    scatter_snapshots_reference,
    verify_fused,
    verify_reference,
    verify_unfused,
)
from tests.support import oracle
from tests.support.batches import BUFFERS, check_paths, leaf_paths, offsets, one_chain, place
from tests.support.bits import assert_close, assert_same_bits
from tests.support.bounds import verify_bounds
from tests.support.cases import Case, Problem, make_problem, oracle_layer, to_numpy
from tests.support.grids import params
from tests.support.marks import interpreter_only
from tests.support.ops import Verify

OPS = [pytest.param(verify_unfused, id="unfused"), pytest.param(verify_reference, id="reference")]

SMALL = (
    Case(B=3, T=6, H=1, HV=2, K=64, padded=(1,)),
    Case(B=2, T=4, H=2, HV=4, K=64, dtype=torch.float16, weight_dtype=torch.float32, lower_bound=-5.0, pitch=8),
    Case(B=2, T=3, H=1, HV=1, K=64, V=128, lower_bound=-5.0, bias=False),
)
LARGE = (
    Case(B=8, T=8, H=8, HV=8, K=128, lower_bound=-5.0, padded=(2,)),
    Case(B=16, T=4, H=1, HV=16, K=128),
    Case(B=5, T=6, H=4, HV=8, K=128, dtype=torch.float16, weight_dtype=torch.float32),
)
CASE = Case(B=3, T=4, H=1, HV=2, K=64)

SHAPES = {
    "chain": lambda t: t - 1,
    "star": lambda t: -1 if t == 0 else 0,
    "binary": lambda t: -1 if t == 0 else (t - 1) // 2,
    "comb": lambda t: max(-1, t - 1 if t % 2 else t - 2),
    "forest": lambda t: t - 2 if t > 1 else -1,
}  # fmt: skip
"""Parent of step t."""


def trees(case: Case, device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """[B, T] parents, request by request of another shape; nonsense for padded ones."""
    shapes = list(SHAPES.values())
    parents = torch.tensor([[shapes[(i + 1) % len(shapes)](t) for t in range(case.T)] for i in range(case.B)])
    parents[list(case.padded)] = 99
    return parents.to(device, dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("case", params(SMALL, LARGE))
def test_each_path_has_the_bits_of_a_chain_of_its_own(case: Case, dtype: torch.dtype, op: Verify, device: str) -> None:
    device = place(op, device)
    problem = make_problem(case, device)
    problem["out"].fill_(float("nan"))
    parents = trees(case, device, dtype)
    errors = new_error_counts(device)
    outcome = problem.run(op, "snapshots", parents=parents, errors=errors)
    check_paths(problem, outcome, op, parents.tolist(), [case.T] * case.B)
    assert not errors.any()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", params([CASE], LARGE[:1]))
def test_ragged_trees(case: Case, op: Verify, device: str) -> None:
    """Lengths 2, 0, T and so on; parents past a request's length are nonsense, leftover inputs NaN."""
    device = place(op, device)
    problem = make_problem(case, device)
    problem["out"].fill_(float("nan"))
    lengths = [(2, 0, case.T, 1)[i % 4] for i in range(case.B)]
    parents = trees(case, device)
    for i, length in enumerate(lengths):
        parents[i, length:] = -7
    for name in ("mixed_qkv", "a", "b"):
        getattr(problem, name)[sum(lengths) :] = float("nan")
        for i in case.padded:
            start = i * case.T  # where the builder put NaN, there is another request now
            getattr(problem, name)[start : min(start + case.T, sum(lengths))] = 0.5
    errors = new_error_counts(device)
    outcome = problem.run(op, "snapshots", parents=parents, starts=offsets(lengths, device), errors=errors)
    check_paths(problem, outcome, op, parents.tolist(), lengths)
    assert not errors.any()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", params(SMALL, LARGE[:1]))
def test_a_tree_that_is_a_chain(case: Case, op: Verify, device: str) -> None:
    device = place(op, device)
    problem = make_problem(case, device)
    parents = torch.arange(-1, case.T - 1, device=device).repeat(case.B, 1)
    outcome, chain = problem.run(op, "snapshots", parents=parents), problem.run(op, "snapshots")
    for name in BUFFERS:
        assert_same_bits(outcome.whole(name), chain.whole(name), name)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", params([CASE], LARGE[1:2]))
def test_paths_stay_within_fp32_error_of_the_oracle(case: Case, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    parents = trees(case, device)
    outcome = problem.run(op, "snapshots", parents=parents)
    layer = oracle_layer(problem.params, problem.shape, case.dtype)
    for i in range(min(case.B, 3)):
        slot = int(problem.slots[i])
        for path in leaf_paths(parents[i].tolist()):
            rows = torch.tensor(path, device=device) + i * case.T
            inputs = (to_numpy(x[rows]) for x in (problem.mixed_qkv, problem.a, problem.b))
            trace = oracle.verify(
                layer, *inputs, to_numpy(problem["conv_state"][slot]), to_numpy(problem["ssm_state"][slot])
            )
            bounds = verify_bounds(layer, trace)
            what = f"{{}} of path {path} of request {i}".format
            assert_close(outcome["out"][rows], trace.out, bounds.out, what("output"))
            assert_close(outcome["conv_window"][i, path], trace.window, 0.0, what("window"))
            assert_close(outcome["snapshots"][i, path], trace.states, bounds.states, what("snapshots"))


NO_TREES = [
    pytest.param(2, 2, id="itself"),
    pytest.param(1, 3, id="a-later-step"),
    pytest.param(2, -2, id="below-the-root"),
    pytest.param(0, 0, id="root-itself"),
    pytest.param(3, 2**31 - 1, id="far-outside"),
    pytest.param(3, -(2**31), id="far-below"),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("step", "parent"), NO_TREES)
def test_D4_no_tree_is_counted_and_neighbours_are_served(step: int, parent: int, op: Verify, device: str) -> None:
    device = place(op, device)
    problem = make_problem(CASE, device)
    problem["out"].fill_(float("nan"))
    parents = trees(CASE, device)
    parents[1, step] = parent
    errors = new_error_counts(device)
    with host_checks(False):
        outcome = problem.run(op, "snapshots", parents=parents, errors=errors)
    assert errors.tolist() == [int(kind is ErrorKind.PARENT) for kind in ErrorKind]
    problem.slots[1] = outcome.slots[1] = -1  # as which it was treated
    check_paths(problem, outcome, op, parents.tolist(), [CASE.T] * CASE.B)


@interpreter_only
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("step", "parent"), NO_TREES)
def test_D4_no_tree_is_refused_on_the_host(step: int, parent: int, op: Verify) -> None:
    problem = make_problem(CASE, "cpu")
    parents = trees(CASE, "cpu")
    parents[1, step] = parent
    message = rf"^parents must name an earlier step.* step {step} of request 1 allows -1\.\.{step - 1}, got {parent}$"
    with pytest.raises(ValueError, match=message):
        problem.run(op, "snapshots", parents=parents)


REFUSED: dict[str, tuple[str, Callable[[torch.Tensor], dict[str, Any]], str]] = {
    "ring": ("ring", lambda p: dict(parents=p), "parents must be None with a Ring: a ring replays a chain"),
    "chunked": ("ring", lambda p: dict(parents=p, form="chunked"), "parents must be None with a Ring"),
    "too-narrow": ("snapshots", lambda p: dict(parents=p[:, 1:]), r"parents must have shape \[3, 4\], got \[3, 3\]"),
    "float": ("snapshots", lambda p: dict(parents=p.float()), "parents must be int32 or int64, got float32"),
    "strided": ("snapshots", lambda p: dict(parents=p.T.contiguous().T), "parents must be packed"),
    "not-a-tensor": ("snapshots", lambda p: dict(parents=p.tolist()), "parents must be a Tensor, got list"),
    "gluon": (
        "snapshots",
        lambda p: dict(parents=p, config=LaunchConfig(32, 4, rows_per_thread=2)),
        "takes no parents: use rows_per_thread=None",
    ),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("what", REFUSED)
def test_what_trees_cannot_be_is_refused(what: str, op: Verify, device: str) -> None:
    mode, change, message = REFUSED[what]
    problem = make_problem(CASE, device)
    with pytest.raises((ValueError, TypeError), match=message):
        problem.run(op, mode, **change(trees(CASE, device)))


def test_D4_a_tree_never_reaches_the_chain_only_lane(device: str) -> None:
    with pytest.raises(
        ValueError, match=r"^parents must be None in the fused lane, which takes no trees: call verify_unfused"
    ):
        make_problem(CASE, device).run(verify_fused, "snapshots", parents=trees(CASE, device))


SCATTERS = [
    pytest.param((scatter_conv, scatter_snapshots), id="kernels"),
    pytest.param((scatter_conv_reference, scatter_snapshots_reference), id="reference"),
]


def commit(outcome: Problem, scatters: tuple[Any, Any], **keywords: Any) -> None:
    """Both scatters, in place."""
    keywords = dict(slots=outcome.slots, draft_tokens=outcome.case.T) | keywords
    scatters[0](outcome["conv_state"][None], outcome["conv_window"][None], **keywords)
    scatters[1](outcome["ssm_state"][None], Snapshots(outcome["snapshots"][None]), **keywords)


@pytest.mark.parametrize("scatters", SCATTERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_the_accepted_path_is_committed(dtype: torch.dtype, scatters: tuple[Any, Any], device: str) -> None:
    """After the commit of a leaf the next token has the bits of the chain root .. leaf, next token."""
    case = CASE
    problem = make_problem(case, device)
    parents = trees(case, device)
    outcome = problem.run(verify_unfused, "snapshots", parents=parents)
    last = [3, -1, 2]
    tracked = torch.tensor([int((set(range(5)) - set(problem.slots.tolist())).pop()), -1, -1], device=device)
    commit(
        outcome, scatters, last_steps=torch.tensor(last, dtype=dtype, device=device),
        track_slots=tracked, track_steps=torch.tensor([0, 0, 0], device=device),
    )  # fmt: skip
    for i, step in enumerate(last):
        slot = int(problem.slots[i])
        path = [step] if step >= 0 else []
        while path and parents[i, path[0]] >= 0:
            path.insert(0, int(parents[i, path[0]]))
        rows = torch.tensor([*(s + i * case.T for s in path), 0], device=device)  # token 0 follows, whoever's it is
        expected = one_chain(problem.fork(), verify_unfused, "snapshots", i, rows)[-1:]
        actual = one_chain(outcome.fork(), verify_unfused, "snapshots", i, rows[-1:])
        assert_same_bits(actual, expected, f"the token after step {step} of request {i}")
        if step < 0:
            for name in ("conv_state", "ssm_state"):
                assert_same_bits(outcome[name][slot], problem[name][slot], name)
    assert_same_bits(outcome["conv_state"][int(tracked[0])], outcome["conv_window"][0, 0], "tracked window")
    assert_same_bits(outcome["ssm_state"][int(tracked[0])], outcome["snapshots"][0, 0], "tracked state")


@pytest.mark.parametrize("scatters", SCATTERS)
def test_last_steps_out_of_range_are_counted_and_their_slots_untouched(scatters: tuple[Any, Any], device: str) -> None:
    outcome = make_problem(CASE, device).run(verify_unfused, "snapshots", parents=trees(CASE, device))
    before = outcome.fork()
    errors = new_error_counts(device)
    with host_checks(False):
        commit(outcome, scatters, last_steps=torch.tensor([4, -2, 3], device=device), errors=errors)
    slot = int(outcome.slots[2])
    before["conv_state"][slot] = before["conv_window"][2, 3]
    before["ssm_state"][slot] = before["snapshots"][2, 3]
    for name in ("conv_state", "ssm_state"):
        assert_same_bits(outcome.whole(name), before.whole(name), name)
    assert errors.tolist() == [4 * int(kind is ErrorKind.ACCEPT) for kind in ErrorKind]  # 2 requests, 2 scatters


@interpreter_only
@pytest.mark.parametrize("scatters", SCATTERS)
def test_last_steps_are_checked_on_the_host(scatters: tuple[Any, Any]) -> None:
    problem = make_problem(CASE, "cpu")
    steps = torch.tensor([4, -1, 3])
    with pytest.raises(ValueError, match=r"last_steps must be within -1\.\.3, got 4"):
        commit(problem, scatters, last_steps=steps)
    with pytest.raises(ValueError, match="accept_lens and last_steps must not be given together"):
        commit(problem, scatters, last_steps=steps, accept_lens=steps)
    with pytest.raises(TypeError, match="accept_lens must be a Tensor, got NoneType"):
        commit(problem, scatters)
