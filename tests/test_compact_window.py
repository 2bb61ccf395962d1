"""Compact windows: verify writes none, and the gather leaves the conv states that windows and scatter leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels import (
    ErrorKind,
    LaunchConfig,
    LayerState,
    gather_conv,
    gather_conv_reference,
    gather_reason,
    host_checks,
    new_error_counts,
    verify_fused,
    verify_reference,
    verify_unfused,
)
from tests.support.batches import offsets, ragged_problem
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, make_problem
from tests.support.compact import WRITTEN, Compact, compact, kept_inputs, with_pitch
from tests.support.grids import GPU_CASES, INTERPRETER_CASES, config_id, every_config, params
from tests.support.marks import interpreter_only
from tests.support.ops import KERNELS, WITH_REFERENCE

SMALL = Case(B=3, T=3, H=1, HV=2, K=64, spare_slots=3)
LENGTHS = [Case(B=2, T=T, H=1, HV=1, K=64, bias=T % 2 == 0) for T in range(1, 9)]


def accepted(case: Case, first: int, device: str) -> torch.Tensor:
    """Prefixes that differ from row to row; over ``first`` 0..T all occur in each."""
    return torch.tensor([(first + i) % (case.T + 1) for i in range(case.B)], dtype=torch.int32, device=device)


def assert_same_verify(both: Compact) -> None:
    """Both verifies wrote the same, and ours no window but where its inputs lie, between unharmed canaries."""
    for name in WRITTEN:
        assert_same_bits(both.ours.whole(name), both.plain.whole(name), name)
    for name in ("conv_window", "conv_state"):
        assert_same_bits(both.ours.whole(name), both.problem.whole(name), name)
    x = both.problem.mixed_qkv
    assert both.noted == [x.data_ptr(), x.stride(0) if len(x) > 1 else x.shape[1], len(x)]
    expected = kept_inputs(both.device)
    expected.view.copy_(both.kept.view)
    assert_same_bits(both.kept.whole, expected.whole, "canaries around kept_inputs")


@pytest.mark.parametrize("mode", ["ring", "snapshots"])
@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("case", params(INTERPRETER_CASES, GPU_CASES[::3]))
def test_every_prefix(case: Case, op: Callable[..., torch.Tensor], mode: str, device: str) -> None:
    """Verify writes what it wrote, but no window; each accepted prefix leaves the plain path's conv states."""
    both = Compact(case, device, op, mode)
    assert_same_verify(both)
    for first in range(case.T + 1):
        plain, ours = both.commit(accepted(case, first, device))
        assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), f"conv states, {first}")
        _, reference = both.commit(accepted(case, first, device), reference=True)
        assert_same_bits(reference.whole("conv_state"), plain.whole("conv_state"), f"reference, {first}")
    assert both.errors["ours"].tolist() == both.errors["plain"].tolist() == [0] * len(ErrorKind)


@pytest.mark.parametrize("case", LENGTHS, ids=lambda c: c.id)
def test_every_draft_length(case: Case, device: str) -> None:
    both = Compact(case, device, verify_fused)
    for first in range(case.T + 1):
        plain, ours = both.commit(accepted(case, first, device))
        assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), f"conv states, {first}")


@pytest.mark.parametrize(("extra", "start"), [(8, 0), (8, 8), (5, 0), (16, 3), (1, 1)])
@pytest.mark.parametrize("op", KERNELS)
def test_inputs_of_any_pitch_and_alignment(
    op: Callable[..., torch.Tensor], extra: int, start: int, device: str
) -> None:
    problem = make_problem(replace(SMALL, padded=(1,)), device)
    problem.mixed_qkv = with_pitch(problem.mixed_qkv, extra, start)
    both = Compact(problem.case, device, op, problem=problem)
    assert both.noted == [problem.mixed_qkv.data_ptr(), problem.shape.conv_dim + extra, 9]
    plain, ours = both.commit(torch.tensor([1, 2, 3], device=device))
    assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), "conv states")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["recurrent", "chunked"])
@pytest.mark.parametrize("config", every_config(128)[::5], ids=config_id)
def test_configurations(config: LaunchConfig, form: str, device: str) -> None:
    case = Case(B=3, T=4, H=2, HV=4, K=128, padded=(1,))
    for op in (verify_fused, verify_unfused):
        for ready in (False, True):
            both = Compact(case, device, op, config=config, form=form, indices_ready=ready)
            assert_same_verify(both)
            plain, ours = both.commit(accepted(case, 1, device))
            assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), "conv states")


