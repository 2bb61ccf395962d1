"""Padding and slots: -1 reads and writes nothing, the pool's edges are served, rows do not see their neighbours."""

from __future__ import annotations

import pytest
import torch

from kda_kernels import (
    ErrorKind,
    describe_errors,
    host_checks,
    new_error_counts,
    verify_fused,
    verify_unfused,
)
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Guarded, Problem, make_problem
from tests.support.commits import fold_problem
from tests.support.grids import params
from tests.support.marks import interpreter_only
from tests.support.memory import record_accesses
from tests.support.ops import KERNELS, RING, WITH_REFERENCE, Verify

BUFFERS = ("conv_window", "snapshots", "conv_state", "ssm_state", *RING)

ONE_OF_FOUR = Case(B=4, T=2, H=1, HV=2, K=64, padded=(1, 2, 3))
LARGE = Case(B=4, T=3, H=4, HV=8, K=128, padded=(1, 2, 3))


def assert_only_row_is_written(outcome: Problem, problem: Problem, row: int, mode: str) -> None:
    """Restore what ``row`` owns from the original and compare whole buffers: nothing else may differ."""
    T, slot = problem.case.T, int(problem.slots[row])
    restored = outcome.fork()
    restored["conv_window"][row, :T] = problem["conv_window"][row, :T]
    if mode == "ring":
        for name in RING:
            restored[name][slot, :, :T] = problem[name][slot, :, :T]
    else:
        restored["snapshots"][row, :T] = problem["snapshots"][row, :T]
    for name in BUFFERS:
        assert_same_bits(restored.whole(name), problem.whole(name), name)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("mode", ["ring", "snapshots"])
@pytest.mark.parametrize("case", params([ONE_OF_FOUR], [LARGE]))
def test_P1_padded_rows_are_zero_and_untouched(case: Case, mode: str, op: Verify, device: str) -> None:
    """NaN in the padded rows' inputs (the builder puts it there), NaN in the output buffer beforehand."""
    problem = make_problem(case, device)
    assert problem.mixed_qkv[case.T :].isnan().all()
    problem["out"].fill_(float("nan"))
    outcome = problem.run(op, mode)
    padded = outcome["out"][case.T :]
    assert_same_bits(padded, torch.zeros_like(padded), "output rows of padded positions")
    assert outcome["out"][: case.T].isfinite().all()
    assert_only_row_is_written(outcome, problem, 0, mode)


