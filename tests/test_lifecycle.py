"""Random lives of a state pool, step by step against each request's own history (`tests.support.lifecycle`)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install hypothesis (dependency group `test`)"
)

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kda_backend import MODES
from kda_kernels import KdaShape
from tests.support.lifecycle import Lifecycle, Seeded
from tests.support.marks import interpreter_only

STEPS = 40
EXAMPLES = 2
OPTIONS = [
    *((mode, False, compact) for mode in MODES for compact in (False, True)),
    *(("ring", True, compact) for compact in (False, True)),
]
"""Mode, fold on verify, compact windows."""


class Drawn:
    """Choices that hypothesis draws.

    The values are shuffled by how many were drawn before: hypothesis begins with runs that take the first of all, and
    these shall be lives too.
    """

    def __init__(self, data: st.DataObject, steps: int) -> None:
        self.data, self.random = data, random.Random(steps)

    def pick(self, values: Any) -> Any:
        return self.data.draw(st.sampled_from(self.random.sample(list(values), len(values))))


class PoolMachine(RuleBasedStateMachine):
    """The steps of `Lifecycle` in any order."""

    mode: str
    fold_on_verify: bool
    compact_window: bool
    lives: list[Lifecycle]

    def __init__(self) -> None:
        super().__init__()
        self.life = Lifecycle(
            self.mode, shape=KdaShape(1, 1, 64, 64), layers=1, slots=5, batch=3, draft_tokens=3, device="cpu",
            fold_on_verify=self.fold_on_verify, compact_window=self.compact_window,
        )  # fmt: skip
        for _ in range(2):
            self.life.arrive(Seeded(0))
        self.lives.append(self.life)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.life.step(Drawn(data, self.life.steps))


@interpreter_only
@pytest.mark.parametrize(("mode", "fold_on_verify", "compact_window"), OPTIONS)
def test_every_request_is_its_own_history(mode: str, fold_on_verify: bool, compact_window: bool) -> None:
    # A failing run is reported as it was: shrinking it takes minutes of interpreted kernels.
    options = {"mode": mode, "fold_on_verify": fold_on_verify, "compact_window": compact_window}
    machine = type("Machine", (PoolMachine,), {**options, "lives": []})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert len(machine.lives) >= EXAMPLES
    assert all(life.steps >= STEPS for life in machine.lives)
    assert sum(life.tokens for life in machine.lives) >= 20, "rounds must have committed something"
    met = sum((life.met for life in machine.lives), Counter())
    assert all(met[what] for what in ("ragged", "rows of nobody", "repeated", "out of range")), met
