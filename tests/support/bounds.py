"""How far fp32 arithmetic may be from the fp64 oracle: a running error analysis, not a guessed rtol.

For every quantity x of the contract this propagates an absolute bound dx >= |x computed in fp32 - x in fp64|, to first
order in the unit roundoff U = 2**-24 (Higham, Accuracy and Stability, chapter 3), and the final bounds are widened by
`SECOND_ORDER`. The inputs are exact (16-bit and fp32 values). Costs of one operation:

* add, multiply, fma: one rounding, U * |result|.
* divide, square root, 1/x: at most 2 ulp = 4U (Triton's fp32 ``/`` is div.full, 2 ulp; sqrt.approx is within 1 ulp).
* exp(x): computed as exp2(x * log2(e)): the rounded argument costs 2|x|U, ex2.approx 2 ulp: relative (2|x| + 4)U.
* log(x): 2 ulp of the result, and never better than 4U absolute near 1.
* a sum over K of products: the canonical tree costs 4 + log2(K/4) roundings, numpy's pairwise sum in the interpreter at
  most K/8 + 5; K/8 + 8 covers both and any torch order of 8 or more partial sums.

A SiLU output sits between two 16-bit values; where the interval [y - dy, y + dy] holds a rounding tie, the kernel may
take either neighbour, and the bound of that element is their distance (else it is 0: the rounded value must be equal).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.support.oracle import Array, Layer, Trace, l2_normalise, round_to, sigmoid, softplus, ulp

U = 2.0**-24
DIVIDE = 4 * U
SECOND_ORDER = 1.02


def exp_error(x: Array) -> Array:
    """Relative error of exp(x) for an exact x."""
    return (2 * np.abs(x) + 4) * U


def dot_error(K: int) -> float:
    """Relative error, to sum |x*y|, of a K-term fp32 dot product."""
    return (K / 8 + 8) * U


@dataclass(frozen=True)
class Bounds:
    """Absolute bounds of a `Trace`'s fields of the same names; ``out`` includes rounding to the activation dtype."""

    y_rounded: Array
    raw_k: Array
    raw_v: Array
    g: Array
    beta: Array
    states: Array
    out: Array
    out_unrounded: Array


def conv_bound(layer: Layer, trace: Trace) -> tuple[Array, Array]:
    """(bound of y before rounding, bound of the rounded y)."""
    d_acc = 6 * U * trace.acc_magnitude  # at most 4 additions and one product rounding, each below U * magnitude
    relative = (1 - sigmoid(trace.acc)) * exp_error(trace.acc) + U + DIVIDE
    d_y = 1.1 * d_acc + np.abs(trace.y) * relative  # |silu'| < 1.1
    low = round_to(trace.y - SECOND_ORDER * d_y, layer.act_dtype)
    high = round_to(trace.y + SECOND_ORDER * d_y, layer.act_dtype)
    return d_y, high - low


def gate_bound(layer: Layer, x: Array, g: Array) -> Array:
    """Bound of g for x = a + dt_bias [T, HV, K]."""
    rate = np.exp(layer.A_log)[:, None]
    d_rate = exp_error(layer.A_log)[:, None]  # relative
    d_x = U * np.abs(x)
    if layer.lower_bound is None:
        small = np.minimum(x, 20.0)
        d_log_argument = sigmoid(small) * (exp_error(small) + d_x) + U
        d_softplus = d_log_argument + 4 * U * np.maximum(1.0, softplus(x))
        d_softplus = np.where(x > 20.0, d_x, d_softplus) + 2.1e-9  # exp(-20): the two branches differ at the threshold
        return rate * d_softplus + np.abs(g) * (d_rate + 2 * U)
    z = rate * x
    s = sigmoid(z)
    d_z = np.abs(z) * (d_rate + 2 * U) + rate * d_x
    d_s = s * (1 - s) * (d_z + exp_error(z)) + s * (U + DIVIDE)
    return abs(layer.lower_bound) * d_s + np.abs(g) * U


