"""Commits of trees: a tracking slot gets a step of the accepted path, never the state of a rejected branch (A6)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from kda_kernels import ErrorKind, Snapshots, host_checks, new_error_counts
from tests.support.batches import offsets
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.marks import interpreter_only
from tests.test_tree import NO_TREES, SCATTERS, SHAPES, commit, trees

CASE = Case(B=2, T=5, H=1, HV=1, K=64)


def filled(device: str, case: Case = CASE) -> Problem:
    """A batch with a value of its own in every window and snapshot."""
    problem = make_problem(case, device)
    for seed, name in enumerate(("conv_window", "snapshots")):
        problem[name].copy_(torch.randn(problem[name].shape, generator=torch.Generator().manual_seed(seed)))
    return problem


def path_to(step: int, parents: list[int]) -> list[int]:
    """The steps from ``step`` up to its root."""
    path = []
    while step >= 0:
        path.append(step)
        step = parents[step]
    return path


def free_slots(problem: Problem) -> list[int]:
    return [slot for slot in range(problem["ssm_state"].shape[0]) if slot not in problem.slots.tolist()]


def copy_step(problem: Problem, slot: int, row: int, step: int) -> None:
    """What a commit of ``step`` to ``slot`` does."""
    problem["conv_state"][slot] = problem["conv_window"][row, step]
    problem["ssm_state"][slot] = problem["snapshots"][row, step]


def same_states(actual: Problem, expected: Problem, what: str) -> None:
    for name in ("conv_state", "ssm_state"):
        assert_same_bits(actual.whole(name), expected.whole(name), f"{name}, {what}")


@pytest.mark.parametrize("scatters", SCATTERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_A6_only_steps_on_the_accepted_path_are_tracked(shape: str, scatters: tuple[Any, Any], device: str) -> None:
    """Every last step with every tracked one; the other request's tree is a chain."""
    problem = filled(device)
    parents = [[SHAPES[shape](t) for t in range(CASE.T)], list(range(-1, CASE.T - 1))]
    given = torch.tensor(parents, dtype=torch.int32, device=device)
    slots, free = problem.slots.tolist(), free_slots(problem)
    errors = new_error_counts(device)
    for last, tracked in product(range(-1, CASE.T), range(-1, CASE.T + 1)):
        actual, expected = problem.fork(), problem.fork()
        commit(
            actual, scatters, last_steps=torch.tensor([last, 3], device=device), parents=given, errors=errors,
            track_slots=torch.tensor(free[:2], device=device), track_steps=torch.tensor([tracked, 1], device=device),
        )  # fmt: skip
        if last >= 0:
            copy_step(expected, slots[0], 0, last)
        if tracked in path_to(last, parents[0]):
            copy_step(expected, free[0], 0, tracked)
        copy_step(expected, slots[1], 1, 3)
        copy_step(expected, free[1], 1, 1)
        same_states(actual, expected, f"path to {last}, step {tracked} tracked")
    assert not errors.any(), "a step that is not tracked is no error"


