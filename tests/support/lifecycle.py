"""Requests that come and go in a `kda_backend.StatePool`, each held against its own token-by-token history.

What every slot must hold is kept beside the pool, free slots and a canary slot included, and compared bit for bit after
each step. A request's history is decoded token by token in a pool of one slot of its own, so that a fault in how slots
are told apart cannot be in both.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pytest
import torch

from kda_backend import LANES, PoolExhausted, StatePool, lane_mode
from kda_kernels import ErrorKind, KdaShape, LayerParams, PendingFold, flush, host_checks
from tests.support.bits import assert_same_bits

T = TypeVar("T")
NAN = float("nan")


class Choices(Protocol):
    """Where a step takes its decisions from."""

    def pick(self, values: Sequence[T]) -> T: ...


class Seeded:
    """Choices of a random generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick(self, values: Sequence[T]) -> T:
        return self.random.choice(values)


@dataclass(frozen=True)
class Batch:
    """Who sits where in a round, -1 among them, and which rows of its inputs are whose.

    Args:
        slots: of each batch position.
        tokens: T, the most that a request has.
        starts: the first row of each request, and where the last one ends; without gaps.
        rows: of all, those of nobody before the first request and after the last among them.
        ragged: whether ``starts`` is handed on; else all requests have T tokens.
    """

    slots: list[int]
    tokens: int
    starts: list[int]
    rows: int
    ragged: bool

    def rows_of(self, i: int) -> list[int]:
        """The rows of batch position i."""
        return list(range(self.starts[i], self.starts[i + 1]))

    def live(self) -> list[int]:
        """The positions that are not padded."""
        return [i for i, slot in enumerate(self.slots) if slot >= 0]

    def unused_rows(self) -> list[int]:
        """Rows of padded positions and of nobody."""
        return sorted(set(range(self.rows)).difference(*(self.rows_of(i) for i in self.live())))


