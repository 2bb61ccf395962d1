"""Ragged batches and trees, and the chains of one length that say what must come out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from kda_kernels import verify_reference
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Guarded, Problem, make_problem
from tests.support.ops import Verify

BUFFERS = ("out", "conv_window", "snapshots", "raw_v", "raw_k", "g", "beta", "conv_state", "ssm_state")
POISONED = ("mixed_qkv", "a", "b")

MODES = {"ring": {}, "snapshots": {}, "chunked": {"form": "chunked"}}
"""What a ragged verify can be: the record, or the ring in the chunked form."""


def place(op: Verify, device: str) -> str:
    """Where to compare ``op`` bit for bit. The order of torch's sums depends, on a GPU, on the size of the batch."""
    return "cpu" if op is verify_reference else device


def record_of(mode: str) -> str:
    return "snapshots" if mode == "snapshots" else "ring"


def offsets(lengths: list[int], device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """[B+1] cumulative offsets."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def ragged_problem(case: Case, device: str, num_tokens: int, padded: tuple[int, ...] = ()) -> Problem:
    """A problem of ``num_tokens`` <= B*T packed rows, with NaN in all of ``out``; ``case`` itself pads nothing."""
    assert not case.padded
    problem = make_problem(case, device)
    problem.slots[list(padded)] = -1
    for name in POISONED:
        setattr(problem, name, getattr(problem, name)[:num_tokens].clone())
    problem.buffers["out"] = Guarded.garbage(
        (num_tokens, *problem["out"].shape[1:]), case.dtype, device, seed=case.seed + 17
    )
    problem["out"].fill_(float("nan"))
    return problem


def poison_unowned(problem: Problem, starts: list[int], usable: list[int]) -> None:
    """NaN into the inputs of every row that belongs to none of the ``usable`` requests."""
    owned = torch.zeros(problem.mixed_qkv.shape[0], dtype=torch.bool)
    for i in usable:
        owned[starts[i] : starts[i + 1]] = True
    for name in POISONED:
        getattr(problem, name)[~owned.to(problem.mixed_qkv.device)] = float("nan")


def one_chain(
    outcome: Problem, op: Verify, mode: str, i: int, rows: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``op`` on the tokens ``rows`` of request i as a chain of its own, into ``outcome``'s buffers."""
    inputs: dict[str, Any] = {name: getattr(outcome, name)[rows] for name in POISONED}
    row = torch.tensor([i], device=rows.device) if outcome.rows is None else outcome.rows[i : i + 1]
    positional, keywords = outcome.arguments(
        record_of(mode), **inputs, slots=outcome.slots[i : i + 1], rows=row, draft_tokens=len(rows), out=out,
        **MODES[mode],
    )  # fmt: skip
    return op(*positional, **keywords)


def chains(problem: Problem, op: Verify, mode: str, starts: list[int], usable: list[int]) -> Problem:
    """What a ragged verify must leave: a chain of its own for each usable request, zeros in all other output rows."""
    expected = problem.fork()
    expected["out"].zero_()
    for i, (start, end) in enumerate(pairwise(starts)):
        if i in usable and end > start:
            rows = torch.arange(start, end, device=problem.mixed_qkv.device)
            one_chain(expected, op, mode, i, rows, out=expected["out"][start:end])
    return expected


def leaf_paths(parents: list[int]) -> list[list[int]]:
    """The steps from a root to each leaf."""
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths


def check_paths(problem: Problem, outcome: Problem, op: Verify, parents: list[list[int]], lengths: list[int]) -> None:
    """Every path of every live request against a chain of its own; nothing else may have been written.

    Request i's rows begin at the sum of the ``lengths`` before it.
    """
    restored = outcome.fork()
    start = 0
    for i, length in enumerate(lengths):
        if int(problem.slots[i]) >= 0:
            for path in leaf_paths(parents[i][:length]):
                chain = problem.fork()
                rows = torch.tensor(path, device=problem.mixed_qkv.device) + start
                out = one_chain(chain, op, "snapshots", i, rows)
                what = f"{{}} of path {path} of request {i}".format
                assert_same_bits(outcome["out"][rows], out, what("output"))
                for name in ("conv_window", "snapshots"):
                    assert_same_bits(outcome[name][i, path], chain[name][i, : len(path)], what(name))
            restored["out"][start : start + length] = problem["out"][start : start + length]
            for name in ("conv_window", "snapshots"):
                restored[name][i, :length] = problem[name][i, :length]
        else:
            assert not outcome["out"][start : start + length].any(), "output rows of padded positions are 0"
            restored["out"][start : start + length] = problem["out"][start : start + length]
        start += length
    assert not outcome["out"][start:].any(), "leftover output rows are 0"
    restored["out"][start:] = problem["out"][start:]
    for name in BUFFERS:
        assert_same_bits(restored.whole(name), problem.whole(name), name)
