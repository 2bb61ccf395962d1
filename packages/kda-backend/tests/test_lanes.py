"""Which lane is taken where there are no tables: the conservative rule, and every reason to fall back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kda_backend import LANES, MODES, StatePool, Target, conservative_lane, lane_mode
from kda_backend.gate import Decision, decide
from kda_kernels import KdaShape, LayerParams, Ring, Snapshots
from kda_kernels.interpreter import is_interpreted

SHAPE = KdaShape(1, 1, 64, 64)
ALONE: dict[str, Any] = {"mode": "ring", "batch": 1, "draft_tokens": 4, "target": Target("cuda", 90)}


def ask(**question: Any) -> Decision:
    """What the gate decides without tables."""
    return decide(SHAPE, **ALONE | question, device_name="a GPU", environ={"KDA_GATE": "off"})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [0, 1, 2, 64])
@pytest.mark.parametrize(
    "target", [Target("cuda", arch) for arch in (80, 86, 89, 90, 100, 103, 110, 120)] + [Target("hip")], ids=str
)
def test_the_conservative_rule(mode: str, batch: int, target: Target) -> None:
    lane, reason = conservative_lane(mode, batch, 4, target)
    fused = mode == "ring" and batch == 1 and target.arch in (90, 100, 103)
    assert lane in LANES
    assert lane_mode(lane) == mode
    assert lane.startswith("fused") == fused
    assert str(target) in reason
    assert reason.startswith(lane)
    decision = ask(mode=mode, batch=batch, target=target)
    assert (decision.lane, decision.launch, decision.reason) == (lane, None, reason)


@pytest.mark.parametrize(
    ("changes", "lane", "reason"),
    [
        ({"tree": True}, "unfused+ring", "these tokens have parents (a tree)"),
        ({"tree": True, "mode": "snapshots"}, "unfused", "fused cannot take this, its kernel takes chains"),
        ({"ragged": True}, "unfused+ring", "these lengths differ (ragged)"),
        ({"form": "chunked", "mode": "snapshots"}, "unfused", "never computes the states that snapshots hold"),
        ({"form": "chunked", "draft_tokens": 17}, "unfused+ring", "takes up to 16 draft tokens, got 17"),
        ({"target": Target("cuda", 75)}, "reference", "kernels need sm80 or later, this is sm75"),
        ({"target": Target("cpu")}, "reference", "kernels run on CUDA and ROCm devices, this is 'cpu'"),
        ({"target": Target("mps")}, "reference", "this is 'mps'"),
        ({"target": Target("hip")}, "unfused+ring", "no table gives a verdict for B=1, T=4 on hip"),
        ({"target": Target("interpreter")}, "unfused+ring", "on interpreter"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_what_a_fused_lane_cannot_take_falls_back_and_says_why(changes: Any, lane: str, reason: str) -> None:
    assert ask().lane == "fused+ring"
    choice = ask(**changes)
    assert choice.lane == lane
    assert reason in choice.reason


def a_ring(**changes: Any) -> Ring:
    ring = Ring.allocate(SHAPE, slots=3, length=4, dtype=torch.bfloat16, device="cpu")
    return dataclasses.replace(ring, **changes)


MALFORMED = [
    ("ndim", lambda: a_ring(g=torch.zeros(3, 4, 64)), "ring.g must have shape"),
    ("raw_v ndim", lambda: a_ring(raw_v=torch.zeros(3, 4, 64).bfloat16()), "ring.raw_v must have 4 dimensions"),
    ("shape", lambda: a_ring(raw_k=torch.zeros(3, 1, 4, 128).bfloat16()), "ring.raw_k must have shape"),
    ("slots", lambda: a_ring(g=torch.zeros(2, 1, 4, 64)), "ring.g must have shape"),
    ("dtype", lambda: a_ring(beta=torch.zeros(3, 1, 4).bfloat16()), "ring.beta must be float32, got bfloat16"),
    ("raw dtype", lambda: a_ring(raw_v=torch.zeros(3, 1, 4, 64)), "ring.raw_v must be bfloat16 or float16"),
    ("strides", lambda: a_ring(g=torch.zeros(3, 1, 64, 4).mT), "ring.g must be packed"),
    ("length", lambda: a_ring(g=torch.zeros(3, 1, 5, 64)), "ring.g must have shape"),
    ("L < T", lambda: Ring.allocate(SHAPE, slots=3, length=3, dtype=torch.bfloat16, device="cpu"), "3 records per"),
    ("device", lambda: a_ring(g=torch.zeros(3, 1, 4, 64, device="meta")), "ring.g must be on cpu"),
    ("member", lambda: a_ring(raw_k=None), "ring.raw_k must be a Tensor, got NoneType"),
    ("raw_v", lambda: a_ring(raw_v=None), "ring.raw_v must be a Tensor, got NoneType"),
    ("kind", lambda: Snapshots.allocate(SHAPE, rows=1, steps=4, device="cpu"), "needs a Ring, got Snapshots"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_a_malformed_ring_is_not_for_the_fused_lane(make: Any, reason: str) -> None:
    assert ask(record=a_ring()).lane == "fused+ring"
    choice = ask(record=make())
    assert choice.lane == "unfused+ring"
    assert reason in choice.reason


class TestPool:
    @pytest.mark.parametrize("mode", MODES)
    def test_a_verify_without_a_lane_takes_the_chosen_one(self, mode: str, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device, dtype)

        params = LayerParams(
            normal(SHAPE.conv_dim, 4), None, torch.zeros(1, device=device), torch.zeros(64, device=device)
        )
        inputs = [normal(2, n) for n in (SHAPE.conv_dim, 64, 1)]
        pools = [
            StatePool(SHAPE, num_layers=1, num_slots=2, max_batch=2, draft_tokens=2, mode=mode, device=device)
            for _ in range(2)
        ]
        outputs = []
        for pool in pools:
            pool.begin(torch.tensor([1], device=device), 2)
            choice = pool.lane_choice()
            rule = conservative_lane(mode, 1, 2, Target.of(torch.device(device)))
            assert (choice.lane, choice.reason, choice.launch) == (*rule, None)
            outputs.append(pool.verify(0, *inputs, params, lane=None if pool is pools[0] else choice.lane))
            pool.commit(torch.tensor([2], device=device))
        assert torch.equal(*outputs)
        assert torch.equal(pools[0].ssm_state, pools[1].ssm_state)

    def test_where_no_kernel_runs_the_reference_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: cls(device.type)))
        pool = StatePool(SHAPE, num_layers=1, num_slots=2, max_batch=1, draft_tokens=2, mode="ring")
        pool.begin(torch.tensor([1]), 2)
        assert pool.lane_choice().lane == "reference"
        params = LayerParams(torch.ones(SHAPE.conv_dim, 4).bfloat16(), None, torch.zeros(1), torch.zeros(64))
        pool.verify(0, *(torch.ones(2, n).bfloat16() for n in (SHAPE.conv_dim, 64, 1)), params)
        assert pool._current_round().reference
        pool.commit(torch.tensor([2]))
        assert pool.ssm_state[0, 1].any()

    def test_what_no_lane_takes_is_refused_by_the_op(self) -> None:
        pool = StatePool(SHAPE, num_layers=1, num_slots=2, max_batch=1, draft_tokens=2, mode="snapshots")
        pool.begin(torch.tensor([1]), 2)
        assert "snapshots hold" in pool.lane_choice("chunked").reason
        params = LayerParams(torch.ones(SHAPE.conv_dim, 4).bfloat16(), None, torch.zeros(1), torch.zeros(64))
        with pytest.raises(ValueError, match="form='chunked' never computes the states that snapshots hold"):
            pool.verify(0, *(torch.ones(2, n).bfloat16() for n in (SHAPE.conv_dim, 64, 1)), params, form="chunked")

    def test_a_round_must_be_open(self) -> None:
        pool = StatePool(SHAPE, num_layers=1, num_slots=2, max_batch=1, draft_tokens=2, mode="ring")
        with pytest.raises(RuntimeError, match="begin"):
            pool.lane_choice()

    def test_a_target_is_that_of_the_process(self) -> None:
        assert Target.of(torch.device("cpu")) == Target("interpreter" if is_interpreted() else "cpu")
        assert Target.of(torch.device("meta")) == Target("meta")
