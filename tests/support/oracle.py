"""An independent fp64 oracle of KDA verify, fold and commit: numpy only, one request at a time, nothing of ours.

It is written from the formulas, not from the kernels, so that two arms of ours that agree can still be caught sharing
a bug. Only the roundings that belong to the contract are applied: a 16-bit weight's product and the SiLU output are
rounded to their 16-bit type. Everything else is fp64, so what is left of a difference is the fp32 arithmetic of the
kernel under test, which `tests.support.bounds` bounds.

Arrays hold exact fp64 copies of 16-bit and fp32 values. Letters: T tokens, H q/k heads, HV v heads, K, V head sizes,
D = 2*H*K + HV*V channels packed q | k | v.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray

# type name -> (significand bits, smallest normal exponent, largest finite value)
_FORMATS = {
    "bfloat16": (8, -126, 3.3895313892515355e38),
    "float16": (11, -14, 65504.0),
    "float32": (24, -126, 3.4028234663852886e38),
}


def ulp(x: Array, dtype: str) -> Array:
    """Spacing of the binary format ``dtype`` around x (of its subnormals where x is one)."""
    bits, smallest, _ = _FORMATS[dtype]
    exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, smallest) - bits + 1)


def round_to(x: Array, dtype: str) -> Array:
    """x rounded once, to nearest even, to the binary format ``dtype``; still an fp64 array."""
    spacing = ulp(x, dtype)
    rounded = np.rint(x / spacing) * spacing
    return np.where(np.abs(rounded) > _FORMATS[dtype][2], np.copysign(np.inf, x), rounded)


@dataclass(frozen=True)
class Layer:
    """Parameters of a layer. ``product_dtype``: the 16-bit type of the conv weights, or None if they are fp32."""

    conv_weight: Array  # [D, 4], tap 3 multiplies the newest token
    conv_bias: Array | None  # [D]
    A_log: Array  # [HV]
    dt_bias: Array  # [HV*K]
    lower_bound: float | None
    scale: float
    H: int
    HV: int
    K: int
    V: int
    act_dtype: str
    product_dtype: str | None


@dataclass(frozen=True)
class Trace:
    """Everything one request's verify computes, fp64, indexed by token first."""

    acc: Array  # [T, D] conv accumulator
    acc_magnitude: Array  # [T, D] sum of the absolute values of the accumulator's terms
    y: Array  # [T, D] SiLU output before it is rounded
    y_rounded: Array  # [T, D]
    window: Array  # [T, 3, D] conv state after token t
    gate_input: Array  # [T, HV, K] a + dt_bias
    beta_input: Array  # [T, HV]
    raw_q: Array  # [T, H, K] rounded, before the norm
    raw_k: Array  # [T, H, K] rounded, before the norm: the ring record
    raw_v: Array  # [T, HV, V] rounded, before the delta rule: the ring record
    g: Array  # [T, HV, K]
    beta: Array  # [T, HV]
    state: Array  # [HV, V, K] before the first token
    states: Array  # [T, HV, V, K] after token t
    out: Array  # [T, HV, V] before it is rounded


def conv_columns(conv_state: Array, x: Array) -> Array:
    """[T+3, D]: the three columns of the conv state, oldest first, then the T new tokens."""
    return np.concatenate([conv_state, x], axis=0)


