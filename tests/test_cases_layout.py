"""Layout and dtype: strided views, dtype mixes, odd pitches, malformed rings: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels import (
    KdaShape,
    LayerState,
    Ring,
    fold,
    fold_reason,
    verify_fused,
    verify_reason,
    verify_reference,
    verify_unfused,
)
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.commits import expected_states, fold_problem, verified, with_layers
from tests.support.grids import params
from tests.support.ops import KERNELS, RING, WITH_REFERENCE, Verify

SMALL, LARGE = Case(B=2, T=2, H=1, HV=2, K=64), Case(B=4, T=3, H=4, HV=8, K=128)


def refused(problem: Problem, name: str, op: Verify, **overrides: Any) -> str:
    """The reason why ``op`` refuses; it must name ``name`` and leave every buffer alone."""
    outcome = problem.fork()
    positional, keywords = outcome.arguments("ring", **overrides)
    with pytest.raises((ValueError, TypeError), match=name) as caught:
        op(*positional, **keywords)
    for buffer in problem.buffers:
        assert_same_bits(outcome.whole(buffer), problem.whole(buffer), buffer)
    return str(caught.value)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("case", params([SMALL], [LARGE]))
def test_L1_views_of_one_merged_projection(case: Case, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    expected = problem.run(op)
    widths = [x.shape[1] for x in (problem.mixed_qkv, problem.a, problem.b)]
    for gap in (0, 3, 16):
        pad = torch.full((case.B * case.T, gap), float("nan"), dtype=case.dtype, device=device)
        merged = torch.cat([problem.mixed_qkv, pad, problem.a, pad, problem.b, pad], 1)
        mixed_qkv, _, a, _, b, _ = merged.split([widths[0], gap, widths[1], gap, widths[2], gap], 1)
        outcome = problem.run(op, mixed_qkv=mixed_qkv, a=a, b=b)
        for name in ("out", "conv_window", *RING):
            assert_same_bits(outcome.whole(name), expected.whole(name), f"{name} with a gap of {gap}")


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b"])
def test_L1_inner_strides_are_refused(name: str, op: Verify, device: str) -> None:
    """``b[:, ::2]`` and its like: every second column of a wider projection."""
    problem = make_problem(SMALL, device)
    x = getattr(problem, name)
    strided = torch.stack([x, torch.full_like(x, float("nan"))], 2)[:, :, 0]
    assert strided.stride(1) == 2
    assert "contiguous" in refused(problem, name, op, **{name: strided})


@pytest.mark.parametrize("op", WITH_REFERENCE)
def test_L2_dtype_mixes_are_refused_by_name(op: Verify, device: str) -> None:
    problem = make_problem(SMALL, device)
    p, s = problem.params, problem.state
    other = torch.float16
    wrong: dict[str, dict[str, Any]] = {
        "conv_state": dict(state=replace(s, conv_state=s.conv_state.to(other))),
        "conv_window": dict(state=replace(s, conv_window=s.conv_window.to(other))),
        "ssm_state": dict(state=replace(s, ssm_state=s.ssm_state.bfloat16())),
        "conv_weight": dict(params=replace(p, conv_weight=p.conv_weight.to(other))),
        "conv_bias": dict(params=replace(p, conv_weight=p.conv_weight.float())),  # the bias stays bf16
        "A_log": dict(params=replace(p, A_log=p.A_log.bfloat16())),
        "dt_bias": dict(params=replace(p, dt_bias=p.dt_bias.double())),
        "mixed_qkv": dict(mixed_qkv=problem.mixed_qkv.float()),
        r"\ba\b": dict(a=problem.a.float()),
        r"\bb\b": dict(b=problem.b.to(other)),
        "raw_v": dict(record=replace(problem.ring, raw_v=problem.ring.raw_v.to(other))),
        r"ring\.g": dict(record=replace(problem.ring, g=problem.ring.g.bfloat16())),
        "out": dict(out=problem["out"].float()),
    }
    for name, arguments in wrong.items():
        refused(problem, name, op, **arguments)


@pytest.mark.parametrize("op", WITH_REFERENCE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_L2_fp32_conv_weights_are_right_with_16_bit_activations(dtype: torch.dtype, op: Verify, device: str) -> None:
    """The same values as fp32 and as 16-bit weights differ: only 16-bit products are rounded."""
    problem = make_problem(replace(SMALL, dtype=dtype), device)
    p = problem.params
    assert p.conv_bias is not None
    wide = problem.run(op, params=replace(p, conv_weight=p.conv_weight.float(), conv_bias=p.conv_bias.float()))
    narrow = problem.run(op)
    assert not torch.equal(wide["raw_k"].nan_to_num(), narrow["raw_k"].nan_to_num())
    torch.testing.assert_close(wide["out"], narrow["out"], rtol=0.1, atol=0.05)


def test_L3_head_counts() -> None:
    with pytest.raises(ValueError, match=r"num_v_heads.*num_v_heads=6.*num_heads=4"):
        KdaShape(4, 6, 64, 64)
    for H, HV, name in ((0, 4, "num_heads"), (4, 0, "num_v_heads"), (-1, 4, "num_heads")):
        with pytest.raises(ValueError, match=name):
            KdaShape(H, HV, 64, 64)
    for bad in (4.0, "4", True, None):
        with pytest.raises(TypeError, match="num_heads"):
            KdaShape(bad, 4, 64, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", WITH_REFERENCE)
def test_L3_gate_parameters_of_another_length(op: Verify, device: str) -> None:
    problem = make_problem(SMALL, device)
    p = problem.params
    for name in ("A_log", "dt_bias", "conv_bias"):
        x = getattr(p, name)
        refused(problem, name, op, params=replace(p, **{name: x[:-1].contiguous()}))
        refused(problem, name, op, params=replace(p, **{name: torch.cat([x, x])}))
        refused(problem, name, op, params=replace(p, **{name: x[None]}))
    refused(problem, "conv_weight", op, params=replace(p, conv_weight=p.conv_weight[:, :3]))
    refused(problem, "conv_weight", op, params=replace(p, conv_weight=p.conv_weight.T.contiguous().T))
    for lower_bound in (0.0, 5.0, float("nan"), -0.0):
        refused(problem, "lower_bound", op, params=replace(p, lower_bound=lower_bound))
    refused(problem, "lower_bound", op, params=replace(p, lower_bound="-5"))


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("mode", ["ring", "snapshots"])
@pytest.mark.parametrize("pitch", [1, 3, 8, 16, pytest.param(1, id="1-K128", marks=pytest.mark.gpu)])
def test_L4_odd_slot_pitch(pitch: int, mode: str, op: Verify, device: str, request: pytest.FixtureRequest) -> None:
    """Not a multiple of 16 elements: another load width in compiled code, the same bits, and untouched gaps."""
    case = replace(LARGE if request.node.get_closest_marker("gpu") else SMALL, pitch=pitch)
    padded = make_problem(case, device)
    packed = make_problem(replace(case, pitch=0), device)
    packed = packed.fork(slots=padded.slots, mixed_qkv=padded.mixed_qkv, a=padded.a, b=padded.b, params=padded.params)
    for name, buffer in packed.buffers.items():
        buffer.view.copy_(padded[name])
    ours, expected = padded.run(op, mode), packed.run(op, mode)
    for name in padded.buffers:
        assert_same_bits(ours[name], expected[name], name)
        if name == "out":
            continue
        # the gaps: overwrite the view with the original's, then everything must be the original
        restored = ours.buffers[name].clone()
        restored.view.copy_(padded[name])
        assert_same_bits(restored.whole, padded.whole(name), f"gaps of {name}")
    if mode == "ring":
        accept = torch.full((case.B,), case.T, device=device)
        assert_same_bits(
            fold_problem(ours, accept)["ssm_state"], fold_problem(expected, accept)["ssm_state"], "folded state"
        )


def malformed_rings(ring: Ring) -> dict[str, tuple[str, Ring]]:
    """One property broken at a time: what -> (member to be named, ring). All but the last are of the right dtype."""

    def broken(member: str, change: Callable[[torch.Tensor], Any]) -> tuple[str, Ring]:
        return member, replace(ring, **{member: change(getattr(ring, member))})

    def inner_gap(x: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype, device=x.device)
        return wide[..., : x.shape[-1]]

    found = {}
    for member in RING:
        found.update(
            {
                f"{member} of one dimension less": broken(member, lambda x: x[0]),
                f"{member} of one dimension more": broken(member, lambda x: x[None]),
                f"{member} of fewer slots": broken(member, lambda x: x[:-1]),
                f"{member} of more heads": broken(member, lambda x: torch.cat([x, x], 1)),
                f"{member} of another dtype": broken(member, lambda x: x.double()),
                f"{member} with inner strides": broken(member, inner_gap),
                f"{member} of another length": broken(member, lambda x: x[:, :, :1].contiguous()),
                f"{member} elsewhere": broken(member, lambda x: x.to("meta")),
                f"{member} missing": broken(member, lambda _: None),
                f"{member} is an array": broken(member, lambda x: x.tolist()),
                f"{member} whose slots share memory": broken(member, lambda x: x[:1].expand(x.shape)),
            }
        )
    found["raw_k of other channels"] = broken("raw_k", lambda x: x[..., :32].contiguous())
    found["g of other channels"] = broken("g", lambda x: x[..., :32].contiguous())
    return found


@pytest.mark.parametrize("what", sorted(malformed_rings(make_problem(SMALL, "cpu").ring)))
def test_L5_malformed_ring_is_refused_by_name(what: str, device: str) -> None:
    """Every lane, the reference and fold decline with a reason that names the ring's member, and write nothing."""
    problem = make_problem(SMALL, device)
    member, ring = malformed_rings(problem.ring)[what]
    name = r"ring\.(raw_v|raw_k|g|beta)" if what.endswith("another length") else rf"ring\.{member}"
    reasons = {refused(problem, name, op, record=ring) for op in (verify_fused, verify_unfused, verify_reference)}
    assert len(reasons) == 1, "the lanes give different reasons"
    if not what.endswith("elsewhere") or device == "cpu":
        positional, keywords = problem.arguments("ring", record=ring)
        assert verify_reason(*positional, **keywords) in reasons


