"""Speculative rounds through the pool end where token-by-token decoding ends, in every lane, over all layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_backend import LANES, StatePool, lane_mode
from kda_kernels import KdaShape, LayerParams

SHAPE = KdaShape(num_heads=1, num_v_heads=1, head_k_dim=64, head_v_dim=64)
LAYERS, SLOTS, STEPS, SLOT = 2, 3, 3, 2
DTYPE = torch.bfloat16


def make_pool(mode: str, steps: int, device: str) -> StatePool:
    pool = StatePool(
        SHAPE,
        num_layers=LAYERS,
        num_slots=SLOTS,
        max_batch=1,
        draft_tokens=steps,
        mode=mode,
        dtype=DTYPE,
        device=device,
    )
    generator = torch.Generator().manual_seed(1)
    conv_state = torch.randn(LAYERS, *pool.conv_state.shape[2:], generator=generator)
    ssm_state = torch.randn(LAYERS, *pool.ssm_state.shape[2:], generator=generator)
    pool.load_slot(SLOT, conv_state.to(device, DTYPE), ssm_state.to(device))
    return pool


@pytest.fixture(scope="module")
def tokens(device: str) -> list[tuple[torch.Tensor, ...]]:
    """(mixed_qkv, a, b) of the accepted tokens of each layer, in order."""
    generator = torch.Generator().manual_seed(2)
    widths = (SHAPE.conv_dim, SHAPE.head_k_dim, 1)
    return [tuple(torch.randn(4, n, generator=generator).to(device, DTYPE) for n in widths) for _ in range(LAYERS)]


@pytest.fixture(scope="module")
def layers(device: str) -> list[LayerParams]:
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    return [
        LayerParams(normal(SHAPE.conv_dim, 4, dtype=DTYPE), None, normal(1), normal(SHAPE.head_k_dim), lower_bound=-5.0)
        for _ in range(LAYERS)
    ]


def advance(
    pool: StatePool,
    lane: str,
    layers: list[LayerParams],
    inputs: list[tuple[torch.Tensor, ...]],
    accept: int,
    **options: Any,
) -> None:
    """One round of the given inputs, of which ``accept`` tokens are kept; ``options`` go to verify."""
    device = pool.conv_state.device
    pool.begin(torch.tensor([SLOT], device=device), draft_tokens=len(inputs[0][0]))
    for layer, params in enumerate(layers):
        pool.verify(layer, *inputs[layer], params, lane=lane, **options)
    pool.commit(torch.tensor([accept], device=device))


FORMS_OF_LANES = [(lane, "recurrent") for lane in LANES] + [(lane, "chunked") for lane in LANES if "ring" in lane]


@pytest.mark.parametrize(("lane", "form"), FORMS_OF_LANES, ids=lambda value: value)
def test_rounds_end_where_plain_decoding_ends(lane: str, form: str, device: str, tokens, layers) -> None:
    """In either form: it decides the outputs, while states come from the records, which are the same."""
    plain = make_pool(lane_mode(lane), 1, device)
    for t in range(4):
        advance(plain, lane, layers, [tuple(x[t : t + 1] for x in layer) for layer in tokens], accept=1)
    pool = make_pool(lane_mode(lane), STEPS, device)
    before = pool.ssm_state.clone()
    advance(pool, lane, layers, [tuple(x[0:3] for x in layer) for layer in tokens], accept=2, form=form)
    advance(pool, lane, layers, [tuple(x[2:4] for x in layer) for layer in tokens], accept=2, form=form)
    assert torch.equal(pool.ssm_state, plain.ssm_state)
    assert torch.equal(pool.conv_state, plain.conv_state)
    assert torch.equal(pool.ssm_state[:, :SLOT], before[:, :SLOT])
    assert not torch.equal(pool.ssm_state[:, SLOT], before[:, SLOT])


def test_a_lane_of_the_other_mode_is_refused(device: str, tokens, layers) -> None:
    with pytest.raises(ValueError, match="lane"):
        advance(make_pool("ring", STEPS, device), "fused", layers, [tuple(x[:1] for x in t) for t in tokens], accept=1)


def test_the_form_reaches_the_kernels(device: str, tokens, layers) -> None:
    """Or its refusals would not come back."""
    pool = make_pool("snapshots", STEPS, device)
    with pytest.raises(ValueError, match="form='chunked' never computes the states that snapshots hold"):
        advance(pool, "fused", layers, [tuple(x[:1] for x in t) for t in tokens], accept=1, form="chunked")
    with pytest.raises(ValueError, match=r"form must be one of \('recurrent', 'chunked'\), got 'x'"):
        advance(pool, "reference", layers, [tuple(x[:1] for x in t) for t in tokens], accept=1, form="x")


@pytest.mark.parametrize("lane", LANES)
def test_indices_known_to_be_ready_change_no_bit(lane: str, device: str, tokens, layers) -> None:
    pools = [make_pool(lane_mode(lane), STEPS, device) for _ in range(2)]
    for pool, ready in zip(pools, (False, True), strict=True):
        advance(pool, lane, layers, [tuple(x[0:3] for x in t) for t in tokens], accept=2, indices_ready=ready)
    assert torch.equal(pools[0].ssm_state, pools[1].ssm_state)
    with pytest.raises(TypeError, match="indices_ready"):
        advance(pools[0], lane, layers, [tuple(x[0:3] for x in t) for t in tokens], accept=2, indices_ready=1)
