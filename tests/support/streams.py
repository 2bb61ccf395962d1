"""Requests as endless token streams on several layers, driven through `kda_backend.StatePool` as an engine would.

A stream fixes what the projections of a layer would deliver for the n-th token of a request, so that speculative and
plain decoding of the same stream can be compared. Drafts that will be rejected carry other tokens than the stream's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda_backend import StatePool, lane_mode
from kda_kernels import KdaShape, LaunchConfig, LayerParams
from tests.support import oracle
from tests.support.cases import Case, make_params, oracle_layer, to_numpy

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # mixed_qkv [n, D], a [n, HV*K], b [n, HV]


@dataclass
class Streams:
    """``tokens[layer][request]`` are the inputs of a request's tokens; the initial states start every pool."""

    case: Case
    device: str
    params: list[LayerParams]
    tokens: list[list[Inputs]]
    wrong: list[Inputs]  # one layer's pool of tokens for rejected drafts
    conv_state: torch.Tensor  # [requests, layers, 3, D]
    ssm_state: torch.Tensor  # [requests, layers, HV, V, K]

    @property
    def layers(self) -> int:
        return len(self.params)

    @property
    def shape(self) -> KdaShape:
        return self.case.shape

    @classmethod
    def make(cls, case: Case, *, layers: int, length: int, device: str) -> Streams:
        """``case.B`` requests of ``length`` tokens; head layout, dtypes and gate are the case's."""
        generator = torch.Generator(device).manual_seed(case.seed + 7)
        shape, act = case.shape, case.dtype
        D, HV, K, V = shape.conv_dim, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device)

        def inputs(n: int) -> Inputs:
            return normal(n, D).to(act), normal(n, HV * K).to(act), (normal(n, HV) * 1.5).to(act)

        return cls(
            case=case,
            device=device,
            params=[make_params(case, generator) for _ in range(layers)],
            tokens=[[inputs(length) for _ in range(case.B)] for _ in range(layers)],
            wrong=[inputs(case.T * case.B) for _ in range(layers)],
            conv_state=normal(case.B, layers, 3, D).to(act),
            ssm_state=normal(case.B, layers, HV, V, K) * 0.3,
        )

    def batch(self, layer: int, starts: list[int], valid: list[int], T: int) -> Inputs:
        """T tokens per request from position ``starts[i]``; from ``valid[i]`` on they are wrong drafts."""
        parts: list[list[torch.Tensor]] = [[], [], []]
        for i, (start, good) in enumerate(zip(starts, valid, strict=True)):
            for j in range(3):
                parts[j].append(self.tokens[layer][i][j][start : start + good])
                parts[j].append(self.wrong[layer][j][i * T + good : (i + 1) * T])
        x, a, b = (torch.cat(part) for part in parts)
        return x, a, b


class Decoder:
    """One pool and lane that follows the streams; ``position[i]`` tokens of request i are committed."""

    def __init__(self, streams: Streams, slots: list[int], lane: str, config: LaunchConfig | None = None) -> None:
        self.streams, self.lane, self.config = streams, lane, config
        self.slots = slots
        case = streams.case
        self.pool = StatePool(
            streams.shape, num_layers=streams.layers, num_slots=case.B + case.spare_slots, max_batch=case.B,
            draft_tokens=case.T, mode=lane_mode(lane), dtype=case.dtype, device=streams.device,
            ring_length=case.L if lane_mode(lane) == "ring" else None,
        )  # fmt: skip
        self.pool.conv_state.fill_(float("nan"))
        self.pool.ssm_state.fill_(float("nan"))
        for i, slot in enumerate(slots):
            self.pool.load_slot(slot, streams.conv_state[i], streams.ssm_state[i])
        self.position = [0] * case.B

    def verify(self, T: int, valid: list[int], active: list[bool] | None = None) -> list[torch.Tensor]:
        """One round's verify on every layer; the outputs [B*T, HV, V]. Inactive requests are padded."""
        active = active or [True] * len(self.slots)
        slots = [slot if on else -1 for slot, on in zip(self.slots, active, strict=True)]
        self.pool.begin(torch.tensor(slots, dtype=torch.int32, device=self.streams.device), T)
        outputs = []
        for layer in range(self.streams.layers):
            x, a, b = self.streams.batch(layer, self.position, valid, T)
            outputs.append(
                self.pool.verify(layer, x, a, b, self.streams.params[layer], lane=self.lane, config=self.config)
            )
        return outputs

    def commit(self, accept: list[int]) -> None:
        self.pool.commit(torch.tensor(accept, dtype=torch.int32, device=self.streams.device))
        self.position = [p + n for p, n in zip(self.position, accept, strict=True)]

    def round(self, T: int, accept: list[int]) -> list[torch.Tensor]:
        """Verify T drafts of which ``accept[i]`` are the stream's, and commit those."""
        outputs = self.verify(T, accept)
        self.commit(accept)
        return outputs


def plain_decode(decoder: Decoder, lengths: list[int]) -> torch.Tensor:
    """The next ``lengths[i]`` tokens of each request, token by token through the T = 1 path.

    Returns the outputs [layers, requests, longest, HV, V], NaN where a request has no such token.
    """
    streams, shape = decoder.streams, decoder.streams.shape
    outputs = torch.full(
        (streams.layers, len(decoder.slots), max(lengths), shape.num_v_heads, shape.head_v_dim), float("nan"),
        dtype=streams.case.dtype, device=streams.device,
    )  # fmt: skip
    for n in range(max(lengths)):
        active = [n < length for length in lengths]
        for layer, out in enumerate(decoder.verify(1, [int(on) for on in active], active)):
            for i, on in enumerate(active):
                if on:
                    outputs[layer, i, n] = out[i]
        decoder.commit([int(on) for on in active])
    return outputs


def oracle_decode(streams: Streams, layer: int, request: int, length: int) -> oracle.Trace:
    """The oracle's run over the first ``length`` tokens of a request."""
    x, a, b = (to_numpy(t[:length]) for t in streams.tokens[layer][request])
    return oracle.verify(
        oracle_layer(streams.params[layer], streams.shape, streams.case.dtype), x, a, b,
        to_numpy(streams.conv_state[request, layer]), to_numpy(streams.ssm_state[request, layer]),
    )  # fmt: skip
