"""Which configurations are compiled ahead of time, as data.

One spec is one call of a public op on small CPU tensors; an unfused verify compiles two kernels. The set covers every
kernel, record, gate, weight type, bias and head size on sm90 and the defaults on every other target; it is kept small
enough that checking all of it takes about two minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kda_kernels import LaunchConfig
from kda_kernels.aot import TARGETS
from kda_kernels.defaults import (
    FEW_HEADS,
    FEW_HEADS_INPUTS_FIRST,
    FEW_HEADS_LONG_DRAFT,
    FEW_HEADS_UNFUSED,
    FIVE_TO_AN_SM,
    FOLD_LONG,
    FOLD_SHORT,
    LONE_HEADS,
    MANY_HEADS,
    MANY_HEADS_IN_BLOCKS,
    MANY_HEADS_LONG_DRAFT,
    MANY_HEADS_STATE_FIRST,
    PORTABLE_LONG_CHUNK,
    SOME_HEADS,
    SOME_HEADS_STATE_FIRST,
    THREE_TO_AN_SM,
    WHOLE_HEADS_IN_BLOCKS,
    WHOLE_HEADS_IN_BLOCKS_STATE_FIRST,
    WHOLE_HEADS_STATE_FIRST,
)
from kda_tooling.compiling.calls import call

KERNELS = (
    "conv", "recurrence", "fused", "fold", "scatter_conv", "scatter_snapshots", "gather_conv", "advance", "flush",
)  # fmt: skip
"""Kernels by the name that the report, the budget and ``--kernel`` use."""

_LABELS = {
    ("verify_unfused", "conv_kernel"): "conv",
    ("verify_unfused", "verify_kernel"): "recurrence",
    ("verify_fused", "verify_kernel"): "fused",
    ("verify_unfused", "verify_gluon_kernel"): "recurrence",
    ("verify_fused", "verify_gluon_kernel"): "fused",
    ("fold", "fold_kernel"): "fold",
    ("fold", "fold_gluon_kernel"): "fold",
    ("scatter_conv", "scatter_kernel"): "scatter_conv",
    ("scatter_snapshots", "scatter_kernel"): "scatter_snapshots",
    ("gather_conv", "gather_kernel"): "gather_conv",
    ("advance", "advance_kernel"): "advance",
    ("flush", "flush_kernel"): "flush",
}


@dataclass(frozen=True)
class CompileSpec:
    """One op call to compile.

    Args:
        op: public op of kda_kernels.
        record: "ring" or "snapshots" for verify, "" for the commit ops.
        heads: (H, HV).
        head_dim: K, and V unless it has its own.
        head_v_dim: V, where it is not K.
        draft_tokens: T; the ring length too.
        dtype: activation dtype, "bf16" or "fp16".
        fp32_weight: conv weight (and bias) in fp32 instead of the activation dtype.
        bias: with a conv bias.
        safe_gate: the safe gate, else the standard one.
        config: a launch configuration (its pdl aside), or None for the portable kernels' default.
        pdl: None for the target's default, False for off.
        track: commit ops: with tracking slots.
        rows: with rows given, instead of 0..B-1.
        chunked: verify in the chunked form.
        indices_ready: slots and rows are declared ready before the PDL wait.
        ragged: with ``starts``.
        tree: with ``parents``; a commit by ``last_steps``.
        pending: verify that folds what is pending first.
        compact: verify that notes its inputs and writes no windows.
    """

    op: str
    record: str = ""
    heads: tuple[int, int] = (8, 8)
    head_dim: int = 128
    head_v_dim: int | None = None
    draft_tokens: int = 4
    dtype: str = "bf16"
    fp32_weight: bool = False
    bias: bool = True
    safe_gate: bool = True
    config: LaunchConfig | None = None
    pdl: bool | None = None
    track: bool = False
    rows: bool = False
    chunked: bool = False
    indices_ready: bool = False
    ragged: bool = False
    tree: bool = False
    pending: bool = False
    compact: bool = False

    @property
    def name(self) -> str:
        """The configuration's name in report and budget: record, sizes, then whatever is not the field's default."""
        parts = [self.record, f"K{self.head_dim}", f"V{self.head_v_dim}" if self.head_v_dim else ""]
        parts += [f"T{self.draft_tokens}"]
        parts += ["H{}-HV{}".format(*self.heads) if self.heads != (8, 8) else ""]
        parts += [self.dtype if self.dtype != "bf16" else "", "w32" if self.fp32_weight else ""]
        parts += ["" if self.bias else "nobias", "" if self.safe_gate else "standard"]
        parts += [_config_name(self.config)]
        parts += ["track" if self.track else "", "rows" if self.rows else "", "nopdl" if self.pdl is False else ""]
        parts += ["chunked" if self.chunked else "", "ready" if self.indices_ready else ""]
        parts += ["ragged" if self.ragged else "", "tree" if self.tree else ""]
        parts += ["pending" if self.pending else "", "compact" if self.compact else ""]
        return "-".join(part for part in parts if part)

    @property
    def labels(self) -> tuple[str, ...]:
        """Kernels of `KERNELS` that this spec reports."""
        own = tuple(dict.fromkeys(label for (op, _), label in _LABELS.items() if op == self.op))
        # The conv kernel knows nothing of record, state tile or what is pending: it is reported once, without.
        reports_conv = self.record == "ring" and self.config is None and not self.pending
        return tuple(label for label in own if label != "conv" or reports_conv)

    def label_of(self, kernel: str) -> str:
        """The report's name of the Triton function ``kernel`` launched by this op. KeyError if it is a new one."""
        return _LABELS[self.op, kernel]

    def call(self) -> None:
        """Call the op with small CPU tensors; inside `kda_kernels.aot.capture` this compiles its kernels."""
        call(self)


