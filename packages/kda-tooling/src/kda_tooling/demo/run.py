"""``kda demo``: the runs (plain, and speculative in each lane), their comparison, and the report as plain data.

On a CPU every run is a job of its own in a pool of processes, because Triton's interpreter is single-threaded Python;
on a GPU the runs follow each other in this process, each once unmeasured so that compilation is not timed.
Under ``torchrun`` every rank does all runs, one after the other: the lanes with its own heads only, plain decoding with
all of them, so that the comparison is with one process.
"""

from __future__ import annotations

import multiprocessing
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from kda_backend.sharding import HeadShard
from kda_kernels import Ring, Snapshots
from kda_kernels.interpreter import is_interpreted
from kda_tooling.cores import usable_cores
from kda_tooling.demo import interpreter_memo
from kda_tooling.demo.decoding import ACTIVATION_DTYPE, PLAIN_LANE, Decoded, Decoder, RequestState, ingest, kda_shape
from kda_tooling.demo.model import load_model
from kda_tooling.demo.prompts import Prompt
from kda_tooling.ranks import Ranks

Progress = Callable[[str, int], None]
"""Called with a run's name and the bytes that it has emitted over all prompts."""


@dataclass(frozen=True)
class Run:
    """One decoding run: plain (one token a round) or speculative in a lane."""

    name: str
    lane: str
    draft_tokens: int
    num_bytes: int
    ring_length: int | None
    form: str = "recurrent"


@dataclass(frozen=True)
class DemoSettings:
    """What ``kda demo`` compares. ``draft_tokens`` counts the root; ``ring_length`` None means as many.

    ``form`` is that of the lanes' verify; plain decoding is always recurrent. ``ranks`` share the lanes' heads; their
    process group is then up.
    """

    lanes: tuple[str, ...]
    draft_tokens: int
    num_bytes: int
    ring_length: int | None
    device: str
    weights: Path
    processes: int | None = None
    form: str = "recurrent"
    ranks: Ranks | None = None

    def runs(self) -> list[Run]:
        """The plain run first, then one a lane."""
        speculative = [
            Run(lane, lane, self.draft_tokens, self.num_bytes, self.ring_length, self.form) for lane in self.lanes
        ]
        return [Run("plain", PLAIN_LANE, 1, self.num_bytes, None), *speculative]


def run_demo(settings: DemoSettings, prompts: Sequence[Prompt], on_progress: Progress) -> dict[str, Any]:
    """Ingest the prompts once, decode them in every run, compare; returns the report (JSON-able).

    ``identical`` says per lane whether all continuations equal plain decoding's byte for byte, ``differing`` how many
    bytes of them do not, ``state_identical`` whether the committed recurrent and conv states are equal bit for bit.
    """
    start = time.perf_counter()
    # One thread: with more, a CPU library may split one and the same product differently under load.
    torch.set_num_threads(1)
    model, metadata = load_model(settings.weights)
    requests = [ingest(model, prompt.text) for prompt in prompts]
    results = _decode_all(settings, requests, on_progress)
    plain = results["plain"]
    shape, layers = kda_shape(model), model.config.num_layers
    length = settings.ring_length or settings.draft_tokens
    common: dict[str, Any] = {"dtype": ACTIVATION_DTYPE, "device": "meta", "num_layers": layers}
    ring = Ring.allocate(shape, slots=len(prompts), length=length, **common).num_bytes
    del common["dtype"]
    snapshots = Snapshots.allocate(shape, rows=len(prompts), steps=settings.draft_tokens, **common).num_bytes
    lanes = {lane: results[lane] for lane in settings.lanes}
    return {
        "identical": {lane: result.texts == plain.texts for lane, result in lanes.items()},
        "state_identical": {lane: _same_state(result, plain) for lane, result in lanes.items()},
        "differing": {lane: _differing(result, plain) for lane, result in lanes.items()},
        "form": settings.form,
        "ranks": settings.ranks.world if settings.ranks else 1,
        "device": torch.cuda.get_device_name(settings.device) if settings.device != "cpu" else "cpu",
        "kernels": "interpreter" if is_interpreted() else "compiled",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "draft_tokens": settings.draft_tokens,
        "bytes": settings.num_bytes,
        "prompts": [
            {
                "source": prompt.source,
                "prompt_bytes": len(prompt.text),
                "prompt_end": prompt.text[-160:].decode(errors="replace"),
                "continuation": text.decode(errors="replace"),
            }
            for prompt, text in zip(prompts, plain.texts, strict=True)
        ],
        "plain": _run_report(plain, 1),
        "lanes": {lane: _run_report(result, settings.draft_tokens) for lane, result in lanes.items()},
        "scratch": {"ring_bytes": ring, "snapshot_bytes": snapshots, "ratio": round(snapshots / ring, 2)},
        "model": {"parameters": metadata.get("parameters"), "bits_per_byte": metadata.get("bits_per_byte")},
        "seconds": round(time.perf_counter() - start, 1),
    }


