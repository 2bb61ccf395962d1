"""Greedy decoding of the demo model through a state pool, plainly or with speculation, bit-reproducible per row.

A matrix product over 12 rows need not be bit-equal to 12 products over one row: libraries choose another kernel for
another row count. Everything outside the KDA kernels therefore runs in blocks of a constant number of rows
(:class:`RowBlocks`), so that a token's logits depend on its own row and state only, and equality between plain and
speculative decoding rests on the KDA kernels alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kda_backend import REFERENCE_LANE, StatePool, lane_mode
from kda_backend.sharding import HeadShard
from kda_kernels import KdaShape, LayerParams
from kda_tooling.demo.corpus import DOCUMENT_START
from kda_tooling.demo.drafting import PromptLookupDrafter, accepted_length
from kda_tooling.demo.model import KdaLanguageModel, KdaMixer, Mlp, ModelConfig

ACTIVATION_DTYPE = torch.bfloat16
PLAIN_LANE = "unfused"
"""Lane of plain decoding: one token a round, committed at once."""

INGEST_TOKENS = 256
"""Prompt bytes that one round of the ingestion verifies and commits."""


@dataclass(frozen=True)
class RowBlocks:
    """Applies row functions in blocks of exactly ``rows`` rows, the last one filled up with zeros.

    One row a block makes rows independent by construction and is right for a CPU; on a GPU, where the time goes into
    launches, 16 rows share one (all rows of a 16-row tile go through the same instructions; tested on the device).
    """

    rows: int

    @classmethod
    def for_device(cls, device: torch.device | str) -> RowBlocks:
        """The block that suits ``device``."""
        return cls(16 if torch.device(device).type == "cuda" else 1)

    def __call__(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """``function`` over the rows (dim 0) of ``inputs``, as if each row were alone; returns a tuple of tensors."""
        count = inputs[0].shape[0]
        blocks = []
        for first in range(0, count, self.rows):
            block = []
            for x in inputs:
                # Always a fresh buffer: CPU libraries may choose instructions by an operand's alignment.
                filled = x.new_zeros(self.rows, *x.shape[1:])
                part = x[first : first + self.rows]
                filled[: part.shape[0]] = part
                block.append(filled)
            blocks.append(function(*block))
        return tuple(torch.cat(parts)[:count] for parts in zip(*blocks, strict=True))


@dataclass(frozen=True)
class RequestState:
    """A request after its prompt: states ``[layers, 3, D]`` and ``[layers, H, V, K]``, and the first byte to emit."""

    text: bytes
    conv_state: Tensor
    ssm_state: Tensor
    root: int


@dataclass
class Decoded:
    """What one decoding run produced. ``from_draft`` marks, per request and byte, the bytes that came as drafts."""

    texts: list[bytes]
    from_draft: list[list[bool]]
    rounds: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    """(request, round) pairs by accepted tokens, the root included."""
    without_draft: int = 0
    """(request, round) pairs for which prompt lookup found nothing."""
    seconds: float = 0.0
    scratch_bytes: int = 0
    """Of this process's pool: its rank's heads."""
    faults: str | None = None
    """Out-of-range values that the kernels counted on the device; None is right."""
    conv_state: Tensor = field(default_factory=lambda: torch.empty(0))
    """Final states of the requests, ``[layers, requests, ...]`` on the CPU."""
    ssm_state: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def tokens_per_second(self) -> float:
        """Bytes emitted in rounds (the first one came with the prompt) per second."""
        return sum(len(text) - 1 for text in self.texts) / self.seconds if self.seconds else 0.0


def kda_shape(model: KdaLanguageModel) -> KdaShape:
    """Head layout of the model's layers."""
    return layer_shape(model.config)


def layer_shape(config: ModelConfig) -> KdaShape:
    """Head layout of the layers of a model of this config."""
    heads, dim = config.num_heads, config.head_dim
    return KdaShape(num_heads=heads, num_v_heads=heads, head_k_dim=dim, head_v_dim=dim)