def _config_name(config: LaunchConfig | None) -> str:
    if config is None:
        return ""
    rows = "" if config.rows_per_thread is None else f"r{config.rows_per_thread}"
    rows += "" if config.max_registers is None else f"m{config.max_registers}"
    flags = ("e" if config.state_first else "") + ("p" if config.prefetch else "")
    flags += "t" if config.token_blocks else ""
    return f"v{config.block_v}w{config.num_warps}{rows}{flags}"


def _verify_specs(record: str, **knobs: Any) -> list[CompileSpec]:
    return [CompileSpec(op, record, **knobs) for op in ("verify_fused", "verify_unfused")]


FOLD_TILE = LaunchConfig(block_v=64, num_warps=4, rows_per_thread=4)
"""Of the Gluon fold, the largest: half a head of V = 128."""

_OTHER: dict[str, Any] = {"head_dim": 64, "dtype": "fp16", "fp32_weight": True, "bias": False, "safe_gate": False}
"""The other value of every yes-or-no choice, in one configuration."""

_EVERYWHERE = [
    *_verify_specs("ring"),
    *_verify_specs("snapshots"),
    CompileSpec("verify_fused", "ring", **_OTHER),
    CompileSpec("fold"),
    CompileSpec("scatter_conv"),
    CompileSpec("scatter_snapshots"),
    *_verify_specs("ring", pending=True),
    CompileSpec("advance"),
    CompileSpec("flush"),
    *_verify_specs("ring", compact=True),
    CompileSpec("gather_conv"),
]

_NVIDIA = [
    *_verify_specs("ring", config=FEW_HEADS),
    CompileSpec("verify_fused", "ring", config=MANY_HEADS_STATE_FIRST),
    CompileSpec("verify_fused", "snapshots", config=MANY_HEADS_STATE_FIRST),
    CompileSpec("verify_fused", "ring", config=MANY_HEADS, chunked=True),
    CompileSpec("verify_fused", "ring", draft_tokens=8, config=MANY_HEADS_IN_BLOCKS, chunked=True),
    CompileSpec("fold", config=FOLD_SHORT),
    CompileSpec("verify_fused", "ring", config=MANY_HEADS, pending=True),
    CompileSpec("verify_fused", "ring", config=MANY_HEADS_STATE_FIRST, compact=True),
]

_PENDING = [
    *_verify_specs("ring", config=LONE_HEADS, pending=True),
    CompileSpec("verify_unfused", "ring", config=MANY_HEADS, pending=True),
    *(
        CompileSpec("verify_fused", "ring", draft_tokens=tokens, config=config, pending=True, **knobs)
        for tokens, config, knobs in (
            (4, LONE_HEADS, {"indices_ready": True}),
            (4, SOME_HEADS_STATE_FIRST, {}),
            (8, LONE_HEADS, {}),
            (8, FEW_HEADS_LONG_DRAFT, {}),
            (8, WHOLE_HEADS_STATE_FIRST, {}),
            (8, MANY_HEADS_LONG_DRAFT, {}),
            (4, LONE_HEADS, {"chunked": True}),
            (4, FEW_HEADS, {"chunked": True}),
            (4, MANY_HEADS_STATE_FIRST, {"chunked": True}),
            (8, LONE_HEADS, {"chunked": True}),
            (8, FEW_HEADS, {"chunked": True}),
            (8, WHOLE_HEADS_STATE_FIRST, {"chunked": True}),
            (8, MANY_HEADS, {"chunked": True}),
            (8, None, {}),
            (4, None, {"chunked": True}),
            (4, FEW_HEADS, _OTHER),
        )
    ),
    CompileSpec("verify_unfused", "ring", ragged=True, pending=True),
    CompileSpec("advance", track=True, ragged=True),
    CompileSpec("flush", draft_tokens=8, track=True),
    CompileSpec("flush", head_dim=64, dtype="fp16"),
]
"""Fold on verify: the configurations that `kda_kernels.defaults` names for T = 4 and 8, in both forms."""

