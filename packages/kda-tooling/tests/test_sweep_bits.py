"""Arms that disagree are found before anything is timed; the state that arms share is put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from kda_kernels import KdaShape, scatter_conv
from kda_tooling.bench.arms import Arm
from kda_tooling.bench.bits import (
    OUTPUT_TOLERANCE,
    STATE_TOLERANCE,
    BitsCheck,
    BitsDifferError,
    check_bits,
    check_commits,
)
from kda_tooling.bench.settings import SweepSettings
from kda_tooling.bench.sweep import build_arms, build_problems
from kda_tooling.problem import Problems, VerifyProblem

SETTINGS = SweepSettings(shape=KdaShape(1, 1, 64, 64), kind="round")
TOKENS, BATCH = 2, 2


@pytest.fixture
def problems(device: str) -> Problems:
    return build_problems(SETTINGS, TOKENS, BATCH, 2, device)


@pytest.fixture
def arms(problems: Problems) -> list[Arm]:
    """Ours in all four lanes: unfused, unfused+ring, fused, fused+ring."""
    return build_arms(SETTINGS, problems.layers[0], [])


@pytest.fixture
def accept_lens(device: str) -> torch.Tensor:
    return torch.tensor([2, 1], dtype=torch.int32, device=device)


def altered(arm: Arm, change: Callable[[VerifyProblem, torch.Tensor], None], owner: str = "kda") -> Arm:
    """``arm`` whose verify does something wrong afterwards."""

    def verify(p: VerifyProblem) -> torch.Tensor:
        out = arm.verify(p)
        change(p, out)
        return out

    return dataclasses.replace(arm, name=f"{owner} wrong", owner=owner, verify=verify)


def flip(tensor: torch.Tensor, index: int = 0) -> None:
    """Flip the last bit of one element."""
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).view(-1)
    bits[index] ^= 1


def test_equal_arms_pass_and_what_they_share_is_put_back(
    problems: Problems, arms: list[Arm], accept_lens: torch.Tensor
) -> None:
    conv, ssm = problems.state.conv_state.clone(), problems.state.ssm_state.clone()
    check_bits(problems.layers[0], arms)
    check_commits(problems, arms, accept_lens)
    assert torch.equal(problems.state.conv_state, conv)
    assert torch.equal(problems.state.ssm_state, ssm)


@pytest.mark.parametrize("tensor", ["raw_v", "raw_k", "g", "beta"])
def test_one_bit_of_a_ring_is_seen(tensor: str, problems: Problems, arms: list[Arm]) -> None:
    wrong = altered(arms[3], lambda p, out: flip(getattr(p.ring, tensor), int(p.slots[0]) * 128))
    if tensor == "beta":
        wrong = altered(arms[3], lambda p, out: flip(p.ring.beta, int(p.slots[0]) * TOKENS))  # type: ignore[union-attr]
    message = rf"kda wrong: {tensor} differs from that of kda unfused\+ring in 1 of"
    with pytest.raises(BitsDifferError, match=message):
        check_bits(problems.layers[0], [*arms[:2], wrong])


def test_a_bit_of_windows_and_snapshots_is_seen(problems: Problems, arms: list[Arm]) -> None:
    with pytest.raises(BitsDifferError, match="kda wrong: conv_window differs from that of kda unfused in 1 of"):
        check_bits(problems.layers[0], [arms[0], altered(arms[2], lambda p, out: flip(p.state.conv_window))])
    wrong = altered(arms[2], lambda p, out: flip(p.snapshots.states))  # type: ignore[union-attr]
    with pytest.raises(BitsDifferError, match="kda wrong: snapshots differs from that of kda unfused in 1 of"):
        check_bits(problems.layers[0], [arms[0], wrong])


def test_a_bit_of_our_output_is_seen_across_modes(problems: Problems, arms: list[Arm]) -> None:
    wrong = altered(arms[1], lambda p, out: flip(out))
    with pytest.raises(BitsDifferError, match="kda wrong: output differs from that of kda unfused in 1 of"):
        check_bits(problems.layers[0], [arms[0], wrong])


def test_the_sign_of_zero_counts(problems: Problems, arms: list[Arm]) -> None:
    """Equal as numbers, different as bits: records are poisoned, so only an arm's own zero can be there."""
    zeroed = [altered(arms[i], lambda p, out, z=z: out.fill_(z)) for i, z in ((0, 0.0), (1, -0.0))]  # type: ignore[misc]
    with pytest.raises(BitsDifferError, match="output differs"):
        check_bits(problems.layers[0], zeroed)