class Lifecycle:
    """A pool under random use. Each public method is a step, and ends in `check`."""

    STEPS = ("arrive", "arrive", "arrive", "leave", "fork", "move", "abandon", "one_too_many", *["round"] * 5)

    def __init__(
        self, mode: str, *, shape: KdaShape, layers: int, slots: int, batch: int, draft_tokens: int, device: str,
        seed: int = 0, fold_on_verify: bool = False, compact_window: bool = False,
    ) -> None:  # fmt: skip
        self.shape, self.layers, self.batch, self.draft_tokens, self.device = shape, layers, batch, draft_tokens, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.lanes = [None, *(lane for lane in LANES if lane_mode(lane) == mode)]
        common: dict[str, Any] = {"num_layers": layers, "device": device}
        self.pool = StatePool(
            shape, num_slots=slots, max_batch=batch, draft_tokens=draft_tokens, mode=mode,
            fold_on_verify=fold_on_verify, compact_window=compact_window, **common,
        )  # fmt: skip
        self.history = StatePool(shape, num_slots=1, max_batch=1, draft_tokens=1, mode="ring", **common)
        self.params = [self._params() for _ in range(layers)]
        self.live: list[int] = []
        for slot in range(slots):
            self._poison(slot)
        (self.canary,) = self.pool.allocate()
        self._poison(self.canary)
        self.conv, self.ssm = self.pool.conv_state.clone(), self.pool.ssm_state.clone()
        self.steps = self.tokens = 0
        self.met: Counter[str] = Counter()
        """How many rounds were ragged or had rows of nobody, verifies were repeated, accept lengths out of range."""

    def _normal(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, device=self.device).to(dtype)

    def _params(self) -> LayerParams:
        f32, shape = torch.float32, self.shape
        return LayerParams(
            self._normal(shape.conv_dim, 4) * 0.5, None, self._normal(shape.num_v_heads, dtype=f32) * 0.5,
            self._normal(shape.num_v_heads * shape.head_k_dim, dtype=f32), lower_bound=-5.0,
        )  # fmt: skip

    def _poison(self, slot: int) -> None:
        """Fill all that a slot has with NaN."""
        for tensor in (self.pool.conv_state, self.pool.ssm_state):
            tensor[:, slot] = NAN
        for tensor in vars(self.pool.ring).values() if self.pool.ring else ():
            tensor[:, slot :: self.pool.num_slots] = NAN  # in either bank

    def _slots_left(self) -> int:
        return self.pool.free_slots

    # Steps

    def step(self, choose: Choices) -> str:
        """One of `STEPS`; its name."""
        self.steps += 1
        name = choose.pick(self.STEPS)
        getattr(self, name)(choose)
        return name

    def arrive(self, choose: Choices) -> None:
        """A request gets a slot: empty, or with the state that prefill left."""
        if self._slots_left():
            (slot,) = self.pool.allocate()
            assert slot not in self.live
            self.conv[:, slot], self.ssm[:, slot] = 0, 0
            self.live.append(slot)
            if choose.pick([True, False]):
                self.conv[:, slot] = self._normal(*self.conv[:, slot].shape)
                self.ssm[:, slot] = self._normal(*self.ssm[:, slot].shape, dtype=torch.float32)
                self.pool.load_slot(slot, self.conv[:, slot], self.ssm[:, slot])
        self.check()

    def leave(self, choose: Choices) -> None:
        """A request ends; what its slot held is poison to the next owner."""
        if self.live:
            slot = choose.pick(self.live)
            self.live.remove(slot)
            self.pool.free([slot])
            with pytest.raises(ValueError, match="freed twice"):
                self.pool.free([slot])
            self._poison(slot)
            self.conv[:, slot], self.ssm[:, slot] = NAN, NAN
        self.check()

    def fork(self, choose: Choices) -> None:
        """A request's state is copied: to a new slot, or over another request."""
        if self.live:
            src = choose.pick(self.live)
            if self._slots_left() and choose.pick([True, False]):
                (dst,) = self.pool.allocate()
                self.live.append(dst)
            else:
                dst = choose.pick(self.live)
            self.pool.copy_slot(src, dst)
            self.conv[:, dst], self.ssm[:, dst] = self.conv[:, src].clone(), self.ssm[:, src].clone()
        self.check()

    def move(self, choose: Choices) -> None:
        """A request leaves the pool and comes back into another slot."""
        if self.live and self._slots_left():
            slot = choose.pick(self.live)
            state = self.pool.export_slot(slot)
            self.leave(_First(slot))
            (again,) = self.pool.allocate()
            self.pool.import_slot(again, state)
            self.live.append(again)
            self.conv[:, again], self.ssm[:, again] = state.conv_state, state.ssm_state
        self.check()

    def one_too_many(self, choose: Choices) -> None:
        """More slots are asked for than there are."""
        free = self._slots_left()
        with pytest.raises(PoolExhausted, match=f" {free} of "):
            self.pool.allocate(free + choose.pick([1, 2]))
        assert self._slots_left() == free
        self.check()

    def abandon(self, choose: Choices) -> None:
        """Drafts are verified and dropped: records are left behind that no commit may use."""
        self._verify(self._batch(choose), choose, "recurrent")
        self.pool.abandon()
        self.check()

    def round(self, choose: Choices) -> None:
        """Drafts of some requests, padding among them, are verified, and a prefix of each is committed.

        Now and then one accept length is out of range, which only the device sees: that slot stays as it was.
        """
        batch = self._batch(choose)
        slots, tokens = batch.slots, batch.tokens
        form = choose.pick(["recurrent", "recurrent", "chunked"]) if self.pool.ring else "recurrent"
        inputs, outputs = self._verify(batch, choose, form)
        self.check()
        lengths = [len(batch.rows_of(i)) for i in range(len(slots))]
        accept = [choose.pick([*range(length + 1), length]) for length in lengths]
        given = list(accept)
        if batch.live() and choose.pick([True, False]):
            wrong = choose.pick(batch.live())
            more = lengths[wrong] + 1  # within T, where others have more tokens: only the request's own length is less
            accept[wrong], given[wrong] = 0, choose.pick([more, more, more, tokens + 1, -1, 2**31 - 1])
            self.met["out of range"] += 1
        track = [-1] * len(slots)
        track_steps = [choose.pick(range(-1, tokens + 1)) for _ in slots]
        others = [slot for slot in self.live if slot not in slots]
        for row in range(len(slots)):
            if others and choose.pick([True, False]):
                track[row] = others.pop(choose.pick(range(len(others))))
        tracking = {"track_slots": self._index(track), "track_steps": self._index(track_steps)}
        with host_checks(given == accept):
            self.pool.commit(self._index(given), **(tracking if any(slot >= 0 for slot in track) else {}))
        for output in outputs:
            assert not output[batch.unused_rows()].count_nonzero(), "rows of padding and of nobody are zero"
        compared = outputs if form == "recurrent" else None
        for i in batch.live():
            self._decode(slots[i], inputs, batch.rows_of(i), accept[i], compared, track[i], track_steps[i])
        self.check()

    # What steps are made of

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _batch(self, choose: Choices) -> Batch:
        """Some requests and padding, of one length or each of its own, from 0 on."""
        waiting, slots = list(self.live), []
        for _ in range(choose.pick(range(1, self.batch + 1))):
            if waiting and choose.pick([True, True, True, False]):
                slots.append(waiting.pop(choose.pick(range(len(waiting)))))
            else:
                slots.append(-1)
        tokens, ragged = choose.pick(range(1, self.draft_tokens + 1)), choose.pick([True, False])
        starts, rows = [choose.pick([0, 0, 1]) if ragged else 0], self.batch * self.draft_tokens
        for _ in slots:
            length = choose.pick([0, *range(tokens + 1)]) if ragged else tokens
            starts.append(min(starts[-1] + length, rows))
        rows = min(starts[-1] + choose.pick([0, 1, 2]), rows) if ragged else starts[-1]
        self.met["ragged"] += ragged
        self.met["rows of nobody"] += rows > starts[-1] - starts[0]
        return Batch(slots, tokens, starts, rows, ragged)

    def _inputs(self, batch: Batch) -> list[torch.Tensor]:
        """mixed_qkv, a and b of a layer; NaN in what nobody may read."""
        shape = self.shape
        widths = shape.conv_dim, shape.num_v_heads * shape.head_k_dim, shape.num_v_heads
        inputs = [self._normal(batch.rows, n) for n in widths]
        for tensor in inputs:
            tensor[batch.unused_rows()] = NAN
        return inputs

    def _verify(self, batch: Batch, choose: Choices, form: str) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        """The inputs and outputs of each layer; every layer in a lane of its own, some after another attempt."""
        inputs = [self._inputs(batch) for _ in range(self.layers)]
        starts = {"starts": self._index(batch.starts)} if batch.ragged else {}
        lanes = [lane for lane in self.lanes if not (batch.ragged and lane is not None and "unfused" not in lane)]
        self.pool.begin(self._index(batch.slots), batch.tokens, **starts)
        outputs = []
        for layer, given in enumerate(inputs):
            attempts = [given]
            if choose.pick([True, False, False, False]):
                attempts.insert(0, self._inputs(batch))
                self.met["repeated"] += 1
            for attempt in attempts:
                out = self.pool.verify(
                    # Nobody but the pool holds what it is given until commit.
                    layer, *(x.clone() for x in attempt), self.params[layer], lane=choose.pick(lanes), form=form
                )  # fmt: skip
            outputs.append(out)
        return inputs, outputs

    def _decode(
        self, slot: int, inputs: list[list[torch.Tensor]], rows: list[int], accept: int,
        outputs: list[torch.Tensor] | None, track: int, track_step: int,
    ) -> None:  # fmt: skip
        """Decode the accepted tokens alone, one by one; compare their outputs, and that of the token after them."""
        history = self.history
        history.load_slot(0, self.conv[:, slot], self.ssm[:, slot])
        for t, row in enumerate(rows[: accept + 1]):
            history.begin(self._index([0]), 1)
            for layer, given in enumerate(inputs):
                alone = history.verify(
                    layer, *(tensor[row : row + 1] for tensor in given), self.params[layer], lane="fused+ring"
                )
                if outputs is not None:
                    assert_same_bits(outputs[layer][row : row + 1], alone, f"output {t} of slot {slot}, layer {layer}")
            if t == accept:
                history.abandon()
                break
            history.commit(self._index([1]))
            self.tokens += 1
            if track >= 0 and t == track_step:
                self.conv[:, track], self.ssm[:, track] = history.conv_state[:, 0], history.ssm_state[:, 0]
        self.conv[:, slot], self.ssm[:, slot] = history.conv_state[:, 0], history.ssm_state[:, 0]

    def _committed(self) -> torch.Tensor:
        """The recurrent states, with what is pending in those of live requests; the pool's own are left as they are."""
        pool, states = self.pool, self.pool.ssm_state
        if pool.pending is None or pool.ring is None:
            return states
        kept = pool.pending
        states, copy = states.clone(), PendingFold(kept.parity, kept.pending, kept.epoch, kept.folded.clone())
        flush(states, pool.ring, copy, shape=self.shape, slots=self._index(self.live), errors=pool.errors)
        return states

    def check(self) -> None:
        """Every slot holds what it must, and the device counted no fault but those that were meant."""
        assert_same_bits(self.pool.conv_state, self.conv, "conv_state")
        assert_same_bits(self._committed(), self.ssm, "ssm_state")
        if self.pool.ring is not None:
            for tensor in vars(self.pool.ring).values():
                assert tensor[:, self.canary :: self.pool.num_slots].isnan().all(), (
                    "no record reached the canary's ring"
                )
        wrong = self.met["out of range"]
        assert self.pool.errors.tolist() == [wrong if kind is ErrorKind.ACCEPT else 0 for kind in ErrorKind]


class _First:
    """Always the given value, where it is asked for."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def pick(self, values: Sequence[T]) -> T:
        return self.value
