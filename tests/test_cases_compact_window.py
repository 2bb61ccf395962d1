"""Compact windows against the field's faults: far and odd pitches, index tensors, padding, slot 0, duplicate rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_kernels import LayerState, gather_conv, gather_conv_reference, verify_fused, verify_unfused
from tests.support.bits import as_bits, assert_same_bits
from tests.support.cases import Case, make_problem
from tests.support.compact import Compact, compact, kept_inputs
from tests.support.ops import KERNELS
from tests.support.sparse import vast_pool, vast_tensor

CASE = Case(B=2, T=3, H=1, HV=1, K=64)
FAR = 2**31 // 2 + 4096
"""Elements: two of them pass 2^31, in elements and the more so in bytes."""


def index(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("op", KERNELS)
def test_S_inputs_with_rows_far_apart(op: Any, device: str) -> None:
    """Row 3 of mixed_qkv, of the second request, begins past 2^31 elements: verify's note and the gather hold it."""
    near = Compact(CASE, device, op)
    problem = make_problem(CASE, device)
    x = vast_tensor(tuple(problem.mixed_qkv.shape), (FAR, 1), problem.mixed_qkv.dtype, device)
    x.copy_(problem.mixed_qkv)
    problem.mixed_qkv = x
    far, kept = problem.fork(), kept_inputs(device)
    positional, keywords = far.arguments("ring", state=compact(far, kept))
    op(*positional, **keywords)
    assert kept.view[0].tolist() == [x.data_ptr(), FAR, 6]
    for accept in ([1, 2], [3, 3]):
        accepts = index(accept, device)
        plain, _ = near.commit(accepts)
        outcome = far.fork()
        common: dict[str, Any] = {"slots": far.slots, "accept_lens": accepts, "draft_tokens": CASE.T}
        gather_conv(outcome["conv_state"][None], kept.view, **common)
        assert_same_bits(outcome.whole("conv_state"), plain.whole("conv_state"), f"conv states, accept {accept}")


@pytest.mark.parametrize("dim", ["slots", "layers"])
def test_S_conv_states_far_apart(dim: str, device: str) -> None:
    both = Compact(CASE, device)
    accepts = index([1, 3], device)
    plain, _ = both.commit(accepts)
    d = both.problem.shape.conv_dim
    layers, slots = (1, 4) if dim == "slots" else (3, 4)
    strides = (8 * FAR, FAR, d, 1) if dim == "slots" else (FAR, 3 * d, d, 1)
    states = vast_tensor((layers, slots, 3, d), strides, torch.bfloat16, device)
    at = [3, 0]
    for layer in range(layers):
        for i, slot in enumerate(both.problem.slots.tolist()):
            states[layer, at[i]] = both.problem["conv_state"][slot]
    gather_conv(
        states, both.kept.view.expand(layers, -1).contiguous(), slots=index(at, device), accept_lens=accepts,
        draft_tokens=CASE.T,
    )  # fmt: skip
    for layer in range(layers):
        for i, slot in enumerate(both.problem.slots.tolist()):
            assert_same_bits(states[layer, at[i]], plain["conv_state"][slot], f"layer {layer}, request {i}")
        assert not states[layer, [1, 2]].any()


def test_S_verify_with_a_far_conv_state(device: str) -> None:
    """The note does not depend on where the states lie."""
    problem = make_problem(CASE, device)
    state = vast_pool((4, 3, problem.shape.conv_dim), FAR, torch.bfloat16, device)
    for slot in problem.slots.tolist():
        state[slot] = problem["conv_state"][slot]
    kept = kept_inputs(device)
    for op in (verify_fused, verify_unfused):
        problem.run(op, state=LayerState(state, problem["ssm_state"], None, kept.view[0]))
        assert kept.view[0].tolist() == [problem.mixed_qkv.data_ptr(), problem.shape.conv_dim, 6]


