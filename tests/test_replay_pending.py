"""Fold on verify's calls are replayed like others: same launches, and refused after a good one as before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kda_kernels import (
    PendingFold,
    Ring,
    _replay,
    advance,
    flush,
    new_error_counts,
    verify_fused,
    verify_unfused,
)
from tests.support.marks import interpreter_only
from tests.support.replays import SHAPE, SLOTS, STEPS, Layer, Recorded, recorded_launches, taken

pytestmark = interpreter_only


@pytest.fixture
def log() -> Iterator[list[Recorded]]:
    with recorded_launches() as launches:
        yield launches


def banks(num_layers: int | None = None) -> dict[str, Any]:
    ring = Ring.allocate(
        SHAPE, slots=2 * SLOTS, length=STEPS, dtype=torch.bfloat16, device="cpu", num_layers=num_layers
    )
    return {"ring": ring, "pending": PendingFold.allocate(SHAPE, slots=SLOTS, device="cpu", num_layers=num_layers)}


@pytest.mark.parametrize("op", [verify_fused, verify_unfused])
def test_verifies(log: list[Recorded], op: Callable[..., torch.Tensor]) -> None:
    layer, folding = Layer(), banks()
    groups = {"record": folding["ring"], "pending": folding["pending"]}
    op(**layer.full(**groups))
    second = layer.full(**groups)
    taken(log)
    op(**second)
    replayed = taken(log)
    assert all(one.replayed for one in replayed)
    assert replayed[-1].arguments["folded"] == folding["pending"].folded.data_ptr()
    _replay.forget()
    op(**second)
    assert [one.what for one in taken(log)] == [one.what for one in replayed]
    # Another group of pending folds is another call, and a plain one is a third.
    other = PendingFold.allocate(SHAPE, slots=SLOTS, device="cpu")
    op(**layer.full(**groups | {"pending": other}))
    launches = taken(log)
    assert not launches[-1].replayed
    assert launches[-1].arguments["folded"] == other.folded.data_ptr()
    with pytest.raises(ValueError, match=r"ring\.raw_v must have shape"):
        op(**layer.full(record=folding["ring"]))


@pytest.mark.parametrize("left_out", [(), ("errors", "track_slots", "track_steps")])
def test_commits(log: list[Recorded], left_out: tuple[str, ...]) -> None:
    folding, states = banks(2), torch.zeros(2, SLOTS, 2, 64, 64)

    def given(op: Callable[..., None]) -> dict[str, Any]:
        def indices(first: int) -> torch.Tensor:
            return torch.arange(first, first + 2, dtype=torch.int32)

        own: dict[str, Any] = {"pending": folding["pending"], "slots": indices(0), "errors": new_error_counts("cpu")}
        own |= {"track_slots": indices(2), "track_steps": indices(0)}
        if op is flush:
            own |= {"ssm_state": states, "ring": folding["ring"], "shape": SHAPE}
        else:
            own |= {"accept_lens": indices(1), "draft_tokens": STEPS, "ring_length": STEPS}
        return {name: value for name, value in own.items() if name not in left_out}

    for op in (advance, flush):
        first, second = given(op), given(op)
        op(**first)
        op(**second)
        ordinary, replayed = taken(log)
        assert (ordinary.replayed, replayed.replayed) == (False, True)
        assert replayed.arguments["slots"] == second["slots"].data_ptr()
        _replay.forget()
        op(**second)
        assert [one.what for one in taken(log)] == [replayed.what]
        with pytest.raises(ValueError, match="slots must be int32 or int64"):
            op(**second | {"slots": second["slots"].short()})
