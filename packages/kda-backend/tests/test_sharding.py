"""Heads over ranks: shapes, slices, and ranks' verify and commit beside the whole layer's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kda_backend import LANES, StatePool, lane_mode
from kda_backend.sharding import HeadShard, join_packed, shard_reason
from kda_kernels import KdaShape, LayerParams

SHAPES = {
    "split": (KdaShape(2, 4, 64, 64), 2),
    "replicated": (KdaShape(1, 4, 64, 64), 2),
    "one head a rank": (KdaShape(2, 4, 64, 64), 4),
    "one rank": (KdaShape(1, 2, 64, 64), 1),
}


def test_shapes_of_a_rank() -> None:
    assert HeadShard(KdaShape(8, 16, 128, 64), 1, 4).local == KdaShape(2, 4, 128, 64)
    assert HeadShard(KdaShape(2, 16, 128, 64), 3, 4).local == KdaShape(1, 4, 128, 64)
    assert [HeadShard(KdaShape(2, 16), rank, 4).first_head for rank in range(4)] == [0, 0, 1, 1]
    assert [HeadShard(KdaShape(4, 8), rank, 2).first_head for rank in range(2)] == [0, 2]
    assert [HeadShard(KdaShape(4, 8), rank, 2).first_v_head for rank in range(2)] == [0, 4]


@pytest.mark.parametrize("h", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_ranks_read_the_heads_of_the_whole_layer(h: int, group: int, world: int) -> None:
    """Each value head of a rank reads, by its own shape, the query/key head that it reads in the whole layer."""
    shape = KdaShape(h, h * group, 64, 64)
    if shard_reason(shape, world) is not None:
        with pytest.raises(ValueError, match="heads cannot be split"):
            HeadShard(shape, 0, world)
        return
    for rank in range(world):
        shard = HeadShard(shape, rank, world)
        per_key = shard.local.num_v_heads // shard.local.num_heads
        for head in range(shard.local.num_v_heads):
            assert shard.first_head + head // per_key == (shard.first_v_head + head) // group


@pytest.mark.parametrize("name", SHAPES)
def test_packed_channels_come_together_again(name: str) -> None:
    shape, world = SHAPES[name]
    shards = [HeadShard(shape, rank, world) for rank in range(world)]
    x = torch.randn(3, shape.conv_dim)
    assert torch.equal(join_packed([shard.packed(x) for shard in shards], shape), x)
    assert torch.equal(join_packed([shard.packed(x.T, 0) for shard in shards], shape, 0), x.T)
    state = torch.randn(5, shape.num_v_heads, 2, 3)
    assert torch.equal(torch.cat([shard.v_heads(state, 1) for shard in shards], 1), state)


def test_what_cannot_be_split_is_refused() -> None:
    shape = KdaShape(4, 8)
    with pytest.raises(ValueError, match=r"8 value heads cannot be split evenly over 3 ranks.*\[1, 2, 4, 8\]"):
        HeadShard(shape, 0, 3)
    with pytest.raises(ValueError, match="4 query/key heads cannot be split over 6 ranks: neither number divides"):
        HeadShard(KdaShape(4, 12), 0, 6)
    with pytest.raises(ValueError, match=r"rank must be within 0\.\.1, got 2"):
        HeadShard(shape, 2, 2)
    with pytest.raises(ValueError, match="world must be at least 1"):
        HeadShard(shape, 0, 0)
    with pytest.raises(TypeError, match="world must be an int"):
        HeadShard(shape, 0, True)
    with pytest.raises(TypeError, match="rank must be an int"):
        HeadShard(shape, 0.0, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shape must be a KdaShape"):
        shard_reason((4, 8), 2)  # type: ignore[arg-type]
    shard = HeadShard(shape, 0, 2)
    with pytest.raises(ValueError, match="D=2048 packed channels along dim -1"):
        shard.packed(torch.zeros(1, 2047))
    with pytest.raises(ValueError, match="a multiple of HV=8 entries along dim 0"):
        shard.v_heads(torch.zeros(7), 0)
    with pytest.raises(TypeError, match="params must be LayerParams"):
        shard.params(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parts must hold the packed channels of every rank, got none"):
        join_packed([], shape)
    with pytest.raises(ValueError, match=r"parts\[1\] must have D=1024 packed channels along dim -1, got \[1, 1023\]"):
        join_packed([torch.zeros(1, 1024), torch.zeros(1, 1023)], shape)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gather_needs_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="gather needs a process group"):
        HeadShard(KdaShape(2, 4), 0, 2).gather(torch.zeros(1, 2))


@pytest.mark.usefixtures("group_of_one")
def test_gather_needs_the_ranks_of_the_world() -> None:
    x = torch.randn(2, 4)
    assert torch.equal(HeadShard(KdaShape(2, 4), 0, 1).gather(x), x)
    for rank in (0, 1):
        shard = HeadShard(KdaShape(2, 4), rank, 2)
        for gather in (shard.gather, shard.gather_packed):
            with pytest.raises(ValueError, match=f"group must have the 2 ranks .* rank {rank}; got rank 0 of 1"):
                gather(x)


def round_of(
    shape: KdaShape, lane: str, device: str, inputs: tuple[torch.Tensor, ...], params: LayerParams,
    start: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output, conv state and state of one verify of 2 requests and 2 tokens, of which 2 and 1 are accepted."""
    pool = StatePool(
        shape, num_layers=1, num_slots=3, max_batch=2, draft_tokens=2, mode=lane_mode(lane), device=device
    )  # fmt: skip
    pool.state.conv_state.copy_(start[0])
    pool.state.ssm_state.copy_(start[1])
    pool.begin(torch.tensor([2, 0], device=device), 2)
    out = pool.verify(0, *inputs, params, lane=lane)
    pool.commit(torch.tensor([2, 1], device=device))
    return out, pool.conv_state, pool.ssm_state


@pytest.mark.parametrize(("name", "lane"), [*(("replicated", lane) for lane in LANES), ("split", "fused+ring")])
def test_ranks_together_have_the_bits_of_the_whole_layer(name: str, lane: str, device: str) -> None:
    shape, world = SHAPES[name]
    generator = torch.Generator().manual_seed(7)
    heads = shape.num_v_heads

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    fp32 = torch.float32
    params = LayerParams(
        normal(shape.conv_dim, 4), normal(shape.conv_dim), normal(heads, dtype=fp32), normal(heads * 64, dtype=fp32)
    )
    mixed_qkv, a, b = normal(4, shape.conv_dim), normal(4, heads * 64), normal(4, heads)
    conv_state, ssm_state = normal(1, 3, 3, shape.conv_dim), normal(1, 3, heads, 64, 64, dtype=fp32)
    whole = round_of(shape, lane, device, (mixed_qkv, a, b), params, (conv_state, ssm_state))
    outs, convs, states = [], [], []
    for rank in range(world):
        shard = HeadShard(shape, rank, world)
        out, conv, state = round_of(
            shard.local, lane, device, (shard.packed(mixed_qkv), shard.v_heads(a), shard.v_heads(b)),
            shard.params(params), (shard.packed(conv_state), shard.v_heads(ssm_state, 2)),
        )  # fmt: skip
        outs.append(out)
        convs.append(conv)
        states.append(state)
    assert torch.equal(torch.cat(outs, 1), whole[0])
    assert torch.equal(join_packed(convs, shape), whole[1])
    assert torch.equal(torch.cat(states, 2), whole[2])