def test_an_arm_that_writes_nothing_is_seen(problems: Problems, arms: list[Arm]) -> None:
    lazy = dataclasses.replace(arms[3], name="kda lazy", verify=lambda p: torch.zeros_like(p.mixed_qkv))
    with pytest.raises(BitsDifferError, match="kda lazy: conv_window differs"):
        check_bits(problems.layers[0], [arms[1], lazy])


def test_a_peer_s_output_may_round_otherwise_but_not_be_another(problems: Problems, arms: list[Arm]) -> None:
    def scale(factor: float) -> Callable[[VerifyProblem, torch.Tensor], None]:
        return lambda p, out: out.mul_(factor)  # type: ignore[func-returns-value]

    check_bits(problems.layers[0], [arms[1], altered(arms[3], lambda p, out: flip(out), owner="peer")])
    # bf16 has steps of 2^-8: the smallest factor that changes values is far above the tolerance
    with pytest.raises(BitsDifferError, match=r"peer wrong: output .* kda unfused\+ring by .* allowed is 0.001"):
        check_bits(problems.layers[0], [arms[1], altered(arms[3], scale(1.01), owner="peer")])
    with pytest.raises(BitsDifferError, match="by nan"):
        check_bits(problems.layers[0], [arms[1], altered(arms[3], scale(float("nan")), owner="peer")])
    assert OUTPUT_TOLERANCE < 2**-8


def test_an_arm_that_rolls_the_conv_state_does_not_spoil_the_next(problems: Problems, arms: list[Arm]) -> None:
    before = problems.state.conv_state.clone()
    rolling = altered(arms[1], lambda p, out: p.state.conv_state.fill_(7.0), owner="peer")  # type: ignore[func-returns-value, arg-type]
    check_bits(problems.layers[0], [arms[0], rolling, arms[3]])
    assert torch.equal(problems.state.conv_state, before)


def test_a_fold_that_is_off_by_a_bit_is_seen(problems: Problems, arms: list[Arm], accept_lens: torch.Tensor) -> None:
    def commit(all_layers: Problems, lens: torch.Tensor) -> None:
        arms[1].commit(all_layers, lens)
        flip(all_layers.state.ssm_state)

    wrong = dataclasses.replace(arms[1], commit=commit)
    with pytest.raises(BitsDifferError, match="kda ring commit: ssm_state differs from that of kda snapshots commit"):
        check_commits(problems, [arms[0], wrong], accept_lens)
    peer = dataclasses.replace(wrong, owner="peer")
    check_commits(problems, [arms[0], peer], accept_lens)


def test_a_peer_that_commits_one_token_too_many_is_seen(
    problems: Problems, arms: list[Arm], accept_lens: torch.Tensor
) -> None:
    def commit(all_layers: Problems, lens: torch.Tensor) -> None:
        conv = all_layers.state.conv_state.clone()
        arms[1].commit(all_layers, torch.full_like(lens, TOKENS))
        all_layers.state.conv_state.copy_(conv)
        state = all_layers.state
        slots = all_layers.layers[0].slots
        scatter_conv(state.conv_state, state.conv_window, slots=slots, accept_lens=lens, draft_tokens=TOKENS)

    peer = dataclasses.replace(arms[1], owner="peer", commit=commit)
    with pytest.raises(BitsDifferError, match=r"peer ring commit: ssm_state .* in norm; allowed is 1e-05"):
        check_commits(problems, [arms[0], peer], accept_lens)
    assert STATE_TOLERANCE < 1e-2


def test_nothing_takes_the_place_of_a_first_arm_that_failed(problems: Problems, arms: list[Arm]) -> None:
    failures = [RuntimeError("out of memory")]

    def verify(p: VerifyProblem) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return arms[1].verify(p)

    bits = BitsCheck(problems.layers[0], dataclasses.replace(arms[1], verify=verify))
    with pytest.raises(RuntimeError, match="out of memory"):
        bits.run(arms[3])
    with pytest.raises(BitsDifferError):
        bits.run(altered(arms[3], lambda p, out: flip(out)))
    bits.run(arms[3])
