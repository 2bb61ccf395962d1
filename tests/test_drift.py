"""Many rounds of random accepts leave the very state of sequential decoding; long lives of a pool on a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kda_backend import LANES, MODES, StatePool, commit_layers, lane_mode
from kda_backend import pool as pool_module
from kda_kernels import KdaShape, LayerParams
from tests.support.bits import assert_same_bits
from tests.support.lifecycle import Lifecycle, Seeded
from tests.support.marks import interpreter_only

WITH_OPTIONS = [
    pytest.param(lane, dict.fromkeys(options, True), id="+".join([lane, *options]))
    for lane, *options in (
        ("fused+ring", "fold_on_verify"), ("unfused+ring", "fold_on_verify", "compact_window"),
        ("unfused+ring", "compact_window"), ("fused", "compact_window"),
    )
]  # fmt: skip
"""Lane, and the options of a pool."""


def drift(
    lane: str, *, shape: KdaShape, layers: int, batch: int, draft_tokens: int, rounds: int, device: str, look: int,
    fold_on_verify: bool = False, compact_window: bool = False,
) -> int:  # fmt: skip
    """Decode with ``lane`` and one token at a time, compare every ``look`` rounds; the number of committed tokens."""
    generator, chosen = torch.Generator(device).manual_seed(1), random.Random(2)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    def index(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    heads, keys, f32 = shape.num_v_heads, shape.head_k_dim, torch.float32
    params = [
        LayerParams(
            normal(shape.conv_dim, 4) * 0.5, None, normal(heads, dtype=f32) * 0.5, normal(heads * keys, dtype=f32) - 3,
            lower_bound=-5.0,
        )
        for _ in range(layers)
    ]  # fmt: skip
    sizes: dict[str, Any] = {"num_layers": layers, "num_slots": batch + 1, "max_batch": batch, "device": device}
    pool = StatePool(
        shape, **sizes, draft_tokens=draft_tokens, mode=lane_mode(lane), fold_on_verify=fold_on_verify,
        compact_window=compact_window,
    )  # fmt: skip
    plain = StatePool(shape, **sizes, draft_tokens=1, mode="ring")
    slots = list(range(batch, 0, -1))
    committed = 0
    for i in range(rounds):
        widths = (shape.conv_dim, heads * keys, heads)
        inputs = [[normal(batch * draft_tokens, n) for n in widths] for _ in range(layers)]
        accept = [chosen.randint(0, draft_tokens) for _ in slots]
        pool.begin(index(slots), draft_tokens)
        for layer, given in enumerate(inputs):
            pool.verify(layer, *given, params[layer], lane=lane)
        pool.commit(index(accept))
        for t in range(max(accept)):
            plain.begin(index([slot if n > t else -1 for slot, n in zip(slots, accept, strict=True)]), 1)
            for layer, given in enumerate(inputs):
                token = [x.unflatten(0, (batch, draft_tokens))[:, t].contiguous() for x in given]
                plain.verify(layer, *token, params[layer], lane="fused+ring")
            plain.commit(index([1] * batch))
        committed += sum(accept)
        if (i + 1) % look == 0 or i + 1 == rounds:
            pool.flush()
            assert_same_bits(pool.ssm_state, plain.ssm_state, f"ssm_state after {i + 1} rounds")
            assert_same_bits(pool.conv_state, plain.conv_state, f"conv_state after {i + 1} rounds")
    assert pool.ssm_state.isfinite().all()
    assert pool.error_summary() is None
    return committed


@interpreter_only
@pytest.mark.parametrize("lane", ["unfused", "fused+ring"])
def test_twenty_rounds_do_not_drift(lane: str) -> None:
    shape = KdaShape(1, 1, 64, 64)
    committed = drift(lane, shape=shape, layers=1, batch=2, draft_tokens=3, rounds=20, device="cpu", look=1)
    assert committed > 40


@interpreter_only
@pytest.mark.parametrize(("lane", "options"), WITH_OPTIONS)
def test_sixteen_rounds_of_a_pool_with_options_do_not_drift(lane: str, options: dict[str, bool]) -> None:
    """With fold on verify eight rounds go by before anything but the next verify brings states up to date."""
    shape = KdaShape(1, 1, 64, 64)
    committed = drift(lane, shape=shape, layers=1, batch=2, draft_tokens=3, rounds=16, device="cpu", look=8, **options)
    assert committed > 30


@pytest.mark.gpu
@pytest.mark.parametrize(("lane", "options"), [*(pytest.param(lane, {}, id=lane) for lane in LANES), *WITH_OPTIONS])
def test_a_thousand_rounds_do_not_drift(lane: str, options: dict[str, bool]) -> None:
    committed = drift(
        lane, shape=KdaShape(2, 4, 128, 128), layers=2, batch=5, draft_tokens=4, rounds=1000, device="cuda", look=100,
        **options,
    )  # fmt: skip
    assert committed > 9000


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "fold_on_verify"), [*((mode, False) for mode in MODES), ("ring", True)])
@pytest.mark.parametrize("compact_window", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_life(mode: str, fold_on_verify: bool, seed: int, compact_window: bool) -> None:
    """As `test_lifecycle`, with hundreds of steps and without hypothesis, which a GPU machine may lack."""
    life = Lifecycle(
        mode, shape=KdaShape(2, 4, 128, 128), layers=3, slots=12, batch=6, draft_tokens=4, device="cuda", seed=seed,
        fold_on_verify=fold_on_verify, compact_window=compact_window,
    )  # fmt: skip
    choices = Seeded(seed)
    names = [life.step(choices) for _ in range(400)]
    assert set(names) == set(life.STEPS)
    assert min(life.met[what] for what in ("ragged", "rows of nobody", "repeated", "out of range")) > 20
    assert life.tokens > 250


@interpreter_only
@pytest.mark.parametrize("mode", MODES)
def test_a_life_catches_what_it_is_there_for(mode: str) -> None:
    """A slot that one step changed behind the pool's back, the canary's among them, is found by the next."""
    life = Lifecycle(mode, shape=KdaShape(1, 1, 64, 64), layers=1, slots=3, batch=1, draft_tokens=1, device="cpu")
    life.arrive(Seeded(0))
    for slot in (life.canary, *life.live):
        before = life.pool.ssm_state[0, slot].clone()
        life.pool.ssm_state[0, slot, 0, 0, 0] = 5.0
        with pytest.raises(AssertionError, match=r"1 of .* elements differ"):
            life.one_too_many(Seeded(0))
        life.pool.ssm_state[0, slot] = before
        life.one_too_many(Seeded(0))


@interpreter_only
def test_a_life_catches_a_commit_that_overlooks_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ragged request's own length, past which records are of an older round."""

    def overlooking(*groups: Any, **arguments: Any) -> None:
        commit_layers(*groups, **arguments | {"starts": None})

    monkeypatch.setattr(pool_module, "commit_layers", overlooking)
    life = Lifecycle("ring", shape=KdaShape(1, 1, 64, 64), layers=1, slots=3, batch=2, draft_tokens=3, device="cpu")
    choices = Seeded(0)
    life.arrive(choices)
    life.arrive(choices)

    def rounds() -> None:
        for _ in range(60):
            life.round(choices)

    with pytest.raises(AssertionError, match=r"state: .* elements differ"):
        rounds()
