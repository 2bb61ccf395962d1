"""A small byte-level language model with Kimi Delta Attention as its only token mixer (torch only).

The dense parts are methods over rows (``[rows, width]``), apart from the recurrence: training feeds them all tokens
at once, decoding feeds them a fixed number of rows, and between them stands either the differentiable chunked form
(:mod:`kda_tooling.demo.chunked`) or the verify kernels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_kernels import CONV_WIDTH
from kda_kernels.shapes import SUPPORTED_HEAD_DIMS
from kda_tooling.demo.chunked import chunked_kda

MAX_ASSET_BYTES = 2 * 1024 * 1024
VOCAB = 256
"""Tokens are bytes."""

FP32_PARAMETERS = ("A_log", "dt_bias")
"""Parameters that the kernels read in fp32; everything else is shipped as bf16."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. ``num_heads`` counts q, k and v heads alike; K = V = ``head_dim``.

    The defaults fit 2 MiB. ``num_layers * num_heads`` is kept small because Triton's interpreter, in which the demo
    runs without a GPU, pays several milliseconds per (request, head, token) whatever the head dim.
    """

    num_layers: int = 3
    width: int = 160
    num_heads: int = 2
    head_dim: int = 64
    mlp_width: int = 416
    lower_bound: float = -5.0
    vocab: int = VOCAB

    @property
    def conv_dim(self) -> int:
        """Packed q | k | v channels."""
        return 3 * self.num_heads * self.head_dim


class KdaMixer(nn.Module):
    """One KDA layer: merged projection, causal conv + SiLU, gated delta rule, gated RMSNorm, output projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.num_heads * config.head_dim
        # Rows of the merged projection: q | k | v | a (gate input) | z (output gate) | b.
        self.split = (config.conv_dim, inner, inner, config.num_heads)
        self.norm = nn.Parameter(torch.ones(config.width))
        self.in_proj = nn.Linear(config.width, sum(self.split), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(config.conv_dim, CONV_WIDTH))
        self.conv_bias = nn.Parameter(torch.zeros(config.conv_dim))
        self.A_log = nn.Parameter(torch.zeros(config.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.out_norm = nn.Parameter(torch.ones(config.head_dim))
        self.out_proj = nn.Linear(inner, config.width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights from torch's global generator."""
        with torch.no_grad():
            nn.init.normal_(self.in_proj.weight, std=self.config.width**-0.5)
            nn.init.normal_(self.out_proj.weight, std=(2 * self.config.num_layers * self.out_proj.in_features) ** -0.5)
            nn.init.uniform_(self.conv_weight, -(CONV_WIDTH**-0.5), CONV_WIDTH**-0.5)
            # Per-step log decay lower_bound * sigmoid(dt_bias) spread log-uniformly from 1/1000 to 1: memories
            # between one and a thousand bytes long.
            decay = torch.exp(torch.empty(self.dt_bias.shape).uniform_(math.log(1e-3), math.log(1.0)))
            self.dt_bias.copy_(torch.logit(decay / -self.config.lower_bound))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``x [..., width]`` -> mixed_qkv ``[..., D]``, a ``[..., H*K]``, b ``[..., H]``, z ``[..., H*V]``."""
        hidden = F.rms_norm(x, (self.config.width,), self.norm, 1e-6)
        mixed_qkv, a, z, b = self.in_proj(hidden).split(self.split, dim=-1)
        return mixed_qkv, a, b, z

    def finish(self, o: Tensor, z: Tensor) -> Tensor:
        """Heads' output ``o [..., H, V]`` and gate ``z [..., H*V]`` -> the layer's residual update ``[..., width]``."""
        normed = F.rms_norm(o, (self.config.head_dim,), self.out_norm, 1e-6)
        return self.out_proj(normed.flatten(-2) * torch.sigmoid(z))

    def recurrence_inputs(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Conv, SiLU, gates and l2-norms over whole sequences ``[batch, tokens, ...]`` from an empty conv state.

        Returns q, k, v, g ``[batch, tokens, H, K]`` and beta ``[batch, tokens, H]`` in fp32, q scaled by K**-0.5.
        """
        tokens = mixed_qkv.shape[1]
        padded = F.pad(mixed_qkv, (0, 0, CONV_WIDTH - 1, 0)).float()
        acc: Tensor = self.conv_bias
        for tap in range(CONV_WIDTH):
            acc = torch.addcmul(acc, padded[:, tap : tap + tokens], self.conv_weight[:, tap])
        q, k, v = (part.unflatten(-1, (self.config.num_heads, -1)) for part in F.silu(acc).chunk(3, dim=-1))
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * self.config.head_dim**-0.5)
        x = (a.float() + self.dt_bias).unflatten(-1, (self.config.num_heads, -1))
        g = self.config.lower_bound * torch.sigmoid(torch.exp(self.A_log)[:, None] * x)
        return q, k, v, g, torch.sigmoid(b.float())

    def forward(self, x: Tensor) -> Tensor:
        """Residual update for whole sequences ``x [batch, tokens, width]`` from an empty state (training form)."""
        mixed_qkv, a, b, z = self.project(x)
        with torch.autocast(x.device.type, enabled=False):
            o, _ = chunked_kda(*self.recurrence_inputs(mixed_qkv, a, b))
        return self.finish(o, z)


class Mlp(nn.Module):
    """SwiGLU with its RMSNorm in front."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(config.width))
        self.up = nn.Linear(config.width, 2 * config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)
        nn.init.normal_(self.up.weight, std=config.width**-0.5)
        nn.init.normal_(self.down.weight, std=(2 * config.num_layers * config.mlp_width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Residual update of ``x [..., width]``, row by row."""
        gate, value = self.up(F.rms_norm(x, x.shape[-1:], self.norm, 1e-6)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class KdaLanguageModel(nn.Module):
    """Bytes in, next-byte logits out; the embedding is tied with the head."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ModelConfig()
        self.embedding = nn.Embedding(config.vocab, config.width)
        # Small, because the tied head makes a byte's own logit about width**0.5 * |embedding| before training.
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.mixers = nn.ModuleList(KdaMixer(config) for _ in range(config.num_layers))
        self.mlps = nn.ModuleList(Mlp(config) for _ in range(config.num_layers))
        self.out_norm = nn.Parameter(torch.ones(config.width))

    def layers(self) -> Iterator[tuple[KdaMixer, Mlp]]:
        """The layers in order, each its mixer and its MLP."""
        return zip(cast("Iterable[KdaMixer]", self.mixers), cast("Iterable[Mlp]", self.mlps), strict=True)

    def embed(self, tokens: Tensor) -> Tensor:
        """``tokens [...]`` integer -> fp32 residual stream ``[..., width]``."""
        return self.embedding(tokens).float() * self.config.width**0.5

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream ``[..., width]`` -> logits ``[..., vocab]``."""
        return F.linear(F.rms_norm(x, x.shape[-1:], self.out_norm, 1e-6), self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens [batch, tokens]`` -> logits ``[batch, tokens, vocab]``, every sequence from an empty state."""
        x = self.embed(tokens)
        for mixer, mlp in self.layers():
            x = x + mixer(x)
            x = x + mlp(x)
        return self.logits(x)


def shipped_tensors(model: KdaLanguageModel) -> dict[str, Tensor]:
    """The tensors as they are stored: bf16 on the CPU, except A_log and dt_bias in fp32."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        dtype = torch.float32 if name.endswith(FP32_PARAMETERS) else torch.bfloat16
        tensors[name] = tensor.detach().to("cpu", dtype).contiguous()
    return tensors


def save_model(model: KdaLanguageModel, weights: Path, metadata: dict[str, Any]) -> None:
    """Write ``weights`` (safetensors) and the JSON beside it, whose ``config`` key :func:`load_model` needs.

    Raises ``ValueError``, before anything is written, when the file would pass :data:`MAX_ASSET_BYTES` or a number is
    not finite.
    """
    from safetensors.torch import save

    tensors = shipped_tensors(model)
    _check_finite(tensors)
    data = save(tensors)
    if len(data) > MAX_ASSET_BYTES:
        raise ValueError(
            f"config={model.config} gives {len(data)} bytes of safetensors, allowed are {MAX_ASSET_BYTES}. "
            "Lower width, mlp_width or num_layers."
        )
    document = {"config": asdict(model.config), "safetensors_bytes": len(data), **metadata}
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_bytes(data)
    weights.with_suffix(".json").write_text(text, encoding="utf-8")


def _check_finite(tensors: dict[str, Tensor]) -> None:
    wrong = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if wrong:
        raise ValueError(f"weights of the model are not finite: {', '.join(wrong)}")


def _config_of(metadata: Any) -> ModelConfig:
    """The checked ``config`` of a model's JSON: sizes that the kernels and bytes as tokens allow."""
    names = [field.name for field in fields(ModelConfig)]
    given = metadata.get("config") if isinstance(metadata, dict) else None
    if not isinstance(given, dict) or set(given) != set(names):
        raise ValueError(f"its config must have the keys {', '.join(names)}")
    for name in names:
        value = given[name]
        if name == "lower_bound":
            if isinstance(value, bool) or not isinstance(value, int | float) or not -1e6 < value < 0:
                raise ValueError(f"its config's lower_bound must be a number below 0, got {value!r}")
            continue
        allowed = {"head_dim": SUPPORTED_HEAD_DIMS, "vocab": (VOCAB,), "num_layers": range(1, 1025)}
        sizes = allowed.get(name, range(1, (1 << 16) + 1))
        if type(value) is not int or value not in sizes:
            said = f"within {sizes[0]}..{sizes[-1]}" if isinstance(sizes, range) else f"of {', '.join(map(str, sizes))}"
            raise ValueError(f"its config's {name} must be a whole number {said}, got {value!r}")
    return ModelConfig(**given)


def _check_bits(metadata: dict[str, Any]) -> None:
    """``bits_per_byte`` may be missing; where it is there, it is what reports print."""
    bits = metadata.get("bits_per_byte")
    if bits is None:
        return
    values = [bits.get(name) for name in ("model", "byte_3gram")] if isinstance(bits, dict) else [None]
    if not all(isinstance(value, int | float) and 0 <= value < 1e6 for value in values):
        raise ValueError(f"its bits_per_byte must be an object with numbers model and byte_3gram, got {bits!r}")


def load_model(weights: Path, device: str | torch.device = "cpu") -> tuple[KdaLanguageModel, dict[str, Any]]:
    """Read a saved model and its metadata. Parameters come back in fp32 holding exactly the stored values.

    Raises ``FileNotFoundError`` when the safetensors or the JSON beside it is missing, ``ValueError`` when one cannot
    be read or they do not fit each other.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    description = weights.with_suffix(".json")
    for path in (weights, description):
        if not path.is_file():
            raise FileNotFoundError(f"no model file {path}; train one with `kda train-demo --out {weights.parent}`.")
    try:
        metadata = json.loads(description.read_text(encoding="utf-8"))
        config = _config_of(metadata)
        _check_bits(metadata)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{description} does not describe a model: {error}") from None
    try:
        tensors = load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights} is no readable safetensors file: {error}") from None
    with torch.device("meta"):  # sizes of any config cost nothing there
        wanted = {name: tuple(tensor.shape) for name, tensor in KdaLanguageModel(config).state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{weights} does not fit the config in {description.name}: {len(wrong)} tensors differ, the first is "
            f"{name} with shape {given.get(name, 'missing')}, expected {wanted.get(name, 'none')}"
        )
    try:
        _check_finite(tensors)
    except ValueError as error:
        raise ValueError(f"{weights}: {error}") from None
    model = KdaLanguageModel(config)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.to(device).eval().requires_grad_(False), metadata
