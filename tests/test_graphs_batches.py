"""Ragged batches, trees and tracked commits in a CUDA graph: replayed with other lengths, trees, slots and ends."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch

from kda_kernels import _replay
from tests.support.bits import assert_same_bits
from tests.support.graphs import BATCH, DEVICE, SLOTS, STEPS, Engine, captured

pytestmark = pytest.mark.gpu


class Plan(NamedTuple):
    """One round of a captured batch.

    Args:
        slots: of each batch position; -1 is a padded row.
        ends: accept lengths, or of trees the last steps.
        lengths: tokens of each request in a ragged batch; None: all have `STEPS`.
        first: in a ragged batch, the first request's first row.
        parents: of trees, those of each request.
    """

    slots: list[int]
    ends: list[int]
    lengths: list[int] | None = None
    first: int = 0
    parents: list[list[int]] | None = None

    def starts(self) -> list[int]:
        """The first row of each request, and where the last one ends."""
        lengths = [STEPS] * BATCH if self.lengths is None else self.lengths
        return list(accumulate(lengths, initial=self.first))

    def used(self) -> torch.Tensor:
        """[BATCH * STEPS]: whether a row belongs to a request that is not padded."""
        used, starts = torch.zeros(BATCH * STEPS, dtype=torch.bool), self.starts()
        for i, slot in enumerate(self.slots):
            used[starts[i] : starts[i + 1]] = slot >= 0
        return used

    def accepted(self, i: int) -> list[int]:
        """The steps that request i goes along; none of a padded one."""
        if self.slots[i] < 0:
            return []
        if self.parents is None:
            return list(range(self.ends[i]))
        path, step = [], self.ends[i]
        while step >= 0:
            path.append(step)
            step = self.parents[i][step]
        return path

    def tracking(self, number: int) -> tuple[list[int], list[int]]:
        """Slots that are not in the round, one for most requests, and the step of each, accepted or not."""
        free = [slot for slot in range(SLOTS) if slot not in self.slots]
        slots = [free[i] if i < len(free) and (number + i) % 4 else -1 for i in range(BATCH)]
        return slots, [(number + i) % STEPS for i in range(BATCH)]


CHAIN, STAR, COMB, FOREST = [-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 2], [-1, -1, 0, 1]
PLANS = {
    "chains": [
        Plan([2, 0, 5, 3], [4, 1, 2, 3]),
        Plan([1, -1, 4, -1], [3, 0, 4, 0]),
        Plan([-1, -1, -1, -1], [0, 0, 0, 0]),
        Plan([5, 4, 3, 2], [0, 4, 1, 2]),
    ],
    "ragged": [
        Plan([2, 0, 5, 3], [4, 1, 0, 2], [4, 1, 0, 3], first=2),
        Plan([1, -1, 4, -1], [3, 0, 1, 0], [3, 2, 4, 1]),
        Plan([5, 2, 0, 3], [0, 4, 3, 4], [0, 4, 4, 4]),
        Plan([-1, -1, -1, -1], [0, 0, 0, 0], [0, 0, 0, 0]),
        Plan([0, 6, 2, 4], [1, 1, 1, 1], [1, 1, 1, 1], first=9),
        Plan([4, 5, -1, 1], [2, 0, 0, 4], [4, 0, 4, 4]),
    ],
    "trees": [
        Plan([2, 0, 5, 3], [3, 2, 3, 3], parents=[CHAIN, STAR, COMB, FOREST]),
        Plan([1, -1, 4, -1], [1, -1, 0, -1], parents=[STAR, CHAIN, FOREST, COMB]),
        Plan([-1, -1, -1, -1], [-1, -1, -1, -1], parents=[STAR] * BATCH),
        Plan([5, 4, 3, 2], [-1, 3, 1, 2], parents=[COMB, COMB, FOREST, CHAIN]),
    ],
    "ragged trees": [
        Plan([2, 0, 5, 3], [3, -1, 1, 2], [4, 0, 2, 3], first=3, parents=[COMB, CHAIN, STAR, FOREST]),
        Plan([1, 4, -1, 6], [1, 3, -1, 0], [2, 4, 4, 1], parents=[FOREST, STAR, COMB, CHAIN]),
        Plan([0, -1, 2, -1], [0, -1, -1, -1], [1, 0, 3, 0], parents=[CHAIN, STAR, COMB, STAR]),
    ],
}  # fmt: skip


class BatchEngine(Engine):
    """An engine whose rounds are those of `PLANS[kind]`, with or without tracking slots."""

    def __init__(self, kind: str, tracked: bool, *options: Any) -> None:
        super().__init__(*options)
        self.rounds = [(plan,) for plan in PLANS[kind]]

        def static(*size: int) -> torch.Tensor:
            return torch.zeros(*size, dtype=torch.int32, device=DEVICE)

        if "ragged" in kind:
            self.batch["starts"] = static(BATCH + 1)
        if "trees" in kind:
            self.batch["parents"] = static(BATCH, STEPS)
            self.ends = {"last_steps": self.accept_lens}
        if tracked:
            self.ends |= {"track_slots": static(BATCH), "track_steps": static(BATCH)}

    def load(self, number: int, plan: Plan) -> None:
        """Fill the static buffers for round ``number``: its own inputs, NaN in rows of nobody."""
        self.fill(number, ~plan.used())
        values = {**self.batch, **self.ends}
        track_slots, track_steps = plan.tracking(number)
        fresh = {
            "starts": plan.starts(), "parents": plan.parents, "accept_lens": plan.ends, "last_steps": plan.ends,
            "track_slots": track_slots, "track_steps": track_steps,
        }  # fmt: skip
        for name, buffer in values.items():
            buffer.copy_(torch.tensor(fresh[name]))
        self.slots.copy_(torch.tensor(plan.slots))


CASES = [  # kind, tracked; lane, form, fold on verify, compact windows
    ("chains", True, "fused+ring", "recurrent", False, False),
    ("chains", True, "fused+ring", "recurrent", True, True),
    ("chains", True, "fused", "recurrent", False, True),
    ("ragged", False, "unfused+ring", "recurrent", False, False),
    ("ragged", False, "unfused+ring", "chunked", True, True),
    ("ragged", True, "unfused+ring", "recurrent", True, False),
    ("ragged", True, None, "recurrent", False, True),
    ("ragged", True, "unfused", "recurrent", False, False),
    ("trees", False, "unfused", "recurrent", False, False),
    ("trees", True, "unfused", "recurrent", False, False),
    ("ragged trees", True, "unfused", "recurrent", False, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case))
@pytest.mark.parametrize("launches", ["ordinary", "known"])
def test_replays_have_the_bits_of_eager_rounds(case: tuple[Any, ...], launches: str) -> None:
    """States, conv, records, windows, outputs and error counts after every round; only slots that were meant move."""
    graphed, eager = BatchEngine(*case), BatchEngine(*case)
    kind, tracked, lane, form, folding, _ = case
    plain = BatchEngine(kind, tracked, lane, form)
    for engine in (graphed, eager, plain):
        engine.warm_up()
    if launches == "ordinary":
        _replay.forget()
    replay, outs = captured(graphed)
    changed = copied = 0
    for number, plan in enumerate(PLANS[kind]):
        before = plain.pool.ssm_state.clone()
        for engine in (graphed, eager, plain):
            engine.load(number, plan)
        replay()
        eager_outs, plain_outs = eager.round(), plain.round()
        for layer, out in enumerate(outs):
            assert_same_bits(out, eager_outs[layer], f"output of layer {layer} in round {number}")
            assert_same_bits(out, plain_outs[layer], f"output of layer {layer} of the plain pool in round {number}")
            assert not out[~plan.used()].any(), "output rows of padding and of nobody are 0"
            assert out[plan.used()].isfinite().all()
        for name, tensor in graphed.tensors().items():
            assert_same_bits(tensor, eager.tensors()[name], f"{name} in round {number}")
        assert_same_bits(graphed.pool.conv_state, plain.pool.conv_state, f"conv states in round {number}")
        live = {slot for i, slot in enumerate(plan.slots) if plan.accepted(i)}
        copies = {
            slot for i, (slot, step) in enumerate(zip(*plan.tracking(number), strict=True))
            if tracked and slot >= 0 and step in plan.accepted(i)
        }  # fmt: skip
        moved = (before != plain.pool.ssm_state).flatten(2).any(-1).all(0).nonzero().flatten().tolist()
        assert moved == sorted(live | copies)
        changed, copied = changed + len(live), copied + len(copies)
    assert changed > BATCH
    assert bool(copied) == tracked
    if folding:
        graphed.pool.flush()
    assert_same_bits(graphed.pool.ssm_state, plain.pool.ssm_state, "states at the end")
    assert graphed.pool.error_summary() is None
