"""Speculative rounds leave exactly the state, and give exactly the outputs, of token-by-token decoding.

Rounds accept nothing, a part or everything of their drafts, over 3 layers with GQA and slots in reversed order. All
four lanes must equal the T = 1 path bit for bit; the fp64 oracle, run over the same accepted tokens, bounds both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

from kda_backend import LANES, StatePool
from kda_kernels import LaunchConfig
from tests.support.bits import assert_close, assert_same_bits
from tests.support.bounds import verify_bounds
from tests.support.cases import Case, oracle_layer
from tests.support.grids import GPU_CASES, params
from tests.support.streams import Decoder, Streams, oracle_decode, plain_decode

LAYERS = 3
SMALL = (
    Case(B=2, T=3, H=1, HV=2, K=64),
    Case(B=2, T=2, H=2, HV=2, K=64, dtype=torch.float16, weight_dtype=torch.float32, lower_bound=-5.0, bias=False),
)
LARGE = (GPU_CASES[7], GPU_CASES[16])  # K = 128, fp16, T = 8; K = 64, bf16, T = 3, GQA


def rounds_of(case: Case) -> list[tuple[int, list[int]]]:
    """(draft tokens, accepted per request): partial, full, none beside full, a T = 1 round, one token only."""
    B, T = case.B, case.T
    return [
        (T, [1 + (i * 2) % T for i in range(B)]),
        (T, [T] * B),
        (T, [0 if i % 2 else T for i in range(B)]),
        (1, [1] * B),
        (T, [1 if i % 2 else T - 1 for i in range(B)]),
    ]


# test_A4 in test_cases_accept.py has the four rounds of the field's report.


@dataclass(frozen=True)
class Plain:
    """Token-by-token decoding of the accepted tokens, and of the T tokens after them."""

    streams: Streams
    lengths: list[int]  # accepted tokens of each request
    ssm_state: torch.Tensor  # [layers, requests, HV, V, K] after the accepted tokens
    conv_state: torch.Tensor  # [layers, requests, 3, D]
    outputs: list[list[torch.Tensor]]  # [layer][request]: [lengths[i] + T, HV, V]


@functools.lru_cache(maxsize=2)
def decoded_plainly(case: Case, device: str) -> Plain:
    lengths = [sum(accept[i] for _, accept in rounds_of(case)) for i in range(case.B)]
    streams = Streams.make(case, layers=LAYERS, length=max(lengths) + case.T, device=device)
    decoder = Decoder(streams, list(range(case.B)), "unfused+ring")
    accepted = plain_decode(decoder, lengths)
    states = decoder.pool.ssm_state[:, : case.B].clone(), decoder.pool.conv_state[:, : case.B].clone()
    following = plain_decode(decoder, [case.T] * case.B)
    outputs = [
        [torch.cat([accepted[layer, i, :n], following[layer, i]]) for i, n in enumerate(lengths)]
        for layer in range(LAYERS)
    ]
    return Plain(streams, lengths, *states, outputs)


@pytest.mark.parametrize(
    ("case", "lane"),
    [pytest.param(case, lane, id=f"{case.id}-{lane}") for case in SMALL for lane in LANES]
    + [pytest.param(LARGE[1], lane, id=f"{LARGE[1].id}-{lane}", marks=pytest.mark.gpu) for lane in LANES]
    + [pytest.param(LARGE[0], "fused+ring", id=f"{LARGE[0].id}-fused+ring", marks=pytest.mark.gpu)],
)
def test_rounds_equal_token_by_token_decoding(case: Case, lane: str, device: str) -> None:
    plain = decoded_plainly(case, device)
    streams, lengths = plain.streams, plain.lengths
    reverse = list(range(case.B + case.spare_slots - 1, case.spare_slots - 1, -1))
    decoder = Decoder(streams, reverse, lane)
    for T, accept in rounds_of(case):
        start = list(decoder.position)
        for layer, out in enumerate(decoder.round(T, accept)):
            rows = out.view(case.B, T, *out.shape[1:])
            for i, n in enumerate(accept):
                assert_same_bits(rows[i, :n], plain.outputs[layer][i][start[i] : start[i] + n], f"output, request {i}")
    assert decoder.position == lengths

    for i in range(case.B):
        assert_same_bits(decoder.pool.ssm_state[:, reverse[i]], plain.ssm_state[:, i], f"state, request {i}")
        assert_same_bits(decoder.pool.conv_state[:, reverse[i]], plain.conv_state[:, i], f"conv, request {i}")
    for slot in set(range(case.B + case.spare_slots)) - set(reverse):
        assert decoder.pool.ssm_state[:, slot].isnan().all(), f"slot {slot} belongs to nobody and was written"
        assert decoder.pool.conv_state[:, slot].isnan().all()

    for layer, out in enumerate(decoder.verify(case.T, [case.T] * case.B)):
        rows = out.view(case.B, case.T, *out.shape[1:])
        for i, n in enumerate(lengths):
            assert_same_bits(rows[i], plain.outputs[layer][i][n:], f"next output, request {i}")
    assert decoder.pool.error_summary() is None


@pytest.mark.parametrize("case", params(SMALL, LARGE))
def test_decoding_stays_within_fp32_error_of_the_oracle(case: Case, device: str) -> None:
    """The bound is a running error analysis from the first token on (tests/support/bounds.py), not a guess."""
    plain = decoded_plainly(case, device)
    streams, lengths = plain.streams, plain.lengths
    for layer in range(LAYERS):
        parameters = oracle_layer(streams.params[layer], streams.shape, case.dtype)
        for i, n in enumerate(lengths):
            trace = oracle_decode(streams, layer, i, n + case.T)
            bounds = verify_bounds(parameters, trace)
            what = f"layer {layer}, request {i}"
            assert_close(plain.ssm_state[layer, i], trace.states[n - 1], bounds.states[n - 1], f"state, {what}")
            assert_close(plain.conv_state[layer, i], trace.window[n - 1], 0.0, f"conv state, {what}")
            assert_close(plain.outputs[layer][i], trace.out, bounds.out, f"outputs, {what}")
            # The bound must be worth something: well below the values it bounds, even after all the tokens.
            assert bounds.states.max() < 0.05 * abs(trace.states).max()


@pytest.mark.parametrize("lane", LANES)
def test_plain_decoding_is_the_same_in_every_lane(lane: str, device: str) -> None:
    case = SMALL[0]
    plain = decoded_plainly(case, device)
    own = plain_decode(Decoder(plain.streams, [1, 3], lane), [3, 2])
    for layer in range(LAYERS):
        for i, n in enumerate((3, 2)):
            assert_same_bits(own[layer, i, :n], plain.outputs[layer][i][:n], f"layer {layer}, request {i}")


@pytest.mark.parametrize("case", params([SMALL[0]], [LARGE[1]]))
def test_rounds_do_not_depend_on_the_launch_configuration(case: Case, device: str) -> None:
    plain = decoded_plainly(case, device)
    config = LaunchConfig(block_v=64, num_warps=8)
    decoder = Decoder(plain.streams, list(range(case.B)), "fused+ring", config)
    for T, accept in rounds_of(case):
        decoder.round(T, accept)
    assert decoder.position == plain.lengths
    assert_same_bits(decoder.pool.ssm_state[:, : case.B], plain.ssm_state, "state")


def test_reference_lane_rounds_stay_within_the_oracle_bound(device: str) -> None:
    """The torch lane follows the same rounds; it sums in another order, so it is bounded and not bit-equal."""
    case = SMALL[0]
    plain = decoded_plainly(case, device)
    streams, lengths = plain.streams, plain.lengths
    for mode_lane in ("fused+ring", "fused"):
        decoder = Decoder(streams, list(range(case.B)), mode_lane)
        decoder.lane = "reference"
        for T, accept in rounds_of(case):
            decoder.round(T, accept)
        for layer in range(LAYERS):
            parameters = oracle_layer(streams.params[layer], streams.shape, case.dtype)
            for i, n in enumerate(lengths):
                trace = oracle_decode(streams, layer, i, n)
                bounds = verify_bounds(parameters, trace)
                assert_close(decoder.pool.ssm_state[layer, i], trace.states[-1], bounds.states[-1], "state")


def test_a_pool_refuses_a_ring_shorter_than_its_drafts() -> None:
    """A2: such tokens could be verified but never committed."""
    with pytest.raises(ValueError, match="ring_length"):
        StatePool(SMALL[0].shape, num_layers=1, num_slots=1, max_batch=1, draft_tokens=4, mode="ring", ring_length=3)
