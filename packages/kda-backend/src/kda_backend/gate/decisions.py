"""The decision which lane a verify takes, and how it is launched. docs/gate.md has the order of the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from kda_backend.gate.advice import warn_of_missing_figures
from kda_backend.gate.buckets import Bucket, other_bucket, own_bucket
from kda_backend.gate.cells import GATES, OPTIONS, Cell, one_line, one_of, whole
from kda_backend.gate.env import GATE, LANE, OFF, TABLES, Settings, process_settings, settings_of
from kda_backend.gate.folders import PACKAGED, folder
from kda_backend.gate.table import Table
from kda_backend.lanes import (
    MODES,
    REFERENCE_LANE,
    Target,
    conservative_lane,
    lane_mode,
    lanes_of,
    no_kernels_reason,
    not_fused_reason,
    record_reason,
)
from kda_kernels import FORMS, KdaShape, LaunchConfig, Ring, Snapshots
from kda_kernels.checking import dtype_name, typed
from kda_kernels.shapes import ACTIVATION_DTYPES

SOURCES = ("override", "user table", "packaged table", "same-sm table", "default", "fallback")
"""What a decision can be due to. "fallback": the fused lane, or any kernel, cannot take the verify."""

MOST_REMEMBERED = 4096


class Step(NamedTuple):
    """One step of the way to a decision: what was looked at, and what it said."""

    name: str
    said: str


@dataclass(frozen=True)
class Decision:
    """A lane for a verify, how to launch it, and why.

    Args:
        lane: one of `kda_backend.LANES`, or "reference" where no kernel can run.
        launch: launch configuration, or None for the kernels' own default.
        source: one of `SOURCES`.
        reason: a sentence for people.
        steps: everything that was looked at, in order; the last one decided.
    """

    lane: str
    launch: LaunchConfig | None
    source: str
    reason: str
    steps: tuple[Step, ...]


class Question(NamedTuple):
    """What `decide` was asked, the record's fault (``unfit``) and the environment included."""

    shape: KdaShape
    mode: str
    batch: int
    draft_tokens: int
    device_name: str
    target: Target
    form: str
    safe_gate: bool
    option: str
    dtype: torch.dtype
    ragged: bool
    tree: bool
    unfit: str | None
    settings: Settings
    tables: str

    @property
    def gate(self) -> str:
        """One of `kda_backend.gate.cells.GATES`."""
        return GATES[0] if self.safe_gate else GATES[1]


_remembered: dict[object, Decision] = {}
_remembered_with: WeakKeyDictionary[Ring | Snapshots, dict[object, Decision]] = WeakKeyDictionary()
"""Record -> decisions of verifies that write it. Groups of tensors are frozen: a look at each is enough."""