def passed(report: dict[str, Any]) -> bool:
    """Whether every lane kept its promise: no kernel counted a fault, and text and state are plain decoding's.

    The chunked form promises outputs within rounding, so that a token may differ where two logits nearly tie.
    """
    runs = [report["plain"], *report["lanes"].values()]
    same = [*report["identical"].values(), *report["state_identical"].values()]
    return (all(same) or report["form"] == "chunked") and all(run["faults"] is None for run in runs)


def _differing(result: Decoded, plain: Decoded) -> int:
    """Bytes at which the continuations differ, over all prompts; after the first one the rest follows from it."""
    pairs = zip(result.texts, plain.texts, strict=True)
    return sum(one != other for texts in pairs for one, other in zip(*texts, strict=True))


def _same_state(result: Decoded, plain: Decoded) -> bool:
    # Compared as bits: 0.0 and -0.0 are different states, NaN equals itself.
    pairs = ((result.ssm_state, plain.ssm_state, torch.int32), (result.conv_state, plain.conv_state, torch.int16))
    return all(torch.equal(a.view(bits), b.view(bits)) for a, b, bits in pairs)


def _run_report(result: Decoded, draft_tokens: int) -> dict[str, Any]:
    accepted = {str(n): result.accepted.get(n, 0) for n in range(1, draft_tokens + 1)}
    rows = sum(result.accepted.values())
    return {
        "rounds": result.rounds,
        "accepted_per_round": accepted,
        "without_draft": result.without_draft,
        "mean_accepted": round(sum(n * c for n, c in result.accepted.items()) / rows, 3) if rows else None,
        "seconds": round(result.seconds, 3),
        "tokens_per_second": round(result.tokens_per_second, 2),
        "scratch_bytes": result.scratch_bytes,
        "faults": result.faults,
        "from_draft": ["".join("d" if drafted else "m" for drafted in row) for row in result.from_draft],
    }


def _decode(
    decoder: Decoder, run: Run, requests: Sequence[RequestState], on_progress: Callable[[int], None]
) -> Decoded:
    return decoder.decode(
        requests,
        lane=run.lane,
        draft_tokens=run.draft_tokens,
        num_bytes=run.num_bytes,
        ring_length=run.ring_length,
        form=run.form,
        on_progress=on_progress,
    )


def _decode_all(settings: DemoSettings, requests: Sequence[RequestState], on_progress: Progress) -> dict[str, Decoded]:
    runs = settings.runs()
    processes = settings.processes or usable_cores()
    processes = min(processes, len(runs)) if settings.device == "cpu" and settings.ranks is None else 1
    if processes > 1:
        return _decode_in_processes(settings.weights, runs, requests, processes, on_progress)
    interpreter_memo.install()
    model, _ = load_model(settings.weights, settings.device)
    whole = Decoder(model, settings.device)
    lanes = whole
    if ranks := settings.ranks:
        lanes = Decoder(model, settings.device, shard=HeadShard(kda_shape(model), ranks.rank, ranks.world))
    results = {}
    for run in runs:
        decoder = whole if run.name == "plain" else lanes
        if settings.device != "cpu":
            _decode(decoder, run, requests, lambda done: None)
        results[run.name] = _decode(decoder, run, requests, partial(on_progress, run.name))
    return results


_progress_queue: Any = None


def _start_worker(queue: Any) -> None:
    global _progress_queue
    _progress_queue = queue
    interpreter_memo.install()
    torch.set_num_threads(1)


def _job(weights: Path, run: Run, requests: Sequence[RequestState]) -> Decoded:
    """Runs in a worker process."""
    model, _ = load_model(weights)
    return _decode(Decoder(model, "cpu"), run, requests, lambda done: _progress_queue.put((run.name, done)))


def _decode_in_processes(
    weights: Path, runs: Sequence[Run], requests: Sequence[RequestState], processes: int, on_progress: Progress
) -> dict[str, Decoded]:
    # spawn, not fork: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with ProcessPoolExecutor(processes, context, _start_worker, (queue,)) as executor:
        futures = {run.name: executor.submit(_job, weights, run, requests) for run in runs}
        pending = set(futures.values())
        while pending:
            _, pending = wait(pending, timeout=0.2)
            while not queue.empty():
                on_progress(*queue.get())
        return {name: future.result() for name, future in futures.items()}
