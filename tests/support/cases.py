"""Random verify problems, poisoned and guarded, with ids that carry the shape (`B4-T8-H8-HV8-K128-bf16`).

Every tensor an op may write sits between canaries in a buffer filled with random bit patterns, and every pool slot
that no request owns holds NaN: a scribble shows when the *whole* buffer is compared, a stray read shows as NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda_kernels import KdaShape, LayerParams, LayerState, Ring, Snapshots
from tests.support import oracle

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
GUARD = 64  # canary elements on both sides of a buffer; keeps 16-byte alignment of every dtype


@dataclass(frozen=True)
class Case:
    """What to build. ``padded``: batch positions with slot -1. ``pitch``: extra elements between pool slots."""

    B: int = 2
    T: int = 3
    H: int = 1
    HV: int = 2
    K: int = 64
    V: int = 0  # 0: as K
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None  # None: as dtype
    bias: bool = True
    lower_bound: float | None = None
    padded: tuple[int, ...] = ()
    length: int = 0  # ring length L; 0: T + 1
    pitch: int = 0
    spare_slots: int = 2
    seed: int = 0

    @property
    def shape(self) -> KdaShape:
        return KdaShape(self.H, self.HV, self.K, self.V or self.K)

    @property
    def L(self) -> int:
        return self.length or self.T + 1

    @property
    def id(self) -> str:
        parts = [f"B{self.B}", f"T{self.T}", f"H{self.H}", f"HV{self.HV}", f"K{self.K}"]
        if self.V and self.V != self.K:
            parts.append(f"V{self.V}")
        parts.append(NAMES[self.dtype])
        if self.weight_dtype not in (None, self.dtype):
            parts.append("w" + NAMES[self.weight_dtype])
        if not self.bias:
            parts.append("nobias")
        if self.lower_bound is not None:
            parts.append("safe")
        if self.padded:
            parts.append("pad" + "".join(map(str, self.padded)))
        if self.length:
            parts.append(f"L{self.length}")
        if self.pitch:
            parts.append(f"pitch{self.pitch}")
        return "-".join(parts)


class Guarded:
    """A tensor inside a larger buffer of random bit patterns; ``whole`` is everything, ``view`` the tensor proper."""

    def __init__(self, whole: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> None:
        self.whole = whole
        self.view = torch.as_strided(whole, size, stride, offset)

    @classmethod
    def garbage(cls, size: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, pitch: int = 0) -> Guarded:
        """``size[0]`` entries of packed inner dimensions, ``pitch`` extra elements between entries."""
        inner = 1
        strides = []
        for n in reversed(size[1:]):
            strides.append(inner)
            inner *= n
        generator = torch.Generator(device).manual_seed(seed)
        numel = size[0] * (inner + pitch) + 2 * GUARD
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        limits = torch.iinfo(integers)
        bits = torch.randint(limits.min, limits.max, (numel,), dtype=integers, device=device, generator=generator)
        return cls(bits.view(dtype), size, (inner + pitch, *reversed(strides)), GUARD)

    def clone(self) -> Guarded:
        return Guarded(self.whole.clone(), self.view.size(), self.view.stride(), self.view.storage_offset())


@dataclass
class Problem:
    """One layer's verify: inputs, and a `Guarded` buffer for everything that is or could be written.

    ``buffers``: conv_state, ssm_state, conv_window, snapshots, raw_v, raw_k, g, beta, out.
    """

    case: Case
    shape: KdaShape
    params: LayerParams
    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    slots: torch.Tensor
    buffers: dict[str, Guarded]
    rows: torch.Tensor | None = None

    @property
    def state(self) -> LayerState:
        return LayerState(self["conv_state"], self["ssm_state"], self["conv_window"])

    @property
    def ring(self) -> Ring:
        return Ring(self["raw_v"], self["raw_k"], self["g"], self["beta"])

    @property
    def snapshots(self) -> Snapshots:
        return Snapshots(self["snapshots"])

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.buffers[name].view

    def whole(self, name: str) -> torch.Tensor:
        return self.buffers[name].whole

    def fork(self, **changes: Any) -> Problem:
        """A copy whose buffers are its own."""
        changes.setdefault("buffers", {name: buffer.clone() for name, buffer in self.buffers.items()})
        return replace(self, **changes)

    def arguments(self, mode: str, **overrides: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """(positional, keyword) arguments of a verify op on this problem's own buffers; ``mode``: ring or snapshots."""
        keywords: dict[str, Any] = dict(
            shape=self.shape,
            params=self.params,
            state=self.state,
            record=self.ring if mode == "ring" else self.snapshots,
            slots=self.slots,
            draft_tokens=self.case.T,
            rows=self.rows,
            out=self["out"],
        )
        keywords.update(overrides)
        positional = tuple(keywords.pop(name, getattr(self, name)) for name in ("mixed_qkv", "a", "b"))
        return positional, keywords

    def run(self, op: Callable[..., torch.Tensor], mode: str = "ring", **overrides: Any) -> Problem:
        """``op`` on a fork of this problem; the fork, whose buffers hold what was written."""
        outcome = self.fork()
        positional, keywords = outcome.arguments(mode, **overrides)
        result = op(*positional, **keywords)
        if "out" not in overrides:
            assert result.data_ptr() == outcome["out"].data_ptr(), "an op must return the out tensor it was given"
        return outcome

    def live(self) -> list[int]:
        """Batch positions that are not padded."""
        return [i for i, slot in enumerate(self.slots.tolist()) if slot >= 0]

    def oracle_trace(self, i: int) -> oracle.Trace:
        """The oracle's verify of batch position i."""
        T, slot = self.case.T, int(self.slots[i])
        tokens = slice(i * T, (i + 1) * T)
        return oracle.verify(
            oracle_layer(self.params, self.shape, self.case.dtype),
            to_numpy(self.mixed_qkv[tokens]), to_numpy(self.a[tokens]), to_numpy(self.b[tokens]),
            to_numpy(self["conv_state"][slot]), to_numpy(self["ssm_state"][slot]),
        )  # fmt: skip