def ragged(lengths: list[int], device: str, padded: tuple[int, ...] = ()) -> tuple[Case, Any, torch.Tensor]:
    """A ragged problem with one row more than its requests have, and its offsets."""
    case = Case(B=len(lengths), T=3, H=1, HV=2, K=64, spare_slots=3)
    return case, ragged_problem(case, device, sum(lengths) + 1, padded), offsets(lengths, device)


@pytest.mark.parametrize("mode", ["ring", "snapshots"])
@pytest.mark.parametrize("op", WITH_REFERENCE[1:])
def test_ragged(op: Callable[..., torch.Tensor], mode: str, device: str) -> None:
    case, problem, starts = ragged([3, 0, 1, 2], device, padded=(2,))
    both = Compact(case, device, op, mode, problem, starts=starts)
    assert_same_verify(both)
    for accepts in ([3, 0, 1, 2], [1, 0, 0, 1], [0, 0, 0, 2], [2, 0, 1, 0]):
        lengths = torch.tensor(accepts, device=device)
        plain, ours = both.commit(lengths)
        _, reference = both.commit(lengths, reference=True)
        assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), f"accept {accepts}")
        assert_same_bits(reference.whole("conv_state"), plain.whole("conv_state"), f"reference, accept {accepts}")
    assert not both.errors["ours"].any()


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
class TestFaults:
    """What the device finds wrong leaves its slots alone and is counted as the scatter counts it."""

    def test_accept_lengths_and_slots(self, reference: bool, device: str) -> None:
        both = Compact(SMALL, device)
        outside = both.problem["conv_state"].shape[0]
        for accepts in ([4, 1, -1], [2**31 - 1, 3, 2]):
            with host_checks(False):
                plain, ours = both.commit(torch.tensor(accepts, device=device), reference)
            assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), f"accept {accepts}")
        slots = both.problem.slots.clone()
        slots[0], slots[2] = outside, -2
        with host_checks(False):
            plain, ours = both.commit(torch.tensor([1, 2, 3], device=device), reference, slots=slots)
        assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), "slots outside the pool")
        assert both.errors["ours"].tolist() == both.errors["plain"].tolist()
        assert both.errors["ours"][ErrorKind.ACCEPT] == 3
        assert both.errors["ours"][ErrorKind.SLOT] == 2

    def test_ranges(self, reference: bool, device: str) -> None:
        """Too long, negative, and longer than the request accepts."""
        case, problem, starts = ragged([3, 2, 1, 1], device)
        both = Compact(case, device, verify_unfused, "ring", problem, starts=starts)
        wrong = torch.tensor([0, 3, 7, 3, 4], device=device)
        with host_checks(False):
            plain, ours = both.commit(torch.tensor([1, 1, 0, 2], device=device), reference, starts=wrong)
        assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), "conv states")
        assert both.errors["ours"].tolist() == both.errors["plain"].tolist()
        assert both.errors["ours"][ErrorKind.LENGTH] == 2
        assert both.errors["ours"][ErrorKind.ACCEPT] == 1

    def test_rows_that_verify_was_not_given_are_not_read(self, reference: bool, device: str) -> None:
        """Ranges past the batch, which verify has padded."""
        case, problem, starts = ragged([3, 2], device)
        both = Compact(case, device, verify_unfused, "ring", problem, starts=starts)
        beyond = torch.tensor([0, 4, 7], device=device)  # 6 rows were given
        with host_checks(False):
            _, ours = both.commit(torch.tensor([0, 1], device=device), reference, starts=beyond)
        assert_same_bits(ours.whole("conv_state"), both.ours.whole("conv_state"), "conv states")
        assert both.errors["ours"].tolist() == [int(kind is ErrorKind.LENGTH) * 2 for kind in ErrorKind]


