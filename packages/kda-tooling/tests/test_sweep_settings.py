"""Settings of a sweep: what their class refuses by itself, derived values, and the call that a result names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kda_kernels import KdaShape
from kda_tooling.bench import settings as limits
from kda_tooling.bench.settings import SweepSettings, command_of
from kda_tooling.cli import app
from kda_tooling.commands import options
from kda_tooling.commands import sweep as command


def test_the_options_limits_are_the_settings() -> None:
    assert options.MOST_TIMED_HEADS == limits.MAX_HEADS
    assert options.MOST_TIMED_BATCH == limits.MAX_BATCH
    assert options.MOST_TIMED_TOKENS == limits.MOST_TUNED_TOKENS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lanes": ()}, "--modes must name lanes of .*; got none"),
        ({"lanes": ("fused", "fast")}, "got fast"),
        ({"batch_sizes": ()}, "--batch-sizes must be within .*; got none"),
        ({"batch_sizes": (4, 0, -1)}, "got 0, -1"),
        ({"draft_tokens": ()}, "--draft-tokens"),
        ({"dtype": "float32"}, "--dtype"),
        ({"lower_bound": 0.0}, "--lower-bound"),
        ({"lower_bound": float("-inf")}, "--lower-bound"),
        ({"kind": "fold"}, "kind must be one of verify, round, commit; got 'fold'"),
        ({"passes": 1}, "--passes"),
        ({"kind": "round", "draft_tokens": (2, 8), "accept": 3}, r"within 1\.\.2"),
        ({"accept": 2}, "--accept"),
        ({"seed": 1 << 63}, "--seed"),
    ],
)
def test_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SweepSettings(**values)  # type: ignore[arg-type]


def test_derived_values() -> None:
    settings = SweepSettings(draft_tokens=(1, 4), batch_sizes=(2, 16), dtype="fp16")
    assert settings.cells() == [(1, 2), (1, 16), (4, 2), (4, 16)]
    assert settings.torch_dtype == torch.float16
    assert [settings.accept_for(t) for t in (1, 2, 4)] == [1, 1, 3]
    assert SweepSettings(kind="commit", accept=2).accept_for(4) == 2


@pytest.mark.parametrize(
    "settings",
    [
        SweepSettings(),
        SweepSettings(lanes=("fused+ring",), batch_sizes=(1, 256), draft_tokens=(3, 8), sweep_configs=True),
        SweepSettings(shape=KdaShape(4, 8, 64, 128), dtype="fp16", lower_bound=None, bias=False, seed=3),
        SweepSettings(shape=KdaShape(16, 16, 128, 64), lower_bound=-2.5, hot=True, passes=21),
        SweepSettings(kind="round"),
        SweepSettings(kind="commit", accept=2),
    ],
    ids=lambda settings: settings.kind,
)
def test_the_named_command_measures_the_same(settings: SweepSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[SweepSettings] = []

    def measure(given: SweepSettings) -> None:
        reached.append(given)
        raise SystemExit(0)

    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(command, "_measure", measure)
    text = command_of(json.loads(json.dumps(dataclasses.asdict(settings))))
    assert text.startswith("kda sweep")
    CliRunner().invoke(app, text.split()[1:])
    assert reached == [settings]


def test_the_named_command_of_a_peer(tmp_path: Path) -> None:
    described = dataclasses.asdict(SweepSettings(peers=(f"sglang={tmp_path}",))) | {"peers": ["sglang"]}
    assert command_of(json.loads(json.dumps(described))) == "kda sweep --peer sglang=peer"