@pytest.mark.parametrize("argument", ["slots", "accept_lens", "track_slots", "track_steps", "starts"])
def test_S4_index_tensors(argument: str, device: str) -> None:
    """int32 or int64, at any 4- or 8-byte address; everything else is refused."""
    starts = index([0, 3, 5], device)
    both = Compact(CASE, device, starts=starts)
    free = sorted(set(range(4)) - set(both.problem.slots.tolist()))
    arguments = {
        "slots": both.problem.slots, "accept_lens": index([2, 1], device), "track_slots": index(free, device),
        "track_steps": index([0, 0], device), "starts": starts,
    }  # fmt: skip

    def commit(values: object) -> torch.Tensor:
        _, ours = both.commit(**{**arguments, argument: values})
        return ours.whole("conv_state")

    right = arguments[argument]
    expected = commit(right)
    assert not torch.equal(as_bits(expected), as_bits(both.ours.whole("conv_state")))
    padded = torch.tensor([7, *right.tolist(), 7], device=device)
    for given in (right.long(), padded[1:-1], padded.int()[1:-1]):
        assert_same_bits(commit(given), expected, "conv states")
    for wrong in (
        right.short(), right.float(), torch.stack([right, right], 1)[:, 0], right[None], right[:1],
        torch.cat([right, right]), torch.empty(len(right), dtype=torch.int32, device="meta"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{argument}|accept_lens|starts"):
            commit(wrong)
    with pytest.raises(TypeError, match=argument):
        commit(right.tolist())


def test_P_padded_rows_move_nothing_and_their_inputs_are_not_read(device: str) -> None:
    """All padding, NaN in every input: no slot changes, whatever is accepted."""
    case = Case(B=3, T=2, H=1, HV=1, K=64, padded=(0, 1, 2))
    both = Compact(case, device)
    for reference in (False, True):
        for accepts in ([0, 0, 0], [2, 1, 2]):
            _, ours = both.commit(index(accepts, device), reference)
            assert_same_bits(ours.whole("conv_state"), both.problem.whole("conv_state"), f"accept {accepts}")
    assert not both.errors["ours"].any()


def test_A_rejected_tokens_do_not_reach_the_state(device: str) -> None:
    """NaN in every row of mixed_qkv from the first rejected token on, after verify: none arrives."""
    both = Compact(CASE, device)
    for accept in (1, 2):
        plain, _ = both.commit(index([accept, accept], device))
        kept = both.problem.mixed_qkv.clone()
        both.problem.mixed_qkv.view(2, 3, -1)[:, accept:] = float("nan")
        _, ours = both.commit(index([accept, accept], device))
        both.problem.mixed_qkv.copy_(kept)
        assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), f"accept {accept}")


def test_O_slot_zero_is_an_ordinary_slot_and_rows_are_batch_positions(device: str) -> None:
    """Slots in descending order, 0 the last; a permutation of ``rows`` has nothing to permute."""
    problem = make_problem(Case(B=3, T=2, H=1, HV=1, K=64, spare_slots=0), device)
    states = problem["conv_state"][problem.slots.long()].clone()
    problem.slots = index([2, 1, 0], device)
    problem["conv_state"][:] = states
    problem["ssm_state"].normal_()
    outcomes = []
    for rows in (None, index([2, 0, 1], device)):
        kept = kept_inputs(device)
        outcome = problem.fork()
        positional, keywords = outcome.arguments("ring", state=compact(outcome, kept), rows=rows)
        verify_fused(*positional, **keywords)
        gather_conv(
            outcome["conv_state"][None], kept.view, slots=problem.slots, accept_lens=index([2, 2, 1], device),
            draft_tokens=2,
        )  # fmt: skip
        outcomes.append(outcome)
    expected = problem.fork()
    gather_conv_reference(
        expected["conv_state"][None], [problem.mixed_qkv], slots=problem.slots, accept_lens=index([2, 2, 1], device),
        draft_tokens=2,
    )  # fmt: skip
    for outcome in outcomes:
        assert_same_bits(outcome.whole("conv_state"), expected.whole("conv_state"), "conv states")