def decide(
    shape: KdaShape,
    *,
    mode: str,
    batch: int,
    draft_tokens: int,
    device_name: str,
    target: Target,
    form: str = "recurrent",
    safe_gate: bool = True,
    option: str = "plain",
    dtype: torch.dtype = torch.bfloat16,
    ragged: bool = False,
    tree: bool = False,
    record: Ring | Snapshots | None = None,
    environ: Mapping[str, str] | None = None,
    tables: str = PACKAGED,
) -> Decision:
    """The lane of a verify and its launch configuration, by measured tables where there are any.

    A function of its arguments, of the files in the folders that they name (each read once per process), and, with
    ``environ=None``, of the environment as it was when the process first asked. The device is not touched. Decisions
    are remembered.

    Args:
        shape: head layout.
        mode: "ring" or "snapshots": which record the verify writes.
        batch: B, batch positions, padded ones included; under CUDA graphs the one that is captured.
        draft_tokens: T, the root included.
        device_name: as torch.cuda.get_device_name says it; see `device_name_of`.
        target: what it runs on; `Target.of(device)`.
        form: "recurrent" or "chunked".
        safe_gate: whether the layer has a lower bound.
        option: of the pool, one of `kda_backend.gate.OPTIONS`.
        dtype: activation dtype.
        ragged: whether the requests' lengths differ.
        tree: whether the tokens have parents, that is, are no chain.
        record: the layer's ring or snapshots as the caller built them, looked at once; None if they need no look.
        environ: environment variables (see `kda_backend.gate.env.ENV`); None: this process's.
        tables: folder of the packaged tables.

    Raises:
        ValueError: an argument or an environment variable is not one of the allowed values, or a lane is forced that
            this verify cannot take.
        TypeError: ``shape`` is no KdaShape, ``target`` no Target, ``batch`` or ``draft_tokens`` not an int,
            ``device_name`` no text, or ``safe_gate``, ``ragged`` or ``tree`` not a bool.
    """
    if shape.__class__ is not KdaShape or target.__class__ is not Target:  # two calls less for most decisions
        typed("shape", shape, KdaShape)
        typed("target", target, Target)
    settings = process_settings() if environ is None else settings_of(environ)
    remembered = _remembered if record is None else _with_record(record)
    key = (
        shape.num_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim, mode, batch, draft_tokens, device_name,
        target.backend, target.arch, form, safe_gate, option, dtype, ragged, tree, settings, tables,
        batch.__class__, draft_tokens.__class__, safe_gate.__class__, ragged.__class__, tree.__class__,  # True equals 1
    )  # fmt: skip
    try:
        known = remembered.get(key)
    except TypeError:  # what cannot be hashed is refused below, by name
        known = None
    if known is not None:
        return known
    question = Question(
        shape, mode, batch, draft_tokens, device_name, target, form, safe_gate, option, dtype, ragged, tree, None,
        settings, tables,
    )  # fmt: skip
    _check(question)
    if record is not None:
        question = question._replace(unfit=record_reason(record, shape, mode, draft_tokens))
    decision = _decide(question)
    if len(remembered) >= MOST_REMEMBERED:
        remembered.clear()
    remembered[key] = decision
    return decision


def _with_record(record: Ring | Snapshots) -> dict[object, Decision]:
    """What is remembered of verifies that write ``record``."""
    try:
        if (known := _remembered_with.get(record)) is None:
            known = _remembered_with[record] = {}
        return known
    except TypeError:  # no weak reference: neither of the two, which `record_reason` says
        return {}


