"""SGLang's side of its calls: pool, layer and backend with its names and layouts, and the keywords that it passes."""

from __future__ import annotations

import types
from typing import Any

import torch

from kda_backend.sglang.gate import can_run_fused_chain_verify
from kda_kernels import KdaShape, LayerState, Ring, Snapshots

SHAPE = KdaShape(num_heads=1, num_v_heads=2, head_k_dim=64, head_v_dim=64)
LAYERS, SLOTS, ROWS, STEPS, LENGTH, DTYPE = 2, 5, 4, 3, 8, torch.bfloat16
RING = ("raw_v", "raw_k", "g", "beta")


class Pool:
    """SGLang's MambaPool.SpeculativeState of two layers: its field names and layouts."""

    def __init__(self, device: str, *, ring: bool = True, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        state = LayerState.allocate(
            SHAPE, slots=SLOTS, rows=ROWS, steps=STEPS, dtype=DTYPE, device=device, num_layers=LAYERS
        )
        for tensor in (state.conv_state, state.ssm_state):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
        self.conv, self.temporal = [state.conv_state], state.ssm_state
        self.intermediate_conv_window = [state.conv_window]
        lead = {"device": device, "num_layers": LAYERS}
        records = Ring.allocate(SHAPE, slots=SLOTS, length=LENGTH, dtype=DTYPE, **lead) if ring else None
        for name, field in zip(("rawv", "rawk", "g", "beta"), RING, strict=True):
            setattr(self, f"replayssm_{name}", getattr(records, field) if records else None)
        self.intermediate_ssm = None if ring else Snapshots.allocate(SHAPE, rows=ROWS, steps=STEPS, **lead).states

    def ring(self) -> Ring:
        return Ring(*(getattr(self, f"replayssm_{name}") for name in ("rawv", "rawk", "g", "beta")))

    def tensors(self) -> list[torch.Tensor]:
        found = [*self.conv, self.temporal, *self.intermediate_conv_window]
        return found + (list(vars(self.ring()).values()) if self.intermediate_ssm is None else [self.intermediate_ssm])


class Layer:
    """SGLang's RadixLinearAttention: weights and head sizes, with A_log in the shape that models give it."""

    def __init__(self, device: str, *, bias: bool = True, lower_bound: float | None = -5.0) -> None:
        generator = torch.Generator().manual_seed(1)

        def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device, dtype)

        self.conv_weights = normal(SHAPE.conv_dim, 4, dtype=DTYPE)
        self.bias = normal(SHAPE.conv_dim, dtype=DTYPE) if bias else None
        self.A_log = torch.nn.Parameter(normal(1, 1, SHAPE.num_v_heads, 1))
        self.dt_bias = torch.nn.Parameter(normal(SHAPE.num_v_heads * SHAPE.head_k_dim))
        self.lower_bound = lower_bound
        self.num_q_heads = self.num_k_heads = SHAPE.num_heads
        self.num_v_heads, self.head_v_dim = SHAPE.num_v_heads, SHAPE.head_v_dim
        self.head_q_dim = self.head_k_dim = SHAPE.head_k_dim


def inputs(device: str, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """mixed_qkv with a free row stride, and a, b with SGLang's leading 1 and head dimension."""
    generator = torch.Generator().manual_seed(2)
    n, hv, k = batch * tokens, SHAPE.num_v_heads, SHAPE.head_k_dim
    merged = torch.randn(n, SHAPE.conv_dim + 64, generator=generator).to(device, DTYPE)
    a = torch.randn(1, n, hv, k, generator=generator).to(device, DTYPE)
    b = torch.randn(1, n, hv, generator=generator).to(device, DTYPE)
    return {"mixed_qkv": merged[:, : SHAPE.conv_dim], "a": a, "b": b}


def call(pool: Pool, layer: Layer, given: dict[str, torch.Tensor], slots: Any, rows: Any, tokens: int) -> dict:
    """The keywords of SGLang's KDAAttnBackend for layer 1 of the pool."""
    ring = {
        f"replayssm_{name}": getattr(pool, f"replayssm_{name}")[1]
        for name in ("rawv", "rawk", "g", "beta") if pool.intermediate_ssm is None
    }  # fmt: skip
    return given | ring | {
        "conv_weight": layer.conv_weights, "conv_bias": layer.bias, "conv_state": pool.conv[0][1].transpose(-1, -2),
        "conv_state_indices": slots, "intermediate_state_indices": rows,
        "intermediate_conv_window": pool.intermediate_conv_window[0][1].transpose(-1, -2),
        "A_log": layer.A_log, "dt_bias": layer.dt_bias, "ssm_states": pool.temporal[1], "cache_indices": slots,
        "intermediate_states_buffer": None if ring else pool.intermediate_ssm[1], "scale": layer.head_k_dim**-0.5,
        "T": tokens, "num_q_heads": layer.num_q_heads, "num_v_heads": layer.num_v_heads,
        "head_k_dim": layer.head_k_dim, "head_v_dim": layer.head_v_dim, "lower_bound": layer.lower_bound,
    } | ({"cache_ring": True} if ring else {})  # fmt: skip


def index(values: list[int], device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def assert_same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


class Backend:
    """What the gate asks of SGLang's KDAAttnBackend."""

    def __init__(self, function: Any = None, *, triton: bool = True) -> None:
        self._fused_chain_verify_fn = function
        self.kernel_dispatcher = types.SimpleNamespace(
            verify_backend=types.SimpleNamespace(is_triton=lambda: triton),
            verify_kernel=types.SimpleNamespace(supports_fused_chain_verify=triton),
        )


def ask(backend: Backend, pool: Pool, layer: Layer, device: str, batch: int = 1, **change: Any) -> bool:
    ring = {f"replayssm_{name}": getattr(pool, f"replayssm_{name}") for name in ("rawv", "rawk", "g", "beta")}
    keywords = inputs(device, batch, 2) | {
        name: None if tensor is None else tensor[1] for name, tensor in ring.items()
    } | {
        "layer": layer, "draft_token_num": 2, "conv_states": pool.conv[0][1], "ssm_states": pool.temporal[1],
        "intermediate_state_cache": None if pool.intermediate_ssm is None else pool.intermediate_ssm[1],
        "intermediate_conv_window_cache": pool.intermediate_conv_window[0][1],
        "cache_indices": index(list(range(batch)), device),
        "intermediate_state_indices": index(list(range(batch)), device),
        "retrieve_next_token": None, "retrieve_next_sibling": None, "retrieve_parent_token": None,
    }  # fmt: skip
    return can_run_fused_chain_verify(backend, **keywords | change)
