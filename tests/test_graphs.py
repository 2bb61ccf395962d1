"""A round in a CUDA graph: captured once with static buffers, replayed with other slots, accepts and live rows."""

from __future__ import annotations

import pytest
import torch

from kda_backend import LANES, lane_mode
from kda_kernels import ErrorKind, _replay
from tests.support.bits import assert_same_bits
from tests.support.graphs import BATCH, DEVICE, LAYERS, ROUNDS, SLOTS, STEPS, Engine, allocations, captured, no_sync

pytestmark = pytest.mark.gpu

CASES = [*((lane, "recurrent") for lane in LANES), ("fused+ring", "chunked"), (None, "recurrent")]
FOLDING = [(lane, form) for lane, form in CASES if lane is None or lane_mode(lane) == "ring"]
EVERY = [*((*case, False) for case in CASES), *((*case, True) for case in FOLDING)]
"""Lane, form, and whether the pool folds on verify."""


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
