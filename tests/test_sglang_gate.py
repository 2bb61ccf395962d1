"""The SGLang plugin's gate: what it accepts, what it refuses, and what the log says of it."""

from __future__ import annotations

import logging

import pytest

from kda_backend.sglang import gate, layers, verify
from kda_backend.sglang.reports import Reports
from kda_backend.sglang.verify import fused_kda_conv_gating_verify
from tests.support.sglang_forms import Backend, Layer, Pool, ask, call, index, inputs


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """New log memory, an empty cache, no settings from outside."""
    mine = Reports()
    for module in (gate, verify):
        monkeypatch.setattr(module, "reports", mine)
    monkeypatch.setattr(layers, "_layers", layers.OwnedCache())
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
