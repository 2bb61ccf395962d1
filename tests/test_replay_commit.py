"""Fold, the scatters and the gather: equal calls are replayed, bad ones refused after a good one as before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_backend import StatePool
from kda_kernels import ErrorKind, KdaShape, LaunchConfig, LayerState, Ring, Snapshots, _replay, fold, new_error_counts
from kda_kernels import gather_conv as gather
from kda_kernels import scatter_conv as conv
from kda_kernels import scatter_snapshots as shots
from tests.support.marks import interpreter_only
from tests.support.replays import CONFIG, ROWS, SHAPE, SLOTS, STEPS, Layer, Recorded, recorded_launches, taken

pytestmark = interpreter_only

OPS: list[Callable[..., None]] = [fold, conv, shots, gather]
LAYERS = 2


@pytest.fixture
def log() -> Iterator[list[Recorded]]:
    with recorded_launches() as launches:
        yield launches


class Pool:
    """State and records of all layers, and commits of them with index tensors of their own."""

    def __init__(self) -> None:
        sizes: dict[str, Any] = {"num_layers": LAYERS, "device": "cpu"}
        self.state = LayerState.allocate(SHAPE, slots=SLOTS, rows=ROWS, steps=STEPS, dtype=torch.bfloat16, **sizes)
        self.ring = Ring.allocate(SHAPE, slots=SLOTS, length=STEPS, dtype=torch.bfloat16, **sizes)
        self.snapshots = Snapshots.allocate(SHAPE, rows=ROWS, steps=STEPS, **sizes)
        self.kept_inputs = torch.zeros(LAYERS, 3, dtype=torch.int64)

    def call(self, op: Callable[..., None], batch: int = 2) -> dict[str, Any]:
        """Arguments of ``op`` by name, every optional one given."""

        def indices(first: int) -> torch.Tensor:
            return torch.arange(first, first + batch, dtype=torch.int32)

        own: dict[Any, dict[str, Any]] = {
            fold: {"ssm_state": self.state.ssm_state, "ring": self.ring, "shape": SHAPE, "config": CONFIG},
            conv: {"conv_state": self.state.conv_state, "conv_window": self.state.conv_window, "rows": indices(0)},
            shots: {"ssm_state": self.state.ssm_state, "snapshots": self.snapshots, "rows": indices(0)},
            gather: {"conv_state": self.state.conv_state, "kept_inputs": self.kept_inputs},
        }
        return own[op] | {
            "slots": indices(0), "accept_lens": indices(1), "draft_tokens": STEPS, "track_slots": indices(batch),
            "track_steps": indices(0), "errors": new_error_counts("cpu"),
        }  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("left_out", [(), ("rows", "errors", "track_slots", "track_steps")])
def test_an_equal_commit_makes_the_launch_that_it_would_have_made(
    log: list[Recorded], op: Callable[..., None], left_out: tuple[str, ...]
) -> None:
    pool = Pool()
    first, second = ({name: value for name, value in pool.call(op).items() if name not in left_out} for _ in range(2))
    op(**first)
    op(**second)
    ordinary, replayed = taken(log)
    assert (ordinary.replayed, replayed.replayed) == (False, True)
    assert replayed.arguments["slots"] == second["slots"].data_ptr()
    _replay.forget()
    op(**second)
    assert [one.what for one in taken(log)] == [replayed.what]


def test_an_optional_tensor_is_not_taken_for_another_one_like_it(log: list[Recorded]) -> None:
    pool = Pool()
    for _ in range(2):
        for name, other in (("rows", "errors"), ("errors", "rows")):
            call = pool.call(conv, len(ErrorKind)) | {"track_slots": None, "track_steps": None, other: None}
            call[name] = torch.arange(len(ErrorKind), dtype=torch.int32)
            conv(**call)
            (one,) = taken(log)
            assert (one.arguments[name], one.arguments[other]) == (call[name].data_ptr(), None)


@pytest.mark.parametrize("op", [conv, shots])
def test_a_commit_of_trees_is_not_taken_for_one_of_chains(log: list[Recorded], op: Callable[..., None]) -> None:
    pool = Pool()
    for trees in (True, False, True):
        for turn in range(2):
            parents = (torch.arange(STEPS, dtype=torch.int32) - 1).repeat(2, 1) if trees else None
            call = pool.call(op)
            call |= {"accept_lens": None, "last_steps": call["rows"].clone(), "parents": parents}
            op(**call)
            (one,) = taken(log)
            assert one.replayed == bool(turn)
            assert one.arguments["parents"] == (None if parents is None else parents.data_ptr())


SHORT = torch.arange(1, dtype=torch.int32)
BAD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "slots are int16": lambda c: {"slots": c["slots"].short()},
    "slots are fewer": lambda c: {"slots": SHORT},
    "slots are a list": lambda c: {"slots": [0, 1]},
    "accept_lens are fewer": lambda c: {"accept_lens": SHORT},
    "accept_lens are floats": lambda c: {"accept_lens": c["accept_lens"].float()},
    "accept_lens are None": lambda c: {"accept_lens": None},
    "accept_lens are on another device": lambda c: {"accept_lens": c["accept_lens"].to("meta")},
    "track_slots are fewer": lambda c: {"track_slots": SHORT},
    "track_slots are alone": lambda c: {"track_steps": None},
    "track_steps are bool": lambda c: {"track_steps": c["track_steps"].bool()},
    "errors are int64": lambda c: {"errors": c["errors"].long()},
    "draft_tokens are 0": lambda c: {"draft_tokens": 0},
    "draft_tokens are a float": lambda c: {"draft_tokens": 3.0},
    "draft_tokens are True": lambda c: {"draft_tokens": True},
}
BAD_STATE: dict[str, Callable[[torch.Tensor], Any]] = {
    "of another dtype": lambda t: t.double(),
    "of one layer": lambda t: t[0],
    "of more layers": lambda t: torch.cat([t, t]),
    "not packed": lambda t: t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])[..., : t.shape[-1]],
    "on another device": lambda t: t.to("meta"),
    "overlapping itself": lambda t: t[:1].expand(t.shape),
    "None": lambda t: None,
}
BAD_OF: dict[Any, dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    fold: {
        "ring is a tensor": lambda c: {"ring": c["ring"].g},
        "ring has other beta": lambda c: {"ring": replace(c["ring"], beta=c["ring"].beta[:, :1])},
        "shape has other heads": lambda c: {"shape": KdaShape(2, 2, 64, 64)},
        "config is a dict": lambda c: {"config": {}},
        "config wants what the device lacks": lambda c: {"config": LaunchConfig(32, 2, pdl=True)},
    },
    conv: {
        "pdl is an int": lambda c: {"pdl": 0},
        "pdl is not to be had": lambda c: {"pdl": True},
        "rows are fewer": lambda c: {"rows": SHORT},
        "parents go with accept_lens": lambda c: {"parents": torch.zeros(2, STEPS, dtype=torch.int32)},
        "windows are short": lambda c: {"conv_window": c["conv_window"][:, :, :2]},
        "windows have another dtype": lambda c: {"conv_window": c["conv_window"].half()},
    },
    shots: {
        "snapshots are a tensor": lambda c: {"snapshots": c["snapshots"].states},
        "snapshots are few": lambda c: {"snapshots": Snapshots(c["snapshots"].states[:, :1]), "rows": None},
    },
    gather: {
        "pdl is an int": lambda c: {"pdl": 0},
        "pdl is not to be had": lambda c: {"pdl": True},
        "kept_inputs are None": lambda c: {"kept_inputs": None},
        "kept_inputs are of one layer": lambda c: {"kept_inputs": c["kept_inputs"][0]},
        "kept_inputs are narrow": lambda c: {"kept_inputs": c["kept_inputs"][:, :2]},
        "kept_inputs are int32": lambda c: {"kept_inputs": c["kept_inputs"].int()},
        "starts are fewer": lambda c: {"starts": SHORT},
    },
}
CASES = [
    (op, name, change)
    for op in OPS
    for name, change in (BAD | BAD_OF[op]).items()
] + [
    (op, f"{state} {name}", lambda c, state=state, change=change: {state: change(c[state])})
    for op, state in ((fold, "ssm_state"), (conv, "conv_state"), (shots, "ssm_state"), (gather, "conv_state"))
    for name, change in BAD_STATE.items()
]  # fmt: skip


@pytest.mark.parametrize(("op", "change"), [pytest.param(op, c, id=f"{op.__name__}-{n}") for op, n, c in CASES])
def test_a_bad_commit_is_refused_after_a_good_one_as_before_it(
    log: list[Recorded], op: Callable[..., None], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    def verdict() -> tuple[type, str]:
        with pytest.raises((ValueError, TypeError)) as refusal:
            op(**bad)
        assert not taken(log)
        return refusal.type, str(refusal.value)

    good = Pool().call(op)
    bad = good | change(good)
    cold = verdict()
    op(**good)
    op(**good)
    assert [one.replayed for one in taken(log)] == [False, True]
    assert verdict() == cold


@pytest.mark.parametrize("name", ["raw_v", "raw_k", "g", "beta"])
def test_a_ring_tensor_resized_in_place_is_refused(log: list[Recorded], name: str) -> None:
    pool = Pool()
    for _ in range(2):
        fold(**pool.call(fold))
    getattr(pool.ring, name).resize_(1)
    with pytest.raises(ValueError, match=rf"ring\.{name} must have"):
        fold(**pool.call(fold))


def test_pools_and_batch_sizes_take_turns(log: list[Recorded]) -> None:
    pools = [Pool(), Pool()]
    for turn in range(3):
        for op in OPS:
            for pool in pools:
                for batch in (1, 2):
                    op(**pool.call(op, batch))
                    (one,) = taken(log)
                    state = pool.state.conv_state if op in (conv, gather) else pool.state.ssm_state
                    written = {fold: "ssm_state", gather: "conv_state"}.get(op, "dst")
                    assert one.arguments[written] == state.data_ptr()
                    assert one.arguments["batch"] == batch
                    assert turn == 0 or one.replayed


@pytest.mark.parametrize("mode", ["ring", "snapshots"])
def test_a_pool_s_rounds_are_replayed(log: list[Recorded], mode: str) -> None:
    pool = StatePool(SHAPE, num_layers=2, num_slots=SLOTS, max_batch=3, draft_tokens=STEPS, mode=mode)
    layers = [Layer() for _ in range(2)]
    lanes = ("fused+ring", "unfused+ring") if mode == "ring" else ("fused", "unfused")

    def run() -> list[bool]:
        pool.begin(torch.arange(2, dtype=torch.int32), STEPS)
        for lane in lanes:
            for i, layer in enumerate(layers):
                call = layer.call(2, STEPS)
                pool.verify(i, call["mixed_qkv"], call["a"], call["b"], layer.params, lane=lane)
        pool.commit(torch.ones(2, dtype=torch.int32))
        return [one.replayed for one in taken(log)]

    launches = 2 * (1 + 2) + 2
    assert run() == [False] * launches
    assert run() == [True] * launches
    pool.begin(torch.arange(2, dtype=torch.int32), STEPS)
    for i, layer in enumerate(layers):
        call = layer.call(2, STEPS)
        pool.verify(i, call["mixed_qkv"], call["a"], call["b"], layer.params, lane=lanes[0])
    taken(log)
    pool.state.ssm_state.resize_(1)
    with pytest.raises(ValueError, match="ssm_state must have shape"):
        pool.commit(torch.ones(2, dtype=torch.int32))
    assert not taken(log), "the windows were copied although the states could not follow"