@pytest.mark.parametrize("scatters", SCATTERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_a_ragged_tree_and_padding(dtype: torch.dtype, scatters: tuple[Any, Any], device: str) -> None:
    """What lies past a request's length, or belongs to padding, is anything."""
    case = Case(B=3, T=4, H=1, HV=1, K=64, padded=(1,))
    problem = filled(device, case)
    parents = torch.tensor([[-1, 0, 0, 77], [99] * 4, [-1, 0, 1, 1]], dtype=dtype, device=device)
    slots, free = problem.slots.tolist(), free_slots(problem)
    actual, expected, errors = problem.fork(), problem.fork(), new_error_counts(device)
    commit(
        actual, scatters, last_steps=torch.tensor([2, -1, 3], dtype=dtype, device=device), parents=parents,
        starts=offsets([3, 0, 4], device), track_slots=torch.tensor([free[0], -1, free[1]], device=device),
        track_steps=torch.tensor([1, 0, 1], device=device), errors=errors,
    )  # fmt: skip
    copy_step(expected, slots[0], 0, 2)  # step 1 is its rejected sibling
    copy_step(expected, slots[2], 2, 3)
    copy_step(expected, free[1], 2, 1)
    same_states(actual, expected, "ragged")
    assert not errors.any()


@pytest.mark.parametrize("scatters", SCATTERS)
@pytest.mark.parametrize(("step", "parent"), NO_TREES)
def test_D4_no_tree_is_not_committed(step: int, parent: int, scatters: tuple[Any, Any], device: str) -> None:
    """As verify treats it: it has written no window and no snapshot, what lies there is an older round's."""
    problem = filled(device)
    parents = trees(CASE, device)
    parents[0, step] = parent
    actual, expected, errors = problem.fork(), problem.fork(), new_error_counts(device)
    with host_checks(False):
        commit(
            actual, scatters, last_steps=torch.tensor([4, 4], device=device), parents=parents, errors=errors,
            track_slots=torch.tensor([free_slots(problem)[0], -1], device=device),
            track_steps=torch.tensor([0, 0], device=device),
        )  # fmt: skip
    copy_step(expected, int(problem.slots[1]), 1, 4)
    same_states(actual, expected, "no tree")
    assert errors.tolist() == [2 * int(kind is ErrorKind.PARENT) for kind in ErrorKind]  # 2 scatters


@interpreter_only
@pytest.mark.parametrize("scatters", SCATTERS)
@pytest.mark.parametrize(("step", "parent"), NO_TREES)
def test_D4_no_tree_is_refused_at_the_commit(step: int, parent: int, scatters: tuple[Any, Any]) -> None:
    problem = filled("cpu")
    before = problem.fork()
    parents = trees(CASE, "cpu")
    parents[0, step] = parent
    with pytest.raises(ValueError, match=rf"^parents must name an earlier step.*step {step} of request 0"):
        commit(problem, scatters, last_steps=torch.tensor([4, 4]), parents=parents)
    same_states(problem, before, "refused")


@pytest.mark.parametrize("scatters", SCATTERS)
def test_parents_that_cannot_be_are_refused(scatters: tuple[Any, Any], device: str) -> None:
    problem = filled(device)
    parents, ends = trees(CASE, device), torch.tensor([1, 1], device=device)
    before = problem.fork()
    with pytest.raises(ValueError, match=r"^parents must be None with accept_lens, which count the tokens of a chain"):
        commit(problem, scatters, accept_lens=ends, parents=parents)
    with pytest.raises(ValueError, match=r"^parents must have shape \[2, 5\], got \[2, 4\]"):
        commit(problem, scatters, last_steps=ends, parents=parents[:, 1:])
    with pytest.raises(ValueError, match=r"^parents must be int32 or int64, got float32"):
        commit(problem, scatters, last_steps=ends, parents=parents.float())
    with pytest.raises(TypeError, match=r"^parents must be a Tensor, got list"):
        commit(problem, scatters, last_steps=ends, parents=parents.tolist())
    same_states(problem, before, "refused")


def test_every_layer_tracks_the_same_path(device: str) -> None:
    """Rows given, two layers, a batch of which one row is far behind: the launch's arithmetic of places."""
    layers, rows, steps, slots = 2, 4, 3, 6
    generator = torch.Generator().manual_seed(5)
    source = torch.randn(layers, rows, steps, 1, 64, 64, generator=generator).to(device)
    given = {
        "slots": torch.tensor([5, -1, 0], device=device), "rows": torch.tensor([3, 0, 1], device=device),
        "last_steps": torch.tensor([2, 0, 2], device=device), "draft_tokens": steps,
        "track_slots": torch.tensor([1, 2, 3], device=device), "track_steps": torch.tensor([1, 0, 1], device=device),
        "parents": torch.tensor([[-1, 0, 0], [9, 9, 9], [-1, 0, 1]], device=device),
    }  # fmt: skip
    for _, scatter in (one.values[0] for one in SCATTERS):
        state = torch.zeros(layers, slots, 1, 64, 64, device=device)
        scatter(state, Snapshots(source), **given)
        expected = torch.zeros_like(state)
        expected[:, 5], expected[:, 0], expected[:, 3] = source[:, 3, 2], source[:, 1, 2], source[:, 1, 1]
        assert torch.equal(state, expected)
