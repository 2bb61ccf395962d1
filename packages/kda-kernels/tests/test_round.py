"""One verify and commit through every public op, small enough for the oldest Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kda_kernels import (
    KdaShape,
    LayerParams,
    LayerState,
    Ring,
    Snapshots,
    fold,
    scatter_conv,
    scatter_snapshots,
    verify_fused,
    verify_reference,
    verify_unfused,
)

SHAPE = KdaShape(num_heads=1, num_v_heads=2, head_k_dim=64, head_v_dim=64)
BATCH, STEPS, SLOTS = 2, 3, 4
DTYPE = torch.bfloat16


class Round:
    """Inputs of a verify, the same ones each time, with state and records of its own."""

    def __init__(self, device: str, lower_bound: float | None) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device, dtype)

        tokens, gates = BATCH * STEPS, SHAPE.num_v_heads * SHAPE.head_k_dim
        self.inputs = normal(tokens, SHAPE.conv_dim), normal(tokens, gates), normal(tokens, SHAPE.num_v_heads)
        self.params = LayerParams(
            conv_weight=normal(SHAPE.conv_dim, 4),
            conv_bias=normal(SHAPE.conv_dim),
            A_log=normal(SHAPE.num_v_heads, dtype=torch.float32),
            dt_bias=normal(gates, dtype=torch.float32),
            lower_bound=lower_bound,
        )
        self.state = LayerState.allocate(SHAPE, slots=SLOTS, rows=BATCH, steps=STEPS, dtype=DTYPE, device=device)
        self.state.conv_state.copy_(normal(*self.state.conv_state.shape))
        self.state.ssm_state.copy_(normal(*self.state.ssm_state.shape))
        self.ring = Ring.allocate(SHAPE, slots=SLOTS, length=STEPS, dtype=DTYPE, device=device)
        self.snapshots = Snapshots.allocate(SHAPE, rows=BATCH, steps=STEPS, device=device)
        self.slots = torch.tensor([3, 1], device=device)

    def verify(self, op: object, record: Ring | Snapshots) -> torch.Tensor:
        return op(  # type: ignore[operator]
            *self.inputs,
            shape=SHAPE,
            params=self.params,
            state=self.state,
            record=record,
            slots=self.slots,
            draft_tokens=STEPS,
        )


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["standard gate", "safe gate"])
def test_lanes_agree_and_the_fold_is_the_snapshot(device: str, lower_bound: float | None) -> None:
    lanes = {}
    for op in (verify_unfused, verify_fused):
        for record in ("ring", "snapshots"):
            this = lanes[op, record] = Round(device, lower_bound)
            this.out = this.verify(op, getattr(this, record))
    first, *others = lanes.values()
    for other in others:
        assert torch.equal(other.out, first.out)
        assert torch.equal(other.state.conv_window, first.state.conv_window)
    for field in fields(Ring):
        ours, theirs = (getattr(lanes[op, "ring"].ring, field.name) for op in (verify_unfused, verify_fused))
        assert torch.equal(ours, theirs), field.name

    reference = Round(device, lower_bound)
    expected = reference.verify(verify_reference, reference.ring)
    # The reference sums in torch's order: fp32 values that differ in their last bits may round to neighbouring bf16
    # values, at most 2**-7 apart relatively; where a sum cancels, the fp32 error of terms of size 1 remains.
    torch.testing.assert_close(first.out, expected, rtol=2**-7, atol=1e-5)

    accept_lens = torch.tensor([1, STEPS], device=device)
    ring, snapshots = lanes[verify_unfused, "ring"], lanes[verify_fused, "snapshots"]
    commit = {"slots": ring.slots, "accept_lens": accept_lens, "draft_tokens": STEPS}
    fold(
        ring.state.ssm_state[None],
        Ring(*(getattr(ring.ring, field.name)[None] for field in fields(Ring))),
        shape=SHAPE,
        **commit,
    )
    scatter_snapshots(snapshots.state.ssm_state[None], Snapshots(snapshots.snapshots.states[None]), **commit)
    assert torch.equal(ring.state.ssm_state, snapshots.state.ssm_state)
    assert torch.equal(ring.state.ssm_state[[0, 2]], reference.state.ssm_state[[0, 2]]), "slots that are not ours"
    assert not torch.equal(ring.state.ssm_state[3], reference.state.ssm_state[3])

    scatter_conv(ring.state.conv_state[None], ring.state.conv_window[None], **commit)
    assert torch.equal(ring.state.conv_state[3], first.state.conv_window[0, 0])
    assert torch.equal(ring.state.conv_state[1], first.state.conv_window[1, STEPS - 1])