def device_name_of(device: torch.device) -> str:
    """The name that tables of ``device`` go by: the GPU's, or that of whatever runs kernels in its place."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(Target.of(device))


def forget_decisions() -> None:
    """Forget what was decided; with `kda_backend.gate.folders.forget`, tables are read anew."""
    _remembered.clear()
    _remembered_with.clear()


def _check(question: Question) -> None:
    one_of("mode", question.mode, MODES)
    one_of("form", question.form, FORMS)
    one_of("option", question.option, OPTIONS)
    whole("batch", question.batch, 0, 1 << 31)
    whole("draft_tokens", question.draft_tokens, 1, 1 << 31)
    one_line("device_name", question.device_name, 200)
    for name in ("safe_gate", "ragged", "tree"):
        if not isinstance(getattr(question, name), bool):
            raise TypeError(f"{name} must be True or False, got {getattr(question, name)!r}")
    if question.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"dtype must be one of {ACTIVATION_DTYPES}, got {question.dtype}")


def _decide(question: Question) -> Decision:
    steps: list[Step] = []
    unfused, fused = lanes_of(question.mode)
    forced, unfit = question.settings.lane, question.unfit

    def decided(lane: str, source: str, reason: str, launch: LaunchConfig | None = None) -> Decision:
        return Decision(lane, launch, source, f"{lane}: {reason}", tuple(steps))

    no_kernels = no_kernels_reason(question.target)
    unfit = unfit or not_fused_reason(
        question.mode, question.draft_tokens, question.form, question.ragged, question.tree
    )
    if forced is not None:
        _refuse_impossible(forced, question.mode, no_kernels, unfit)
        steps.append(Step(LANE, f"forces {forced}"))
    if forced == REFERENCE_LANE:
        return decided(forced, "override", f"{LANE} forces it")
    if no_kernels is not None:
        steps.append(Step("device", no_kernels))
        return decided(REFERENCE_LANE, "fallback", no_kernels)
    if unfit is not None:
        steps.append(Step("fused lane", f"{fused} cannot take this, {unfit}"))
        if forced is not None:
            return decided(forced, "override", f"{LANE} forces it")
        return decided(unfused, "fallback", f"{fused} cannot take this, {unfit}")
    found = _look_up(question, steps)
    if forced is not None:
        launch = None if found is None else found[1].cell.config(forced)
        return decided(forced, "override", f"{LANE} forces it", launch)
    if found is not None:
        source, bucket = found
        if bucket.lane is not None:
            return decided(bucket.lane, source, f"{source}, {bucket.said}", bucket.cell.config(bucket.lane))
    lane, reason = conservative_lane(question.mode, question.batch, question.draft_tokens, question.target)
    steps.append(Step("conservative rule", reason))
    if found is None:
        return Decision(lane, None, "default", reason, tuple(steps))
    return decided(lane, source, f"the conservative rule; {bucket.said}", bucket.cell.config(lane))


def _refuse_impossible(forced: str, mode: str, no_kernels: str | None, unfit: str | None) -> None:
    """ValueError if the lane ``forced`` cannot be had."""
    if forced == REFERENCE_LANE:
        return
    unfused, fused = lanes_of(mode)
    why = no_kernels
    if lane_mode(forced) != mode:
        why = f"this verify is of mode {mode!r}, whose lanes are {unfused} and {fused}"
    elif forced == fused:
        why = why or unfit
    if why is not None:
        raise ValueError(
            f"{LANE}={forced} forces a lane that is impossible here: {why}. Unset it, or name another lane"
        )


def _look_up(question: Question, steps: list[Step]) -> tuple[str, Bucket] | None:
    """(source, bucket) of the first table that has one; what every step said is added to ``steps``."""
    if question.settings.off:
        steps.append(Step(GATE, f"{OFF}: no table is looked at"))
        return None
    lacks = []
    folders = [("user table", question.settings.folder), ("packaged table", question.tables)]
    dtype, arch = dtype_name(question.dtype), str(question.target)
    for source, path in folders:
        if path is None:
            steps.append(Step(source, f"{TABLES} is not set"))
            continue
        table, said = folder(path).exact(question.shape, question.device_name, dtype, arch)
        bucket = None if table is None else _bucket(question, table, own_bucket)
        if table is not None:
            found = _no_bucket(question, table) if bucket is None else bucket.said
            said = f"{said}: {found}"
            lacks.append(found)
        steps.append(Step(source, said))
        if bucket is not None:
            return source, bucket
    warn_of_missing_figures(question, lacks)
    if question.target.backend == "cuda":
        for table in _same_arch(question, [path for _, path in folders if path is not None], dtype, arch):
            bucket = _bucket(question, table, other_bucket)
            said = _no_bucket(question, table) if bucket is None else bucket.said
            steps.append(Step("same-sm table", f"{table.device_name}: {said}"))
            if bucket is not None:
                return "same-sm table", bucket._replace(said=f"{table.device_name}, {bucket.said}")
        if steps[-1].name != "same-sm table":
            steps.append(Step("same-sm table", f"none of another {arch} for these heads and {dtype}"))
    return None


def _same_arch(question: Question, paths: list[str], dtype: str, arch: str) -> Iterator[Table]:
    for path in paths:
        yield from folder(path).same_arch(question.shape, question.device_name, dtype, arch)


def _bucket(
    question: Question, table: Table, rule: Callable[[Table, Mapping[int, Cell], int], Bucket | None]
) -> Bucket | None:
    cells = table.buckets(
        gate=question.gate, form=question.form, mode=question.mode,
        option=question.option, draft_tokens=question.draft_tokens,
    )  # fmt: skip
    return rule(table, cells, question.batch)


def _no_bucket(question: Question, table: Table) -> str:
    """Why ``table`` says nothing here."""
    gates = GATES[:1] if question.safe_gate else GATES
    measured = {
        (cell.key.draft_tokens, cell.key.batch)
        for cell in table.cells
        if (cell.key.form, cell.key.mode, cell.key.option) == (question.form, question.mode, question.option)
        and cell.key.gate in gates
    }
    what = f"{question.form}, {question.mode}, {question.option}"
    if not measured:
        return f"nothing measured for {what}"
    steps = sorted({t for t, _ in measured})
    if question.draft_tokens not in steps:
        return f"T={question.draft_tokens} not measured for {what}, only {', '.join(map(str, steps))}"
    least = min(b for t, b in measured if t == question.draft_tokens)
    return f"nothing measured at or below B={question.batch}, the least is B={least}"