_COMPACT = [
    *(
        CompileSpec("verify_fused", "ring", draft_tokens=tokens, config=config, compact=True, **knobs)
        for tokens, config, knobs in (
            (4, LONE_HEADS, {"indices_ready": True}),
            (4, FEW_HEADS, {}),
            (4, SOME_HEADS, {}),
            (4, MANY_HEADS, {"chunked": True}),
            (4, MANY_HEADS, {"pending": True}),
            (8, LONE_HEADS, {}),
            (8, FEW_HEADS_LONG_DRAFT, {}),
            (8, SOME_HEADS, {}),
            (8, MANY_HEADS_LONG_DRAFT, {}),
            (8, MANY_HEADS_IN_BLOCKS, {"chunked": True}),
            (4, FEW_HEADS, _OTHER),
        )
    ),
    *_verify_specs("snapshots", compact=True),
    CompileSpec("verify_fused", "snapshots", config=MANY_HEADS_STATE_FIRST, compact=True),
    CompileSpec("verify_unfused", "ring", ragged=True, compact=True),
    CompileSpec("gather_conv", track=True, ragged=True),
    CompileSpec("gather_conv", head_dim=64, dtype="fp16"),
    CompileSpec("gather_conv", pdl=False),
]
"""Without conv windows."""

_SM90 = [
    *_verify_specs("ring", config=SOME_HEADS),
    *_verify_specs("snapshots", config=SOME_HEADS),
    CompileSpec("verify_unfused", "ring", config=LONE_HEADS),
    CompileSpec("verify_unfused", "ring", config=FEW_HEADS_UNFUSED),
    CompileSpec("verify_unfused", "ring", config=SOME_HEADS_STATE_FIRST),
    CompileSpec("verify_unfused", "ring", config=MANY_HEADS_STATE_FIRST),
    CompileSpec("verify_unfused", "ring", draft_tokens=8, config=LONE_HEADS),
    CompileSpec("verify_unfused", "ring", draft_tokens=8, config=SOME_HEADS_STATE_FIRST),
    CompileSpec("verify_unfused", "ring", draft_tokens=8, config=MANY_HEADS_STATE_FIRST),
    *_verify_specs("ring", draft_tokens=3, config=MANY_HEADS),
    CompileSpec("verify_fused", "ring", config=LONE_HEADS, indices_ready=True),
    CompileSpec("verify_fused", "ring", draft_tokens=8, config=LONE_HEADS),
    CompileSpec("verify_fused", "ring", draft_tokens=8, config=FEW_HEADS_LONG_DRAFT, rows=True, indices_ready=True),
    CompileSpec("verify_fused", "ring", draft_tokens=8, config=SOME_HEADS),
    CompileSpec("verify_fused", "ring", config=LONE_HEADS, chunked=True, indices_ready=True),
    *_verify_specs("ring", config=FEW_HEADS, chunked=True),
    CompileSpec("verify_fused", "ring", config=MANY_HEADS_STATE_FIRST, chunked=True),
    CompileSpec("verify_fused", "ring", draft_tokens=8, config=LONE_HEADS, chunked=True),
    CompileSpec("verify_fused", "ring", draft_tokens=8, config=SOME_HEADS_STATE_FIRST, chunked=True),
    *(
        CompileSpec("verify_fused", "ring", draft_tokens=tokens, config=config, chunked=True)
        for tokens in (5, 6, 7)
        for config in (THREE_TO_AN_SM, WHOLE_HEADS_IN_BLOCKS_STATE_FIRST, WHOLE_HEADS_IN_BLOCKS)
    ),
    CompileSpec("verify_fused", "ring", config=FIVE_TO_AN_SM),
    CompileSpec("verify_fused", "ring", draft_tokens=8, config=THREE_TO_AN_SM),
    CompileSpec("verify_fused", "ring", config=FEW_HEADS_INPUTS_FIRST, chunked=True),
    CompileSpec("verify_fused", "ring", draft_tokens=3, config=WHOLE_HEADS_STATE_FIRST, chunked=True),
    CompileSpec("verify_unfused", "ring", config=SOME_HEADS_STATE_FIRST, chunked=True),
    CompileSpec("verify_unfused", "ring", config=WHOLE_HEADS_STATE_FIRST, chunked=True),
    CompileSpec("verify_unfused", "ring", draft_tokens=8, config=SOME_HEADS, chunked=True),
    CompileSpec("verify_unfused", "ring", draft_tokens=8, config=MANY_HEADS_IN_BLOCKS, chunked=True),
    CompileSpec("verify_fused", "ring", draft_tokens=16, config=PORTABLE_LONG_CHUNK, chunked=True),
    *_verify_specs("ring", draft_tokens=8, config=MANY_HEADS_LONG_DRAFT),
    *_verify_specs("ring", draft_tokens=1, config=FEW_HEADS),
    CompileSpec("verify_fused", "ring", config=FEW_HEADS, **_OTHER),
    CompileSpec("verify_fused", "ring", config=FEW_HEADS, pdl=False),
    CompileSpec("verify_unfused", "ring", **_OTHER),
    *_verify_specs("snapshots", **_OTHER),
    *_verify_specs("ring", draft_tokens=1),
    *_verify_specs("snapshots", draft_tokens=1),
    *_verify_specs("ring", draft_tokens=8),
    *_verify_specs("ring", heads=(4, 8)),
    *_verify_specs("ring", config=LaunchConfig(8, 1)),
    *_verify_specs("ring", config=LaunchConfig(32, 8)),
    *_verify_specs("ring", pdl=False),
    CompileSpec("verify_fused", "snapshots", rows=True),
    CompileSpec("fold", head_dim=64, dtype="fp16"),
    CompileSpec("verify_fused", "ring", chunked=True),
    CompileSpec("fold", draft_tokens=8, track=True),
    CompileSpec("fold", config=LaunchConfig(8, 1)),
    CompileSpec("fold", config=LaunchConfig(32, 8)),
    CompileSpec("fold", config=LaunchConfig(16, 1, rows_per_thread=4)),
    CompileSpec("fold", config=FOLD_TILE),
    CompileSpec("fold", draft_tokens=8, config=FOLD_LONG),
    CompileSpec("fold", head_dim=64, dtype="fp16", config=FOLD_TILE),
    CompileSpec("fold", heads=(4, 8), draft_tokens=8, track=True, config=FOLD_TILE),
    CompileSpec("fold", pdl=False, config=FOLD_TILE),
    CompileSpec("fold", pdl=False),
    CompileSpec("scatter_conv", track=True),
    CompileSpec("scatter_conv", pdl=False),
    *(CompileSpec("verify_unfused", record, ragged=True) for record in ("ring", "snapshots")),
    CompileSpec("verify_unfused", "snapshots", tree=True),
    CompileSpec("verify_unfused", "snapshots", ragged=True, tree=True),
    CompileSpec("verify_unfused", "ring", ragged=True, chunked=True),
    CompileSpec("fold", ragged=True, config=FOLD_SHORT),
    CompileSpec("scatter_conv", tree=True),
    CompileSpec("scatter_conv", track=True, tree=True),
    CompileSpec("scatter_snapshots", ragged=True, tree=True),
    CompileSpec("scatter_snapshots", track=True, rows=True),
]