def to_numpy(x: torch.Tensor) -> Any:
    """Exact fp64 numpy copy."""
    return x.detach().cpu().double().numpy()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def oracle_layer(params: LayerParams, shape: KdaShape, dtype: torch.dtype) -> oracle.Layer:
    """The oracle's view of a layer; ``dtype``: the activation dtype."""
    sixteen_bit = params.conv_weight.dtype != torch.float32
    return oracle.Layer(
        conv_weight=to_numpy(params.conv_weight),
        conv_bias=None if params.conv_bias is None else to_numpy(params.conv_bias),
        A_log=to_numpy(params.A_log), dt_bias=to_numpy(params.dt_bias), lower_bound=params.lower_bound,
        scale=shape.head_k_dim**-0.5 if params.scale is None else params.scale,
        H=shape.num_heads, HV=shape.num_v_heads, K=shape.head_k_dim, V=shape.head_v_dim,
        act_dtype=dtype_name(dtype), product_dtype=dtype_name(params.conv_weight.dtype) if sixteen_bit else None,
    )  # fmt: skip


def make_params(case: Case, generator: torch.Generator) -> LayerParams:
    """Parameters of the magnitudes that training gives: rates exp(A_log) in [1, 4.5], dt_bias in [-4, 1], 4 conv taps
    of which the newest is the largest. On the generator's device."""
    device = generator.device
    shape = case.shape
    D, HV, K = shape.conv_dim, shape.num_v_heads, shape.head_k_dim
    weight_dtype = case.weight_dtype or case.dtype
    taps = torch.tensor([0.25, 0.3, 0.4, 0.7], device=device)
    weight = (torch.randn(D, 4, generator=generator, device=device) * 0.4 + 0.5) * taps
    bias = torch.randn(D, generator=generator, device=device) * 0.2 if case.bias else None
    return LayerParams(
        conv_weight=weight.to(weight_dtype),
        conv_bias=None if bias is None else bias.to(weight_dtype),
        A_log=torch.rand(HV, generator=generator, device=device) * 1.5,
        dt_bias=torch.rand(HV * K, generator=generator, device=device) * 5 - 4,
        lower_bound=case.lower_bound,
    )


def make_problem(case: Case, device: str) -> Problem:
    """The problem of a case: always the same one for the same case and device type."""
    seed = zlib.crc32(case.id.encode()) + case.seed
    generator = torch.Generator(device).manual_seed(seed)
    shape, B, T = case.shape, case.B, case.T
    D, H, HV, K, V = shape.conv_dim, shape.num_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim
    num_slots = B + case.spare_slots

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    slots = torch.randperm(num_slots, generator=generator, device=device)[:B].to(torch.int32)
    slots[list(case.padded)] = -1
    inputs = {
        "mixed_qkv": normal(B * T, D),
        "a": normal(B * T, HV * K),
        "b": normal(B * T, HV) * 1.5,
    }
    for x in inputs.values():
        x.view(B, T, x.shape[1])[list(case.padded)] = float("nan")

    def guarded(name: str, size: tuple[int, ...], dtype: torch.dtype, pitch: int = 0) -> Guarded:
        return Guarded.garbage(size, dtype, device, seed + zlib.crc32(name.encode()), pitch)

    f32, act, pitch = torch.float32, case.dtype, case.pitch
    buffers = {
        "conv_state": guarded("conv_state", (num_slots, 3, D), act, pitch),
        "ssm_state": guarded("ssm_state", (num_slots, HV, V, K), f32, pitch),
        "conv_window": guarded("conv_window", (B, T, 3, D), act, pitch),
        "snapshots": guarded("snapshots", (B, T, HV, V, K), f32, pitch),
        "raw_v": guarded("raw_v", (num_slots, HV, case.L, V), act, pitch),
        "raw_k": guarded("raw_k", (num_slots, H, case.L, K), act, pitch),
        "g": guarded("g", (num_slots, HV, case.L, K), f32, pitch),
        "beta": guarded("beta", (num_slots, HV, case.L), f32, pitch),
        "out": guarded("out", (B * T, HV, V), act),
    }
    conv_state, ssm_state = buffers["conv_state"].view, buffers["ssm_state"].view
    conv_state.fill_(float("nan"))
    ssm_state.fill_(float("nan"))
    live = slots[slots >= 0].long()
    conv_state[live] = normal(len(live), 3, D).to(act)
    ssm_state[live] = normal(len(live), HV, V, K) * 0.3
    return Problem(
        case=case,
        shape=shape,
        params=make_params(case, generator),
        mixed_qkv=inputs["mixed_qkv"].to(act),
        a=inputs["a"].to(act),
        b=inputs["b"].to(act),
        slots=slots,
        buffers=buffers,
    )
