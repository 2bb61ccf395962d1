"""A round in a CUDA graph: captured once with static buffers, replayed with other slots, accepts and live rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kda_backend import LANES, StatePool, lane_mode
from kda_kernels import ErrorKind, KdaShape, LayerParams, _replay
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPE = KdaShape(num_heads=2, num_v_heads=4)
LAYERS, SLOTS, BATCH, STEPS = 2, 7, 4, 4
CASES = [*((lane, "recurrent") for lane in LANES), ("fused+ring", "chunked"), (None, "recurrent")]
FOLDING = [(lane, form) for lane, form in CASES if lane is None or lane_mode(lane) == "ring"]
EVERY = [*((*case, False) for case in CASES), *((*case, True) for case in FOLDING)]
"""Lane, form, and whether the pool folds on verify."""

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
        self.outs: list[torch.Tensor | None] = [None] * LAYERS

    def load(self, number: int, slots: list[int], accept_lens: list[int]) -> None:
        """Fill the static buffers for round ``number``: its own inputs, NaN where a row is padded."""
        generator = torch.Generator().manual_seed(100 + number)
        padded = torch.tensor(slots).lt(0).repeat_interleave(STEPS)
        for layer in self.inputs:
            for static in layer:
                fresh = torch.randn(static.shape, generator=generator)
                fresh[padded] = float("nan")
                static.copy_(fresh.to(static.dtype))
        self.slots.copy_(torch.tensor(slots))
        self.accept_lens.copy_(torch.tensor(accept_lens))

    def round(self) -> list[torch.Tensor]:
        """One round over all layers: what is captured, and what runs eagerly beside it."""
        pool = self.pool
        pool.begin(self.slots, STEPS)
        results = [
            pool.verify(i, *self.inputs[i], self.params[i], lane=self.lane, form=self.form, out=self.outs[i])
            for i in range(LAYERS)
        ]
        pool.commit(self.accept_lens)
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
        self.load(0, *ROUNDS[0])
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


@pytest.mark.parametrize(("lane", "form"), CASES)
@pytest.mark.parametrize("launches", ["ordinary", "known"])
def test_replays_have_the_bits_of_eager_rounds(lane: str | None, form: str, launches: str) -> None:
    """States, conv, records, windows, outputs and error counts, after every round, over the whole pool."""
    graphed, eager = Engine(lane, form), Engine(lane, form)
    graphed.warm_up()
    eager.warm_up()
    if launches == "ordinary":
        _replay.forget()
    replay, outs = captured(graphed)
    for name, tensor in graphed.tensors().items():
        assert_same_bits(tensor, eager.tensors()[name], f"{name}: capturing runs nothing")
    changed = 0
    for number, (slots, accept_lens) in enumerate(ROUNDS):
        before = eager.pool.ssm_state.clone()
        for engine in (graphed, eager):
            engine.load(number, slots, accept_lens)
        replay()
        expected = eager.round()
        for layer, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
            assert_same_bits(out, wanted, f"output of layer {layer} in round {number}")
            padded = [i for i, slot in enumerate(slots) if slot < 0]
            assert not out.view(BATCH, STEPS, -1)[padded].any(), "output rows of padded positions are 0"
        for name, tensor in graphed.tensors().items():
            assert_same_bits(tensor, eager.tensors()[name], f"{name} in round {number}")
        moved = (before != eager.pool.ssm_state).flatten(2).any(-1).all(0)
        live = sorted(slot for slot, accept in zip(slots, accept_lens, strict=True) if slot >= 0 and accept)
        assert moved.nonzero().flatten().tolist() == live
        changed += len(live)
    assert changed > BATCH
    assert graphed.pool.error_summary() is None


@pytest.mark.parametrize(("lane", "form"), FOLDING)
@pytest.mark.parametrize("launches", ["ordinary", "known"])
def test_rounds_that_fold_on_verify_have_the_bits_of_eager_ones_and_of_a_plain_pool(
    lane: str | None, form: str, launches: str
) -> None:
    """Everything that a round writes beside eager rounds; outputs, conv and flushed states beside a pool without."""
    graphed, eager, plain = Engine(lane, form, folding=True), Engine(lane, form, folding=True), Engine(lane, form)
    for engine in (graphed, eager, plain):
        engine.warm_up()
    if launches == "ordinary":
        _replay.forget()
    replay, outs = captured(graphed)
    for number, (slots, accept_lens) in enumerate(ROUNDS):
        for engine in (graphed, eager, plain):
            engine.load(number, slots, accept_lens)
        replay()
        eager_outs, plain_outs = eager.round(), plain.round()
        for layer, out in enumerate(outs):
            assert_same_bits(out, eager_outs[layer], f"output of layer {layer} in round {number}")
            assert_same_bits(out, plain_outs[layer], f"output of layer {layer} of the plain pool in round {number}")
        for name, tensor in graphed.tensors().items():
            assert_same_bits(tensor, eager.tensors()[name], f"{name} in round {number}")
        assert_same_bits(graphed.pool.conv_state, plain.pool.conv_state, f"conv states in round {number}")
        if number in (2, len(ROUNDS) - 1):  # the graph goes on from states that another launch brought up to date
            assert not torch.equal(graphed.pool.ssm_state, plain.pool.ssm_state), "something must be pending"
            for engine in (graphed, eager):
                engine.pool.flush()
            assert_same_bits(graphed.pool.ssm_state, plain.pool.ssm_state, f"flushed states in round {number}")
    assert graphed.pool.error_summary() is None


@pytest.mark.parametrize(("lane", "form", "folding"), EVERY)
@pytest.mark.parametrize("launches", ["ordinary", "known"])
def test_rounds_with_compact_windows_have_the_bits_of_a_plain_pool(
    lane: str | None, form: str, folding: bool, launches: str
) -> None:
    """Outputs, states and counts after every round. Each mixed_qkv is the graph's own, held by the pool alone."""
    graphed, plain = Engine(lane, form, folding, compact=True), Engine(lane, form, folding)
    for engine in (graphed, plain):
        engine.warm_up()
    if launches == "ordinary":
        _replay.forget()
    pool, scratch = graphed.pool, [torch.zeros_like(graphed.inputs[0][0]) for _ in "12"]
    outs: list[torch.Tensor] = []
    verifying, committing = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(verifying), no_sync():
        pool.begin(graphed.slots, STEPS)
        for i, (mixed_qkv, a, b) in enumerate(graphed.inputs):
            outs.append(pool.verify(i, mixed_qkv.clone(), a, b, graphed.params[i], lane=lane, form=form))
            scratch[i].copy_(mixed_qkv * 0 - 7)  # takes the memory of what nobody holds
    with torch.cuda.graph(committing, pool=verifying.pool()), no_sync():
        pool.commit(graphed.accept_lens)
    for number, (slots, accept_lens) in enumerate(ROUNDS):
        for engine in (graphed, plain):
            engine.load(number, slots, accept_lens)
        verifying.replay()
        committing.replay()
        for layer, (out, wanted) in enumerate(zip(outs, plain.round(), strict=True)):
            assert_same_bits(out, wanted, f"output of layer {layer} in round {number}")
        expected = plain.tensors()
        for name, tensor in graphed.tensors().items():
            assert_same_bits(tensor, expected[name], f"{name} in round {number}")
    assert pool.error_summary() is None