def conv(layer: Layer, columns: Array, t: int) -> tuple[Array, Array]:
    """(accumulator, sum of absolute terms) of token t, both [D]."""
    terms = [np.zeros(columns.shape[1]) if layer.conv_bias is None else layer.conv_bias]
    for tap in range(4):
        product = columns[t + tap] * layer.conv_weight[:, tap]  # exact for 16-bit operands
        terms.append(product if layer.product_dtype is None else round_to(product, layer.product_dtype))
    return np.sum(terms, axis=0), np.sum(np.abs(terms), axis=0)


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), and x itself beyond 20 (the field's threshold)."""
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def log_decay(layer: Layer, x: Array) -> Array:
    """g of both gates. x = a + dt_bias: [HV, K]."""
    rate = np.exp(layer.A_log)[:, None]
    if layer.lower_bound is not None:
        return layer.lower_bound * sigmoid(rate * x)
    return -rate * softplus(x)


def l2_normalise(x: Array) -> Array:
    """Over the last axis, with the contract's 1e-6 under the root."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def delta_step(S: Array, k: Array, v: Array, g: Array, beta: float) -> Array:
    """One step of the gated delta rule on one head's state S [V, K]; k is normalised."""
    decayed = S * np.exp(g)[None, :]
    u = beta * (v - decayed @ k)
    return decayed + np.outer(u, k)


def split_channels(layer: Layer, y: Array) -> tuple[Array, Array, Array]:
    """[D] -> q [H, K], k [H, K], v [HV, V]."""
    q_end, k_end = layer.H * layer.K, 2 * layer.H * layer.K
    return (
        y[:q_end].reshape(layer.H, layer.K),
        y[q_end:k_end].reshape(layer.H, layer.K),
        y[k_end:].reshape(layer.HV, layer.V),
    )


def verify(layer: Layer, x: Array, a: Array, b: Array, conv_state: Array, ssm_state: Array) -> Trace:
    """T tokens of one request.

    x [T, D], a [T, HV*K], b [T, HV], conv_state [3, D] (oldest first), ssm_state [HV, V, K]. Also plain decoding: the
    state after token t does not depend on later tokens.
    """
    columns = conv_columns(conv_state, x)
    group = layer.HV // layer.H
    S = ssm_state.copy()
    rows: dict[str, list[Array]] = {name: [] for name in Trace.__dataclass_fields__ if name != "state"}
    for t in range(x.shape[0]):
        acc, magnitude = conv(layer, columns, t)
        y = silu(acc)
        y_rounded = round_to(y, layer.act_dtype)
        raw_q, raw_k, raw_v = split_channels(layer, y_rounded)
        gate_input = (a[t] + layer.dt_bias).reshape(layer.HV, layer.K)
        g = log_decay(layer, gate_input)
        beta = sigmoid(b[t])
        q = l2_normalise(raw_q) * layer.scale
        k = l2_normalise(raw_k)
        out = np.zeros((layer.HV, layer.V))
        S = S.copy()
        for head in range(layer.HV):
            S[head] = delta_step(S[head], k[head // group], raw_v[head], g[head], beta[head])
            out[head] = S[head] @ q[head // group]
        values = dict(
            acc=acc, acc_magnitude=magnitude, y=y, y_rounded=y_rounded, window=columns[t + 1 : t + 4],
            gate_input=gate_input, beta_input=b[t], raw_q=raw_q, raw_k=raw_k, raw_v=raw_v, g=g, beta=beta,
            states=S, out=out,
        )  # fmt: skip
        for name, value in values.items():
            rows[name].append(value)
    return Trace(state=ssm_state, **{name: np.stack(values) for name, values in rows.items()})


def fold(layer: Layer, state: Array, raw_k: Array, raw_v: Array, g: Array, beta: Array, accept: int) -> Array:
    """Replay ``accept`` records, indexed by token first, on ``state`` [HV, V, K]."""
    S = state.copy()
    for t in range(accept):
        for head in range(layer.HV):
            k = l2_normalise(raw_k[t, head // (layer.HV // layer.H)])
            S[head] = delta_step(S[head], k, raw_v[t, head], g[t, head], beta[t, head])
    return S


def commit_conv(conv_state: Array, window: Array, slots: list[int], accept_lens: list[int]) -> Array:
    """The conv pool [slots, 3, D] after commit: row b's window [rows, T, 3, D] of its last accepted token."""
    result = conv_state.copy()
    for row, (slot, accept) in enumerate(zip(slots, accept_lens, strict=True)):
        if slot >= 0 and accept > 0:
            result[slot] = window[row, accept - 1]
    return result
