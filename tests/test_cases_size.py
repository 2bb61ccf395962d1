"""Size and index arithmetic: offsets past 2^31, grids past 65,535, far rows, index tensors of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_kernels import (
    LayerState,
    Ring,
    Snapshots,
    fold,
    scatter_conv,
    scatter_snapshots,
)
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.commits import fold_problem, verified
from tests.support.grids import params
from tests.support.ops import KERNELS, RING, WITH_REFERENCE, Verify
from tests.support.sparse import vast_pool, vast_tensor

SMALL = Case(B=2, T=2, H=1, HV=1, K=64, length=2)
LARGE = Case(B=2, T=3, H=4, HV=4, K=128, length=3)
LARGEST = Case(B=2, T=3, H=32, HV=32, K=128, length=3)  # slot 4096 of a packed state pool begins at element 2^31
LAST_SLOT = 4096

# With `pytest -n N --dist loadgroup` one worker takes these, so that their many GiB are not needed N times.
pytestmark = pytest.mark.xdist_group("vast")


def vast(problem: Problem, name: str, entries: int, at: list[int], device: str) -> torch.Tensor:
    """Buffer ``name`` with ``entries`` entries whose last begins at an element offset >= 2^31; live data at ``at``."""
    source = problem[name]
    pitch = -(-(2**31) // (entries - 1))
    pool = vast_pool((entries, *source.shape[1:]), pitch + (-pitch) % 64, source.dtype, device)
    for i, slot in enumerate(problem.slots.tolist()):
        pool[at[i]] = source[slot if name in ("conv_state", "ssm_state", *RING) else i]
    return pool


def untouched(pool: torch.Tensor, at: list[int]) -> None:
    """The entries around the live ones, and around where a 32-bit offset would wrap to, are still zero."""
    for slot in at:
        for near in {slot - 1, slot + 1, slot // 2, 0, 1} - set(at):
            if 0 <= near < pool.shape[0]:
                assert not pool[near].any(), f"entry {near} was written"


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(SMALL, name, id=name) for name in ("ssm_state", "conv_state", *RING)]
    + [pytest.param(LARGE, name, id=f"{LARGE.id}-{name}", marks=pytest.mark.gpu) for name in ("conv_state", *RING)]
    + [pytest.param(LARGEST, "ssm_state", id=f"{LARGEST.id}-ssm_state", marks=pytest.mark.gpu)],
)
def test_S1_slot_offsets_past_two_to_the_31(case: Case, name: str, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    near = problem.run(op, "ring")
    at = [LAST_SLOT, 5]
    # every pool has 4097 slots; only the one under test is vast, the others share one entry per slot parity
    pools = {}
    for other in ("ssm_state", "conv_state", *RING):
        if other == name:
            pools[other] = vast(problem, other, LAST_SLOT + 1, at, device)
        else:
            source = problem[other]
            entry = source[0].numel()
            pools[other] = vast_pool((LAST_SLOT + 1, *source.shape[1:]), entry, source.dtype, device)
            for i, slot in enumerate(problem.slots.tolist()):
                pools[other][at[i]] = source[slot]
    slots = torch.tensor(at, dtype=torch.int32, device=device)
    far = problem.run(
        op, "ring", slots=slots, record=Ring(*(pools[ring] for ring in RING)),
        state=LayerState(pools["conv_state"], pools["ssm_state"], problem.buffers["conv_window"].clone().view),
    )  # fmt: skip
    assert_same_bits(far["out"], near["out"], "output")
    for ring in RING:
        for i, slot in enumerate(problem.slots.tolist()):
            assert_same_bits(pools[ring][at[i]], near[ring][slot], ring)
    untouched(pools[name], at)
    if name in ("ssm_state", *RING):  # fold reads the far ring, and reads and writes the far state
        accept = torch.tensor([case.T, case.T - 1], device=device)
        folded = fold_problem(near, accept)
        ring = Ring(*(pools[ring][None] for ring in RING))
        fold(pools["ssm_state"][None], ring, shape=problem.shape, slots=slots, accept_lens=accept, draft_tokens=case.T)
        for i, slot in enumerate(problem.slots.tolist()):
            assert_same_bits(pools["ssm_state"][at[i]], folded["ssm_state"][slot], "folded state")
        untouched(pools[name], at)


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("name", ["conv_window", "snapshots"])
@pytest.mark.parametrize("case", params([SMALL], [LARGE]))
def test_S1_row_offsets_past_two_to_the_31(case: Case, name: str, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    near = problem.run(op, "snapshots")
    far_rows = {other: problem.buffers[other].clone().view for other in ("conv_window", "snapshots")}
    far_rows[name] = vast(problem, name, case.B, [0, 1], device)
    far = problem.run(
        op, "snapshots", record=Snapshots(far_rows["snapshots"]),
        state=LayerState(problem["conv_state"], problem["ssm_state"], far_rows["conv_window"]),
    )  # fmt: skip
    assert_same_bits(far["out"], near["out"], "output")
    for other, rows in far_rows.items():
        assert_same_bits(rows[: case.B], near[other], other)
    accept = torch.tensor([1, case.T], device=device)
    common: dict[str, Any] = dict(slots=problem.slots, accept_lens=accept, draft_tokens=case.T)
    scattered = far.fork()
    if name == "snapshots":
        scatter_snapshots(scattered["ssm_state"][None], Snapshots(far_rows[name][None]), **common)
    else:
        scatter_conv(scattered["conv_state"][None], far_rows[name][None], **common)
    state = "ssm_state" if name == "snapshots" else "conv_state"
    expected = problem.buffers[state].clone()
    for i, slot in enumerate(problem.slots.tolist()):
        expected.view[slot] = near[name][i, int(accept[i]) - 1]
    assert_same_bits(scattered.whole(state), expected.whole, state)


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        pytest.param(Case(B=1, T=1, H=1, HV=1, K=64, spare_slots=0), 66, id="66-layers"),
        pytest.param(Case(B=2, T=3, H=4, HV=8, K=128), 66, id="K128-66-layers", marks=pytest.mark.gpu),
    ],
)
def test_S1_fold_of_66_layers_of_two_to_the_25(case: Case, layers: int, device: str) -> None:
    """The last state begins at element 65 * 2^25 > 2^31; first, middle and last layer fold as one layer does."""
    problem = verified(case, device)
    accept = torch.full((case.B,), case.T, device=device)
    one = fold_problem(problem, accept)
    state = problem["ssm_state"]
    far = vast_tensor((layers, *state.shape), (2**25, *state.stride()), state.dtype, device)
    rings = Ring(*(problem[name][None].repeat(layers, *[1] * problem[name].ndim) for name in RING))
    for layer in (0, layers // 2, layers - 1):
        far[layer] = state
    fold(far, rings, shape=problem.shape, slots=problem.slots, accept_lens=accept, draft_tokens=case.T)
    for layer in (0, layers // 2, layers - 1):
        assert_same_bits(far[layer], one["ssm_state"], f"layer {layer}")


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize(("batch", "mode"), [(2047, "ring"), (2048, "ring"), (2050, "ring"), (2050, "snapshots")])
def test_S2_grids_past_65535(batch: int, mode: str, op: Verify, device: str) -> None:
    """B * HV from 65,504 to 65,600; the last rows equal the same rows in a batch of 2."""
    case = Case(B=batch, T=1, H=32, HV=32, K=64, length=1)
    problem = make_problem(case, device)
    outcome = problem.run(op, mode)
    last = slice(batch - 2, batch)
    few = problem.fork(slots=problem.slots[last].clone())
    positional, keywords = few.arguments(
        mode, mixed_qkv=problem.mixed_qkv[last], a=problem.a[last], b=problem.b[last], out=None
    )
    assert_same_bits(op(*positional, **keywords), outcome["out"][last], "output of the last rows")
    assert_same_bits(few["conv_window"][:2], outcome["conv_window"][last], "window of the last rows")
    accept = torch.ones(batch, dtype=torch.int32, device=device)
    if mode == "ring":
        folded = fold_problem(outcome, accept)
        slots = problem.slots[last].long()
        few_folded = outcome.fork()
        ring = Ring(*(few_folded[name][None] for name in RING))
        fold(
            few_folded["ssm_state"][None], ring, shape=problem.shape, slots=problem.slots[last].clone(),
            accept_lens=accept[:2], draft_tokens=1,
        )  # fmt: skip
        assert_same_bits(folded["ssm_state"][slots], few_folded["ssm_state"][slots], "folded state")


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize(
    "case",
    params([Case(B=32, T=5, H=1, HV=1, K=64)], [Case(B=20, T=8, H=4, HV=4, K=128)]),
)
def test_S3_row_stride_of_two_to_the_24(case: Case, op: Verify, device: str) -> None:
    """160 rows: the last begins at element 159 * 2^24 > 2^31."""
    problem = make_problem(case, device)
    tokens, D = problem.mixed_qkv.shape
    assert tokens == 160
    far = vast_tensor((tokens, D), (2**24, 1), problem.mixed_qkv.dtype, device)
    far.copy_(problem.mixed_qkv)
    outcome, expected = problem.run(op, mixed_qkv=far), problem.run(op)
    assert_same_bits(outcome["out"], expected["out"], "output")
    for name in ("conv_window", *RING):
        assert_same_bits(outcome.whole(name), expected.whole(name), name)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b"])
@pytest.mark.parametrize("case", params([Case(B=1, T=8, H=1, HV=1, K=64)], [Case(B=1, T=8, H=4, HV=4, K=128)]))
def test_S3_row_stride_past_two_to_the_31_within_one_request(case: Case, name: str, op: Verify, device: str) -> None:
    """7 * 2^29 > 2^31: also the offset from a request's first token to its last needs 64 bits."""
    problem = make_problem(case, device)
    near = getattr(problem, name)
    far = vast_tensor(tuple(near.shape), (2**29, 1), near.dtype, device)
    far.copy_(near)
    outcome, expected = problem.run(op, **{name: far}), problem.run(op)
    for written in ("out", "conv_window", *RING):
        assert_same_bits(outcome.whole(written), expected.whole(written), written)


