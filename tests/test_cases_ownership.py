"""Ownership and order: one writer for every element, rows by batch position, causality, any T."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kda_kernels import LayerState, Snapshots, fold, verify_unfused
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.commits import fold_problem, with_layers
from tests.support.grids import params
from tests.support.marks import interpreter_only
from tests.support.memory import record_accesses, reversed_programs
from tests.support.ops import KERNELS, RING, WITH_REFERENCE, Verify

ALL = ("out", "conv_window", "snapshots", "conv_state", "ssm_state", *RING)

GQA = Case(B=2, T=2, H=1, HV=4, K=64, padded=(1,))
SIXTEEN = Case(B=1, T=6, H=1, HV=16, K=128)


def assert_same(actual: Problem, expected: Problem) -> None:
    for name in ALL:
        assert_same_bits(actual.whole(name), expected.whole(name), name)


@interpreter_only
@pytest.mark.parametrize("record", ["ring", "snapshots"])
@pytest.mark.parametrize("op", KERNELS)
def test_O1_every_element_has_one_writer(op: Verify, record: str) -> None:
    """Heads that share a q/k head, and tiles that share a head, must agree on who writes; nobody writes state."""
    from kda_kernels import LaunchConfig

    problem = make_problem(GQA, "cpu").fork()
    positional, keywords = problem.arguments(record, config=LaunchConfig(block_v=32))
    with record_accesses() as accesses:
        op(*positional, **keywords)
    T, slot = GQA.T, int(problem.slots[0])
    assert (accesses.stored(problem["out"]) == 1).all(), "output"
    assert (accesses.stored(problem["conv_window"][0]) == 1).all(), "window of the live row"
    assert not accesses.stored(problem["conv_window"][1]).any(), "window of the padded row"
    for name in RING:
        counts = accesses.stored(problem[name])
        expected = np.zeros_like(counts)
        if record == "ring":
            expected[slot, :, :T] = 1
        assert np.array_equal(counts, expected), name
    counts = accesses.stored(problem["snapshots"])
    assert (counts[0] == (record == "snapshots")).all(), "snapshots of the live row"
    assert not counts[1].any(), "snapshots of the padded row"
    for name in ("conv_state", "ssm_state"):
        assert not accesses.stored(problem[name]).any(), f"verify wrote {name}"


@interpreter_only
def test_O1_fold_has_one_writer() -> None:
    problem = make_problem(GQA, "cpu").run(verify_unfused)
    with record_accesses() as accesses:
        outcome = fold_problem(problem, torch.full((GQA.B,), GQA.T))
    counts = accesses.stored(outcome["ssm_state"])
    expected = np.zeros_like(counts)
    expected[int(problem.slots[0])] = 1
    assert np.array_equal(counts, expected)


@interpreter_only
@pytest.mark.parametrize("op", KERNELS)
def test_O1_bits_do_not_depend_on_the_order_of_programs(op: Verify) -> None:
    """A program that read what another one writes would see it in one order only."""
    problem = make_problem(GQA, "cpu")
    for record in ("ring", "snapshots"):
        forward = problem.run(op, record)
        with reversed_programs():
            backward = problem.run(op, record)
        assert_same(backward, forward)
    accept = torch.full((GQA.B,), GQA.T)
    forward = fold_problem(problem.run(op), accept)
    with reversed_programs():
        backward = fold_problem(problem.run(op), accept)
    assert_same(backward, forward)


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
def test_O1_bits_do_not_depend_on_how_many_blocks_run_at_once(op: Verify, device: str) -> None:
    """B = 1 alone, and the same request among 48 others, thirty times: a race would differ sooner or later."""
    one = make_problem(SIXTEEN, device)
    alone = one.run(op)
    many = replace(make_problem(Case(B=48, T=6, H=1, HV=16, K=128), device), params=one.params)
    slot, position = int(many.slots[20]), slice(20 * 6, 21 * 6)
    for name in ("mixed_qkv", "a", "b"):
        getattr(many, name)[position] = getattr(one, name)
    for name in ("conv_state", "ssm_state"):
        many[name][slot] = one[name][int(one.slots[0])]
    first = many.run(op)
    assert_same_bits(first["out"][position], alone["out"], "output")
    assert_same_bits(first["conv_window"][20], alone["conv_window"][0], "window")
    for name in RING:
        assert_same_bits(first[name][slot, :, :6], alone[name][int(one.slots[0]), :, :6], name)
    for _ in range(30):
        assert_same(many.run(op), first)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize(
    ("case", "slots"),
    [
        pytest.param(Case(B=3, T=1, H=1, HV=1, K=64, spare_slots=5), [7, 0, 5], id="8-slots"),
        pytest.param(
            Case(B=3, T=3, H=4, HV=8, K=128, spare_slots=197), [190, 7, 63], id="200-slots", marks=pytest.mark.gpu
        ),
    ],
)
def test_O2_window_rows_by_batch_position(case: Case, slots: list[int], op: Verify, device: str) -> None:
    """3 rows serve slots far beyond 3; with 2 rows the call is refused; the canary after the buffers stays."""
    problem = make_problem(case, device)
    for new, old in zip(slots, problem.slots.tolist(), strict=True):
        for name in ("conv_state", "ssm_state"):
            problem[name][new] = problem[name][old].clone().nan_to_num()
    problem.slots = torch.tensor(slots, dtype=torch.int32, device=device)
    outcome = problem.run(op, "snapshots")
    for i, slot in enumerate(slots):
        columns = torch.cat([problem["conv_state"][slot], problem.mixed_qkv[i * case.T : (i + 1) * case.T]])
        for t in range(case.T):
            assert_same_bits(outcome["conv_window"][i, t], columns[t + 1 : t + 4], f"window of row {i}, token {t}")
    for name in ("conv_window", "snapshots"):
        before, after = problem.buffers[name], outcome.buffers[name]
        end = before.view.storage_offset() + before.view.numel()
        assert_same_bits(after.whole[end:], before.whole[end:], f"canary after {name}")
        assert_same_bits(
            after.whole[: before.view.storage_offset()],
            before.whole[: before.view.storage_offset()],
            f"canary before {name}",
        )
    two_rows = LayerState(problem["conv_state"], problem["ssm_state"], problem["conv_window"][:2])
    with pytest.raises(ValueError, match="conv_window"):
        problem.run(op, "snapshots", state=two_rows)
    with pytest.raises(ValueError, match="states"):
        problem.run(op, "snapshots", record=Snapshots(problem["snapshots"][:2]))


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("case", params([Case(B=1, T=3, H=1, HV=2, K=64)], [Case(B=2, T=3, H=4, HV=8, K=128)]))
def test_O3_later_tokens_change_no_earlier_row(case: Case, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    for record in ("ring", "snapshots"):
        plain = problem.run(op, record)
        for t in range(case.T - 1):
            later = (torch.arange(case.B * case.T, device=device) % case.T > t)[:, None]
            changed = {
                name: torch.where(later, float("inf") if name == "b" else 3.0, getattr(problem, name))
                for name in ("mixed_qkv", "a", "b")
            }
            other = problem.run(op, record, **changed)
            for i in range(case.B):
                slot, row = int(problem.slots[i]), slice(i * case.T, i * case.T + t + 1)
                assert_same_bits(other["out"][row], plain["out"][row], f"output up to token {t}")
                for name in ("conv_window", "snapshots"):
                    assert_same_bits(other[name][i, : t + 1], plain[name][i, : t + 1], f"{name} up to token {t}")
                for name in RING:
                    assert_same_bits(other[name][slot, :, : t + 1], plain[name][slot, :, : t + 1], name)
            assert not torch.equal(other["out"], plain["out"])


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize(
    "case",
    params(
        [Case(B=1, T=T, H=1, HV=1, K=64) for T in (1, 2, 3, 4, 7)],
        [Case(B=2, T=T, H=2, HV=4, K=128) for T in (1, 2, 16)],
    ),
)
def test_O4_every_row_equals_a_token_by_token_loop(case: Case, op: Verify, device: str) -> None:
    """T calls of one token each, every one followed by fold and window commit, give the rows of one call."""
    problem = make_problem(case, device)
    whole = problem.run(op, "ring")
    step = problem.fork()
    one = torch.ones(case.B, dtype=torch.int32, device=device)
    B, T = case.B, case.T
    for t in range(T):
        token = torch.arange(B, device=device) * T + t
        out = op(
            problem.mixed_qkv[token], problem.a[token], problem.b[token], shape=problem.shape, params=problem.params,
            state=step.state, record=step.ring, slots=problem.slots, draft_tokens=1,
        )  # fmt: skip
        assert_same_bits(out, whole["out"][token], f"output of token {t}")
        assert_same_bits(step["conv_window"][:, 0], whole["conv_window"][:, t], f"window of token {t}")
        for name in RING:
            slots = problem.slots.long()
            assert_same_bits(step[name][slots, :, 0], whole[name][slots, :, t], f"{name} of token {t}")
        fold(
            step["ssm_state"][None], with_layers(step.ring),
            shape=problem.shape, slots=problem.slots, accept_lens=one, draft_tokens=1,
        )  # fmt: skip
        step["conv_state"][problem.slots.long()] = step["conv_window"][:, 0]
