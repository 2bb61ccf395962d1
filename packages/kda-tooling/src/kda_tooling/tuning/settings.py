"""What a tuning run is asked to do, checked before anything runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kda_backend import MODES
from kda_backend.gate import CellKey
from kda_backend.gate.cells import (
    COMPACT_WINDOW,
    FOLD_ON_VERIFY,
    GATES,
    LEAST_PASSES,
    MOST_PASSES,
    OPTIONS,
)
from kda_backend.gate.table import MOST_MARGIN
from kda_backend.lanes import lanes_of
from kda_kernels import FORMS, MAX_CHUNKED_TOKENS, KdaShape
from kda_tooling.bench.settings import DEFAULT_SHAPE, SweepSettings

DEFAULT_BATCH_SIZES = (
    1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 40, 44, 48, 56, 64, 80, 96, 112, 128,
    160, 192, 224, 256,
)  # fmt: skip
"""Up to 32 what SGLang captures with drafts (sglang/srt/arg_groups/cuda_graph_hook.py of 0.5.23), and 13; from there on
powers of two and 1.25, 1.5 and 1.75 times each, and 44.

Where programs come to need another wave on the SMs, the fastest configuration and the faster lane change within less
than a factor of 1.25. Choices between powers alone cost up to 20 %, without 1.25 times each up to 12 %, without 1.75
times each (and with 1.25 up to 32 only) up to 15 %, without 13 up to 7 % (docs/measured-facts.md).
"""

FULL_WAVES = (0.5, 1, 2, 3, 4)
"""Heads on every SM at which a batch size is worth a cell, as one more request is one wave more: of programs of half a
head's value channels, and of whole heads'."""

DEFAULT_DRAFT_TOKENS = (2, 3, 4, 5, 6, 7, 8)
SAFE_BOUND = -5.0
"""Lower bound of the safe gate that is timed; its value costs nothing, whether there is one does."""

MOST_FINALISTS = 16
MOST_SEED = (1 << 63) - MOST_PASSES - 1


@dataclass(frozen=True, order=True)
class Group:
    """Cells that differ in B only: they share their compiled kernels, and are measured together."""

    gate: str
    form: str
    mode: str
    option: str
    draft_tokens: int

    def key(self, batch: int) -> CellKey:
        """The key of the cell at ``batch``."""
        return CellKey(self.gate, self.form, self.mode, self.option, self.draft_tokens, batch)

    @property
    def lanes(self) -> tuple[str, str]:
        """(unfused lane, fused lane)."""
        return lanes_of(self.mode)

    def __str__(self) -> str:
        words = [self.form, self.mode, f"T={self.draft_tokens}"]
        words += [self.option] if self.option != OPTIONS[0] else []
        return " ".join(words + ([f"{self.gate} gate"] if self.gate != GATES[0] else []))


def usual_batch_sizes(shape: KdaShape, multiprocessors: int) -> tuple[int, ...]:
    """`DEFAULT_BATCH_SIZES` and, within them, the last ones whose programs get by with so many waves on the GPU's SMs.

    One request more needs another wave, so that the configuration found for it, sometimes its verdict too, is not the
    best: with 12 heads on 132 SMs and a table without B = 11, up to 34 % was lost there (docs/measured-facts.md).

    Args:
        shape: head layout of a layer.
        multiprocessors: SMs of the GPU.
    """
    ends = {int(waves * multiprocessors / shape.num_v_heads) for waves in FULL_WAVES}
    smallest, largest = DEFAULT_BATCH_SIZES[0], DEFAULT_BATCH_SIZES[-1]
    return tuple(sorted({*DEFAULT_BATCH_SIZES, *(end for end in ends if smallest <= end <= largest)}))


@dataclass(frozen=True)
class TuneSettings:
    """Settings of a tuning run.

    Args:
        shape: head layout of a layer.
        dtype: "bf16" or "fp16".
        gates, forms, modes, options: of `kda_backend.gate.cells.GATES`, `kda_kernels.FORMS`, `kda_backend.MODES` and
            `kda_backend.gate.cells.OPTIONS`; combinations that no kernel takes are left out.
        draft_tokens, batch_sizes: T and B of the cells.
        margin: share of unfused's time by which fused has to win each pass.
        passes: independent passes.
        finalists: configurations per lane and B that are timed in every pass.
        seed: of the random inputs of the first pass.

    Raises:
        ValueError: a value is unknown, out of range, or nothing is left to measure; the message names the option.
    """

    shape: KdaShape = DEFAULT_SHAPE
    dtype: str = "bf16"
    gates: tuple[str, ...] = GATES[:1]
    forms: tuple[str, ...] = FORMS
    modes: tuple[str, ...] = MODES
    options: tuple[str, ...] = OPTIONS[:1]
    draft_tokens: tuple[int, ...] = DEFAULT_DRAFT_TOKENS
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    margin: float = 0.02
    passes: int = LEAST_PASSES
    finalists: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for option, values, allowed in (
            ("--gate", self.gates, GATES), ("--form", self.forms, FORMS), ("--mode", self.modes, MODES),
            ("--option", self.options, OPTIONS),
        ):  # fmt: skip
            wrong = [value for value in values if value not in allowed]
            if wrong or not values:
                raise ValueError(f"{option} must name some of {', '.join(allowed)}; got {', '.join(wrong) or 'none'}")
        for option, number, least, most in (
            ("--passes", self.passes, LEAST_PASSES, MOST_PASSES),
            ("--finalists", self.finalists, 1, MOST_FINALISTS),
        ):
            if not least <= number <= most:
                raise ValueError(f"{option} must be within {least}..{most}; got {number}")
        if not 0 <= self.seed < MOST_SEED:  # every pass adds one; refused here, not after minutes of compiling
            raise ValueError(f"--seed must be at least 0 and below 2**63 - {MOST_PASSES + 1}; got {self.seed}")
        if not 0 <= self.margin < MOST_MARGIN:
            raise ValueError(f"--margin must be a share from 0 to below {MOST_MARGIN}; got {self.margin}")
        for draft_tokens in self.draft_tokens:
            SweepSettings(
                batch_sizes=self.batch_sizes, draft_tokens=(draft_tokens,), shape=self.shape, dtype=self.dtype
            )
        if not self.groups():
            raise ValueError(
                "--form, --mode, --option and --draft-tokens leave nothing to measure: form chunked and fold-on-verify "
                f"go with mode ring only, and form chunked takes up to {MAX_CHUNKED_TOKENS} tokens"
            )

    @property
    def command(self) -> str:
        """The `kda tune` call of these settings, defaults left out: what a table says it was made by."""
        usual, shape, words = TuneSettings(), self.shape, ["kda", "tune"]
        for option, value, default in (
            ("--heads", shape.num_heads, usual.shape.num_heads),
            ("--hv-heads", shape.num_v_heads, shape.num_heads),
            ("--head-k-dim", shape.head_k_dim, usual.shape.head_k_dim),
            ("--head-v-dim", shape.head_v_dim, usual.shape.head_v_dim),
            ("--dtype", self.dtype, usual.dtype),
            ("--draft-tokens", self.draft_tokens, usual.draft_tokens),
            ("--batch-sizes", self.batch_sizes, None),  # always: which are usual depends on the GPU
            ("--form", self.forms, usual.forms),
            ("--mode", self.modes, usual.modes),
            ("--option", self.options, usual.options),
            ("--gate", self.gates, usual.gates),
            ("--margin", self.margin, usual.margin),
            ("--passes", self.passes, usual.passes),
            ("--finalists", self.finalists, usual.finalists),
            ("--seed", self.seed, usual.seed),
        ):
            if value != default:
                words += [option, *map(str, value if isinstance(value, tuple) else (value,))]
        return " ".join(words)

    def groups(self) -> list[Group]:
        """The groups that some kernel takes, in the order of measurement: all of a T together."""
        found = []
        for t, gate, form, mode, option in itertools.product(
            self.draft_tokens, self.gates, self.forms, self.modes, self.options
        ):
            group = Group(gate, form, mode, option, t)
            try:
                group.key(1)
            except ValueError:
                continue
            found.append(group)
        return found

    def keys(self) -> list[CellKey]:
        """Those of every cell, in the order of measurement."""
        return [group.key(batch) for group in self.groups() for batch in self.batch_sizes]

    def sweep_settings(self, group: Group, seed: int = 0) -> SweepSettings:
        """The settings that a sweep of ``group``'s cells would have."""
        return SweepSettings(
            lanes=group.lanes, batch_sizes=self.batch_sizes, draft_tokens=(group.draft_tokens,), shape=self.shape,
            dtype=self.dtype, lower_bound=SAFE_BOUND if group.gate == GATES[0] else None, forms=(group.form,),
            kind="verify" if group.option == OPTIONS[0] else "round",
            fold_on_verify=FOLD_ON_VERIFY in group.option, compact_window=COMPACT_WINDOW in group.option, seed=seed,
        )  # fmt: skip
