"""The bridge to flash-linear-attention, against its own CPU reference.

Its naive KDA runs a prefix, the state goes into a pool slot, and both sides go on from there. Each is held to the fp64
oracle, started from the very state that was bridged, by the running error bounds of tests/support/bounds.py: fla's
recurrence is fp32 as ours is, its inputs are the oracle's rounded q, k, v, which its bound contains. So the two differ
by at most twice the bound. Conv columns are copied 16-bit values and must be equal.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kda_backend import StatePool, lane_mode
from kda_backend.fla import conv_weight_from_fla, fla_from_slot, slot_from_fla
from kda_kernels import KdaShape
from tests.support import oracle
from tests.support.bits import assert_close, assert_same_bits
from tests.support.bounds import verify_bounds
from tests.support.cases import Case, make_params, oracle_layer, to_numpy
from tests.test_oracle import fla_module

CASE = Case(B=1, T=3, H=1, HV=2, K=64, V=128, lower_bound=-5.0)
PREFIX, ACCEPT, SLOT = 5, 2, 1


class FlaLayer:
    """A KDA layer as fla runs it on a CPU: conv caches by its convention, gates and recurrence by its naive functions.

    Its conv kernels need a GPU; q, k and v after conv and SiLU are the oracle's, rounded to the activation dtype.
    """

    def __init__(self, case: Case) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.case, self.shape = case, case.shape
        self.params = make_params(case, self.generator)
        self.layer = oracle_layer(self.params, self.shape, case.dtype)
        self.naive, self.gates = fla_module("fla.ops.kda.naive"), fla_module("fla.ops.kda.gate")
        shape = self.shape
        keys, values = shape.num_heads * shape.head_k_dim, shape.num_v_heads * shape.head_v_dim
        self.channels = (keys, keys, values)
        self.columns = torch.zeros(3, shape.conv_dim, dtype=case.dtype)  # every token so far, after three of nothing
        self.caches = [torch.zeros(1, n, 4, dtype=case.dtype) for n in self.channels]
        self.state = torch.zeros(1, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim)  # K first

    def inputs(self, tokens: int) -> tuple[torch.Tensor, ...]:
        shape = self.shape
        widths = (shape.conv_dim, shape.num_v_heads * shape.head_k_dim, shape.num_v_heads)
        return tuple(torch.randn(tokens, n, generator=self.generator).to(self.case.dtype) for n in widths)

    def trace(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> oracle.Trace:
        """The oracle's view of these tokens from here."""
        state = to_numpy(self.state[0].transpose(-1, -2))
        return oracle.verify(self.layer, *map(to_numpy, (x, a, b, self.columns[-3:])), state)

    def run(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Outputs [tokens, HV, V] of fla's recurrence; state and caches advance."""
        trace, p = self.trace(x, a, b), self.params
        gate = a.float().view(1, -1, self.shape.num_v_heads, self.shape.head_k_dim)
        if p.lower_bound is None:
            g = self.gates.naive_kda_gate(gate, p.A_log, p.dt_bias)
        else:
            g = self.gates.naive_kda_lowerbound_gate(gate, p.A_log, p.dt_bias, p.lower_bound)

        def normalised(raw: np.ndarray) -> torch.Tensor:
            t = torch.from_numpy(raw).float()
            return (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6))[None]

        out, self.state = self.naive.naive_recurrent_kda(
            normalised(trace.raw_q), normalised(trace.raw_k), torch.from_numpy(trace.raw_v).float()[None], g,
            torch.sigmoid(b.float())[None], initial_state=self.state, output_final_state=True,
        )  # fmt: skip
        for token in x:  # shift the oldest column out, put the current token in
            for cache, part in zip(self.caches, token.split(self.channels), strict=True):
                cache[0] = torch.cat([cache[0, :, 1:], part[:, None]], dim=1)
        self.columns = torch.cat([self.columns, x])
        return out[0]


@pytest.mark.parametrize(
    ("lane", "v_first"), [("reference", True), ("unfused", True), ("fused+ring", True), ("fused+ring", False)]
)
def test_a_sequence_goes_on_in_a_slot_and_back(lane: str, v_first: bool, device: str) -> None:
    fla = FlaLayer(CASE)
    shape = CASE.shape
    fla.run(*fla.inputs(PREFIX))
    recurrent = fla.state.transpose(-1, -2).contiguous() if v_first else fla.state
    conv_state, ssm_state = slot_from_fla(recurrent, fla.caches, shape=shape, v_first=v_first)
    assert_same_bits(conv_state[0], fla.columns[-3:], "conv state")
    assert_same_bits(ssm_state, fla.state.transpose(-1, -2), "state")

    pool = StatePool(
        shape, num_layers=1, num_slots=2, max_batch=1, draft_tokens=CASE.T, dtype=CASE.dtype, device=device,
        mode="ring" if lane == "reference" else lane_mode(lane),
    )  # fmt: skip
    pool.load_slot(SLOT, conv_state, ssm_state)
    x, a, b = fla.inputs(CASE.T)
    on_device = make_params(CASE, torch.Generator().manual_seed(5))
    tensors = {name: getattr(on_device, name).to(device) for name in ("conv_weight", "conv_bias", "A_log", "dt_bias")}
    params = type(on_device)(**tensors, lower_bound=on_device.lower_bound)
    pool.begin(torch.tensor([SLOT], device=device), CASE.T)
    out = pool.verify(0, x.to(device), a.to(device), b.to(device), params, lane=lane)
    pool.commit(torch.tensor([ACCEPT], device=device))

    trace = fla.trace(x, a, b)
    bounds = verify_bounds(fla.layer, trace)
    theirs = fla.run(x[:ACCEPT], a[:ACCEPT], b[:ACCEPT])
    assert_close(out, trace.out, bounds.out, "our outputs")
    assert_close(theirs, trace.out[:ACCEPT], bounds.out_unrounded[:ACCEPT], "fla's outputs")
    assert_close(fla.state[0].transpose(-1, -2), trace.states[ACCEPT - 1], bounds.states[ACCEPT - 1], "fla's state")

    back, caches = fla_from_slot(pool.conv_state[0, [SLOT]], pool.ssm_state[0, [SLOT]], shape=shape, v_first=v_first)
    mine = back if v_first else back.transpose(-1, -2)
    limit = 2 * bounds.states[ACCEPT - 1]
    assert_close(mine[0], to_numpy(fla.state[0].transpose(-1, -2)), limit, "our state beside fla's")
    assert np.median(limit) < 1e-4 * fla.state.abs().max().item(), "a bound that cannot fail proves nothing"
    for name, own, other in zip("qkv", caches, fla.caches, strict=True):
        assert_same_bits(own[:, :, 1:].cpu(), other[:, :, 1:], f"conv cache of {name}")
        assert not own[:, :, 0].any()


