"""The SGLang plugin's gate: what it accepts, what it refuses, and what the log says of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_backend import Target
from kda_backend.gate import device_name_of, write_table
from kda_backend.gate.env import process_settings
from kda_backend.sglang import gate, layers, rule, verify
from kda_backend.sglang.reports import Reports
from kda_backend.sglang.verify import fused_kda_conv_gating_verify
from kda_kernels import LaunchConfig
from tests.support.sglang_forms import SHAPE, Backend, Layer, Pool, ask, call, index, inputs
from tests.support.tables import a_cell, a_table


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, fresh_gate: None) -> None:
    """New log memory, an empty cache, no settings from outside."""
    mine = Reports()
    for module in (gate, verify):
        monkeypatch.setattr(module, "reports", mine)
    monkeypatch.setattr(layers, "_layers", layers.OwnedCache())
    rule._decision.cache_clear()
    for name in ("KDA_SGLANG_FUSED", "SGLANG_OPT_FUSED_KDA_VERIFY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "snapshots"])
def test_gate_accepts_and_hands_the_backend_our_function(
    ring: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDA_SGLANG_FUSED", "always")
    backend, pool, layer = Backend(), Pool(device, ring=ring), Layer(device)
    assert ask(backend, pool, layer, device, batch=3)
    assert backend._fused_chain_verify_fn is fused_kda_conv_gating_verify
    hooked = Backend(lambda: None)
    hooked._fused_chain_verify_fn.__wrapped__ = None  # as SGLang's hooks leave it
    function = hooked._fused_chain_verify_fn
    assert ask(hooked, pool, layer, device)
    assert hooked._fused_chain_verify_fn is function


def test_what_the_gate_accepts_verify_takes_with_the_same_groups(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_SGLANG_FUSED", "always")
    pool, layer = Pool(device), Layer(device)
    assert ask(Backend(), pool, layer, device)
    (entry,) = layers._layers._entries.values()
    fused_kda_conv_gating_verify(**call(pool, layer, inputs(device, 1, 2), index([0], device), index([0], device), 2))
    assert [e[2] for e in layers._layers._entries.values()] == [entry[2]]


def test_gate_refuses_with_the_reason_and_warns_once(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KDA_SGLANG_FUSED", "always")
    caplog.set_level(logging.DEBUG, logger="kda_backend.sglang")
    backend, pool, layer = Backend(), Pool(device), Layer(device)
    some = index([0], device)
    odd = Layer(device)
    odd.num_k_heads = 2
    large = Layer(device)
    large.head_q_dim = large.head_k_dim = 256
    refused = {
        "a tree": ask(backend, pool, layer, device, retrieve_parent_token=some),
        "not a multiple of T=4": ask(backend, pool, layer, device, batch=3, draft_token_num=4),
        "equal heads": ask(backend, pool, odd, device),
        "head_k_dim must be one of": ask(backend, pool, large, device),
        "neither": ask(backend, pool, layer, device, replayssm_beta=None),
        "ssm_state must be float32": ask(backend, pool, layer, device, ssm_states=pool.temporal[1].bfloat16()),
        "the ring holds 8 records": ask(
            backend, pool, layer, device, **inputs(device, 1, 9), draft_token_num=9
        ),
        "a must have": ask(backend, pool, layer, device, a=some),
        "AttributeError": ask(backend, pool, layer, device, mixed_qkv=None),
        "TypeError": ask(backend, pool, layer, device, draft_token_num=None),
        "must be triton": ask(Backend(triton=False), pool, layer, device),
    }  # fmt: skip
    monkeypatch.setenv("SGLANG_OPT_FUSED_KDA_VERIFY", "0")
    refused["SGLANG_OPT_FUSED_KDA_VERIFY=0"] = ask(backend, pool, layer, device)
    assert not any(refused.values())
    lines = [record for record in caplog.records if "SGLang's own kernel runs" in record.message]
    assert [record.levelno for record in lines] == [logging.WARNING] + [logging.DEBUG] * (len(refused) - 1)
    for named, record in zip(refused, lines, strict=True):
        assert named in record.message
    ask(backend, pool, layer, device, retrieve_parent_token=some)
    assert sum("a tree" in record.message for record in caplog.records) == 1
    assert backend._fused_chain_verify_fn is None


def test_gate_follows_the_rule(device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kda_backend.sglang")
    pool, layer = Pool(device), Layer(device)
    assert not ask(Backend(), pool, layer, device, batch=2)
    assert not ask(Backend(), pool, layer, device, batch=3)
    monkeypatch.setenv("KDA_SGLANG_FUSED", "never")
    assert not ask(Backend(), pool, layer, device)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert "B=2" in lines[0]


def own_table(device: str, *cells: Any) -> Any:
    where = torch.device(device)
    return a_table(*cells, shape=SHAPE, device_name=device_name_of(where), arch=str(Target.of(where)))


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "snapshots"])
def test_a_measured_table_decides_and_configures(
    ring: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fused at B = 2 and up, unfused below and for the standard gate; the fused function gets the configuration."""
    caplog.set_level(logging.INFO, logger="kda_backend.sglang")
    config = LaunchConfig(32, 2)
    key: dict[str, Any] = dict(mode="ring" if ring else "snapshots", draft_tokens=2, configs=(None, config))
    cells = [a_cell(batch=1, fused=False, **key), a_cell(batch=2, **key)]
    write_table(own_table(device, *cells, a_cell(batch=2, gate="standard", fused=False, **key)), tmp_path)
    monkeypatch.setenv("KDA_GATE_TABLES", str(tmp_path))
    pool, layer = Pool(device, ring=ring), Layer(device)
    assert not ask(Backend(), pool, layer, device, batch=1)
    assert "user table, B=1: verify" in caplog.records[0].message
    assert ask(Backend(), pool, layer, device, batch=2)
    assert ask(Backend(), pool, layer, device, batch=3)
    assert not ask(Backend(), pool, Layer(device, lower_bound=None), device, batch=2)
    used: list[Any] = []
    real = verify.verify_fused
    monkeypatch.setattr(verify, "verify_fused", lambda *a, **k: used.append(k["config"]) or real(*a, **k))
    rows = index([0, 1], device)
    fused_kda_conv_gating_verify(**call(pool, layer, inputs(device, 2, 2), rows, rows, 2))
    assert used == [config]