@pytest.mark.parametrize(
    "what", ["g missing", "beta of another dtype", "raw_v of fewer slots", "raw_k with inner strides"]
)
def test_L5_fold_refuses_a_malformed_ring(what: str, device: str) -> None:
    problem = make_problem(SMALL, device)
    member, ring = malformed_rings(problem.ring)[what]
    layered = Ring(*(None if x is None else x[None] for x in (ring.raw_v, ring.raw_k, ring.g, ring.beta)))
    accept = torch.ones(2, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = dict(shape=problem.shape, slots=problem.slots, accept_lens=accept, draft_tokens=2)
    state = problem["ssm_state"][None].clone()
    reason = fold_reason(state, layered, **arguments)
    assert reason is not None
    assert member in reason
    with pytest.raises(ValueError, match=rf"ring\.{member}"):
        fold(state, layered, **arguments)
    assert_same_bits(state[0], problem["ssm_state"], "ssm_state")


def test_L5_a_missing_ring_or_wrong_record(device: str) -> None:
    problem = make_problem(SMALL, device)
    for record in (None, problem["raw_v"], {"raw_v": problem["raw_v"]}, (problem["raw_v"],) * 4):
        refused(problem, "record", verify_fused, record=record)
    with pytest.raises(TypeError, match="ring"):
        fold(problem["ssm_state"][None], None, shape=problem.shape, slots=problem.slots,
             accept_lens=problem.slots, draft_tokens=1)  # fmt: skip


def test_layers_fold_independently(device: str) -> None:
    """Three layers in one launch, each with its own ring and state, equal three launches of one layer."""
    problems = [verified(replace(SMALL, seed=seed), device) for seed in range(3)]
    slots = problems[0].slots
    lengths = [2, 1]
    accept = torch.tensor(lengths, device=device)
    for problem in problems[1:]:  # the same slots in every layer
        for old, new in zip(problem.slots.tolist(), slots.tolist(), strict=True):
            for name in ("ssm_state", *RING):
                problem[name][[old, new]] = problem[name][[new, old]].clone()
        problem.slots = slots
    state = torch.stack([problem["ssm_state"] for problem in problems])
    rings = [problem.ring for problem in problems]
    ring = Ring(*(torch.stack([getattr(r, name) for r in rings]) for name in RING))
    fold(state, ring, shape=problems[0].shape, slots=slots, accept_lens=accept, draft_tokens=2)
    for layer, problem in enumerate(problems):
        assert_same_bits(state[layer], fold_problem(problem, accept)["ssm_state"], f"layer {layer}")
        assert_same_bits(state[layer], expected_states(problem, lengths).view, f"snapshot of layer {layer}")
    assert with_layers(rings[0]).layer(0).g.shape == rings[0].g.shape
    assert LayerState(state[:, :, 0], state, state).layer(1).conv_state.data_ptr() == state[1].data_ptr()