SPECS: dict[str, tuple[CompileSpec, ...]] = {
    name: tuple(
        _EVERYWHERE
        + (_NVIDIA if target.backend == "cuda" else [])
        + (_SM90 + _PENDING + _COMPACT if name == "sm90" else [])
    )
    for name, target in TARGETS.items()
}
"""Target -> what is compiled for it."""


Specs = Mapping[str, tuple[CompileSpec, ...]]


@dataclass(frozen=True)
class Selection:
    """What to compile: targets, kernels and configuration names; an empty tuple means all of them.

    Args:
        targets, kernels, configs: names.
        source: what there is to select from; the repository's own specs, or `kda_tooling.compiling.tables.table_specs`.

    Raises:
        ValueError: a name is not known; the message names the option.
    """

    targets: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    source: Specs = field(default_factory=lambda: SPECS)

    def __post_init__(self) -> None:
        every_config = tuple(dict.fromkeys(spec.name for specs in self.source.values() for spec in specs))
        known = {"target": tuple(self.source), "kernel": KERNELS, "config": every_config}
        for (kind, names), given in zip(known.items(), (self.targets, self.kernels, self.configs), strict=True):
            for one in given:
                if one not in names:
                    raise ValueError(f"--{kind} must be one of {', '.join(names)}; got {one!r}")

    @property
    def everything(self) -> bool:
        """Nothing is left out."""
        return not (self.targets or self.kernels or self.configs)

    def covers(self, target: str, kernel: str, config: str) -> bool:
        """Whether this kernel in this configuration was asked for."""
        asked = ((self.targets, target), (self.kernels, kernel), (self.configs, config))
        return all(not names or one in names for names, one in asked)

    def specs(self) -> list[tuple[str, CompileSpec]]:
        """(target, spec) of every spec with a kernel that was asked for, in the source's order."""
        return [
            (target, spec)
            for target, specs in self.source.items()
            for spec in specs
            if any(self.covers(target, label, spec.name) for label in spec.labels)
        ]
