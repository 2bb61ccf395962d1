"""Plain-torch reference of verify's chunked form: the outputs of T tokens from the state before them."""

from __future__ import annotations

import torch


def chunked_outputs(
    S: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Outputs of T tokens, in the dtype of the arguments; S is not changed.

    Decays are products of exp(g), as in the kernels, not exp of a sum. Each token's row of the triangular system is
    solved with the rows up to its own, so a token does not depend on later ones, whatever they hold.

    Args:
        S: [HV, V, K], the state before token 0.
        q: [T, HV, K], normalised and scaled.
        k: [T, HV, K], normalised.
        v: [T, HV, V].
        g: [T, HV, K], log-decays.
        beta: [T, HV].

    Returns:
        [T, HV, V].

    Formula: docs/arithmetic.md, "The chunked form".
    """
    tokens, heads, _ = k.shape
    decay = torch.exp(g)
    product = torch.cumprod(decay, 0)
    decayed_k = k * product
    keys = k.new_zeros(0, heads, k.shape[2])  # every key so far, decayed to the token at hand
    system = torch.eye(tokens, dtype=k.dtype, device=k.device).repeat(heads, 1, 1)
    outputs = []
    for t in range(tokens):
        keys = keys * decay[t]
        system[:, t, :t] = (beta[t] * (keys * k[t]).sum(-1)).T
        keys = torch.cat([keys, k[t : t + 1]])
        row = (keys * q[t]).sum(-1).T[:, None, :]
        solved = torch.linalg.solve_triangular(
            system[:, : t + 1, : t + 1], row, upper=False, left=False, unitriangular=True
        )
        coefficients = solved[:, 0].T * beta[: t + 1]
        w = q[t] * product[t] - (coefficients[:, :, None] * decayed_k[: t + 1]).sum(0)
        outputs.append((S * w[:, None, :]).sum(-1) + (coefficients[:, :, None] * v[: t + 1]).sum(0))
    return torch.stack(outputs)