def norm_bound(raw: Array, d_raw: Array, extra: float) -> Array:
    """Bound of x * (1 / sqrt(sum(x^2) + 1e-6)) over the last axis; ``extra``: relative, for further factors."""
    total = np.sum(raw * raw, axis=-1, keepdims=True) + 1e-6
    d_total = dot_error(raw.shape[-1]) * total + U * total + 2 * np.sum(np.abs(raw) * d_raw, -1, keepdims=True)
    relative = 0.5 * d_total / total + DIVIDE + DIVIDE + U + extra
    return d_raw / np.sqrt(total) + np.abs(l2_normalise(raw)) * relative


def step_bound(
    S: Array, dS: Array, k: Array, dk: Array, v: Array, dv: Array, g: Array, dg: Array, beta: float, dbeta: float
) -> tuple[Array, Array]:
    """(state, its bound) after one delta step on one head [V, K]."""
    dot = dot_error(k.shape[0])
    decay = np.exp(g)
    d_decay = decay * (exp_error(g) + dg)
    S1 = S * decay
    dS1 = dS * decay + np.abs(S) * d_decay + U * np.abs(S1)
    p = S1 @ k
    dp = dot * (np.abs(S1) @ np.abs(k)) + dS1 @ np.abs(k) + np.abs(S1) @ dk
    w = v - p
    dw = dv + dp + U * np.abs(w)
    u = beta * w
    du = dbeta * np.abs(w) + beta * dw + U * np.abs(u)
    rank1 = np.outer(u, k)
    S2 = S1 + rank1
    dS2 = dS1 + np.outer(np.abs(u), dk) + np.outer(du, np.abs(k)) + U * np.abs(rank1) + U * np.abs(S2)
    return S2, dS2


def verify_bounds(layer: Layer, trace: Trace, d_state: Array | float = 0.0) -> Bounds:
    """Bounds of a `Trace`. ``d_state``: bound of the state it started from."""
    T, HV, V, K = trace.states.shape
    group = HV // layer.H
    _, d_y = conv_bound(layer, trace)
    q_end, k_end = layer.H * K, 2 * layer.H * K
    d_raw_q = d_y[:, :q_end].reshape(T, layer.H, K)
    d_raw_k = d_y[:, q_end:k_end].reshape(T, layer.H, K)
    d_raw_v = d_y[:, k_end:].reshape(T, HV, V)
    d_g = gate_bound(layer, trace.gate_input, trace.g)
    z = trace.beta_input
    d_beta = trace.beta * ((1 - trace.beta) * exp_error(z) + U + DIVIDE)

    k = l2_normalise(trace.raw_k)
    dk = norm_bound(trace.raw_k, d_raw_k, 0.0)
    q = l2_normalise(trace.raw_q) * layer.scale
    dq = norm_bound(trace.raw_q, d_raw_q, 2 * U) * layer.scale  # the scale is rounded to fp32, then multiplied

    S = trace.state.copy()
    dS = np.broadcast_to(np.asarray(d_state, dtype=np.float64), S.shape).copy()
    d_states, d_out = np.zeros_like(trace.states), np.zeros_like(trace.out)
    for t in range(T):
        for head in range(HV):
            i_h = head // group
            S[head], dS[head] = step_bound(
                S[head], dS[head], k[t, i_h], dk[t, i_h], trace.raw_v[t, head], d_raw_v[t, head],
                trace.g[t, head], d_g[t, head], trace.beta[t, head], d_beta[t, head],
            )  # fmt: skip
            magnitude = np.abs(S[head])
            d_out[t, head] = dot_error(K) * (magnitude @ np.abs(q[t, i_h])) + dS[head] @ np.abs(q[t, i_h])
            d_out[t, head] += magnitude @ dq[t, i_h]
        d_states[t] = dS
    d_out *= SECOND_ORDER
    half_ulp = 0.5 * ulp(np.abs(trace.out) + d_out, layer.act_dtype)
    return Bounds(
        y_rounded=d_y, raw_k=d_raw_k, raw_v=d_raw_v, g=SECOND_ORDER * d_g, beta=SECOND_ORDER * d_beta,
        states=SECOND_ORDER * d_states, out=d_out + half_ulp, out_unrounded=d_out,
    )  # fmt: skip