INDEX_CASE = Case(B=2, T=2, H=1, HV=1, K=64)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("argument", ["slots", "rows"])
def test_S4_index_tensors_of_verify(argument: str, op: Verify, device: str) -> None:
    problem = make_problem(INDEX_CASE, device)
    right = problem.slots if argument == "slots" else torch.tensor([1, 0], dtype=torch.int32, device=device)
    expected = problem.run(op, "snapshots", **{argument: right})
    padded = torch.tensor([7, *right.tolist(), 7], device=device)
    accepted = {
        "int64": right.long(),
        "int32": right.int(),
        "a slice": padded[1:3],
        "an int32 slice of odd alignment": padded.int()[1:3],
    }
    for what, index in accepted.items():
        outcome = problem.run(op, "snapshots", **{argument: index})
        for name in ("out", "conv_window", "snapshots"):
            assert_same_bits(outcome.whole(name), expected.whole(name), f"{name} with {argument} as {what}")
    refused = {
        "int16": right.short(),
        "fp32": right.float(),
        "bool": right.bool(),
        "strided": torch.stack([right, right], 1)[:, 0],
        "two-dimensional": right[None],
        "too short": right[:1],
        "too long": torch.cat([right, right]),
        "elsewhere": torch.empty(2, dtype=torch.int32, device="meta"),
    }
    for index in refused.values():
        with pytest.raises(ValueError, match=rf"{argument}|mixed_qkv"):
            problem.run(op, "snapshots", **{argument: index})
    with pytest.raises(TypeError, match=argument):
        problem.run(op, "snapshots", **{argument: right.tolist()})


