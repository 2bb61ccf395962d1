"""A pool with the static buffers of a round, and the capture of such a round as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kda_backend import StatePool, lane_mode
from kda_kernels import KdaShape, LayerParams

DEVICE = "cuda"
SHAPE = KdaShape(num_heads=2, num_v_heads=4)
LAYERS, SLOTS, BATCH, STEPS = 2, 7, 4, 4

# (slots, accept lengths) of rounds that one captured graph runs: other slots, rows that are padded, accepts 0 and T
ROUNDS = [
    ([2, 0, 5, 3], [4, 1, 2, 3]),
    ([1, -1, 4, -1], [3, 0, 4, 0]),
    ([-1, -1, -1, 0], [0, 0, 0, 4]),
    ([5, 4, 3, 2], [0, 4, 1, 2]),
    ([-1, -1, -1, -1], [0, 0, 0, 0]),
    ([0, 6, 2, 4], [1, 1, 1, 1]),
]


class Engine:
    """A pool and the static buffers of a round, always the same at first."""

    rounds: Sequence[tuple[Any, ...]] = ROUNDS
    """What `load` takes, after the number."""

    def __init__(self, lane: str | None, form: str, folding: bool = False, compact: bool = False) -> None:
        self.lane, self.form = lane, form
        generator = torch.Generator().manual_seed(11)

        def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(DEVICE, dtype)

        fp32, heads, gates = torch.float32, SHAPE.num_v_heads, SHAPE.num_v_heads * SHAPE.head_k_dim
        self.params = [
            LayerParams(
                normal(SHAPE.conv_dim, 4), normal(SHAPE.conv_dim), normal(heads, dtype=fp32),
                normal(gates, dtype=fp32), lower_bound=-5.0,
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.pool = StatePool(
            SHAPE, num_layers=LAYERS, num_slots=SLOTS, max_batch=BATCH, draft_tokens=STEPS,
            mode="ring" if lane is None else lane_mode(lane), device=DEVICE, fold_on_verify=folding,
            compact_window=compact,
        )  # fmt: skip
        self.pool.conv_state.copy_(normal(*self.pool.conv_state.shape))
        self.pool.ssm_state.copy_(normal(*self.pool.ssm_state.shape, dtype=fp32))
        tokens = BATCH * STEPS
        self.inputs = [(normal(tokens, SHAPE.conv_dim), normal(tokens, gates), normal(tokens, heads)) for _ in "12"]
        self.slots, self.accept_lens = (torch.zeros(BATCH, dtype=torch.int32, device=DEVICE) for _ in "12")
        self.batch: dict[str, torch.Tensor] = {}
        self.ends = {"accept_lens": self.accept_lens}
        self.outs: list[torch.Tensor | None] = [None] * LAYERS

    def load(self, number: int, slots: list[int], accept_lens: list[int]) -> None:
        """Fill the static buffers for round ``number``: its own inputs, NaN where a row is padded."""
        self.fill(number, torch.tensor(slots).lt(0).repeat_interleave(STEPS))
        self.slots.copy_(torch.tensor(slots))
        self.accept_lens.copy_(torch.tensor(accept_lens))

    def fill(self, number: int, unused: torch.Tensor) -> None:
        """The inputs of round ``number``, NaN in rows where ``unused`` is true."""
        generator = torch.Generator().manual_seed(100 + number)
        for layer in self.inputs:
            for static in layer:
                fresh = torch.randn(static.shape, generator=generator)
                fresh[unused] = float("nan")
                static.copy_(fresh.to(static.dtype))

    def round(self) -> list[torch.Tensor]:
        """One round over all layers: what is captured, and what runs eagerly beside it."""
        pool = self.pool
        pool.begin(self.slots, STEPS, **self.batch)
        results = [
            pool.verify(i, *self.inputs[i], self.params[i], lane=self.lane, form=self.form, out=self.outs[i])
            for i in range(LAYERS)
        ]
        pool.commit(**self.ends)
        return results

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a round may write."""
        pool = self.pool
        groups = {**vars(pool.state), **vars(pool.record), **({} if pool.pending is None else vars(pool.pending))}
        del groups["kept_inputs"]  # addresses
        return {name: tensor for name, tensor in groups.items() if tensor is not None} | {"errors": pool.errors}

    def warm_up(self) -> None:
        """Compile, and have the calls known; then everything is as it was."""
        before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        self.load(0, *self.rounds[0])
        for _ in range(2):
            self.round()
        for name, tensor in self.tensors().items():
            tensor.copy_(before[name])


@contextmanager
def no_sync() -> Iterator[None]:
    """Fail where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocations() -> int:
    """Blocks that torch's allocator has handed out so far, to graphs as well."""
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def captured(engine: Engine) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """The engine's round as a graph: what replays it, and its static outputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_sync():
        before = allocations()
        outs = engine.round()
        made = allocations() - before
    assert made == LAYERS, "under capture only the outputs are allocated"
    return graph.replay, outs
