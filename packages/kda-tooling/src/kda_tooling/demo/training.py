"""Training of the demo model on the standard library's source, and its held-out bits per byte (``kda train-demo``)."""

from __future__ import annotations

import datetime
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from kda_tooling.demo.corpus import DOCUMENT_START, Corpus, load_corpus
from kda_tooling.demo.model import KdaLanguageModel, ModelConfig, save_model, shipped_tensors
from kda_tooling.demo.ngram import ByteTrigram

WEIGHTS_NAME = "demo_model.safetensors"
EVAL_WINDOW = 2048
REPORTS = 20


class DivergedError(RuntimeError):
    """The loss or what was measured of the model is no finite number."""


@dataclass(frozen=True)
class TrainSettings:
    """A training run: ``batch`` sequences of ``sequence`` bytes a step, for ``minutes`` of wall clock."""

    minutes: float = 4.5
    batch: int = 64
    sequence: int = 1024
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup: float = 0.03
    clip: float = 1.0
    seed: int = 0
    device: str = "cpu"
    compile: bool = False
    eval_bytes: int | None = None


def learning_rate_scale(progress: float, warmup: float) -> float:
    """Linear warm-up over the first ``warmup`` share of the run, then a cosine to 0; ``progress`` is 0..1."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return 0.5 * (1.0 + math.cos(math.pi * min((progress - warmup) / (1.0 - warmup), 1.0)))


def _optimizer(model: KdaLanguageModel, settings: TrainSettings) -> torch.optim.AdamW:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "conv" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "conv" in name]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = settings.device.startswith("cuda")
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=fused)


def _batches(text: Tensor, settings: TrainSettings) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of the training text as (inputs, targets), each ``[batch, sequence]`` int64."""
    generator = torch.Generator(text.device).manual_seed(settings.seed)
    window = torch.arange(settings.sequence + 1, device=text.device)
    last = text.numel() - settings.sequence
    while True:
        starts = torch.randint(last, (settings.batch, 1), generator=generator, device=text.device)
        chosen = text[starts + window].long()
        yield chosen[:, :-1], chosen[:, 1:]


def fit(model: KdaLanguageModel, train_text: bytes, settings: TrainSettings, console: Console) -> dict[str, float]:
    """Train ``model`` in place for ``settings.minutes``; returns steps, bytes seen, seconds and the last loss (bits).

    Raises :class:`DivergedError` when the loss stops being finite.
    """
    device = torch.device(settings.device)
    text = torch.frombuffer(bytearray(train_text), dtype=torch.uint8).to(device)
    optimizer = _optimizer(model, settings)
    forward = torch.compile(model) if settings.compile else model
    seconds = settings.minutes * 60
    average: Tensor | None = None
    shown = float("nan")
    step = 0
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("step {task.fields[step]}  {task.fields[loss]:.3f} bits/byte"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=1.0, step=0, loss=float("nan"))
        reported = 0
        start = time.monotonic()
        for inputs, targets in _batches(text, settings):
            elapsed = time.monotonic() - start
            if elapsed >= seconds and step > 0:
                break
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * learning_rate_scale(elapsed / seconds, settings.warmup)
            # On CPUs without bf16 units autocast is several times slower than fp32.
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = forward(inputs)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            average = loss.detach() if average is None else torch.lerp(average, loss.detach(), 0.05)
            step += 1
            # Reading the loss waits for the GPU; the wait also keeps the wall clock honest.
            if step % 10 == 0 or step == 1:
                shown = _bits(average, step)
                progress.update(task, completed=min(elapsed / seconds, 1.0), step=step, loss=shown)
                if elapsed / seconds * REPORTS >= reported + 1 and not console.is_terminal:
                    reported = int(elapsed / seconds * REPORTS)
                    console.print(f"{elapsed:6.0f} s  step {step:6d}  {shown:.4f} bits/byte")
        shown = _bits(average, step)  # the steps since the last look may have diverged
        progress.update(task, completed=1.0, step=step, loss=shown)
    return {
        "steps": step,
        "bytes_seen": step * settings.batch * settings.sequence,
        "seconds": round(time.monotonic() - start, 1),
        "train_bits_per_byte": round(shown, 4),
    }