@interpreter_only
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("mode", ["ring", "snapshots"])
def test_P1_nothing_is_read_through_a_padded_row(mode: str, op: Verify) -> None:
    problem = make_problem(ONE_OF_FOUR, "cpu").fork()
    positional, keywords = problem.arguments(mode)
    workspace = torch.empty_like(problem.mixed_qkv)
    with record_accesses() as accesses:
        op(*positional, **keywords, workspace=workspace)
    T, slot = ONE_OF_FOUR.T, int(problem.slots[0])
    for x in positional:
        assert accesses.loaded(x)[:T].any()
        assert not accesses.loaded(x)[T:].any(), "a padded row's input was read"
    for name in ("conv_state", "ssm_state"):
        counts = accesses.loaded(problem[name])
        counts[slot] = 0
        assert not counts.any(), f"{name} of another slot was read"
    own = [workspace, *positional, *(problem[name] for name in (*BUFFERS, "out")), problem.slots]
    p = problem.params
    own += [x for x in (p.conv_weight, p.conv_bias, p.A_log, p.dt_bias) if x is not None]
    assert accesses.outside(own) == 0, "an access hit none of the arguments' tensors"


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("case", params([Case(B=2, T=2, H=1, HV=1, K=64)], [Case(B=2, T=3, H=4, HV=8, K=128)]))
def test_P2_first_and_last_slot_are_served(case: Case, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    last = problem["ssm_state"].shape[0] - 1
    served = problem.fork(slots=torch.tensor([last, 0], dtype=torch.int32, device=device))
    for new, old in zip((last, 0), problem.slots.tolist(), strict=True):
        for name in ("conv_state", "ssm_state"):
            served[name][new] = problem[name][old]
    expected, outcome = problem.run(op), served.run(op)
    assert_same_bits(outcome["out"], expected["out"], "output")
    for name in RING:
        for new, old in zip((last, 0), problem.slots.tolist(), strict=True):
            assert_same_bits(outcome[name][new, :, : case.T], expected[name][old, :, : case.T], name)


@interpreter_only
@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("bad", [4, 5, 2**31 - 1, -2, -(2**31)])
def test_P2_slot_outside_the_pool_is_refused_on_the_host(bad: int, op: Verify) -> None:
    problem = make_problem(Case(B=2, T=1, H=1, HV=1, K=64), "cpu")
    problem.slots = torch.tensor([0, bad], dtype=torch.int32)
    before = problem.fork()
    with pytest.raises(ValueError, match=rf"slots.*-1\.\.3.*{bad}"):
        problem.run(op)
    for name in BUFFERS:
        assert_same_bits(problem.whole(name), before.whole(name), name)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize(
    ("case", "bad"),
    [pytest.param(Case(B=2, T=1, H=1, HV=1, K=64), bad, id=str(bad)) for bad in (4, 2**31 - 1, -2, -(2**31), 2**32)]
    + [
        pytest.param(Case(B=2, T=3, H=4, HV=8, K=128), bad, id=f"K128-{bad}", marks=pytest.mark.gpu)
        for bad in (4, 2**40, -(2**40))
    ],
)
def test_P2_slot_met_on_the_device_is_padding_and_counted(case: Case, bad: int, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    good = int(problem.slots[0])
    kind = torch.int64 if abs(bad) > 2**31 else torch.int32
    problem.slots = torch.tensor([good, bad], dtype=kind, device=device)
    padded = problem.fork(slots=torch.tensor([good, -1], dtype=torch.int32, device=device))
    errors = new_error_counts(device)
    with host_checks(False):
        for mode in ("ring", "snapshots"):
            outcome, expected = problem.run(op, mode, errors=errors), padded.run(op, mode)
            for name in ("out", *BUFFERS):
                assert_same_bits(outcome.whole(name), expected.whole(name), name)
    assert errors.tolist() == [2 if kind is ErrorKind.SLOT else 0 for kind in ErrorKind]
    summary = describe_errors(errors)
    assert summary is not None
    assert "slot" in summary


@interpreter_only
@pytest.mark.parametrize("bad", [4, 2**31 - 1, -2, 2**40])
def test_P2_no_access_leaves_the_pool(bad: int) -> None:
    """The interpreter's own record of addresses: verify and fold with a slot outside touch only their arguments."""
    problem = make_problem(Case(B=2, T=1, H=1, HV=1, K=64), "cpu")
    problem.slots = torch.tensor([int(problem.slots[0]), bad], dtype=torch.int64)
    outcome = problem.fork()
    accept, errors = torch.ones(2, dtype=torch.int32), new_error_counts("cpu")
    p, workspace = problem.params, torch.empty_like(problem.mixed_qkv)
    with host_checks(False), record_accesses() as accesses:
        for op in (verify_fused, verify_unfused):
            positional, keywords = outcome.arguments("ring")
            op(*positional, **keywords, workspace=workspace)
        outcome.buffers = fold_problem(outcome, accept, errors=errors).buffers
    assert errors.tolist()[ErrorKind.SLOT] == 1
    own = [*positional, workspace, p.conv_weight, p.A_log, p.dt_bias, problem.slots, accept]
    assert p.conv_bias is not None
    assert accesses.loaded(problem.slots).any()
    # fold works on a copy whose buffers `outcome` now holds; verify worked on the ones given in `keywords`.
    state, ring = keywords["state"], keywords["record"]
    own += [p.conv_bias, state.conv_state, state.ssm_state, state.conv_window, keywords["out"]]
    own += [*(getattr(ring, name) for name in RING), *(outcome[name] for name in BUFFERS)]
    assert accesses.outside(own) == 0


@pytest.mark.parametrize("op", WITH_REFERENCE)
def test_P2_minus_one_never_reaches_the_last_slot(op: Verify, device: str) -> None:
    """Python indexing wraps; ours must not, in verify and in fold."""
    problem = make_problem(Case(B=2, T=1, H=1, HV=1, K=64, padded=(1,)), device)
    outcome = problem.run(op)
    assert_only_row_is_written(outcome, problem, 0, "ring")
    folded = fold_problem(outcome, torch.ones(2, dtype=torch.int32, device=device))
    folded["ssm_state"][int(problem.slots[0])] = outcome["ssm_state"][int(problem.slots[0])]
    assert_same_bits(folded.whole("ssm_state"), outcome.whole("ssm_state"), "state of other slots")


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("mode", ["ring", "snapshots"])
@pytest.mark.parametrize("batch", [0, 2])
def test_P3_empty_and_all_padded_batches(batch: int, mode: str, op: Verify, device: str) -> None:
    case = Case(B=batch, T=2, H=1, HV=1, K=64, padded=tuple(range(batch)))
    problem = make_problem(case, device)
    outcome = problem.run(op, mode)
    assert outcome["out"].shape == (batch * 2, 1, 64)
    assert not outcome["out"].any()
    for name in BUFFERS:
        assert_same_bits(outcome.whole(name), problem.whole(name), name)
    folded = fold_problem(outcome, torch.full((batch,), 2, dtype=torch.int32, device=device))
    assert_same_bits(folded.whole("ssm_state"), problem.whole("ssm_state"), "state after fold")
    positional, keywords = problem.arguments(mode)
    keywords.pop("out")
    assert op(*positional, **keywords).shape == (batch * 2, 1, 64)


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("mode", ["ring", "snapshots"])
@pytest.mark.parametrize("case", params([Case(B=3, T=2, H=1, HV=2, K=64)], [Case(B=16, T=3, H=4, HV=8, K=128)]))
def test_P4_a_row_does_not_depend_on_batch_or_neighbours(case: Case, mode: str, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    together = problem.run(op, mode)
    T = case.T
    for i in {0, case.B - 1}:
        tokens, slot = slice(i * T, (i + 1) * T), int(problem.slots[i])
        # alone, B = 1, in row 0 of every buffer
        alone = problem.run(
            op, mode, mixed_qkv=problem.mixed_qkv[tokens], a=problem.a[tokens], b=problem.b[tokens],
            slots=problem.slots[i : i + 1].clone(), out=None,
        )  # fmt: skip
        own = problem.fork()
        positional, keywords = own.arguments(
            mode, mixed_qkv=problem.mixed_qkv[tokens], a=problem.a[tokens], b=problem.b[tokens],
            slots=problem.slots[i : i + 1].clone(), out=None,
        )  # fmt: skip
        assert_same_bits(op(*positional, **keywords), together["out"][tokens], "output alone")
        assert_same_bits(alone["conv_window"][0], together["conv_window"][i], "window alone")
        # beside neighbours whose inputs and states are NaN
        poisoned = problem.fork(mixed_qkv=problem.mixed_qkv.clone(), a=problem.a.clone(), b=problem.b.clone())
        for j, other in enumerate(problem.slots.tolist()):
            if j != i:
                for x in (poisoned.mixed_qkv, poisoned.a, poisoned.b):
                    x[j * T : (j + 1) * T] = float("nan")
                poisoned["conv_state"][other] = float("nan")
                poisoned["ssm_state"][other] = float("nan")
        beside = poisoned.run(op, mode)
        assert_same_bits(beside["out"][tokens], together["out"][tokens], "output beside NaN")
        assert_same_bits(beside["conv_window"][i], together["conv_window"][i], "window beside NaN")
        if mode == "snapshots":
            assert_same_bits(beside["snapshots"][i], together["snapshots"][i], "snapshots beside NaN")
            assert_same_bits(alone["snapshots"][0], together["snapshots"][i], "snapshots alone")
        else:
            for name in RING:
                assert_same_bits(beside[name][slot], together[name][slot], f"{name} beside NaN")
                assert_same_bits(alone[name][slot], together[name][slot], f"{name} alone")


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("bad", [-1, 3, 5, 2**31 - 1, 2**32])
def test_P2_row_met_on_the_device_is_padding_and_counted(bad: int, op: Verify, device: str) -> None:
    """Windows have 5 rows and snapshots 3: a row that only one of them has is no row, in both lanes alike."""
    case = Case(B=2, T=1, H=1, HV=1, K=64)
    problem = make_problem(case, device)
    for name, count in (("conv_window", 5), ("snapshots", 3)):
        size = (count, *problem[name].shape[1:])
        problem.buffers[name] = Guarded.garbage(size, problem[name].dtype, device, seed=count)
    padded = problem.fork(slots=torch.tensor([int(problem.slots[0]), -1], dtype=torch.int32, device=device))
    errors = new_error_counts(device)
    with host_checks(False):
        outcome = problem.run(op, "snapshots", rows=torch.tensor([2, bad], device=device), errors=errors)
    expected = padded.run(op, "snapshots", rows=torch.tensor([2, 0], device=device))
    for name in ("out", *BUFFERS):
        assert_same_bits(outcome.whole(name), expected.whole(name), name)
    assert errors.tolist() == [int(kind is ErrorKind.ROW) for kind in ErrorKind]
    if device == "cpu":
        with pytest.raises(ValueError, match=r"rows.*0\.\.2"):
            problem.run(op, "snapshots", rows=torch.tensor([2, bad]))