@pytest.mark.parametrize("argument", ["slots", "rows", "accept_lens", "track_slots", "track_steps"])
def test_S4_index_tensors_of_commit(argument: str, device: str) -> None:
    problem = verified(INDEX_CASE, device)
    free = sorted(set(range(4)) - set(problem.slots.tolist()))
    arguments = {
        "slots": problem.slots,
        "rows": torch.tensor([1, 0], dtype=torch.int32, device=device),
        "accept_lens": torch.tensor([2, 1], dtype=torch.int32, device=device),
        "track_slots": torch.tensor(free, dtype=torch.int32, device=device),
        "track_steps": torch.tensor([0, 0], dtype=torch.int32, device=device),
    }

    def commit(index: object) -> Problem:
        given: dict[str, Any] = {**arguments, argument: index}
        outcome = problem.fork()
        ring = Ring(*(outcome[name][None] for name in RING))
        scatter_conv(outcome["conv_state"][None], outcome["conv_window"][None], draft_tokens=2, **given)
        given.pop("rows")
        fold(outcome["ssm_state"][None], ring, shape=problem.shape, draft_tokens=2, **given)
        return outcome

    right = arguments[argument]
    expected = commit(right)
    padded = torch.tensor([7, *right.tolist(), 7], device=device)
    for index in (right.long(), padded[1:3], padded.int()[1:3]):
        outcome = commit(index)
        for name in ("ssm_state", "conv_state"):
            assert_same_bits(outcome.whole(name), expected.whole(name), name)
    for wrong in (
        right.short(), right.float(), torch.stack([right, right], 1)[:, 0], right[None], right[:1],
        torch.cat([right, right]), torch.empty(2, dtype=torch.int32, device="meta"),
    ):  # fmt: skip
        # a batch of another size may be blamed on any of the tensors that no longer agree
        with pytest.raises(ValueError, match=f"{argument}|accept_lens"):
            commit(wrong)
    with pytest.raises(TypeError, match=argument):
        commit(right.tolist())
