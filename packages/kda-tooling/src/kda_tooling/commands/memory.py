"""`kda memory`: how many requests fit into a memory budget, with rings and with snapshots."""

from __future__ import annotations

import re
from dataclasses import asdict, astuple, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kda_tooling.commands.options import HeadKDim, Heads, HeadVDim, HvHeads, LongDtype, refuse, shape_of
from kda_tooling.commands.outputs import check_outputs, console_for, write_json

if TYPE_CHECKING:
    from kda_backend import MemoryPlan
    from kda_kernels import KdaShape

UNITS = {"b": 1} | {f"{letter}{binary}b": base**power for power, letter in enumerate("kmgt", 1)
                    for binary, base in (("", 1000), ("i", 1024))}  # fmt: skip
"""Bytes of each unit, in small letters."""

KIMI_LINEAR = "Kimi-Linear-48B-A3B on one GPU: 20 KDA layers, 32 heads of 128"
DEFAULTS = {"heads": 32, "layers": 20, "head_dim": 128, "draft_tokens": 4}
"""The default shape, that of `KIMI_LINEAR`, and the default number of draft tokens."""

FOLDING = "ring_fold_on_verify"
"""The report's name for a pool of rings that folds on verify."""

COMPACT = "_compact_window"
"""What follows the name of a pool where verify writes no conv windows."""

LARGEST = 1 << 63
MOST = 1 << 20
"""Of any size of the model, and of spare slots. Larger numbers are slips, their bytes too many to be written in TiB."""