def test_nothing_noted_commits_nothing(device: str) -> None:
    """A layer that was not verified has no inputs to read."""
    problem = make_problem(SMALL, device)
    outcome, errors = problem.fork(), new_error_counts(device)
    gather_conv(
        outcome["conv_state"][None], torch.zeros(1, 3, dtype=torch.int64, device=device), slots=problem.slots,
        accept_lens=torch.ones(3, dtype=torch.int32, device=device), draft_tokens=3, errors=errors,
    )  # fmt: skip
    assert_same_bits(outcome.whole("conv_state"), problem.whole("conv_state"), "conv states")
    assert errors.tolist() == [3 * int(kind is ErrorKind.LENGTH) for kind in ErrorKind]


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
@pytest.mark.parametrize("steps", [[0, 0, 0], [0, 1, 2], [2, 1, 0], [-1, 3, 1]], ids=str)
def test_tracking(steps: list[int], reference: bool, device: str) -> None:
    """The second slot gets the state after its step, from the old state of the request's slot."""
    both = Compact(SMALL, device)
    free = sorted(set(range(6)) - set(both.problem.slots.tolist()))
    for targets in (free, [-1, free[0], -1], [99, -1, free[2]]):
        for accepts in ([3, 3, 3], [1, 2, 3], [0, 1, 2]):
            track = {
                "track_slots": torch.tensor(targets, device=device),
                "track_steps": torch.tensor(steps, device=device),
            }
            with host_checks(99 not in targets):
                plain, ours = both.commit(torch.tensor(accepts, device=device), reference, **track)
            assert_same_bits(ours.whole("conv_state"), plain.whole("conv_state"), f"{targets}, accept {accepts}")
    assert both.errors["ours"].tolist() == both.errors["plain"].tolist()
    assert both.errors["ours"][ErrorKind.TRACK_SLOT] == 2


@pytest.mark.parametrize("pitch", [0, 3, 64])
def test_layers_in_one_launch(pitch: int, device: str) -> None:
    """Every layer from its own inputs, whatever their pitches, into its own states."""
    problems = [make_problem(replace(SMALL, seed=seed), device) for seed in range(3)]
    slots, accepts = problems[0].slots, torch.tensor([1, 3, 2], device=device)
    for i, problem in enumerate(problems):
        problem.mixed_qkv, problem.slots = with_pitch(problem.mixed_qkv, 4 * i + i % 2), slots
        problem["conv_state"].copy_(torch.arange(6.0).add(10 * i)[:, None, None] + torch.arange(3.0)[:, None] / 8)
    sides = [Compact(problem.case, device, problem=problem) for problem in problems]
    d = problems[0].shape.conv_dim
    states = torch.full((3, 6, 3 * d + pitch), float("nan"), dtype=torch.bfloat16, device=device)
    together = states[:, :, : 3 * d].unflatten(2, (3, d))
    for layer, one in enumerate(sides):
        together[layer] = one.problem["conv_state"]
    gather_conv(together, torch.cat([one.kept.view for one in sides]), slots=slots, accept_lens=accepts, draft_tokens=3)
    for layer, one in enumerate(sides):
        plain, _ = one.commit(accepts)
        assert_same_bits(together[layer], plain["conv_state"], f"layer {layer}")
    assert states[:, :, 3 * d :].isnan().all()


def test_an_empty_batch_touches_nothing(device: str) -> None:
    for op in (verify_fused, verify_unfused, verify_reference):
        both = Compact(Case(B=0, T=2, H=1, HV=1, K=64), device, op)
        _, ours = both.commit(torch.zeros(0, dtype=torch.int32, device=device))
        assert_same_bits(ours.whole("conv_state"), both.problem.whole("conv_state"), "conv states")
        assert_same_bits(both.kept.whole, kept_inputs(device).whole, "kept_inputs")


