"""The Gluon verify kernel beside the portable one: what only its layouts could get wrong, and where it is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from kda_kernels import (
    ErrorKind,
    KdaShape,
    LaunchConfig,
    Ring,
    _launch,
    host_checks,
    new_error_counts,
    verify_fused,
    verify_reason,
)
from kda_kernels.defaults import (
    FEW_HEADS,
    FEW_HEADS_INPUTS_FIRST,
    FEW_HEADS_LONG_DRAFT,
    FEW_HEADS_UNFUSED,
    FIVE_TO_AN_SM,
    LONE_HEADS,
    MANY_HEADS,
    MANY_HEADS_IN_BLOCKS,
    MANY_HEADS_LONG_DRAFT,
    MANY_HEADS_STATE_FIRST,
    PORTABLE,
    PORTABLE_LONG_CHUNK,
    SOME_HEADS,
    SOME_HEADS_STATE_FIRST,
    THREE_TO_AN_SM,
    WHOLE_HEAD,
    WHOLE_HEADS_IN_BLOCKS,
    WHOLE_HEADS_IN_BLOCKS_STATE_FIRST,
    WHOLE_HEADS_STATE_FIRST,
    default_verify_config,
)
from tests.support.cases import Case, make_problem
from tests.support.grids import config_id
from tests.support.marks import interpreter_only
from tests.support.ops import KERNELS
from tests.test_lanes_bits import assert_same_buffers

DEFAULTS = [
    LONE_HEADS, FEW_HEADS, FEW_HEADS_LONG_DRAFT, SOME_HEADS, SOME_HEADS_STATE_FIRST, MANY_HEADS, MANY_HEADS_STATE_FIRST,
    MANY_HEADS_LONG_DRAFT, FEW_HEADS_INPUTS_FIRST, WHOLE_HEADS_STATE_FIRST, FIVE_TO_AN_SM, THREE_TO_AN_SM,
]  # fmt: skip

# Token counts that fill no power of two, a ring shorter than the draft, odd pitches, V other than K, one head.
GPU_CASES = [
    Case(B=3, T=1, H=1, HV=1, K=128, padded=(0,)),
    Case(B=3, T=2, H=2, HV=4, K=64, pitch=3, dtype=torch.float16),
    Case(B=2, T=5, H=4, HV=4, K=128, V=64, pitch=8, weight_dtype=torch.float32, lower_bound=-5.0),
    Case(B=2, T=7, H=1, HV=3, K=64, V=128, lower_bound=-5.0, bias=False),
    Case(B=5, T=16, H=2, HV=2, K=128, padded=(1, 4)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("config", DEFAULTS, ids=config_id)
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.id)
def test_defaults_equal_the_portable_kernel(case: Case, config: LaunchConfig, op: Any, device: str) -> None:
    problem = make_problem(case, device)
    for record in ("ring", "snapshots"):
        assert_same_buffers(problem.run(op, record, config=config), problem.run(op, record, config=PORTABLE))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 3])
def test_records_past_a_short_ring_are_dropped(length: int, device: str) -> None:
    problem = make_problem(Case(B=2, T=4, H=2, HV=4, K=128), device)
    short = Ring.allocate(problem.shape, slots=problem["beta"].shape[0], length=length, dtype=problem.case.dtype,
                          device=device)  # fmt: skip
    rings = {}
    for config in (PORTABLE, *DEFAULTS):
        ring = Ring(*(torch.full_like(getattr(short, f.name), 3.0) for f in dataclasses.fields(short)))
        problem.run(verify_fused, record=ring, config=config)
        rings[config] = ring
    for config, ring in rings.items():
        for field in dataclasses.fields(ring):
            same = torch.equal(getattr(ring, field.name), getattr(rings[PORTABLE], field.name))
            assert same, f"{field.name} with {config}"


@pytest.mark.gpu
def test_slots_met_on_the_device_are_counted_once_and_give_zeros(device: str) -> None:
    problem = make_problem(Case(B=3, T=4, H=2, HV=4, K=128), device)
    slots = problem.slots.clone()
    slots[1] = 2**30
    for config in DEFAULTS:
        errors = new_error_counts(device)
        with host_checks(False):
            outcome = problem.run(verify_fused, slots=slots, errors=errors, config=config)
        assert errors.tolist() == [1] + [0] * (len(ErrorKind) - 1)
        assert not outcome["out"][4:8].any()
        assert not outcome["out"][4:8].isnan().any()


@interpreter_only
def test_refused_with_a_reason_where_it_cannot_run(device: str) -> None:
    problem = make_problem(Case(B=1, T=1, H=1, HV=1, K=64), device)
    positional, keywords = problem.arguments("ring", config=FEW_HEADS)
    reason = verify_reason(*positional, **keywords)
    assert reason is not None
    assert "config.rows_per_thread=2" in reason
    assert "interpreter" in reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows_per_thread": 3}, "rows_per_thread must be None or one of"),
        ({"block_v": 32, "num_warps": 4, "rows_per_thread": 4}, "multiple of 4 \\* num_warps \\* rows_per_thread = 64"),
        ({"max_registers": 64.5}, "max_registers must be an int, got float"),
        ({"max_registers": "64"}, "max_registers must be an int, got str"),
        ({"rows_per_thread": True}, "rows_per_thread must be an int, got bool"),
        ({"rows_per_thread": 2.0, "block_v": 32}, "rows_per_thread must be an int, got float"),
        ({"max_registers": 16}, "max_registers must be None or within 32..255"),
        ({"max_registers": 300}, "max_registers must be None or within 32..255"),
        ({"state_first": True}, "state_first needs rows_per_thread"),
        ({"prefetch": True}, "prefetch needs rows_per_thread"),
        ({"token_blocks": True}, "token_blocks needs rows_per_thread"),
        ({"token_blocks": 1, "rows_per_thread": 1, "num_warps": 4}, "token_blocks must be True or False, got 1"),
    ],
)
def test_configurations_that_cannot_be_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LaunchConfig(**fields)


def test_the_default_follows_the_number_of_heads_and_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    shape, narrow = KdaShape(8, 8, 128, 128), KdaShape(8, 8, 128, 64)
    monkeypatch.setattr(_launch, "TARGET_OVERRIDE", ("cuda", 90))

    def chosen(draft_tokens: int, *batches: int, **kind: Any) -> list[LaunchConfig]:
        return [default_verify_config(shape, batch, draft_tokens, device, **kind) for batch in batches]

    assert chosen(4, 2, 3, 8) == [LONE_HEADS, *[FEW_HEADS] * 2]
    assert chosen(4, 9, 16, 17, 20, 21, 256) == [
        *[SOME_HEADS] * 2, *[FIVE_TO_AN_SM] * 2, *[MANY_HEADS_STATE_FIRST] * 2
    ]  # fmt: skip
    assert chosen(3, 1, 24, 25) == chosen(1, 1, 24, 25) == [FEW_HEADS, FEW_HEADS, MANY_HEADS]
    assert chosen(8, 2, 3, 4, 5, 16) == [LONE_HEADS, *[FEW_HEADS_LONG_DRAFT] * 2, *[SOME_HEADS] * 2]
    assert chosen(8, 17, 24) == chosen(5, 17, 24) == [THREE_TO_AN_SM] * 2
    assert chosen(8, 25) == chosen(5, 256) == chosen(16, 17) == [MANY_HEADS_LONG_DRAFT]
    chunked = {"form": "chunked"}
    assert chosen(3, 8, 9, 33, 34, **chunked) == [
        FEW_HEADS, *[WHOLE_HEADS_STATE_FIRST] * 2, MANY_HEADS_STATE_FIRST
    ]  # fmt: skip
    assert chosen(4, 1, 2, 8, 9, 33, 34, **chunked) == [
        LONE_HEADS, *[FEW_HEADS_INPUTS_FIRST] * 2, *[MANY_HEADS] * 2, MANY_HEADS_STATE_FIRST
    ]  # fmt: skip
    assert chosen(8, 2, 3, 8, 9, 256, **chunked) == [
        LONE_HEADS, *[SOME_HEADS_STATE_FIRST] * 2, *[MANY_HEADS_IN_BLOCKS] * 2
    ]  # fmt: skip
    assert chosen(5, 2, 8, 9, 16, 17, **chunked) == [
        LONE_HEADS, THREE_TO_AN_SM, *[WHOLE_HEADS_IN_BLOCKS_STATE_FIRST] * 2, WHOLE_HEADS_IN_BLOCKS
    ]  # fmt: skip
    assert chosen(9, 1, 64, form="chunked") == [PORTABLE_LONG_CHUNK] * 2
    unfused = {"fused": False}
    assert chosen(4, 2, 4, 5, 17, **unfused) == [
        LONE_HEADS, FEW_HEADS_UNFUSED, SOME_HEADS_STATE_FIRST, MANY_HEADS_STATE_FIRST
    ]  # fmt: skip
    assert chosen(8, 2, 3, 17, **unfused) == [LONE_HEADS, SOME_HEADS_STATE_FIRST, MANY_HEADS_STATE_FIRST]
    assert chosen(4, 2, 4, 5, **chunked, **unfused) == [LONE_HEADS, SOME_HEADS_STATE_FIRST, WHOLE_HEADS_STATE_FIRST]
    assert chosen(8, 2, 3, 16, 17, **chunked, **unfused) == [LONE_HEADS, *[SOME_HEADS] * 2, MANY_HEADS_IN_BLOCKS]
    pending = {"pending": True}
    assert chosen(4, 4, 5, 16, 17, **pending) == [LONE_HEADS, *[SOME_HEADS_STATE_FIRST] * 2, MANY_HEADS]
    assert chosen(8, 2, 3, 4, 16, 17, **pending) == [
        LONE_HEADS, *[FEW_HEADS_LONG_DRAFT] * 2, WHOLE_HEADS_STATE_FIRST, MANY_HEADS_LONG_DRAFT
    ]  # fmt: skip
    assert chosen(4, 2, 3, 16, 17, form="chunked", **pending) == [LONE_HEADS, *[FEW_HEADS] * 2, MANY_HEADS_STATE_FIRST]
    assert chosen(8, 2, 3, 4, 16, 17, form="chunked", **pending) == [
        LONE_HEADS, *[FEW_HEADS] * 2, WHOLE_HEADS_STATE_FIRST, MANY_HEADS
    ]  # fmt: skip
    assert chosen(8, 16, fused=False, pending=True) == chosen(8, 16, pending=True)
    assert default_verify_config(narrow, 64, 8, device) == SOME_HEADS
    monkeypatch.setattr(_launch, "TARGET_OVERRIDE", ("hip", 942))
    assert default_verify_config(shape, 64, 8, device) == PORTABLE
    monkeypatch.setattr(_launch, "TARGET_OVERRIDE", ("interpreter", 0))
    assert default_verify_config(shape, 64, 8, device) == WHOLE_HEAD


def test_more_tokens_than_the_chunked_kernel_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "TARGET_OVERRIDE", ("cuda", 90))
    problem = make_problem(Case(B=1, T=9, H=1, HV=1, K=64), "cpu")
    positional, keywords = problem.arguments("ring", config=FEW_HEADS)
    assert verify_reason(*positional, **keywords) is None
    reason = verify_reason(*positional, **keywords, form="chunked")
    assert reason is not None
    assert "takes up to 8 draft tokens with form='chunked', got draft_tokens=9" in reason
    positional, keywords = problem.arguments("ring", config=PORTABLE_LONG_CHUNK)
    assert verify_reason(*positional, **keywords, form="chunked") is None


_KEYS = """
import sys
from kda_kernels._gluon import commit as gluon_commit, verify as gluon_verify
from kda_kernels._triton import commit, verify
kernels = {
    "verify": verify.verify_kernel, "conv": verify.conv_kernel, "fold": commit.fold_kernel,
    "scatter": commit.scatter_kernel, "gluon_verify": gluon_verify.verify_gluon_kernel,
    "gluon_fold": gluon_commit.fold_gluon_kernel,
}
for name in list(kernels)[:: int(sys.argv[1])]:
    kernels[name].cache_key
print({name: kernel.cache_key for name, kernel in kernels.items()})
"""


def test_cache_keys_do_not_depend_on_which_kernel_came_first() -> None:
    """Or a disk cache filled by one process would miss in another."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    orders = [
        subprocess.run(
            [sys.executable, "-c", _KEYS, step], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for step in ("1", "-1")
    ]
    assert orders[0]
    assert orders[0] == orders[1]
