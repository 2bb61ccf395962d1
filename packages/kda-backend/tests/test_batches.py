"""Ragged and tree rounds through the pool end where a chain of each request's accepted tokens ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_backend import StatePool
from kda_kernels import KdaShape, LayerParams

SHAPE = KdaShape(num_heads=1, num_v_heads=1, head_k_dim=64, head_v_dim=64)
LAYERS, SLOTS, T = 2, 5, 3
DTYPE = torch.bfloat16


def make_pool(mode: str, device: str, max_batch: int = 3) -> StatePool:
    """A pool whose slots hold random states."""
    pool = StatePool(
        SHAPE, num_layers=LAYERS, num_slots=SLOTS, max_batch=max_batch, draft_tokens=T, mode=mode, dtype=DTYPE,
        device=device,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for state in (pool.ssm_state, pool.conv_state):
        state.copy_(torch.randn(state.shape, generator=generator))
    return pool


def make_params(device: str) -> LayerParams:
    generator = torch.Generator().manual_seed(2)
    return LayerParams(
        conv_weight=torch.randn(SHAPE.conv_dim, 4, generator=generator).to(device, DTYPE),
        conv_bias=None,
        A_log=torch.zeros(1, device=device),
        dt_bias=torch.zeros(64, device=device),
        lower_bound=-5.0,
    )


def make_tokens(rows: int, device: str) -> list[tuple[torch.Tensor, ...]]:
    """(mixed_qkv, a, b) of each layer."""
    generator = torch.Generator().manual_seed(3)
    widths = (SHAPE.conv_dim, 64, 1)
    return [
        tuple(torch.randn(rows, n, generator=generator).to(device, DTYPE) for n in widths) for _ in range(LAYERS)
    ]  # fmt: skip


def int32(values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def advance_alone(pool: StatePool, slot: int, tokens: list[tuple[torch.Tensor, ...]], rows: list[int]) -> None:
    """Decode ``rows`` of the tokens for one slot, token by token."""
    for row in rows:
        pool.begin(int32([slot], str(pool.device)), 1)
        for layer, inputs in enumerate(tokens):
            pool.verify(layer, *(x[row : row + 1] for x in inputs), make_params(str(pool.device)), lane=None)
        pool.commit(int32([1], str(pool.device)))


@pytest.mark.parametrize("lane", ["unfused", "unfused+ring", None, "reference"])
def test_a_ragged_round_advances_each_request_by_its_own_tokens(lane: str | None, device: str) -> None:
    mode = "snapshots" if lane == "unfused" else "ring"
    pool, alone = make_pool(mode, device), make_pool(mode, device)
    slots, starts, accepted = [4, 1, 2], [0, 3, 4, 6], [2, 1, 2]
    tokens = make_tokens(8, device)  # two rows belong to no request
    pool.begin(int32(slots, device), T, starts=int32(starts, device))
    if lane is None:
        assert pool.lane_choice().lane == "unfused+ring"
    for layer, inputs in enumerate(tokens):
        out = pool.verify(layer, *inputs, make_params(device), lane=lane)
        assert out.shape[0] == 8
        assert not out[6:].any()
    pool.commit(int32(accepted, device))
    for slot, start, accept in zip(slots, starts, accepted, strict=False):
        advance_alone(alone, slot, tokens, list(range(start, start + accept)))
    if lane == "reference":  # its sums have another order
        torch.testing.assert_close(pool.ssm_state, alone.ssm_state, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(pool.ssm_state, alone.ssm_state)
    assert torch.equal(pool.conv_state, alone.conv_state)
    assert not pool.errors.any()


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("lane", ["unfused", None, "reference"])
def test_a_tree_round_advances_along_the_accepted_path(lane: str | None, step: int, device: str) -> None:
    pool, alone = make_pool("snapshots", device), make_pool("snapshots", device)
    slots, parents, last_steps, track = [3, 0], [[-1, 0, 0], [-1, 0, 1]], [2, -1], 1
    tokens = make_tokens(2 * T, device)
    pool.begin(int32(slots, device), T, parents=int32(parents, device))
    for layer, inputs in enumerate(tokens):
        pool.verify(layer, *inputs, make_params(device), lane=lane)
    tracked = pool.snapshots.states[:, 0].clone(), pool.conv_window[:, 0].clone()
    pool.commit(
        last_steps=int32(last_steps, device), track_slots=int32([track, -1], device),
        track_steps=int32([step, 0], device),
    )  # fmt: skip
    advance_alone(alone, 3, tokens, [0, 2])  # step 2 follows step 0; the other request accepts nothing
    if step != 1:  # which was rejected
        alone.ssm_state[:, track], alone.conv_state[:, track] = tracked[0][:, step], tracked[1][:, step]
    if lane == "reference":  # its sums have another order
        torch.testing.assert_close(pool.ssm_state, alone.ssm_state, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(pool.ssm_state, alone.ssm_state)
    assert torch.equal(pool.conv_state, alone.conv_state)


def test_what_a_batch_cannot_be_is_refused(device: str) -> None:
    pool = make_pool("ring", device)
    slots = int32([1], device)
    with pytest.raises(ValueError, match="parents must be None in a pool of mode 'ring'"):
        pool.begin(slots, T, parents=int32([[-1, 0, 1]], device))
    with pytest.raises(TypeError, match="starts must be a Tensor or None, got list"):
        pool.begin(slots, T, starts=[0, 3])  # type: ignore[arg-type]
    tokens = make_tokens(10, device)
    pool.begin(slots, T, starts=int32([0, 3], device))
    with pytest.raises(ValueError, match="at most max_batch \\* draft_tokens = 9 rows, got 10"):
        pool.verify(0, *tokens[0], make_params(device))
    with pytest.raises(ValueError, match="fused"):
        pool.verify(0, *(x[:3] for x in tokens[0]), make_params(device), lane="fused+ring")


@pytest.mark.parametrize(("trees", "wrong"), [(True, "accept_lens"), (False, "last_steps")])
def test_commit_takes_the_ends_that_fit_the_batch(trees: bool, wrong: str, device: str) -> None:
    pool = make_pool("snapshots", device)
    pool.begin(int32([1], device), T, parents=int32([[-1, 0, 1]], device) if trees else None)
    for layer, inputs in enumerate(make_tokens(T, device)):
        pool.verify(layer, *inputs, make_params(device))
    before = pool.ssm_state.clone()
    ends = int32([1], device)
    with pytest.raises(ValueError, match=f"not {wrong}"):
        pool.commit(**{wrong: ends})
    with pytest.raises(ValueError, match=f"not {wrong}"):
        pool.commit()
    assert torch.equal(pool.ssm_state, before)
    pool.commit(**{"last_steps" if trees else "accept_lens": ends})  # the round stayed open


def test_starts_that_were_changed_are_noticed(device: str) -> None:
    pool = make_pool("ring", device)
    starts = int32([0, 3], device)
    pool.begin(int32([1], device), T, starts=starts)
    for layer, inputs in enumerate(make_tokens(T, device)):
        pool.verify(layer, *inputs, make_params(device))
    starts[1] = 2
    with pytest.raises(RuntimeError, match="starts were changed in place since begin"):
        pool.commit(int32([1], device))
