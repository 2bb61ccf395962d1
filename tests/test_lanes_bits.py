"""Fused and unfused lanes give the same bits: output, conv windows, ring, snapshots, whole buffers compared."""

from __future__ import annotations

import pytest
import torch

from kda_kernels import LaunchConfig, verify_fused, verify_unfused
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.grids import GPU_CASES, HEADS, INTERPRETER_CASES, config_id, every_config, params
from tests.support.ops import KERNELS, RING

STATE = ("conv_state", "ssm_state")
WRITTEN = {"ring": ("out", "conv_window", *RING), "snapshots": ("out", "conv_window", "snapshots")}
ALL_BUFFERS = ("out", "conv_window", "snapshots", *STATE, *RING)


def assert_same_buffers(actual: Problem, expected: Problem, names: tuple[str, ...] = ALL_BUFFERS) -> None:
    """Whole buffers, canaries and unowned slots included."""
    for name in names:
        assert_same_bits(actual.whole(name), expected.whole(name), name)


@pytest.mark.parametrize(
    ("case", "record"),
    [pytest.param(case, record, id=f"{case.id}-{record}") for case in INTERPRETER_CASES for record in WRITTEN]
    + [pytest.param(case, "ring", id=f"{case.id}-ring", marks=pytest.mark.gpu) for case in GPU_CASES]
    + [pytest.param(case, "snapshots", id=f"{case.id}-snapshots", marks=pytest.mark.gpu) for case in GPU_CASES[::2]],
)
def test_fused_equals_unfused(case: Case, record: str, device: str) -> None:
    problem = make_problem(case, device)
    fused = problem.run(verify_fused, record)
    # On a GPU the default is the Gluon kernel: the other lane goes through the portable one, so both are compared.
    unfused = problem.run(verify_unfused, record, config=LaunchConfig() if device == "cuda" else None)
    assert_same_buffers(fused, unfused)
    # What this mode has no business with is as it was, canaries and all; so is the state, in both lanes.
    untouched = tuple(name for name in ALL_BUFFERS if name not in WRITTEN[record])
    for outcome in (fused, unfused):
        assert_same_buffers(outcome, problem, untouched)
    # A test of equal garbage would pass too: what had to be written has been.
    for name in WRITTEN[record]:
        assert not torch.equal(fused.whole(name), problem.whole(name)), f"{name} was not written"


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("case", params(INTERPRETER_CASES[:2], GPU_CASES[::10]))
def test_ring_and_snapshots_give_the_same_output(case: Case, op: object, device: str) -> None:
    problem = make_problem(case, device)
    ring, snapshots = problem.run(op, "ring"), problem.run(op, "snapshots")  # type: ignore[arg-type]
    assert_same_buffers(ring, snapshots, ("out", "conv_window", *STATE))


SMALL = Case(B=1, T=2, H=1, HV=2, K=64)
FEW_CONFIGS = [LaunchConfig(block_v=8), LaunchConfig(block_v=32, num_warps=1), LaunchConfig(block_v=64, num_warps=8)]
# K = 128 is compiled with every configuration, K = 64 with the corners of the list.
K128 = Case(B=2, T=2, H=2, HV=4, K=128)
K64 = Case(B=2, T=2, H=2, HV=4, K=64, weight_dtype=torch.float32, lower_bound=-5.0)
CORNERS = [
    LaunchConfig(block_v=v, num_warps=w, rows_per_thread=r)
    for v, w, r in ((8, 8, None), (64, 1, None), (8, 2, 1), (64, 4, 4), (128, 8, 4))
]
ALL_CONFIGS = [(K128, config) for config in every_config(128)] + [(K64, config) for config in CORNERS]


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("record", ["ring", "snapshots"])
@pytest.mark.parametrize("config", FEW_CONFIGS, ids=config_id)
def test_a_few_configurations(config: LaunchConfig, record: str, op: object, device: str) -> None:
    problem = make_problem(SMALL, device)
    assert_same_buffers(
        problem.run(op, record, config=config),  # type: ignore[arg-type]
        problem.run(verify_unfused, record),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize(
    ("case", "config"), [pytest.param(*pair, id=f"K{pair[0].K}-{config_id(pair[1])}") for pair in ALL_CONFIGS]
)
def test_every_configuration_that_can_be_named(case: Case, config: LaunchConfig, op: object, device: str) -> None:
    problem = make_problem(case, device)
    for mode in ("ring", "snapshots"):
        outcome = problem.run(op, mode, config=config)  # type: ignore[arg-type]
        assert_same_buffers(outcome, problem.run(verify_unfused, mode))


def test_the_list_of_configurations_is_not_empty() -> None:
    configs = every_config()
    assert {8, 16, 32, 64, 128} <= {c.block_v for c in configs}
    assert {1, 2, 4, 8} <= {c.num_warps for c in configs}
    assert {None, 1, 2, 4} == {c.rows_per_thread for c in configs}


@pytest.mark.parametrize("pdl", [None, False])
@pytest.mark.parametrize("case", params([SMALL], [K128]))
def test_pdl_changes_no_bit(case: Case, pdl: bool | None, device: str) -> None:
    problem = make_problem(case, device)
    for op in (verify_fused, verify_unfused):
        assert_same_buffers(
            problem.run(op, config=LaunchConfig(block_v=64, pdl=pdl)), problem.run(verify_unfused, "ring")
        )


@pytest.mark.parametrize("lane", KERNELS)
def test_rows_choose_window_and_snapshot_rows(lane: object, device: str) -> None:
    """``rows`` as a permutation moves windows and snapshots, and nothing else."""
    problem = make_problem(Case(B=2, T=2, H=1, HV=1, K=64), device)
    plain = problem.run(lane, "snapshots")  # type: ignore[arg-type]
    swapped = problem.run(lane, "snapshots", rows=torch.tensor([1, 0], device=device))  # type: ignore[arg-type]
    for name in ("conv_window", "snapshots"):
        assert_same_bits(swapped[name], plain[name].flip(0), name)
    assert_same_buffers(swapped, plain, ("out", *STATE, *RING))


def test_the_gpu_set_covers_every_pair_of_factors() -> None:
    import itertools

    from tests.support.grids import DRAFT_TOKENS, factors

    levels = [factors(case) for case in GPU_CASES]
    assert {level["heads"] for level in levels} == set(HEADS)
    assert {level["T"] for level in levels} == set(DRAFT_TOKENS)
    for one, two in itertools.combinations(levels[0], 2):
        seen = {(level[one], level[two]) for level in levels}
        every = {(x[one], y[two]) for x in levels for y in levels}
        assert seen == every, f"pairs of {one} and {two} that no GPU case has: {every - seen}"