def test_the_oldest_column_decides_nothing() -> None:
    """A cache that went through a slot and one that did not are equal after one more token of fla's update."""
    shape = KdaShape(1, 2, 64, 64)
    caches = [torch.randn(2, n, 4).bfloat16() for n in (64, 64, 128)]
    state = torch.randn(2, 2, 64, 64)
    recurrent, back = fla_from_slot(*slot_from_fla(state, caches, shape=shape), shape=shape)
    assert torch.equal(recurrent, state)
    for cache, other in zip(caches, back, strict=True):
        token = torch.randn(2, cache.shape[1], 1).bfloat16()
        assert torch.equal(torch.cat([cache[:, :, 1:], token], -1), torch.cat([other[:, :, 1:], token], -1))
    back[0].zero_()
    recurrent.zero_()
    assert caches[0].any()
    assert state.any()


def test_conv_weights_are_packed_like_the_channels() -> None:
    shape = KdaShape(1, 2, 64, 64)
    weights = [torch.randn(n, 1, 4) for n in (64, 64, 128)]
    packed = conv_weight_from_fla(weights, shape=shape)
    assert torch.equal(packed, torch.cat([w[:, 0] for w in weights]))
    with pytest.raises(ValueError, match=r"weights\[2\] \(v\) must have shape \[128, 1, 4\]"):
        conv_weight_from_fla([*weights[:2], weights[0]], shape=shape)


SHAPE = KdaShape(1, 2, 64, 128)
REFUSED = {
    "K first": (
        dict(recurrent_state=torch.zeros(2, 2, 64, 128)),
        ValueError,
        r"recurrent_state must have shape \[N, 2",
    ),
    "state dtype": (dict(recurrent_state=torch.zeros(2, 2, 128, 64).half()), ValueError, "must be torch.float32, got"),
    "no state": (dict(recurrent_state=None), TypeError, "recurrent_state must be a Tensor"),
    "two caches": (dict(count=2), ValueError, "three caches of q, k and v, got 2"),
    "one tensor": (dict(conv_states=torch.zeros(3, 2, 64, 4)), TypeError, "conv_states must be the three caches"),
    "three columns": (dict(width=3), ValueError, r"conv_states\[0\] \(q\) must have shape \[N, 64, 4\]"),
    "fp32 caches": (dict(dtype=torch.float32), ValueError, "torch.bfloat16 or torch.float16, got torch.float32"),
    "sequences": (dict(n=3), ValueError, "as many sequences as recurrent_state, 2, got 3"),
    "layout": (dict(v_first=1), TypeError, "v_first must be True or False"),
    "shape": (dict(shape=(1, 2)), TypeError, "shape must be a KdaShape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason(name: str) -> None:
    given, error, message = REFUSED[name]
    n, width, dtype = given.get("n", 2), given.get("width", 4), given.get("dtype", torch.bfloat16)
    caches = [torch.zeros(n, d, width, dtype=dtype) for d in (64, 64, 256)][: given.get("count", 3)]
    with pytest.raises(error, match=message):
        slot_from_fla(
            given.get("recurrent_state", torch.zeros(2, 2, 128, 64)), given.get("conv_states", caches),
            shape=given.get("shape", SHAPE), v_first=given.get("v_first", True),
        )  # fmt: skip


def test_mixed_caches_and_wrong_slots_are_refused() -> None:
    caches = [torch.zeros(1, d, 4, dtype=torch.bfloat16) for d in (64, 64, 256)]
    caches[1] = caches[1].half()
    with pytest.raises(ValueError, match=r"conv_states\[1\] \(k\) must be torch.bfloat16, got torch.float16"):
        slot_from_fla(torch.zeros(1, 2, 128, 64), caches, shape=SHAPE)
    conv, ssm = torch.zeros(2, 3, SHAPE.conv_dim).bfloat16(), torch.zeros(1, 2, 128, 64)
    with pytest.raises(ValueError, match="as many slots as conv_state, 2, got 1"):
        fla_from_slot(conv, ssm, shape=SHAPE)
    with pytest.raises(ValueError, match=r"conv_state must have shape \[N, 3, 384\]"):
        fla_from_slot(conv.transpose(1, 2), ssm, shape=SHAPE)
    with pytest.raises(ValueError, match="ssm_state must be on cpu as conv_state, got meta"):
        fla_from_slot(conv[:1], ssm.to("meta"), shape=SHAPE)
    with pytest.raises(TypeError, match="weights must be the three conv weights of q, k and v, got NoneType"):
        conv_weight_from_fla(None, shape=SHAPE)  # type: ignore[arg-type]