HELP = f"""Say how many requests a memory budget holds, with rings and with snapshots.

Bytes are those of kda_backend.StatePool: the state of KDA layers and what undoing drafts takes; no weights, and no
cache of other layers. The default shape is that of {KIMI_LINEAR}. With heads sharded over GPUs, give those of one GPU.
"""
EXAMPLES = (
    "Examples: [bold]kda memory --budget 80GiB[/bold], "
    "[bold]kda memory --budget 16GiB --heads 8 --draft-tokens 8 --spare-slots 100 --json -[/bold]"
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(help=HELP, epilog=EXAMPLES)(memory)


def parse_bytes(option: str, text: str) -> int:
    """Bytes of ``80GiB``, ``1.5 GB``, ``512MiB`` or ``1000000``. Raises ``typer.BadParameter``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE | re.ASCII)
    unit = (match[2].lower() or "b") if match else ""
    if match is None or unit not in UNITS:
        raise refuse(
            option,
            f"{text!r} is no amount of memory; give a number and B, kB, MB, GB, TB, KiB, MiB, GiB or TiB: 80GiB.",
        )
    amount = int(Decimal(match[1]) * UNITS[unit])
    if amount < 1:
        raise refuse(option, f"{text!r} is less than one byte.")
    if amount >= LARGEST:
        raise refuse(option, f"{text!r} is more than the 8 EiB that an address can reach.")
    return amount


def readable(amount: int) -> str:
    """``amount`` bytes in the largest binary unit that leaves a number of at least 1."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if amount >= UNITS[unit.lower()]:
            return f"{amount / UNITS[unit.lower()]:.2f} {unit}"
    return f"{amount} B"


def memory(
    budget: Annotated[str, typer.Option(help="Memory for the pool: 80GiB, 1.5GB, 512MiB, or bytes.")],
    heads: Heads = DEFAULTS["heads"],
    hv_heads: HvHeads = None,
    head_k_dim: HeadKDim = DEFAULTS["head_dim"],
    head_v_dim: HeadVDim = DEFAULTS["head_dim"],
    layers: Annotated[int, typer.Option(min=1, max=MOST, help="KDA layers.")] = DEFAULTS["layers"],
    draft_tokens: Annotated[
        int, typer.Option(min=1, max=MOST, help="Tokens verified per request and round, the root included.")
    ] = DEFAULTS["draft_tokens"],
    ring_length: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Records per slot of the ring; default: the draft tokens.")
    ] = None,
    dtype: LongDtype = "bf16",
    spare_slots: Annotated[
        int, typer.Option(min=0, max=MOST, help="Slots kept beside those of the requests, for a prefix cache.")
    ] = 0,
    fold_on_verify: Annotated[
        bool,
        typer.Option(
            "--fold-on-verify", help="Also a pool of rings that folds on verify, which keeps two banks of each ring."
        ),
    ] = False,
    compact_window: Annotated[
        bool,
        typer.Option(
            "--compact-window", help="Also each of the pools with compact windows, where verify writes no conv windows."
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here ('-': standard output).")
    ] = None,
) -> None:
    """Print the table of `HELP`, and write its JSON."""
    amount = parse_bytes("--budget", budget)
    if ring_length is not None and ring_length < draft_tokens:
        raise refuse("--ring-length", f"{ring_length} is less than the {draft_tokens} tokens of --draft-tokens.")
    check_outputs({"--json": json_file})
    import torch

    from kda_backend import MODES, memory_plan

    shape = shape_of(heads, hv_heads, head_k_dim, head_v_dim)

    def plan(mode: str, folding: bool = False) -> MemoryPlan:
        length = ring_length if mode == "ring" else None
        return memory_plan(shape, layers, mode, getattr(torch, dtype), 1, 1, draft_tokens, length, folding)

    plans = {mode: plan(mode) for mode in MODES}
    if fold_on_verify:
        plans[FOLDING] = plan("ring", folding=True)
    if compact_window:
        plans |= {name + COMPACT: replace(plan, compact_window=True) for name, plan in plans.items()}
    sizes = {"layers": layers, "draft_tokens": draft_tokens, "ring_length": plans["ring"].ring_length, "dtype": dtype}
    report: dict[str, Any] = {
        "budget_bytes": amount, "shape": asdict(shape), "default_shape": _is_default(shape, layers), **sizes,
        "spare_slots": spare_slots,
        "modes": {mode: _figures(plan, amount, spare_slots) for mode, plan in plans.items()},
    }  # fmt: skip
    write_json(json_file, report)
    _show(report, console_for(json_file))
    if not any(figures["requests"] for figures in report["modes"].values()):
        needed = min(replace(plan, num_slots=1 + spare_slots, max_batch=1).total_bytes for plan in plans.values())
        typer.echo(_none_fits(budget, amount, needed, spare_slots), err=True)


def _none_fits(budget: str, amount: int, needed: int, spare_slots: int) -> str:
    """That ``amount`` bytes, given as ``budget``, hold not one request; a forgotten unit is the likeliest reason."""
    spare = f" beside {spare_slots} spare slots" if spare_slots else ""
    meant = f"{budget.strip().rstrip('bB').strip()}GiB"
    slip = str(amount) == meant.removesuffix("GiB") and needed <= amount << 30 < LARGEST
    return f"Not one request fits: the first{spare} needs {readable(needed)}, --budget is {readable(amount)}" + (
        f"; did you mean {meant}?" if slip else "."
    )


def _is_default(shape: KdaShape, layers: int) -> bool:
    heads, dim = DEFAULTS["heads"], DEFAULTS["head_dim"]
    return astuple(shape) == (heads, heads, dim, dim) and layers == DEFAULTS["layers"]


def _figures(plan: MemoryPlan, budget: int, spare_slots: int) -> dict[str, int]:
    """What `kda memory` says of one mode."""
    requests = plan.max_requests(budget, spare_slots=spare_slots)
    total = 0
    if requests:
        total = replace(plan, num_slots=requests + spare_slots, max_batch=requests).total_bytes
    return {
        "requests": requests, "total_bytes": total, "bytes_per_request": plan.bytes_per_request,
        "bytes_per_slot": plan.bytes_per_slot, "state_bytes_per_slot": plan.state_bytes_per_slot,
        "ring_bytes_per_slot": plan.ring_bytes_per_slot, "pending_bytes_per_slot": plan.pending_bytes_per_slot,
        "bytes_per_row": plan.bytes_per_row,
        "snapshot_bytes_per_row": plan.snapshot_bytes_per_row, "window_bytes_per_row": plan.window_bytes_per_row,
        "workspace_bytes_per_row": plan.workspace_bytes_per_row, "error_bytes": plan.error_bytes,
        "kept_input_bytes": plan.kept_input_bytes,
    }  # fmt: skip


COLUMNS = {
    "requests": ("requests", "that verify together"),
    "bytes_per_slot": ("per slot", "state, ring"),
    "bytes_per_row": ("per batch row", "snapshots, windows, workspace"),
    "bytes_per_request": ("per request", "slot and row"),
    "total_bytes": ("total", "of so many requests"),
}


def _show(report: dict[str, Any], console: Console) -> None:
    """Print the table."""
    shape = report["shape"]
    spare = f", {report['spare_slots']} spare slots" if report["spare_slots"] else ""
    if report["default_shape"]:
        console.print(f"Default shape: {KIMI_LINEAR}.", highlight=False)
    console.print(
        f"{report['layers']} KDA layers, H = {shape['num_heads']}, HV = {shape['num_v_heads']}, "
        f"K = {shape['head_k_dim']}, V = {shape['head_v_dim']}, {report['dtype']}, T = {report['draft_tokens']}, "
        f"L = {report['ring_length']}{spare}",
        highlight=False,
    )
    table = Table(title=f"Requests in {readable(report['budget_bytes'])}", title_justify="left")
    table.add_column("mode")
    for title, detail in COLUMNS.values():
        table.add_column(f"{title}\n[dim]{detail}[/dim]", justify="right")
    for mode, figures in report["modes"].items():
        cells = [str(figures[name]) if name == "requests" else readable(figures[name]) for name in COLUMNS]
        table.add_row(mode.replace(FOLDING, "ring, fold on verify").replace(COMPACT, ", compact window"), *cells)
    console.print(table)
