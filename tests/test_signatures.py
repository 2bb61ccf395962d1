"""Fused, unfused and reference ops take the same arguments; so do fold and scatters and their references."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

import kda_kernels

SAME = [
    ("verify_fused", "verify_unfused"),
    ("verify_fused", "verify_reference"),
    ("fold", "fold_reference"),
    ("scatter_conv", "scatter_conv_reference"),
    ("flush", "flush_reference"),
    ("advance", "advance_reference"),
    ("scatter_snapshots", "scatter_snapshots_reference"),
]


def parameters(name: str) -> dict[str, tuple[object, object, object]]:
    """name -> (kind, default, annotation) in order."""
    function: Callable[..., object] = getattr(kda_kernels, name)
    return {p.name: (p.kind, p.default, p.annotation) for p in inspect.signature(function).parameters.values()}


@pytest.mark.parametrize(("one", "two"), SAME)
def test_same_parameters_in_the_same_order(one: str, two: str) -> None:
    assert list(parameters(one).items()) == list(parameters(two).items())
    signatures = [inspect.signature(getattr(kda_kernels, name)) for name in (one, two)]
    assert signatures[0].return_annotation == signatures[1].return_annotation


@pytest.mark.parametrize(
    ("op", "predicate"),
    [
        ("verify_fused", "verify_reason"),
        ("fold", "fold_reason"),
        ("flush", "flush_reason"),
        ("advance", "advance_reason"),
        ("gather_conv", "gather_reason"),
    ],
)
def test_predicates_take_what_their_op_takes(op: str, predicate: str) -> None:
    """One set of arguments goes to both; the predicate may have switches of its own."""
    wanted, given = parameters(op), parameters(predicate)
    assert {name: given.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("name", kda_kernels.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = getattr(kda_kernels, name)
    if callable(value):
        assert inspect.getdoc(value), f"{name} has no docstring"


@pytest.mark.parametrize("name", ["verify_fused", "verify_unfused", "verify_reference", "fold"])
def test_no_op_takes_a_catch_all(name: str) -> None:
    """``**kwargs`` would swallow a mistyped keyword."""
    kinds = {kind for kind, _, _ in parameters(name).values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
