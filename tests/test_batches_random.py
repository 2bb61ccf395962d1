"""Random ragged batches of random trees in the interpreter: the bits of chains, whatever the lengths and parents."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install hypothesis (dependency group `test`)"
)

from hypothesis import given, settings
from hypothesis import strategies as st

from kda_kernels import new_error_counts, verify_unfused
from tests.support.batches import (
    BUFFERS,
    MODES,
    chains,
    check_paths,
    offsets,
    poison_unowned,
    ragged_problem,
    record_of,
)
from tests.support.bits import assert_same_bits
from tests.support.cases import Case
from tests.support.marks import interpreter_only

CASE = Case(B=4, T=5, H=1, HV=1, K=64, lower_bound=-5.0)
INDICES = st.sampled_from([torch.int32, torch.int64])
LENGTHS = st.lists(st.integers(0, CASE.T), min_size=CASE.B, max_size=CASE.B)
PADDED = st.sets(st.integers(0, CASE.B - 1), max_size=2)
PARENTS = st.tuples(*(st.integers(-1, t - 1) for t in range(CASE.T)))


@interpreter_only
@settings(max_examples=15)
@given(LENGTHS, PADDED, st.integers(0, 20), INDICES, st.sampled_from(list(MODES)))
def test_ragged_batches_are_chains(
    lengths: list[int], padded: set[int], leftover: int, dtype: torch.dtype, mode: str
) -> None:
    starts = offsets(lengths, "cpu", dtype)
    most = CASE.B * CASE.T
    problem = ragged_problem(CASE, "cpu", min(most, int(starts[-1]) + leftover), tuple(padded))
    usable = [i for i in range(CASE.B) if i not in padded]
    poison_unowned(problem, starts.tolist(), usable)
    errors = new_error_counts("cpu")
    outcome = problem.run(verify_unfused, record_of(mode), starts=starts, errors=errors, **MODES[mode])
    expected = chains(problem, verify_unfused, mode, starts.tolist(), usable)
    for name in BUFFERS:
        assert_same_bits(outcome.whole(name), expected.whole(name), name)
    assert not errors.any()


@interpreter_only
@settings(max_examples=15)
@given(LENGTHS, PADDED, st.lists(PARENTS, min_size=CASE.B, max_size=CASE.B), INDICES)
def test_ragged_trees_are_chains(
    lengths: list[int], padded: set[int], parents: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    starts = offsets(lengths, "cpu")
    problem = ragged_problem(CASE, "cpu", CASE.B * CASE.T, tuple(padded))
    poison_unowned(problem, starts.tolist(), [i for i in range(CASE.B) if i not in padded])
    given_parents = torch.tensor(parents, dtype=dtype)
    for i, length in enumerate(lengths):
        given_parents[i, length:] = 77
    errors = new_error_counts("cpu")
    outcome = problem.run(verify_unfused, "snapshots", starts=starts, parents=given_parents, errors=errors)
    check_paths(problem, outcome, verify_unfused, given_parents.tolist(), lengths)
    assert not errors.any()
