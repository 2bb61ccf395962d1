"""``kda sweep --round --compact-window``: every lane once more, checked like the others, with its own floor."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kda_kernels import KdaShape, verify_fused
from kda_tooling.bench.arms import Arm, commit_arms
from kda_tooling.bench.bits import BitsDifferError, check_bits, check_commits
from kda_tooling.bench.settings import SweepSettings, command_of
from kda_tooling.bench.sweep import build_arms, build_problems, floor_of
from kda_tooling.cli import app
from kda_tooling.problem import Problems, VerifyProblem
from kda_tooling.tuning.compiling import arm_of
from kda_tooling.tuning.settings import TuneSettings

SETTINGS = SweepSettings(
    shape=KdaShape(1, 1, 64, 64), kind="round", lanes=("fused", "fused+ring", "unfused+ring"), compact_window=True
)
BOTH = dataclasses.replace(SETTINGS, fold_on_verify=True)


@pytest.fixture
def problems(device: str) -> Problems:
    return build_problems(BOTH, 2, 2, 2, device)


def names(settings: SweepSettings, problems: Problems) -> list[str]:
    return [arm.name for arm in build_arms(settings, problems.layers[0], [])]


def test_every_lane_has_an_arm_more(problems: Problems) -> None:
    assert names(SETTINGS, problems) == [
        "kda fused", "kda fused compact", "kda fused+ring", "kda fused+ring compact", "kda unfused+ring",
        "kda unfused+ring compact",
    ]  # fmt: skip
    assert names(dataclasses.replace(BOTH, lanes=("fused+ring", "fused")), problems) == [
        "kda fused+ring", "kda fused+ring compact", "kda fused+ring fold-on-verify",
        "kda fused+ring fold-on-verify compact", "kda fused", "kda fused compact",
    ]  # fmt: skip
    assert [arm.name for arm in commit_arms(build_arms(BOTH, problems.layers[0], []))] == [
        "kda snapshots commit", "kda snapshots compact commit", "kda ring commit", "kda ring compact commit",
        "kda ring fold-on-verify commit", "kda ring fold-on-verify compact commit",
    ]  # fmt: skip


def test_the_floor_is_that_of_its_own_traffic() -> None:
    """No window is written, 24 bytes of a note are written and read; the three columns of a commit stay."""
    window, batch, tokens = 3 * 192 * 2, 64, 4
    for mode, folds in (("ring", False), ("ring", True), ("snapshots", False)):
        plain, compact = (floor_of(SETTINGS, tokens, batch, mode, folds, option) for option in (False, True))
        assert plain.written - compact.written == batch * tokens * window - 24
        assert compact.read - plain.read == 24


def test_its_bits_are_checked(problems: Problems) -> None:
    arms = build_arms(BOTH, problems.layers[0], [])
    accept_lens = torch.tensor([2, 1], dtype=torch.int32, device=problems.state.ssm_state.device)
    before = problems.state.conv_state.clone(), problems.state.ssm_state.clone()
    check_bits(problems.layers[0], arms)
    check_commits(problems, arms, accept_lens)
    assert torch.equal(problems.state.conv_state, before[0])
    assert torch.equal(problems.state.ssm_state, before[1])


def replaced(arms: list[Arm], name: str, **changes: Any) -> list[Arm]:
    return [dataclasses.replace(arm, **changes) if arm.name == name else arm for arm in arms]


def test_a_wrong_arm_is_not_timed(problems: Problems) -> None:
    """One that commits nothing, one that notes nothing, and one that writes windows all the same."""
    arms = build_arms(SETTINGS, problems.layers[0], [])
    accept_lens = torch.tensor([2, 1], dtype=torch.int32, device=problems.state.ssm_state.device)
    with pytest.raises(BitsDifferError, match="kda ring compact commit: conv_state differs"):
        check_commits(
            problems, replaced(arms, "kda fused+ring compact", commit=lambda problems, accept_lens: None), accept_lens
        )
    plain = next(arm for arm in arms if arm.name == "kda fused+ring")
    silent = replaced(arms, "kda fused+ring compact", verify=plain.verify)
    with pytest.raises(BitsDifferError, match=r"kda fused\+ring compact: conv_window was written"):
        check_bits(problems.layers[0], silent)
    with pytest.raises(BitsDifferError, match="kda ring compact commit: conv_state differs"):
        check_commits(problems, silent, accept_lens)

    def other(problem: VerifyProblem) -> torch.Tensor:
        return verify_fused(
            problem.mixed_qkv + 1, problem.a, problem.b, shape=problem.shape, params=problem.params,
            state=problem.compact, record=problem.record("ring"), slots=problem.slots, draft_tokens=2,
        )  # fmt: skip

    with pytest.raises(BitsDifferError, match=r"kda fused\+ring compact: "):
        check_bits(problems.layers[0], replaced(arms, "kda fused+ring compact", verify=other))


def test_rounds_one_after_another_are_those_of_the_plain_lane(device: str) -> None:
    """What is timed is replayed many times over; with two ring banks, the third round is in the first one's."""
    problems = build_problems(BOTH, 2, 2, 1, device)
    arms = build_arms(BOTH, problems.layers[0], [])
    accept_lens = torch.tensor([2, 1], dtype=torch.int32, device=problems.state.ssm_state.device)
    conv, ssm = problems.state.conv_state.clone(), problems.state.ssm_state.clone()
    states = {}
    for arm in arms:
        problems.state.conv_state.copy_(conv)
        problems.state.ssm_state.copy_(ssm)
        problems.folding.reset()
        for _ in range(3):
            for problem in problems.layers:
                arm.verify(problem)
            arm.commit(problems, accept_lens)
        states[arm.name] = problems.state.conv_state.clone()
    first = states.pop("kda fused")
    assert not torch.equal(first, conv)
    assert all(torch.equal(first, other) for other in states.values())


@pytest.mark.parametrize("kind", ["verify", "commit"])
def test_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="--compact-window moves work from verify to commit: give --round"):
        dataclasses.replace(SETTINGS, kind=kind)
    flag = [] if kind == "verify" else ["--commit"]
    result = CliRunner().invoke(app, ["sweep", "--compact-window", *flag])
    assert result.exit_code == 2
    assert "give --round" in " ".join(result.output.replace("│", " ").split())


def test_the_call_that_a_result_names() -> None:
    stored = {**dataclasses.asdict(BOTH), "lanes": ["fused+ring"], "batch_sizes": [1, 4, 16, 64]}
    stored |= {"draft_tokens": [4], "forms": ["recurrent"]}
    assert command_of(stored).endswith("--round --fold-on-verify --compact-window")


def test_problems_without_it() -> None:
    problems = build_problems(dataclasses.replace(SETTINGS, compact_window=False), 2, 2, 1, "cpu")
    for one in (problems, problems.layers[0]):
        with pytest.raises(ValueError, match="build it with compact_window=True"):
            _ = one.compact


def test_tuning_measures_the_option_that_it_names() -> None:
    settings = TuneSettings(options=("compact-window", "fold-on-verify+compact-window"), draft_tokens=(4,))
    found = set()
    for group in settings.groups():
        arm = arm_of(settings, group, group.lanes[0], None)
        assert arm.compact_window
        assert settings.sweep_settings(group).compact_window
        assert arm.fold_on_verify == group.option.startswith("fold")
        found.add(group.option)
    assert len(found) == 2
