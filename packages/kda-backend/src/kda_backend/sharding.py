"""Heads of a KDA layer over tensor-parallel ranks.

KDA works head by head: conv, gates, state, ring and output of a value head need only its own channels and those of the
query/key head it reads. So a rank runs ``HV / world`` value heads with the query/key heads these read, as a layer of
its own (`HeadShard.local`) with a `StatePool` of that shape. Nothing is exchanged until the output projection, for
which `HeadShard.gather` puts the heads side by side: values are moved, none summed, so the world size decides no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda_kernels import KdaShape, LayerParams


@dataclass(frozen=True)
class HeadShard:
    """One rank's heads of a layer.

    Value heads are split evenly, in order. Query/key heads too where ``world`` divides them; where there are fewer of
    them than ranks, each is *replicated* on the ``world / H`` ranks whose value heads read it, as engines replicate KV
    heads. Such ranks convolve and record the same keys.

    Args:
        shape: head layout of the whole layer.
        rank: 0..world-1.
        world: ranks.

    Raises:
        TypeError: ``shape`` is not a KdaShape, or a number is not an int.
        ValueError: ``rank`` is not in the world, or the heads cannot be split evenly; see `shard_reason`.
    """

    shape: KdaShape
    rank: int
    world: int

    def __post_init__(self) -> None:
        reason = shard_reason(self.shape, self.world)
        if reason is not None:
            raise ValueError(reason)
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise TypeError(f"rank must be an int, got {type(self.rank).__name__}")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be within 0..{self.world - 1}, got {self.rank}")

    @property
    def local(self) -> KdaShape:
        """The rank's own head layout: the shape of its pool and the one that its tables are looked up by."""
        return replace(
            self.shape,
            num_heads=max(1, self.shape.num_heads // self.world),
            num_v_heads=self.shape.num_v_heads // self.world,
        )

    @property
    def first_v_head(self) -> int:
        """Index of the rank's first value head in the whole layer."""
        return self.rank * self.local.num_v_heads

    @property
    def first_head(self) -> int:
        """Index of the rank's first query/key head in the whole layer."""
        return self.first_v_head // (self.shape.num_v_heads // self.shape.num_heads)

    def packed(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The rank's channels of a tensor with packed q | k | v channels [.., D, ..]: a packed copy [.., D_local, ..].

        For mixed_qkv, conv weights (``dim=0``), biases and conv states. An engine slices the rows of its projection
        weight this way, once, and then projects to the rank's channels only.

        Raises:
            ValueError: ``x`` does not have D entries along ``dim``.
        """
        whole, local = self.shape, self.local
        if x.shape[dim] != whole.conv_dim:
            raise ValueError(f"x must have D={whole.conv_dim} packed channels along dim {dim}, got {list(x.shape)}")
        q, k, v = x.split(_channels(whole), dim)
        key_first, key_count = self.first_head * whole.head_k_dim, local.num_heads * whole.head_k_dim
        v_first, v_count = self.first_v_head * whole.head_v_dim, local.num_v_heads * whole.head_v_dim
        parts = (q.narrow(dim, key_first, key_count), k.narrow(dim, key_first, key_count))
        return torch.cat((*parts, v.narrow(dim, v_first, v_count)), dim)

    def v_heads(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The rank's part, a view, of a tensor ordered by value heads along ``dim``.

        For a [.., HV*K], b [.., HV], A_log, dt_bias, states [slots, HV, V, K] (``dim=1``) and an output gate.

        Raises:
            ValueError: ``x`` does not have a multiple of HV entries along ``dim``.
        """
        entries = x.shape[dim]
        if not entries or entries % self.shape.num_v_heads:
            raise ValueError(
                f"x must have a multiple of HV={self.shape.num_v_heads} entries along dim {dim}, got {list(x.shape)}"
            )
        count = entries // self.world
        return x.narrow(dim, self.rank * count, count)

    def params(self, params: LayerParams) -> LayerParams:
        """The rank's part of a layer's parameters."""
        if not isinstance(params, LayerParams):
            raise TypeError(f"params must be LayerParams, got {type(params).__name__}")
        return replace(
            params,
            conv_weight=self.packed(params.conv_weight, 0),
            conv_bias=None if params.conv_bias is None else self.packed(params.conv_bias, 0),
            A_log=self.v_heads(params.A_log, 0).contiguous(),
            dt_bias=self.v_heads(params.dt_bias, 0).contiguous(),
        )

    def gather(self, x: torch.Tensor, dim: int = 1, group: Any = None) -> torch.Tensor:
        """Every rank's ``x``, ordered by value heads along ``dim``, side by side: on each rank, the whole tensor.

        For verify's output [B*T, HV_local, V] before the output projection. All ranks of the world must call it, with
        tensors of one shape and dtype. ``group`` is a `torch.distributed` process group, None the default one.

        Raises:
            RuntimeError: there is no process group.
            ValueError: the group has another number of ranks than the world, or this rank another place in it.
        """
        return torch.cat(self._everyone(x, group), dim)

    def gather_packed(self, x: torch.Tensor, dim: int = -1, group: Any = None) -> torch.Tensor:
        """The inverse of `packed` over all ranks: conv states, for example, of the whole layer."""
        return join_packed(self._everyone(x, group), self.shape, dim)

    def _everyone(self, x: torch.Tensor, group: Any) -> list[torch.Tensor]:
        """Every rank's tensor, in order. Bytes are moved as integers, whatever the library makes of 16-bit floats."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("gather needs a process group: torch.distributed.init_process_group() comes first")
        size, place = dist.get_world_size(group), dist.get_rank(group)
        if (size, place) != (self.world, self.rank):
            raise ValueError(
                f"group must have the {self.world} ranks that the heads are split over, this one as rank {self.rank}; "
                + ("got a group without this rank" if place < 0 else f"got rank {place} of {size}")
            )
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather([part.view(torch.uint8) for part in parts], own.view(torch.uint8), group=group)
        return parts


def shard_reason(shape: KdaShape, world: int) -> str | None:
    """Why a layer's heads cannot be split over ``world`` ranks, or None.

    Raises:
        TypeError: ``shape`` is not a KdaShape, or ``world`` not an int.
    """
    if not isinstance(shape, KdaShape):
        raise TypeError(f"shape must be a KdaShape, got {type(shape).__name__}")
    if isinstance(world, bool) or not isinstance(world, int):
        raise TypeError(f"world must be an int, got {type(world).__name__}")
    if world < 1:
        return f"world must be at least 1, got {world}"
    h, hv = shape.num_heads, shape.num_v_heads
    if hv % world:
        sizes = [n for n in range(1, hv + 1) if hv % n == 0 and (h % n == 0 or n % h == 0)]
        return f"{hv} value heads cannot be split evenly over {world} ranks; allowed world sizes are {sizes}"
    if h % world and world % h:
        return (
            f"{h} query/key heads cannot be split over {world} ranks: neither number divides the other, so that a "
            "rank's value heads would read parts of several; use a world size that divides the heads, or a multiple"
        )
    return None


def join_packed(parts: Sequence[torch.Tensor], shape: KdaShape, dim: int = -1) -> torch.Tensor:
    """The whole layer's packed channels from every rank's, in order of rank; the inverse of `HeadShard.packed`.

    Raises:
        ValueError: the heads cannot be split over so many ranks, or a part has other channels than its rank's.
    """
    if not parts:
        raise ValueError("parts must hold the packed channels of every rank, got none")
    shards = [HeadShard(shape, rank, len(parts)) for rank in range(len(parts))]
    for rank, (part, shard) in enumerate(zip(parts, shards, strict=True)):
        if part.shape[dim] != shard.local.conv_dim:
            raise ValueError(
                f"parts[{rank}] must have D={shard.local.conv_dim} packed channels along dim {dim}, "
                f"got {list(part.shape)}"
            )
    split = [part.split(_channels(shard.local), dim) for shard, part in zip(shards, parts, strict=True)]
    # Of the ranks that replicate a query/key head the first one's copy is taken.
    owners = [rank for rank in range(len(parts)) if rank == 0 or shards[rank].first_head > shards[rank - 1].first_head]
    keys = [split[rank][i] for i in (0, 1) for rank in owners]
    return torch.cat([*keys, *(part[2] for part in split)], dim)


def _channels(shape: KdaShape) -> tuple[int, int, int]:
    """Channels of q, k and v."""
    keys = shape.num_heads * shape.head_k_dim
    return keys, keys, shape.num_v_heads * shape.head_v_dim