@pytest.mark.parametrize(("lane", "form"), FOLDING)
def test_bookkeeping_that_cannot_be_is_met_by_a_replay_as_padding(lane: str | None, form: str) -> None:
    engine = Engine(lane, form, folding=True)
    engine.warm_up()
    replay, outs = captured(engine)
    engine.load(0, *ROUNDS[0])
    replay()
    engine.pool.pending.pending[2] = STEPS + 1
    engine.pool.pending.parity[0] = -1
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    engine.load(1, [2, 0, 5, -1], [2, 2, 0, 0])
    replay()
    for name, tensor in engine.tensors().items():
        if name in ("raw_v", "raw_k", "g", "beta"):
            for bank in (0, SLOTS):
                assert_same_bits(tensor[:, [bank, bank + 2]], before[name][:, [bank, bank + 2]], name)
        elif name in ("ssm_state", "folded"):
            assert_same_bits(tensor[:, [0, 2]], before[name][:, [0, 2]], name)
        elif name in ("parity", "pending", "epoch"):
            assert_same_bits(tensor, before[name], name)
    assert not outs[0][: 2 * STEPS].any()
    assert outs[0][2 * STEPS : 3 * STEPS].any()
    assert engine.pool.errors[ErrorKind.ACCEPT] == 4  # two rows, by verify and by commit


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("lane", "form", "folding"), EVERY)
def test_faults_that_a_replay_meets_are_counted_and_touch_nothing(
    lane: str | None, form: str, folding: bool, compact: bool
) -> None:
    engine = Engine(lane, form, folding, compact)
    engine.warm_up()
    replay, outs = captured(engine)
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    engine.load(1, [SLOTS, -7, 3, 1], [1, 1, STEPS + 1, -1])
    replay()
    assert_same_bits(engine.pool.ssm_state, before["ssm_state"], "states")
    assert_same_bits(engine.pool.conv_state, before["conv_state"], "conv states")
    assert not outs[0][: 2 * STEPS].any()
    counts = engine.pool.errors.tolist()
    assert counts[ErrorKind.SLOT] == 4  # two rows, by verify and by commit
    assert counts[ErrorKind.ACCEPT] == 2
    assert "slot: 4" in engine.pool.error_summary()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("lane", "form", "folding"), EVERY)
@pytest.mark.parametrize("launches", ["ordinary", "known"])
def test_a_round_waits_for_nothing_and_allocates_the_outputs_only(
    lane: str | None, form: str, folding: bool, launches: str, compact: bool
) -> None:
    engine = Engine(lane, form, folding, compact)
    engine.warm_up()
    kept = []
    for given, wanted in ((False, LAYERS), (True, 0)):
        if given:
            engine.outs = list(kept[0])
            engine.warm_up()
        engine.load(3, *ROUNDS[3])
        if launches == "ordinary":
            _replay.forget()
        before = allocations()
        with no_sync():
            kept.append(engine.round())
        assert allocations() - before == wanted
    assert all(out is own for out, own in zip(kept[1], engine.outs, strict=True))


def test_the_guards_see_what_they_guard_against() -> None:
    tensor = torch.ones(1, device=DEVICE)
    with no_sync(), pytest.raises(RuntimeError, match="synchronizing"):
        tensor.item()
    before = allocations()
    torch.empty(1, device=DEVICE)
    assert allocations() - before == 1
