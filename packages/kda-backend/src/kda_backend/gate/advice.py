"""What is said where the gate finds no measured figures: what is missing, and the `kda tune` call that measures it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import torch

from kda_backend.gate.cells import GATES, MOST_TUNED_TOKENS, OPTIONS
from kda_backend.gate.env import TABLES
from kda_backend.gate.folders import warn_once
from kda_kernels import KdaShape
from kda_kernels.checking import dtype_name

if TYPE_CHECKING:
    from kda_backend.gate.decisions import Question


def tune_command(
    shape: KdaShape, draft_tokens: int, dtype: torch.dtype = torch.bfloat16, *, kind: str = "", into: str = "tables"
) -> str:
    """The command that measures these heads and T; ``kind``: the options that leave out other kinds of verify."""
    words = [f"kda tune --heads {shape.num_heads} --hv-heads {shape.num_v_heads}"]
    words += [
        f"{name} {value}"
        for name, value in (("--head-k-dim", shape.head_k_dim), ("--head-v-dim", shape.head_v_dim))
        if value != 128
    ]
    if dtype != torch.bfloat16:
        words.append("--dtype fp16")
    words.append(f"--draft-tokens {draft_tokens}")
    words += [kind] if kind else []
    return " ".join([*words, f"--into {shlex.quote(into)}"])


def warn_of_missing_figures(question: Question, lacks: list[str]) -> None:
    """Say once per process what no table of this GPU has, and how it is measured.

    `kda gate explain` says it of every question. Nothing is said of what nobody measures: Triton's interpreter, no
    requests, or more tokens than `kda tune` takes.

    Args:
        question: what was looked for.
        lacks: what each of the device's tables says it lacks; empty where it has none.
    """
    tuned = question.target.backend in ("cuda", "hip")
    if not tuned or not question.batch or question.draft_tokens > MOST_TUNED_TOKENS:
        return
    shape, into = question.shape, question.settings.folder or "tables"
    dtype = dtype_name(question.dtype)
    missing, kind = "no table of measured verifies", ""
    if lacks:
        missing = f"no measured verifies of T={question.draft_tokens} ({'; '.join(dict.fromkeys(lacks))})"
        kind = f"--form {question.form} --mode {question.mode}"
        kind += f" --option {question.option}" if question.option != OPTIONS[0] else ""
        kind += f" --gate {question.gate}" if question.gate != GATES[0] else ""
    others = f"what is known of other {question.target} GPUs or " if question.target.backend == "cuda" else ""
    warn_once(
        "missing figures",
        "%s for %s with H=%d, HV=%d, K=%d, V=%d, %s: %sthe conservative rule chooses the lanes. To measure them on "
        "this GPU: %s, then %s=%s (docs/gate.md)",
        missing, question.device_name, shape.num_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim, dtype,
        others, tune_command(shape, question.draft_tokens, question.dtype, kind=kind, into=into), TABLES,
        shlex.quote(into),
    )  # fmt: skip
