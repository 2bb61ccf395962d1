"""The SGLang plugin's verify and commit, called in SGLang's forms, against direct calls of the kernels: equal bits."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import pytest
import torch

from kda_backend.sglang import commit, layers, verify
from kda_backend.sglang.commit import commit_kda_replayssm_after_verify
from kda_backend.sglang.verify import fused_kda_conv_gating_verify
from kda_kernels import LayerParams, LayerState, Snapshots, fold, host_checks, scatter_conv, verify_fused
from tests.support.sglang_forms import LAYERS, SHAPE, STEPS, Layer, Pool, assert_same_bits, call, index, inputs


@pytest.fixture(autouse=True)
def _empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_layers", layers.OwnedCache())
    monkeypatch.setattr(commit, "_rings", layers.OwnedCache())


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "snapshots"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_verify_in_sglangs_call_form_equals_the_direct_call(ring: bool, tokens: int, device: str) -> None:
    pool, direct = Pool(device, ring=ring), Pool(device, ring=ring)
    layer = Layer(device, bias=ring, lower_bound=-5.0 if ring else None)
    slots, rows = index([3, -1, 0], device), index([2, 3, 0], device)
    given = inputs(device, 3, tokens)
    out = fused_kda_conv_gating_verify(**call(pool, layer, given, slots, rows, tokens))
    record = direct.ring().layer(1) if ring else Snapshots(direct.intermediate_ssm[1])
    wanted = verify_fused(
        given["mixed_qkv"], given["a"].view(3 * tokens, -1), given["b"].view(3 * tokens, -1), shape=SHAPE,
        params=LayerParams(
            layer.conv_weights, layer.bias, layer.A_log.detach().view(-1), layer.dt_bias.detach(), layer.lower_bound
        ),
        state=LayerState(direct.conv[0][1], direct.temporal[1], direct.intermediate_conv_window[0][1]),
        record=record, slots=slots, draft_tokens=tokens, rows=rows,
    )  # fmt: skip
    assert out.shape == (1, 3 * tokens, SHAPE.num_v_heads, SHAPE.head_v_dim)
    assert_same_bits([out[0], *pool.tensors()], [wanted, *direct.tensors()])
    assert not out[0, tokens : 2 * tokens].any(), "a padded row's output must be 0"


def test_groups_are_the_same_objects_in_every_call_and_go_with_the_layer(device: str) -> None:
    pool, layer = Pool(device), Layer(device)
    slots, rows = index([1], device), index([0], device)
    keywords = call(pool, layer, inputs(device, 1, 2), slots, rows, 2)
    fused_kda_conv_gating_verify(**keywords)
    (entry,) = layers._layers._entries.values()
    groups = weakref.ref(entry[2])
    del entry
    fused_kda_conv_gating_verify(**call(pool, layer, inputs(device, 1, 2), slots, rows, 2))
    assert [e[2] for e in layers._layers._entries.values()] == [groups()]
    other = Pool(device, seed=1)  # as if SGLang had allocated its pool anew: the old one must not be kept
    fused_kda_conv_gating_verify(**call(other, layer, inputs(device, 1, 2), slots, rows, 2))
    assert len(layers._layers) == 1
    assert groups() is None
    del layer, keywords
    gc.collect()
    assert len(layers._layers) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"softplus_beta": 2.0}, "softplus_beta"),
        ({"softplus_threshold": 10.0}, "softplus_threshold"),
        ({"use_qk_l2norm_in_kernel": False}, "use_qk_l2norm_in_kernel"),
        ({"intermediate_conv_window": None}, "intermediate_conv_window"),
        ({"cache_ring": False}, "cache_ring"),
        ({"replayssm_g": None}, "cache_ring"),
        ({"head_k_dim": 32}, "head_k_dim"),
        ({"cache_indices": torch.zeros(1, dtype=torch.int32)}, "cache_indices"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_verify_cannot_take_is_named(change: dict[str, Any], named: str, device: str) -> None:
    keywords = call(Pool(device), Layer(device), inputs(device, 1, 2), index([1], device), index([0], device), 2)
    with pytest.raises(ValueError, match=named):
        fused_kda_conv_gating_verify(**keywords | change)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_commit_equals_fold_and_scatter(index_dtype: torch.dtype, device: str) -> None:
    pool, layer = Pool(device), Layer(device)
    slots, rows = index([3, 0, 1], device, index_dtype), index([2, 0, 3], device, index_dtype)
    for which in range(LAYERS):
        single = types.SimpleNamespace(**vars(pool))
        keywords = call(single, layer, inputs(device, 3, STEPS), slots.int(), rows.int(), STEPS)
        keywords |= {  # layer 0 and 1 alike
            "conv_state": pool.conv[0][which].transpose(-1, -2), "ssm_states": pool.temporal[which],
            "intermediate_conv_window": pool.intermediate_conv_window[0][which].transpose(-1, -2),
        }  # fmt: skip
        for name in ("rawv", "rawk", "g", "beta"):
            keywords[f"replayssm_{name}"] = getattr(pool, f"replayssm_{name}")[which]
        fused_kda_conv_gating_verify(**keywords)
    accept = index([3, 0, 2], device, index_dtype)
    track_slots, track_steps = index([2, -1, 4], device, index_dtype), index([1, -1, -1], device, index_dtype)
    direct_conv, direct_state = pool.conv[0].clone(), pool.temporal.clone()
    commit_kda_replayssm_after_verify(
        spec_state=pool, state_batch_indices=slots, accept_lens=accept, last_correct_step_indices=accept - 1,
        mamba_track_indices=track_slots, mamba_steps_to_track=track_steps, src_indices_raw=rows,
    )  # fmt: skip
    common = {
        "slots": slots, "accept_lens": accept, "draft_tokens": STEPS, "track_slots": track_slots,
        "track_steps": track_steps,
    }  # fmt: skip
    fold(direct_state, pool.ring(), shape=SHAPE, **common)
    scatter_conv(direct_conv, pool.intermediate_conv_window[0], rows=rows, **common)
    assert_same_bits([pool.conv[0], pool.temporal], [direct_conv, direct_state])
    before = Pool(device)
    assert_same_bits([pool.temporal[:, 0], pool.temporal[:, 4]], [before.temporal[:, 0], before.temporal[:, 4]])
    assert not torch.equal(pool.temporal[:, 2], before.temporal[:, 2]), "the tracking slot got its state"


def test_commit_skips_what_the_engine_counts_as_no_slot(device: str) -> None:
    pool, before = Pool(device), Pool(device)
    pool.replayssm_beta.fill_(0.5)
    one = index([1, 1], device)
    commit_kda_replayssm_after_verify(
        spec_state=pool, state_batch_indices=index([0, 2], device), accept_lens=one,
        last_correct_step_indices=one - 2, null_block_id=0,
    )  # fmt: skip
    assert_same_bits([pool.conv[0], pool.temporal[:, 0]], [before.conv[0], before.temporal[:, 0]])
    assert torch.equal(pool.temporal[:, 2], before.temporal[:, 2]), "g and k are 0: a step changes nothing"
    (entry,) = commit._rings._entries.values()
    ring = weakref.ref(entry[2])
    del entry, pool
    gc.collect()
    assert ring() is None


def test_commit_of_more_tokens_than_the_ring_holds_moves_neither_state(device: str) -> None:
    """Windows may have more steps than the ring has records."""
    pool = Pool(device)
    for name in ("rawv", "rawk", "g", "beta"):
        tensor = getattr(pool, f"replayssm_{name}")
        setattr(pool, f"replayssm_{name}", tensor[:, :, :, :2].contiguous().normal_())
    pool.intermediate_conv_window[0].normal_()
    before = [pool.conv[0].clone(), pool.temporal.clone()]
    accept = index([2, 3], device)
    with host_checks(False):  # as on a GPU, where the host does not look
        commit_kda_replayssm_after_verify(
            spec_state=pool, state_batch_indices=index([1, 3], device), accept_lens=accept,
            last_correct_step_indices=accept - 1,
        )  # fmt: skip
    for tensor, old in zip((pool.conv[0], pool.temporal), before, strict=True):
        assert (tensor != old).flatten(2).any(-1).all(0).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("missing", [None, "temporal", "conv", "replayssm_g"])
def test_sglangs_own_functions_take_what_ours_do_not_know(
    missing: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a field that another version of SGLang has no more, or None where a tensor was: no check names those."""
    taken: list[dict[str, Any]] = []
    for module in (commit, verify):
        monkeypatch.setattr(module, "original", lambda *name: lambda **given: taken.append(given))
    one, pool = index([1], device), Pool(device)
    before = Pool(device).tensors()
    if missing is None:
        keywords = call(pool, Layer(device), inputs(device, 1, 2), one, index([0], device), 2)
        assert fused_kda_conv_gating_verify(**keywords | {"A_log": None}) is None
    else:
        unlike = types.SimpleNamespace(**{name: value for name, value in vars(pool).items() if name != missing})
        commit_kda_replayssm_after_verify(
            spec_state=unlike, state_batch_indices=one, accept_lens=one, last_correct_step_indices=one - 1
        )
    assert len(taken) == 1
    assert_same_bits(pool.tensors(), before)


def test_what_commit_cannot_take_is_named(device: str) -> None:
    one = index([1], device)
    given = {"state_batch_indices": one, "accept_lens": one, "last_correct_step_indices": one - 1}
    with pytest.raises(ValueError, match="four replayssm tensors"):
        commit_kda_replayssm_after_verify(spec_state=Pool(device, ring=False), **given)
    pool = Pool(device)
    pool.intermediate_conv_window = []
    with pytest.raises(ValueError, match="intermediate_conv_window must be of one length"):
        commit_kda_replayssm_after_verify(spec_state=pool, **given)