class Decoder:
    """The model on a device, its KDA layers running through a :class:`kda_backend.StatePool`.

    With a ``shard`` this process runs that rank's heads of every KDA layer, and heads are gathered before the output
    projection. Everything else every rank computes whole, from whole weights, because a product with fewer columns
    need not be bit-equal to those columns of the whole one; which token comes next is rank 0's choice.
    """

    def __init__(
        self,
        model: KdaLanguageModel,
        device: torch.device | str,
        blocks: RowBlocks | None = None,
        shard: HeadShard | None = None,
    ) -> None:
        self.model = model.to(device)
        self.device = torch.device(device)
        self.shard = shard
        self.shape = shard.local if shard else kda_shape(model)
        self.blocks = blocks or RowBlocks.for_device(device)
        self.params = [
            LayerParams(
                conv_weight=mixer.conv_weight.detach().to(ACTIVATION_DTYPE),
                conv_bias=mixer.conv_bias.detach().to(ACTIVATION_DTYPE),
                A_log=mixer.A_log.detach().float(),
                dt_bias=mixer.dt_bias.detach().float(),
                lower_bound=model.config.lower_bound,
                scale=None,
            )
            for mixer, _ in model.layers()
        ]
        if shard:
            self.params = [shard.params(params) for params in self.params]

    @torch.no_grad()
    def round_logits(self, pool: StatePool, tokens: Tensor, lane: str, form: str = "recurrent") -> Tensor:
        """Verify ``tokens [B, T]`` in the round that ``pool.begin`` opened; logits ``[B, T, vocab]``, no commit."""
        model, blocks = self.model, self.blocks
        (x,) = blocks(lambda rows: (model.embed(rows),), tokens.flatten())
        for layer, (mixer, mlp) in enumerate(model.layers()):
            mixed_qkv, a, b, z = blocks(mixer.project, x)
            mixed_qkv, a, b = (part.to(ACTIVATION_DTYPE) for part in (mixed_qkv, a, b))
            if self.shard:
                mixed_qkv, a, b = self.shard.packed(mixed_qkv), self.shard.v_heads(a), self.shard.v_heads(b)
            o = pool.verify(layer, mixed_qkv, a, b, self.params[layer], lane=lane, form=form)
            if self.shard:
                o = self.shard.gather(o)
            (x,) = blocks(lambda *rows, mixer=mixer, mlp=mlp: (_after_kda(mixer, mlp, *rows),), x, o.float(), z)
        (logits,) = blocks(lambda rows: (model.logits(rows),), x)
        return logits.unflatten(0, tokens.shape)

    def decode(
        self,
        requests: Sequence[RequestState],
        *,
        lane: str,
        draft_tokens: int,
        num_bytes: int,
        ring_length: int | None = None,
        form: str = "recurrent",
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> Decoded:
        """Continue all ``requests`` by ``num_bytes`` bytes each in one batch, in rounds of ``draft_tokens`` tokens.

        ``draft_tokens`` counts the root: 1 is plain decoding. A request that is done leaves its row padded (slot -1).
        The accept length is cut at the last byte wanted, so every run ends in the state after the same bytes.
        ``form`` is that of verify (`kda_kernels.FORMS`). ``on_progress`` is called after each round with the bytes
        emitted so far over all requests.
        """
        count = len(requests)
        mode = lane_mode(lane)
        pool = StatePool(
            self.shape,
            num_layers=self.model.config.num_layers,
            num_slots=count,
            max_batch=count,
            draft_tokens=draft_tokens,
            mode=mode,
            dtype=ACTIVATION_DTYPE,
            device=self.device,
            ring_length=ring_length if mode == "ring" else None,
        )
        # Batch position b lives in slot count-1-b: rows and slots are different things.
        slots = list(reversed(range(count)))
        drafters = []
        for slot, request in zip(slots, requests, strict=True):
            states = request.conv_state.to(self.device), request.ssm_state.to(self.device)
            if self.shard:
                states = self.shard.packed(states[0]), self.shard.v_heads(states[1], 1)
            pool.load_slot(slot, *states)
            drafters.append(PromptLookupDrafter(request.text + bytes([request.root])))
        result = Decoded([bytes([r.root]) for r in requests], [[False] for _ in requests])
        result.scratch_bytes = pool.scratch_bytes
        start = time.perf_counter()
        while any(len(text) < num_bytes for text in result.texts):
            drafts = [
                drafter.draft(draft_tokens - 1) if len(text) < num_bytes else b""
                for drafter, text in zip(drafters, result.texts, strict=True)
            ]
            fed = [
                text[-1:] + draft.ljust(draft_tokens - 1, b"\0")
                for text, draft in zip(result.texts, drafts, strict=True)
            ]
            live = [len(text) < num_bytes for text in result.texts]
            round_slots = [slot if alive else -1 for slot, alive in zip(slots, live, strict=True)]
            pool.begin(torch.tensor(round_slots, dtype=torch.int32, device=self.device), draft_tokens)
            tokens = torch.tensor([list(row) for row in fed], device=self.device)
            chosen = self.round_logits(pool, tokens, lane, form).argmax(-1)
            if self.shard:
                torch.distributed.broadcast(chosen, 0)
            predicted = chosen.tolist()
            accept = [0] * count
            for i in range(count):
                if not live[i]:
                    continue
                wanted = num_bytes - len(result.texts[i])
                accept[i] = min(accepted_length(fed[i], bytes(predicted[i]), len(drafts[i])), wanted)
                emitted = bytes(predicted[i][: accept[i]])
                result.texts[i] += emitted
                # The last byte is the model's own choice, those before it were drafts.
                result.from_draft[i] += [True] * (accept[i] - 1) + [False]
                result.accepted[accept[i]] = result.accepted.get(accept[i], 0) + 1
                result.without_draft += not drafts[i]
                drafters[i].extend(emitted)
            pool.commit(torch.tensor(accept, dtype=torch.int32, device=self.device))
            result.rounds += 1
            on_progress(sum(len(text) for text in result.texts))
        conv_state, ssm_state = pool.conv_state[:, slots], pool.ssm_state[:, slots]
        if self.shard:
            conv_state, ssm_state = self.shard.gather_packed(conv_state), self.shard.gather(ssm_state, 2)
        result.conv_state, result.ssm_state = conv_state.cpu(), ssm_state.cpu()
        result.seconds = time.perf_counter() - start
        result.faults = pool.error_summary()
        return result


def ingest(model: KdaLanguageModel, prompt: bytes) -> RequestState:
    """Run ``prompt`` through the reference lane on the CPU, `INGEST_TOKENS` tokens a round; ``model`` must be there.

    Raises ``ValueError`` for an empty prompt.
    """
    if not prompt:
        raise ValueError("prompt is empty; at least one byte is needed to continue from.")
    decoder = Decoder(model, "cpu", RowBlocks(INGEST_TOKENS))
    pool = StatePool(
        decoder.shape,
        num_layers=model.config.num_layers,
        num_slots=1,
        max_batch=1,
        draft_tokens=INGEST_TOKENS,
        mode="ring",
        dtype=ACTIVATION_DTYPE,
    )
    for tokens in torch.tensor([[DOCUMENT_START, *prompt]]).split(INGEST_TOKENS, dim=1):
        pool.begin(torch.tensor([0]), tokens.shape[1])
        logits = decoder.round_logits(pool, tokens, REFERENCE_LANE)
        pool.commit(torch.tensor([tokens.shape[1]]))
    root = int(logits[0, -1].argmax())
    return RequestState(prompt, pool.conv_state[:, 0].clone(), pool.ssm_state[:, 0].clone(), root)


def _after_kda(mixer: KdaMixer, mlp: Mlp, x: Tensor, o: Tensor, z: Tensor) -> Tensor:
    x = x + mixer.finish(o, z)
    return x + mlp(x)
