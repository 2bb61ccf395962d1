"""`kda demo --form chunked`: differing tokens are counted and forgiven, faults are not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kda_kernels import MAX_CHUNKED_TOKENS
from kda_tooling.cli import app
from kda_tooling.commands import demo as command
from kda_tooling.demo import run as demo_module
from kda_tooling.demo.decoding import Decoded
from kda_tooling.demo.model import KdaLanguageModel, ModelConfig, save_model

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
RING = ["unfused+ring", "fused+ring"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, device: str) -> list[str]:
    """A tiny model, one prompt and a few bytes."""
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = KdaLanguageModel(ModelConfig(num_layers=1, width=32, num_heads=1, mlp_width=32))
    save_model(model, folder / "demo_model.safetensors", {})
    text = folder / "mine.py"
    text.write_text("abcabcabcabcab")
    given = ["demo", "--form", "chunked", "--model", str(folder), "--prompt-file", str(text), "--bytes", "5"]
    return [*given, "--draft-tokens", "3", "--device", device, "--processes", "1"]


def test_a_small_run_end_to_end(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    forms = []
    verify = demo_module.Decoder.round_logits

    def noted(self: Any, pool: Any, tokens: Any, lane: str, form: str = "recurrent") -> Any:
        forms.append((lane, form))
        return verify(self, pool, tokens, lane, form)

    monkeypatch.setattr(demo_module.Decoder, "round_logits", noted)
    result = runner.invoke(app, [*arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["form"] == "chunked"
    assert list(report["lanes"]) == RING
    # Of 4 bytes and one layer none is near enough to a tie.
    assert report["differing"] == dict.fromkeys(RING, 0)
    assert report["identical"] == report["state_identical"] == dict.fromkeys(RING, True)
    assert set(forms) == {("reference", "recurrent"), ("unfused", "recurrent"), *((lane, "chunked") for lane in RING)}


@pytest.mark.parametrize("faults", [None, "slot: 1"])
def test_differing_tokens_are_counted(
    faults: str | None, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode_all(settings: Any, requests: Sequence[Any], on_progress: Any) -> dict[str, Decoded]:
        results = {}
        for run in settings.runs():
            other = run.name == "fused+ring"
            results[run.name] = Decoded(
                [b"writ!" if other else b"write"] * len(requests), [[False] * 5] * len(requests), accepted={1: 4},
                seconds=1.0, faults=faults if other else None, ssm_state=torch.tensor([float(other)]),
                conv_state=torch.zeros(1, dtype=torch.bfloat16),
            )  # fmt: skip
        return results

    monkeypatch.setattr(demo_module, "_decode_all", decode_all)
    for flags in ([], ["--json", "-"]):
        result = runner.invoke(app, [*arguments, *flags])
        assert result.exit_code == (0 if faults is None else 1), result.output
        assert "NO" not in result.output
    report = json.loads(result.stdout)
    assert report["identical"] == {"unfused+ring": True, "fused+ring": False}
    assert report["differing"] == {"unfused+ring": 0, "fused+ring": 1}
    shown = runner.invoke(app, arguments).output
    assert "1 of 5 differ" in shown
    assert "Beside plain decoding (chunked form)" in shown


def test_the_limit_of_the_command_is_the_kernels() -> None:
    assert command.MAX_CHUNKED_TOKENS == MAX_CHUNKED_TOKENS