class TestRefusals:
    def test_exactly_one_of_windows_and_kept_inputs(self, device: str) -> None:
        problem = make_problem(SMALL, device)
        kept = kept_inputs(device).view[0]
        both = LayerState(problem["conv_state"], problem["ssm_state"], problem["conv_window"], kept)
        neither = LayerState(problem["conv_state"], problem["ssm_state"], None)
        for state, given in ((both, "both"), (neither, "neither")):
            for op in (verify_fused, verify_unfused, verify_reference):
                with pytest.raises(ValueError, match=f"exactly one of state.conv_window .* got {given}"):
                    problem.run(op, state=state)

    def test_trees(self, device: str) -> None:
        problem = make_problem(SMALL, device)
        parents = torch.tensor([[-1, 0, 0]] * 3, device=device)
        state = compact(problem, kept_inputs(device))
        for op in (verify_unfused, verify_reference):
            with pytest.raises(ValueError, match=r"parents must be None where state\.kept_inputs"):
                problem.run(op, "snapshots", state=state, parents=parents)

    @pytest.mark.parametrize(
        ("kept", "message"),
        [
            (torch.zeros(2, dtype=torch.int64), r"kept_inputs must have shape \[3\]"),
            (torch.zeros(3, dtype=torch.int32), "kept_inputs must be int64"),
            (torch.zeros(6, dtype=torch.int64)[::2], "kept_inputs must be packed"),
        ],
    )
    def test_kept_inputs_of_another_kind(self, kept: torch.Tensor, message: str, device: str) -> None:
        problem = make_problem(SMALL, device)
        kept = torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=device)
        with pytest.raises(ValueError, match=message):
            problem.run(verify_fused, state=LayerState(problem["conv_state"], problem["ssm_state"], None, kept))

    @pytest.mark.parametrize("name", ["mixed_qkv", "a", "out", "conv_state", "ssm_state", "g"])
    def test_kept_inputs_that_overlap(self, name: str, device: str) -> None:
        """They are written: no other tensor of the call may lie there, not even in part."""
        problem = make_problem(SMALL, device)
        tensor = getattr(problem, name) if name in ("mixed_qkv", "a") else problem[name]
        start = -(-(tensor.storage_offset() * tensor.element_size() + tensor.element_size()) // 8)
        kept = torch.tensor([], dtype=torch.int64, device=device).set_(tensor.untyped_storage(), start, (3,))
        for op in (verify_fused, verify_unfused, verify_reference):
            state = LayerState(problem["conv_state"], problem["ssm_state"], None, kept)
            positional, keywords = problem.arguments("ring", state=state)
            with pytest.raises(
                ValueError, match=r"must not share memory with .*state.kept_inputs|state.kept_inputs must"
            ):
                op(*positional, **keywords)

    def test_gather(self, device: str) -> None:
        both = Compact(SMALL, device)
        state, kept = both.ours["conv_state"][None], both.kept.view
        common: dict[str, Any] = dict(
            slots=both.problem.slots, accept_lens=torch.ones(3, dtype=torch.int32, device=device), draft_tokens=3
        )
        assert gather_reason(state, kept, **common) is None
        for changes, message in (
            ({"conv_state": state[0]}, "conv_state must have shape"),
            ({"conv_state": state.float()}, "conv_state must be bfloat16 or float16, got float32"),
            ({"conv_state": state[..., :40].contiguous()}, "conv_state must have a multiple of 64 channels, got 40"),
            ({"conv_state": state.expand(2, -1, -1, -1)}, "conv_state must not overlap itself"),
            ({"kept_inputs": kept.expand(2, -1)}, r"kept_inputs must have shape \[1, 3\]"),
            ({"kept_inputs": kept.int()}, "kept_inputs must be int64"),
            ({"draft_tokens": 0}, "draft_tokens must be at least 1"),
            ({"slots": both.problem.slots[None]}, r"slots must have shape \[B\]"),
            ({"accept_lens": common["accept_lens"][:2]}, r"accept_lens must have shape \[3\]"),
            ({"track_slots": common["accept_lens"]}, "track_slots and track_steps must be given together"),
            ({"errors": torch.zeros(2, dtype=torch.int32, device=device)}, "errors must have shape"),
            ({"starts": torch.zeros(3, dtype=torch.int32, device=device)}, r"starts must have shape \[4\]"),
        ):
            given = {"conv_state": state, "kept_inputs": kept, **common, **changes}
            assert gather_reason(**given) is not None
            with pytest.raises(ValueError, match=message):
                gather_conv(**given)
        assert_same_bits(both.ours.whole("conv_state"), both.problem.whole("conv_state"), "conv states")
        with pytest.raises(TypeError, match="kept_inputs must be a Tensor"):
            gather_conv(state, [1, 2, 3], **common)

    @interpreter_only
    def test_values_on_the_host(self) -> None:
        both = Compact(SMALL, "cpu")
        for reference in (False, True):
            with pytest.raises(ValueError, match=r"accept_lens must be within 0\.\.3, got 4"):
                both.commit(torch.tensor([4, 1, 1]), reference)
            with pytest.raises(ValueError, match=r"slots must be within -1\.\.5"):
                both.commit(torch.tensor([1, 1, 1]), reference, slots=torch.tensor([9, 1, 2]))

    def test_reference(self, device: str) -> None:
        both = Compact(SMALL, device)
        common: dict[str, Any] = dict(
            slots=both.problem.slots, accept_lens=torch.ones(3, dtype=torch.int32, device=device), draft_tokens=3
        )
        state, x = both.ours["conv_state"][None], both.problem.mixed_qkv
        for inputs, message in (
            ([], "mixed_qkv must hold a tensor for each of the 1 layers, got 0"),
            ([x.float()], r"mixed_qkv\[0\] must be bfloat16"),
            ([x[:, :64]], r"mixed_qkv\[0\] must have shape"),
        ):
            with pytest.raises(ValueError, match=message):
                gather_conv_reference(state, inputs, **common)
        with pytest.raises(TypeError, match="mixed_qkv must be a list or tuple of Tensors"):
            gather_conv_reference(state, x, **common)
