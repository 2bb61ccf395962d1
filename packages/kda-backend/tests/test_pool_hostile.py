"""Misuse that could lose or mix up state: interrupted commits, changed slots, loading into an open round."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from kda_backend import SlotState, StatePool, commit_layers
from kda_backend import commit as commit_module
from kda_kernels import ErrorKind, KdaShape, LayerParams, host_checks

SHAPE = KdaShape(1, 1, 64, 64)
T = 2


def _params() -> LayerParams:
    g = torch.Generator().manual_seed(0)
    return LayerParams(
        conv_weight=torch.randn(SHAPE.conv_dim, 4, generator=g).bfloat16(), conv_bias=None,
        A_log=torch.zeros(1), dt_bias=torch.zeros(64), lower_bound=-5.0,
    )  # fmt: skip


def _inputs(batch: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    return tuple(torch.randn(batch * T, n, generator=g).bfloat16() for n in (SHAPE.conv_dim, 64, 1))


def _pool(mode: str = "ring") -> StatePool:
    pool = StatePool(SHAPE, num_layers=1, num_slots=4, max_batch=2, draft_tokens=T, mode=mode)
    g = torch.Generator().manual_seed(2)
    pool.ssm_state.copy_(torch.randn(pool.ssm_state.shape, generator=g))
    pool.conv_state.copy_(torch.randn(pool.conv_state.shape, generator=g))
    return pool


def _verified(mode: str = "ring", slots: tuple[int, ...] = (0, 2)) -> StatePool:
    pool = _pool(mode)
    pool.begin(torch.tensor(slots), T)
    pool.verify(0, *_inputs(len(slots)), _params(), lane="reference")
    return pool


def _states(pool: StatePool) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.ssm_state.clone(), pool.conv_state.clone()


def _same(pool: StatePool, before: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(pool.ssm_state, before[0]) and torch.equal(pool.conv_state, before[1])


@pytest.mark.parametrize(
    "broken",
    [
        lambda s: dataclasses.replace(s, conv_window=s.conv_window[:, :1]),
        lambda s: dataclasses.replace(s, conv_window=s.conv_window[:, :, :1]),
        lambda s: dataclasses.replace(s, conv_window=s.conv_window.float()),
        lambda s: dataclasses.replace(s, ssm_state=s.ssm_state.double()),
    ],
    ids=["window rows", "window steps", "window dtype", "state dtype"],
)
@pytest.mark.parametrize("mode", ["ring", "snapshots"])
def test_a_refused_commit_has_written_nothing(mode: str, broken: Any) -> None:
    pool = _verified(mode)
    before = _states(pool)
    with pytest.raises(ValueError, match="must"):
        commit_layers(
            broken(pool.state), pool.record, shape=SHAPE, slots=torch.tensor([0, 2]),
            accept_lens=torch.tensor([2, 2]), draft_tokens=T, reference=True,
        )  # fmt: skip
    assert _same(pool, before)


def test_an_interrupted_commit_is_not_folded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _verified()
    monkeypatch.setattr(commit_module, "fold_reference", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.commit(torch.tensor([2, 2]))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="no round has begun"):
        pool.commit(torch.tensor([2, 2]))


def _interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_a_refused_accept_length_leaves_the_round_open() -> None:
    pool = _verified()
    before = _states(pool)
    with pytest.raises(ValueError, match="accept_lens"):
        pool.commit(torch.tensor([2, 3]))
    assert _same(pool, before)
    pool.commit(torch.tensor([2, 1]))
    assert not _same(pool, before)


def test_slots_changed_between_verify_and_commit_are_noticed() -> None:
    pool = _pool()
    slots = torch.tensor([0, 2])
    pool.begin(slots, T)
    pool.verify(0, *_inputs(2), _params(), lane="reference")
    slots.copy_(torch.tensor([0, 1]))
    before = _states(pool)
    with pytest.raises(RuntimeError, match="slots were changed in place"):
        pool.commit(torch.tensor([2, 2]))
    assert _same(pool, before)


def test_load_slot_waits_for_the_open_round() -> None:
    pool = _verified()
    state = torch.ones(1, 3, SHAPE.conv_dim, dtype=torch.bfloat16), torch.ones(1, 1, 64, 64)
    with pytest.raises(RuntimeError, match="abandon"):
        pool.load_slot(0, *state)
    pool.abandon()
    pool.load_slot(0, *state)
    assert torch.equal(pool.ssm_state[:, 0], state[1])


@pytest.mark.parametrize("slot", [True, False, 1.0, "1", None])
def test_load_slot_takes_an_int(slot: Any) -> None:
    pool = _pool()
    before = _states(pool)
    with pytest.raises(TypeError, match="slot must be an int"):
        pool.load_slot(slot, torch.ones(1, 3, SHAPE.conv_dim, dtype=torch.bfloat16), torch.ones(1, 1, 64, 64))
    assert _same(pool, before)


def test_a_state_that_is_not_dense_changes_nothing() -> None:
    pool = _pool()
    before = _states(pool)
    with pytest.raises(ValueError, match="ssm_state must be dense"):
        pool.load_slot(0, torch.ones(1, 3, SHAPE.conv_dim).bfloat16(), torch.ones(1, 1, 64, 64).to_sparse())
    assert _same(pool, before)


def test_a_state_without_values_changes_nothing() -> None:
    pool = _pool()
    before = _states(pool)
    conv, ssm = torch.ones(1, 3, SHAPE.conv_dim).bfloat16(), torch.ones(1, 1, 64, 64)
    with pytest.raises(ValueError, match="conv_state must have values, got a tensor on device 'meta'"):
        pool.load_slot(0, conv.to("meta"), ssm)
    with pytest.raises(ValueError, match="ssm_state must have values, got a tensor on device 'meta'"):
        pool.import_slot(0, SlotState(conv, ssm.to("meta")))
    assert _same(pool, before)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("xyz", "device must be one that torch can use on this machine, got 'xyz'"),
        ("cuda:99", "device must be one that torch can use on this machine, got 'cuda:99'"),
        (torch.device("cuda", 99), "device must be one that torch can use on this machine, got 'cuda:99'"),
        (3.0, "device must be a torch.device or its name, 'cuda' or 'cpu' say, got float"),
        (None, "device must be a torch.device or its name, 'cuda' or 'cpu' say, got NoneType"),
    ],
    ids=["no name", "not here", "not here either", "float", "None"],
)
def test_a_device_that_cannot_be_used_is_named(device: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        StatePool(SHAPE, num_layers=1, num_slots=1, max_batch=1, draft_tokens=T, mode="ring", device=device)


def test_a_commit_of_nothing_says_what_was_given() -> None:
    pool = _verified()
    ends = torch.tensor([1, 1])
    for given, got in (
        ({}, "neither"), ({"last_steps": ends}, "last_steps"),
        ({"accept_lens": ends, "last_steps": ends}, "accept_lens and last_steps"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"commit of chains takes accept_lens and not last_steps, got {got}: see"):
            pool.commit(**given)
    pool.commit(ends)


@pytest.mark.parametrize("lane", ["unfused+ring", "fused+ring", "reference"])
@pytest.mark.parametrize("given", [None, [1.0], torch.tensor(1.0)], ids=["None", "list", "0-d"])
def test_what_is_no_batch_of_tokens_is_named(given: Any, lane: str) -> None:
    pool = _pool()
    pool.begin(torch.tensor([0, 2]), T)
    with pytest.raises((TypeError, ValueError), match="mixed_qkv must"):
        pool.verify(0, given, *_inputs(2)[1:], _params(), lane=lane)


def test_a_form_that_cannot_be_hashed_is_named() -> None:
    pool = _pool()
    pool.begin(torch.tensor([0, 2]), T)
    with pytest.raises(ValueError, match="form must be one of"):
        pool.verify(0, *_inputs(2), _params(), form=["chunked"])  # type: ignore[arg-type]


def test_states_never_carry_gradients() -> None:
    pool = _pool()
    pool.load_slot(
        0, torch.ones(1, 3, SHAPE.conv_dim, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(1, 1, 64, 64, requires_grad=True),
    )  # fmt: skip
    params = dataclasses.replace(_params(), dt_bias=torch.zeros(64, requires_grad=True))
    pool.begin(torch.tensor([0]), T)
    out = pool.verify(0, *_inputs(1), params, lane="reference")
    pool.commit(torch.tensor([2]))
    assert not any(tensor.requires_grad for tensor in (out, pool.ssm_state, pool.conv_state))


def test_two_requests_in_one_slot_are_refused() -> None:
    with pytest.raises(ValueError, match="slots must name each of its values once"):
        _pool().begin(torch.tensor([1, 1]), T)


@pytest.mark.parametrize("track", [(0, -1), (-1, 0), (3, 3)])
def test_tracking_into_a_live_or_shared_slot_is_refused(track: tuple[int, int]) -> None:
    pool = _verified()
    before = _states(pool)
    with pytest.raises(ValueError, match="track_slots must name"):
        pool.commit(torch.tensor([2, 2]), track_slots=torch.tensor(track), track_steps=torch.tensor([0, 0]))
    assert _same(pool, before)


def test_a_faulty_slot_is_counted_by_verify_and_by_commit() -> None:
    pool = _pool()
    with host_checks(False):
        pool.begin(torch.tensor([0, 99]), T)
        pool.verify(0, *_inputs(2), _params(), lane="reference")
        assert (int(pool.errors[ErrorKind.SLOT]), int(pool.errors.sum())) == (1, 1)
        pool.commit(torch.tensor([2, 2]))
    assert (int(pool.errors[ErrorKind.SLOT]), int(pool.errors.sum())) == (2, 2)
