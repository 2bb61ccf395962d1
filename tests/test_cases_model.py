"""The demo model decodes the same bytes with and without speculation, in every lane (case G5)."""

from __future__ import annotations

from typing import Any

import pytest

from kda_backend import LANES
from kda_tooling.commands.demo import ASSETS
from kda_tooling.demo.prompts import held_out_prompts
from kda_tooling.demo.run import DemoSettings, passed, run_demo
from kda_tooling.demo.training import WEIGHTS_NAME

PROMPTS = 20


def continuations(device: str, lanes: tuple[str, ...], num_bytes: int, draft_tokens: int) -> dict[str, Any]:
    settings = DemoSettings(
        lanes=lanes, draft_tokens=draft_tokens, num_bytes=num_bytes, ring_length=None, device=device,
        weights=ASSETS / WEIGHTS_NAME, processes=1,
    )  # fmt: skip
    prompts = held_out_prompts(PROMPTS, 512)
    assert len({prompt.source for prompt in prompts}) == PROMPTS
    return run_demo(settings, prompts, lambda name, done: None)


def test_G5_twenty_continuations_equal_plain_decoding(device: str) -> None:
    # The interpreter pays per (prompt, head, token): a few bytes there, and the lane that plain decoding does not use.
    report = continuations(device, LANES, 48, 4) if device == "cuda" else continuations(device, ("fused+ring",), 4, 3)
    assert passed(report), report["identical"]


@pytest.mark.gpu
@pytest.mark.parametrize("draft_tokens", [3, 6, 8])
def test_G5_twenty_continuations_at_other_draft_lengths(draft_tokens: int) -> None:
    report = continuations("cuda", LANES, 96, draft_tokens)
    assert passed(report), report["identical"]
    for lane in report["lanes"].values():
        lengths = {int(n) for n, count in lane["accepted_per_round"].items() if count}
        assert {1, draft_tokens} <= lengths, "partial and full acceptance must both occur"