def test_the_plugin_s_override_goes_before_tables_and_keeps_their_configurations(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LaunchConfig(8, 1)
    write_table(own_table(device, a_cell(fused=False, draft_tokens=2, configs=(None, config))), tmp_path)
    monkeypatch.setenv("KDA_GATE_TABLES", str(tmp_path))
    asked: dict[str, Any] = dict(dtype=torch.bfloat16, safe_gate=True)
    for value, expected in (("auto", (False, None)), ("always", (True, config)), ("never", (False, None))):
        monkeypatch.setenv("KDA_SGLANG_FUSED", value)
        choice = rule.choose(SHAPE, "ring", 1, 2, torch.device(device), **asked)
        assert (choice.fused, choice.config) == expected


@pytest.mark.parametrize(
    ("value", "said"), [("fused", "forces a lane that is impossible here"), ("fast", "must be one")]
)
def test_an_override_that_cannot_hold_leaves_sglang_its_own_kernels(
    value: str, said: str, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="kda_backend.sglang")
    monkeypatch.setenv("KDA_LANE", value)
    assert not ask(Backend(), Pool(device), Layer(device), device)
    assert "KDA_LANE" in caplog.records[0].message
    assert said in caplog.records[0].message
    assert "KDA_LANE" in rule.describe_rule()


def test_the_log_says_what_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rule.describe_rule().startswith("the measured tables of its gate, or where they say nothing by the conserv")
    monkeypatch.setenv("KDA_GATE", "off")
    process_settings.cache_clear()
    assert rule.describe_rule().startswith("the conservative rule: fused with a ring, for one request")
