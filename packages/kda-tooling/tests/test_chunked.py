"""The chunked training form against the sequential recurrence it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda_tooling.demo.chunked import CHUNK, chunked_kda

BATCH, HEADS, DIM = 2, 2, 16


def inputs(tokens: int, dtype: torch.dtype, kind: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (randn(BATCH, tokens, HEADS, DIM) for _ in range(3))
    q = q / q.norm(dim=-1, keepdim=True) * DIM**-0.5
    k = k / k.norm(dim=-1, keepdim=True)
    g = -5 * torch.sigmoid(randn(BATCH, tokens, HEADS, DIM) - 4)
    beta = torch.sigmoid(randn(BATCH, tokens, HEADS))
    if kind == "hard":
        # Channels that forget within a step beside channels that never do, equal keys next to each other: G spans 320
        # within a chunk, and (I + A)^-1 is as far from the identity as it gets.
        g[..., ::3] = -5.0
        g[..., 1::3] = -1e-6
        k[:, 1::2] = k[:, : tokens - 1 : 2]
        beta[:] = 1.0
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


def sequential_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `chunked_kda`, token by token: ``S *= exp(g); u = beta (v - S k); S += u k^T; o = S q``."""
    batch, tokens, heads, key_dim = k.shape
    state = v.new_zeros(batch, heads, v.shape[-1], key_dim) if initial_state is None else initial_state
    outputs = []
    for t in range(tokens):
        state = state * torch.exp(g[:, t]).unsqueeze(-2)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - (state * k[:, t].unsqueeze(-2)).sum(-1))
        state = state + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-2)).sum(-1))
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("kind", ["mild", "hard"])
@pytest.mark.parametrize("tokens", [1, CHUNK, 2 * CHUNK + 17], ids=lambda n: f"T{n}")
def test_outputs_state_and_gradients_are_the_recurrences(tokens: int, kind: str) -> None:
    arguments = inputs(tokens, torch.float64, kind)
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(BATCH, HEADS, DIM, DIM, generator=generator, dtype=torch.float64).requires_grad_()
    o_weight = torch.randn(BATCH, tokens, HEADS, DIM, generator=generator, dtype=torch.float64)
    s_weight = torch.randn(BATCH, HEADS, DIM, DIM, generator=generator, dtype=torch.float64)
    results = []
    for form in (chunked_kda, sequential_kda):
        o, last = form(*arguments, state)
        loss = (o * o_weight).sum() + (last * s_weight).sum()
        results.append((o, last, *torch.autograd.grad(loss, [*arguments, state])))
    # fp64 rounds at 1e-16; sums over 145 tokens and 16 channels leave several decades of room.
    for name, chunked, sequential in zip(("o", "S", "dq", "dk", "dv", "dg", "dbeta", "dS"), *results, strict=True):
        torch.testing.assert_close(chunked, sequential, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_fp32_is_finite_and_close_when_a_chunk_decays_by_exp_320() -> None:
    exact, _ = sequential_kda(*inputs(2 * CHUNK, torch.float64, "hard"))
    arguments = inputs(2 * CHUNK, torch.float32, "hard")
    o, last = chunked_kda(*arguments)
    gradients = torch.autograd.grad(o.sum() + last.sum(), arguments)
    assert all(torch.isfinite(x).all() for x in (o, last, *gradients))
    # 128 tokens of fp32 (6e-8 each) on outputs of order 1.
    assert (o - exact).abs().max() < 1e-5


def test_a_later_token_does_not_change_an_earlier_output() -> None:
    arguments = inputs(CHUNK + 9, torch.float64, "mild")
    full, _ = chunked_kda(*arguments)
    cut, _ = chunked_kda(*(x[:, :40] for x in arguments))
    torch.testing.assert_close(full[:, :40], cut, rtol=0, atol=1e-13)