def _bits(average: Tensor | None, step: int) -> float:
    """The running loss in bits; DivergedError where it is no number. NaN and infinity stay in a running average."""
    bits = math.nan if average is None else average.item() / math.log(2)
    if not math.isfinite(bits):
        raise DivergedError(f"the loss is {bits} at step {step}; lower --learning-rate.")
    return bits


@torch.no_grad()
def bits_of(model: KdaLanguageModel, documents: list[bytes], batch: int = 16) -> float:
    """Total bits ``model`` needs for ``documents``, in fp32, from an empty state every :data:`EVAL_WINDOW` bytes.

    Every byte is counted once; the input before a window's first byte is the byte before it.
    """
    device = model.out_norm.device
    full: list[Tensor] = []
    rest: list[Tensor] = []
    for text in documents:
        data = torch.frombuffer(bytearray(bytes([DOCUMENT_START]) + text), dtype=torch.uint8).long()
        for first in range(0, len(text), EVAL_WINDOW):
            window = data[first : first + EVAL_WINDOW + 1]
            (full if window.numel() == EVAL_WINDOW + 1 else rest).append(window)
    groups = [torch.stack(full[i : i + batch]) for i in range(0, len(full), batch)] + [w[None] for w in rest]
    total = 0.0
    for group in groups:
        group = group.to(device)
        loss = F.cross_entropy(model(group[:, :-1]).flatten(0, 1), group[:, 1:].flatten(), reduction="sum")
        total += loss.item()
    return total / math.log(2)


def _held_out_documents(corpus: Corpus, limit: int | None) -> list[bytes]:
    documents = list(corpus.held_out.values())
    if limit is None:
        return documents
    share = max(limit // len(documents), 1)
    return [text[:share] for text in documents]


def train_demo(settings: TrainSettings, out: Path, command: str, console: Console) -> dict[str, Any]:
    """Train, round to the shipped precision, measure beside the byte 3-gram, save; returns the metadata written.

    ``out`` is a folder; it gets ``demo_model.safetensors`` and ``demo_model.json``.

    Raises :class:`DivergedError`, before anything is written, when the loss or the measured bits are not finite.
    """
    torch.manual_seed(settings.seed)
    corpus = load_corpus()
    documents = _held_out_documents(corpus, settings.eval_bytes)
    held_out_bytes = sum(len(text) for text in documents)
    console.print(
        f"{len(corpus.train):,} bytes of standard library to learn from, {held_out_bytes:,} bytes of "
        f"{len(corpus.held_out)} held-out modules to measure on"
    )
    trigram = ByteTrigram(corpus.train)
    trigram_bits = sum(trigram.bits(text) for text in documents)
    del trigram

    config = ModelConfig()
    model = KdaLanguageModel(config).to(settings.device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        run = fit(model, corpus.train, settings, console)
    finally:
        torch.set_float32_matmul_precision(precision)

    model.load_state_dict({name: tensor.float() for name, tensor in shipped_tensors(model).items()})
    model.eval()
    with console.status("measuring held-out bits per byte"):
        model_bits = bits_of(model, documents)
    if not math.isfinite(model_bits):
        raise DivergedError(f"the trained model needs {model_bits} bits for held-out text; lower --learning-rate.")
    cuda = settings.device.startswith("cuda")
    metadata: dict[str, Any] = {
        "bits_per_byte": {
            "model": round(model_bits / held_out_bytes, 4),
            "byte_3gram": round(trigram_bits / held_out_bytes, 4),
            "byte_3gram_smoothing": "Witten-Bell interpolation",
            "held_out_bytes": held_out_bytes,
            "model_context": f"fp32 arithmetic on the shipped bf16 weights, empty state every {EVAL_WINDOW} bytes",
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "device": torch.cuda.get_device_name(settings.device) if cuda else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": {"batch": settings.batch, "sequence": settings.sequence, "seed": settings.seed, **run},
        "training_text_bytes": len(corpus.train),
        "held_out_modules": sorted(corpus.held_out),
    }
    save_model(model, out / WEIGHTS_NAME, metadata)
    return metadata
