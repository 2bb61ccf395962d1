"""Arguments that share memory with a buffer that verify writes are refused, by name, in every lane."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_kernels import LayerState, Ring, Snapshots, verify_fused, verify_reference, verify_unfused
from tests.support.bits import as_bits
from tests.support.cases import Case, Problem, make_problem

CASE = Case(B=2, T=1, H=1, HV=1, K=64)
OPS = [verify_fused, verify_unfused, verify_reference]


def _overlapping(problem: Problem, name: str) -> dict[str, Any]:
    state, shape = problem.state, problem.shape
    tokens = CASE.B * CASE.T
    if name == "out in mixed_qkv":
        return {"out": problem.mixed_qkv.view(-1)[: tokens * shape.head_v_dim].view(tokens, 1, shape.head_v_dim)}
    if name == "workspace is mixed_qkv":
        return {"workspace": problem.mixed_qkv}
    if name == "out in workspace":
        workspace = torch.zeros_like(problem.mixed_qkv)
        out = workspace.view(-1)[: tokens * shape.head_v_dim].view(tokens, 1, shape.head_v_dim)
        return {"workspace": workspace, "out": out}
    if name == "window is conv_state":
        return {"state": LayerState(state.conv_state, state.ssm_state, state.conv_state[:, None])}
    if name == "snapshots are ssm_state":
        return {"record": Snapshots(state.ssm_state[:, None])}
    ring = problem.ring
    return {"record": Ring(ring.raw_v, ring.raw_v, ring.g, ring.beta)}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    "name",
    ["out in mixed_qkv", "workspace is mixed_qkv", "out in workspace", "window is conv_state",
     "snapshots are ssm_state", "raw_k is raw_v"],
)  # fmt: skip
def test_shared_memory_is_refused(op: Any, name: str, device: str) -> None:
    problem = make_problem(CASE, device)
    positional, keywords = problem.arguments("ring")
    before = {key: problem.whole(key).clone() for key in ("conv_state", "ssm_state", "raw_v", "raw_k")}
    inputs = problem.mixed_qkv.clone()
    with pytest.raises(ValueError, match="must not share memory with"):
        op(*positional, **{**keywords, **_overlapping(problem, name)})
    for key, old in before.items():
        assert torch.equal(as_bits(problem.whole(key)), as_bits(old)), key
    assert torch.equal(as_bits(problem.mixed_qkv), as_bits(inputs))
