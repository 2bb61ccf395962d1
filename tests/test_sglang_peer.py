"""Against SGLang's own kernels, where they are at hand: equal rings and windows, and rings that fold on either side.

Set KDA_SGLANG to an unpacked wheel (``pip download --no-deps sglang==0.5.23`` and unzip) or unpack it into ``peer/``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kda_kernels import KdaShape, fold, scatter_conv, verify_fused, verify_unfused
from kda_tooling.peers import load_peer
from kda_tooling.peers.sglang import SglangPeer
from kda_tooling.problem import VerifyProblem, random_problems
from tests.support.bits import as_bits
from tests.support.ops import RING

SGLANG = Path(os.environ.get("KDA_SGLANG", Path(__file__).parents[1] / "peer"))
needs_sglang = pytest.mark.skipif(
    not (SGLANG / "sglang").is_dir(), reason=f"no SGLang at {SGLANG}: unpack its wheel there or set KDA_SGLANG"
)

CASES = {
    "B5-T4-H8-HV8-K128-bf16-safe-bias": (KdaShape(8, 8, 128, 128), 5, 4, torch.bfloat16, None, -5.0, True),
    "B3-T3-H4-HV8-K128-bf16-fp32weights": (KdaShape(4, 8, 128, 128), 3, 3, torch.bfloat16, torch.float32, None, True),
    "B3-T6-H16-HV16-K128-fp16-safe": (KdaShape(16, 16, 128, 128), 3, 6, torch.float16, None, -5.0, False),
    "B2-T8-H1-HV16-K128-bf16-standard": (KdaShape(1, 16, 128, 128), 2, 8, torch.bfloat16, None, None, True),
    "B2-T4-H4-HV4-K64-bf16-safe": (KdaShape(4, 4, 64, 64), 2, 4, torch.bfloat16, None, -5.0, True),
    "B100-T4-H8-HV8-K128-bf16-safe-bias": (KdaShape(8, 8, 128, 128), 100, 4, torch.bfloat16, None, -5.0, True),
}


def _peer() -> SglangPeer:
    peer = load_peer(f"sglang={SGLANG}")
    assert isinstance(peer, SglangPeer)
    return peer


def _record(problem: VerifyProblem) -> dict[str, torch.Tensor]:
    assert problem.ring is not None
    found = {f"ring.{name}": getattr(problem.ring, name).clone() for name in RING}
    return found | {"conv_window": problem.state.conv_window.clone()}


def _poison(problem: VerifyProblem) -> None:
    assert problem.ring is not None
    for name in RING:
        getattr(problem.ring, name).fill_(3.0)
    problem.state.conv_window.fill_(7.0)


@needs_sglang
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_rings_and_windows_equal_sglangs_bit_for_bit(case: str) -> None:
    shape, batch, tokens, dtype, weight_dtype, lower_bound, bias = CASES[case]
    problem = random_problems(
        shape, layers=1, batch=batch, draft_tokens=tokens, dtype=dtype, device="cuda", lower_bound=lower_bound,
        bias=bias, weight_dtype=weight_dtype,
    ).layers[0]  # fmt: skip
    conv_state = problem.state.conv_state.clone()
    common = {
        "shape": shape, "params": problem.params, "state": problem.state, "record": problem.ring,
        "slots": problem.slots, "draft_tokens": tokens,
    }  # fmt: skip
    records, outputs = {}, {}
    for name, op in (("fused", verify_fused), ("unfused", verify_unfused)):
        _poison(problem)
        outputs[name] = op(problem.mixed_qkv, problem.a, problem.b, **common)  # type: ignore[operator]
        records[name] = _record(problem)
    for name, arm in _peer().verify_arms(problem).items():
        _poison(problem)
        problem.state.conv_state.copy_(conv_state)  # the unfused arm rolls it
        outputs[f"sglang {name}"] = arm(problem)
        records[f"sglang {name}"] = _record(problem)
    for name, record in records.items():
        for field, tensor in record.items():
            assert torch.equal(as_bits(tensor), as_bits(records["fused"][field])), f"{field} of {name}"
    assert torch.equal(as_bits(outputs["fused"]), as_bits(outputs["unfused"]))
    for name, out in outputs.items():
        # Different summation orders over K: fp32 rounding, then at most a flip of the last 16-bit place on o(1) values.
        difference = (out.float() - outputs["fused"].float()).norm() / outputs["fused"].float().norm()
        assert difference < 1e-3, f"output of {name}: relative difference {difference:.1e}"


@needs_sglang
@pytest.mark.gpu
def test_a_ring_written_by_sglang_folds_here_to_the_state_its_own_fold_commits() -> None:
    """Not bit for bit: SGLang's fold divides k by its norm, verify (its own too) multiplies by the reciprocal.

    Both k agree within 3 ulps (2 of the approximate division, 1 of the product), so after accept steps each state
    element differs by a few ulps of the largest contribution: 1e-6 in norm is far above that, and far below a step.
    """
    shape, tokens, layers, accept = KdaShape(8, 8, 128, 128), 4, 2, 3
    problems = random_problems(shape, layers=layers, batch=4, draft_tokens=tokens, dtype=torch.bfloat16, device="cuda")
    peer = _peer()
    for problem in problems.layers:
        peer.verify_fused(problem, 16)
    assert problems.ring is not None
    accept_lens = torch.tensor([accept, 1, tokens, 0], dtype=torch.int32, device="cuda")
    slots = problems.layers[0].slots
    states = {who: problems.state.ssm_state.clone() for who in ("ours", "sglang")}
    convs = {who: problems.state.conv_state.clone() for who in ("ours", "sglang")}
    before = states["ours"].clone()
    fold(states["ours"], problems.ring, shape=shape, slots=slots, accept_lens=accept_lens, draft_tokens=tokens)
    scatter_conv(convs["ours"], problems.state.conv_window, slots=slots, accept_lens=accept_lens, draft_tokens=tokens)
    peer.commit(states["sglang"], problems.ring, convs["sglang"], problems.state.conv_window, slots, accept_lens)
    assert torch.equal(as_bits(convs["ours"]), as_bits(convs["sglang"]))
    relative = (states["ours"] - states["sglang"]).norm() / states["sglang"].norm()
    assert relative < 1e-6
    assert (states["ours"] - before).norm() > 0.01 * before.norm()
