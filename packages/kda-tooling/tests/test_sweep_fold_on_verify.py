"""``kda sweep --round --fold-on-verify``: ring lanes once more, checked like the others, with their own floor."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kda_kernels import KdaShape
from kda_tooling.bench.arms import commit_arms
from kda_tooling.bench.bits import BitsDifferError, check_bits, check_commits
from kda_tooling.bench.settings import SweepSettings, command_of
from kda_tooling.bench.sweep import build_arms, build_problems, cell_bytes, floor_of
from kda_tooling.problem import Problems

SETTINGS = SweepSettings(
    shape=KdaShape(1, 1, 64, 64), kind="round", lanes=("fused", "fused+ring", "unfused+ring"), fold_on_verify=True
)


@pytest.fixture
def problems(device: str) -> Problems:
    return build_problems(SETTINGS, 2, 2, 2, device)


def test_ring_lanes_have_an_arm_more(problems: Problems) -> None:
    arms = build_arms(SETTINGS, problems.layers[0], [])
    assert [arm.name for arm in arms] == [
        "kda fused", "kda fused+ring", "kda fused+ring fold-on-verify", "kda unfused+ring",
        "kda unfused+ring fold-on-verify",
    ]  # fmt: skip
    assert [arm.name for arm in commit_arms(arms)] == [
        "kda snapshots commit", "kda ring commit", "kda ring fold-on-verify commit",
    ]  # fmt: skip
    plain, folding = (floor_of(SETTINGS, 4, 64, "ring", folds).total for folds in (False, True))
    assert folding < 0.75 * plain


def test_its_bits_are_checked(problems: Problems) -> None:
    arms = build_arms(SETTINGS, problems.layers[0], [])
    accept_lens = torch.tensor([2, 1], dtype=torch.int32, device=problems.state.ssm_state.device)
    before = problems.state.ssm_state.clone()
    check_bits(problems.layers[0], arms)
    check_commits(problems, arms, accept_lens)
    assert torch.equal(problems.state.ssm_state, before)
    for tensor in vars(problems.folding.pending).values():
        assert not tensor.any()
    lazy = dataclasses.replace(arms[2], commit=lambda problems, accept_lens: None)
    with pytest.raises(BitsDifferError, match="kda ring fold-on-verify commit: conv_state differs"):
        check_commits(problems, [arms[1], lazy], accept_lens)


def test_rounds_one_after_another_are_those_of_the_plain_lane(problems: Problems) -> None:
    """What is timed is replayed many times over: every replay folds what the one before accepted."""
    arms = build_arms(SETTINGS, problems.layers[0], [])
    accept_lens = torch.tensor([2, 1], dtype=torch.int32, device=problems.state.ssm_state.device)
    conv, ssm = problems.state.conv_state.clone(), problems.state.ssm_state.clone()
    outputs: dict[str, list[torch.Tensor]] = {}
    for arm in arms[1:3]:
        problems.state.conv_state.copy_(conv)
        problems.state.ssm_state.copy_(ssm)
        outputs[arm.name] = []
        for _ in range(3):
            outputs[arm.name] += [arm.verify(problem) for problem in problems.layers]
            arm.commit(problems, accept_lens)
    first, second = outputs.values()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[2])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "verify"}, "--fold-on-verify moves work from commit to verify: give --round"),
        ({"kind": "commit"}, "--fold-on-verify moves work from commit to verify: give --round"),
        ({"lanes": ("fused",)}, "--fold-on-verify is of ring lanes, and --modes names none: fused"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **values)


def test_the_call_that_a_result_names() -> None:
    stored = {**dataclasses.asdict(SETTINGS), "lanes": ["fused+ring"], "batch_sizes": [1, 4, 16, 64]}
    stored |= {"draft_tokens": [4], "forms": ["recurrent"]}
    assert command_of(stored).endswith("--round --fold-on-verify")


def test_the_second_ring_counts_as_memory() -> None:
    plain = dataclasses.replace(SETTINGS, fold_on_verify=False)
    assert cell_bytes(SETTINGS, 2, 2, 2) > cell_bytes(plain, 2, 2, 2)
    problems = build_problems(plain, 2, 2, 1, "cpu")
    with pytest.raises(ValueError, match="build it with fold_on_verify=True"):
        _ = problems.folding
