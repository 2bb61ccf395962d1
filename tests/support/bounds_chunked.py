"""How far the chunked form computed in fp32 may be from the fp64 oracle: `tests.support.bounds`, continued.

The same running error analysis with the same costs (U a rounding, `dot_error` a sum over K, `exp_error` an exp), along
the chunked form's own steps. A fused multiply-add is charged two roundings, of the product and of the sum, because the
interpreter and torch have no fused one. What underflows is lost absolutely, not relatively: `UNDERFLOW` per product of
decays, from the smallest normal fp32 number because a device may flush what is below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.support.bounds import SECOND_ORDER, U, dot_error, exp_error, norm_bound, verify_bounds
from tests.support.oracle import Array, Layer, Trace, l2_normalise

UNDERFLOW = 2.0**-126


@dataclass(frozen=True)
class Approximate:
    """Exact values and a bound of the error with which fp32 arithmetic has them."""

    value: Array
    error: Array

    def __getitem__(self, index: object) -> Approximate:
        return Approximate(self.value[index], self.error[index])

    def times(self, other: Approximate) -> Approximate:
        """One rounded product."""
        value = self.value * other.value
        error = self.error * np.abs(other.value) + np.abs(self.value) * other.error + U * np.abs(value)
        return Approximate(value, error + UNDERFLOW)

    def plus(self, other: Approximate) -> Approximate:
        """One rounded sum."""
        value = self.value + other.value
        return Approximate(value, self.error + other.error + U * np.abs(value))

    def minus(self, other: Approximate) -> Approximate:
        """One rounded difference."""
        return self.plus(Approximate(-other.value, other.error))

    def dot(self, other: Approximate) -> Approximate:
        """Sum over the last axis of the products."""
        x, y = np.abs(self.value), np.abs(other.value)
        K = x.shape[-1]
        error = np.sum(dot_error(K) * x * y + self.error * y + x * other.error, axis=-1) + K * UNDERFLOW
        return Approximate(np.sum(self.value * other.value, axis=-1), error)


def head_outputs(
    S: Array, q: Approximate, k: Approximate, v: Approximate, d: Approximate, beta: Approximate
) -> Approximate:
    """The outputs [T, V] of one head. S: [V, K] exact; q, k, d = exp(g): [T, K]; v: [T, V]; beta: [T]."""
    T = q.value.shape[0]
    state = Approximate(S, np.zeros_like(S))
    product, keys, decayed = d[0], [], []
    A: dict[tuple[int, int], Approximate] = {}
    outputs = []
    for t in range(T):
        product = product.times(d[t]) if t else product
        keys = [key.times(d[t]) for key in keys]
        for s in range(t):
            A[t, s] = beta[t].times(keys[s].dot(k[t]))
        keys.append(k[t])
        decayed.append(k[t].times(product))
        M = [key.dot(q[t]) for key in keys]
        for r in range(t, 0, -1):
            for s in range(r):
                M[s] = M[s].minus(M[r].times(A[r, s]))
        C = [M[s].times(beta[s]) for s in range(t + 1)]
        w = q[t].times(product)
        for s in range(t + 1):
            w = w.minus(decayed[s].times(C[s]))
        out = state.dot(w)
        for s in range(t + 1):
            out = out.plus(v[s].times(C[s]))
        outputs.append(out)
    return Approximate(np.stack([o.value for o in outputs]), np.stack([o.error for o in outputs]))


def chunked_out(layer: Layer, trace: Trace) -> tuple[Array, Array]:
    """(outputs by the chunked form, bound of their fp32 error before they are rounded), both [T, HV, V]."""
    T, HV, V, K = trace.states.shape
    inputs = verify_bounds(layer, trace)
    d_raw_q = inputs.y_rounded[:, : layer.H * K].reshape(T, layer.H, K)
    k = Approximate(l2_normalise(trace.raw_k), norm_bound(trace.raw_k, inputs.raw_k, 0.0))
    scaled = l2_normalise(trace.raw_q) * layer.scale
    q = Approximate(scaled, norm_bound(trace.raw_q, d_raw_q, 2 * U) * layer.scale)
    decay = np.exp(trace.g)
    d = Approximate(decay, decay * (exp_error(trace.g) + inputs.g) + UNDERFLOW)
    beta, v = Approximate(trace.beta, inputs.beta), Approximate(trace.raw_v, inputs.raw_v)
    out, bound = np.zeros((T, HV, V)), np.zeros((T, HV, V))
    for head in range(HV):
        of_k_head, of_head = (slice(None), head // (HV // layer.H)), (slice(None), head)
        result = head_outputs(trace.state[head], q[of_k_head], k[of_k_head], v[of_head], d[of_head], beta[of_head])
        out[:, head], bound[:, head] = result.value, SECOND_ORDER * result.error
    return out, bound
