"""`verifies_unchecked`, under which benchmarks capture: same bits, nothing looked at or remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_kernels import checks, verify_fused
from kda_kernels.checking import checks_calls, verifies_unchecked
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem

CASE = Case(B=2, T=3, H=1, HV=2, K=64)


def verified(problem: Problem) -> torch.Tensor:
    positional, keywords = problem.arguments("ring")
    return verify_fused(*positional, **keywords)


def test_the_bits_are_those_of_a_checked_verify(device: str) -> None:
    checked, unchecked = make_problem(CASE, device), make_problem(CASE, device)
    expected = verified(checked)
    with verifies_unchecked():
        assert_same_bits(verified(unchecked), expected, "out")
    for name in checked.buffers:
        assert_same_bits(unchecked.whole(name), checked.whole(name), name)


def is_looked_at_afterwards(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[dict[str, Any]] = []
    monkeypatch.setattr(checks, "verify_reason", lambda **arguments: looked.append(arguments))
    problem = make_problem(CASE, device)
    with verifies_unchecked():
        verified(problem)
    assert not looked
    verified(problem)
    assert len(looked) == 1


def test_the_same_call_is_looked_at_afterwards(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_looked_at_afterwards(device, monkeypatch)


@pytest.mark.gpu
def test_on_a_gpu_the_same_call_is_looked_at_afterwards(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, calls that were looked at are remembered."""
    is_looked_at_afterwards(device, monkeypatch)


def test_an_error_ends_it() -> None:
    def fails() -> None:
        with verifies_unchecked():
            assert not checks_calls()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert checks_calls()
