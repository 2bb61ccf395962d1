"""Differentiable chunked form of the gated delta rule in plain torch.

Within a chunk, with G_t the running sum of the log decay g (all <= 0) and S the state before the chunk
(Kimi Linear, arXiv 2510.26692; the WY / UT form of the delta rule):

    A[t, s] = beta_t sum_K k_t k_s exp(G_t - G_s)  (s < t)      B[t, s] = sum_K q_t k_s exp(G_t - G_s)  (s <= t)
    u = (I + A)^-1 diag(beta) (v - (k exp(G)) S)                o = (q exp(G)) S + B u
    S_next = exp(G_end) S + sum_s k_s exp(G_end - G_s) u_s

A safe gate may decay by exp(-5) a step, so over 64 steps exp(G) underflows and exp(-G) overflows: the difference must
be formed before the exponential. It is, in two parts: inside a block of 16 tokens directly, over [t, s, K]; between
blocks relative to G just before the row block, which lies between G_t and G_s, so both exponents are <= 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
BLOCK = 16


def _pairwise(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """sum_K k_t k_s exp(G_t - G_s) for s < t and sum_K q_t k_s exp(G_t - G_s) for s <= t.

    ``q``, ``k``, ``total`` (G) are ``[..., CHUNK, K]``; both results ``[..., CHUNK, CHUNK]``, zero elsewhere.
    """
    blocks = CHUNK // BLOCK
    rows = torch.stack((k, q), dim=-2)  # [..., t, 2, K]: one product serves both results
    in_blocks = (*k.shape[:-2], blocks, BLOCK)
    k_blocks = k.view(*in_blocks, -1)
    g_blocks = total.view(*in_blocks, -1)
    r_blocks = rows.view(*in_blocks, 2, -1)

    # Same block: the difference itself, [..., block, t, s, K].
    lower = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=k.device).tril()
    difference = g_blocks.unsqueeze(-2) - g_blocks.unsqueeze(-3)
    decayed = torch.exp(difference.masked_fill(~lower[..., None], float("-inf"))) * k_blocks.unsqueeze(-3)
    near = r_blocks @ decayed.transpose(-1, -2)  # [..., block, t, 2, s]

    # Earlier blocks: relative to G before the row block (0 before the first).
    start = F.pad(g_blocks[..., :-1, -1, :], (0, 0, 1, 0))  # [..., block, K]
    first = torch.arange(0, CHUNK, BLOCK, device=k.device)
    earlier = torch.arange(CHUNK, device=k.device) < first[:, None]  # [block, s]
    gap = (start.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(~earlier[..., None], float("-inf"))
    columns = torch.exp(gap) * k.unsqueeze(-3)  # [..., block, s, K]
    row_decay = torch.exp(g_blocks - start.unsqueeze(-2)).unsqueeze(-2)
    far = (r_blocks * row_decay).flatten(-3, -2) @ columns.transpose(-1, -2)
    far = far.view(*in_blocks, 2, CHUNK)

    # Put the near squares on the block diagonal.
    diagonal = torch.eye(blocks, device=k.device, dtype=k.dtype)[:, None, None, :, None]
    both = far + (near.unsqueeze(-2) * diagonal).flatten(-2)
    both = both.flatten(-4, -3)  # [..., t, 2, s]
    return both[..., 0, :].tril(-1), both[..., 1, :]


def chunked_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gated delta rule over whole sequences, differentiable, about ``tokens / 64`` dependent steps.

    ``q``, ``k``, ``g`` are ``[batch, tokens, H, K]`` (q, k normalised, q scaled, g the log decay <= 0), ``v``
    ``[batch, tokens, H, V]``, ``beta`` ``[batch, tokens, H]``, all fp32 or fp64. Returns o ``[batch, tokens, H, V]``
    and the state after the last token ``[batch, H, V, K]``, the layout of ``initial_state`` too.
    """
    batch, tokens, heads, key_dim = k.shape
    pad = -tokens % CHUNK
    # A padded token has beta = 0 and g = 0: it neither writes nor decays the state.
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, g))
    beta = F.pad(beta, (0, 0, 0, pad))
    chunks = (tokens + pad) // CHUNK

    def per_chunk(x: Tensor) -> Tensor:  # [batch, tokens, H, ...] -> [chunks, batch, H, CHUNK, ...]
        return x.unflatten(1, (chunks, CHUNK)).transpose(2, 3).transpose(0, 1).contiguous()

    q, k, v, g = (per_chunk(x) for x in (q, k, v, g))
    beta = per_chunk(beta.unsqueeze(-1))
    total = g.cumsum(-2)
    end = total[..., -1:, :]
    kk, qk = _pairwise(q, k, total)
    decay = torch.exp(total)
    right = beta * torch.cat((v, k * decay), dim=-1)
    solved = torch.linalg.solve_triangular(beta * kk, right, upper=False, unitriangular=True)
    u_own, u_state = solved.split((v.shape[-1], key_dim), dim=-1)
    writes = (k * torch.exp(end - total)).transpose(-1, -2)
    end_decay = torch.exp(end).transpose(-1, -2)

    if initial_state is None:
        state = v.new_zeros(batch, heads, key_dim, v.shape[-1])
    else:
        state = initial_state.transpose(-1, -2)
    before, updates = [], []
    for u_i, w_i, write_i, decay_i in zip(
        u_own.unbind(0), u_state.unbind(0), writes.unbind(0), end_decay.unbind(0), strict=True
    ):
        before.append(state)
        u = u_i - w_i @ state
        updates.append(u)
        state = decay_i * state + write_i @ u
    o = (q * decay) @ torch.stack(before) + qk @ torch.stack(updates)
    o = o.transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, :tokens]
    return o, state.transpose(-1, -2)
