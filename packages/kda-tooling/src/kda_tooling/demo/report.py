"""``kda demo`` on the terminal: progress and report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kda_tooling.demo.prompts import Prompt
from kda_tooling.demo.run import DemoSettings, run_demo
from kda_tooling.terminal import plain, printable


def run_with_progress(settings: DemoSettings, prompts: Sequence[Prompt], console: Console) -> dict[str, Any]:
    """:func:`kda_tooling.demo.run.run_demo` under a progress bar per run."""
    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TextColumn("bytes"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        total = settings.num_bytes * len(prompts)
        tasks = {run.name: progress.add_task(run.name, total=total, start=False) for run in settings.runs()}

        def on_progress(name: str, done: int) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], completed=done)

        return run_demo(settings, prompts, on_progress)


def _size(count: int) -> str:
    return f"{count / 1024:,.1f} KiB"


def _bar(share: float, width: int = 8) -> str:
    return "█" * max(round(share * width), 1 if share > 0 else 0)


def continuation_panels(report: dict[str, Any]) -> Group:
    """Each prompt's end and its continuation; bytes that came as accepted drafts are green (first lane's view)."""
    first = next(iter(report["lanes"].values()))
    panels = []
    for prompt, drafted in zip(report["prompts"], first["from_draft"], strict=True):
        text = Text("…" + printable(prompt["prompt_end"].replace("\r\n", "\n")), style="dim")
        # A continuation that is not ASCII has fewer characters than bytes; then it is shown in one colour.
        continuation = printable(prompt["continuation"])
        marks = drafted if len(drafted) == len(continuation) else "m" * len(continuation)
        for character, mark in zip(continuation, marks, strict=True):
            text.append(character, style="bold green" if mark == "d" else "bold cyan")
        title = f"{plain(prompt['source'])} ({prompt['prompt_bytes']} bytes of prompt)"
        panels.append(Panel(text, title=title, title_align="left", expand=False))
    return Group(*panels, Text("dim: prompt · cyan: chosen by the model · green: draft accepted by it", style="dim"))


def lane_table(report: dict[str, Any]) -> Table:
    """A row a lane: text and state equal to plain decoding, rounds, speed, mean tokens accepted per round."""
    chunked = report["form"] == "chunked"
    title = "Beside plain decoding (chunked form)" if chunked else "Against plain decoding, token by token"
    table = Table(title=title, padding=(0, 0), collapse_padding=True)
    for name in ("lane", "identical", "state", "rounds", "tokens/s", "accepted", "no draft", "faults"):
        table.add_column(name, justify="left" if name in ("lane", "identical", "state") else "right", no_wrap=True)

    def yes(same: bool) -> str:
        return "[green]yes[/green]" if same else "no" if chunked else "[bold red]NO[/bold red]"

    def text(lane: str) -> str:
        if chunked and not report["identical"][lane]:
            return f"{report['differing'][lane]} of {report['bytes'] * len(report['prompts'])} differ"
        return yes(report["identical"][lane])

    rows = [("plain", report["plain"], "", "")]
    for lane, run in report["lanes"].items():
        rows.append((lane, run, text(lane), yes(report["state_identical"][lane])))
    for name, run, same, state in rows:
        cells = (str(run["rounds"]), f"{run['tokens_per_second']:.1f}", f"{run['mean_accepted'] or 0:.2f}")
        without = "" if name == "plain" else str(run["without_draft"])
        table.add_row(name, same, state, *cells, without, plain(run["faults"] or "none"))
    return table


def acceptance_table(report: dict[str, Any]) -> Table:
    """Histogram of accepted tokens (the root included) over all requests and rounds, one column a lane."""
    table = Table(title=f"Accepted tokens per request and round, of {report['draft_tokens']}")
    table.add_column("accepted", justify="right")
    for lane in report["lanes"]:
        table.add_column(lane)
    for n in range(1, report["draft_tokens"] + 1):
        name = {1: "1 (root only)", report["draft_tokens"]: f"{n} (all)"}.get(n, str(n))
        cells = []
        for run in report["lanes"].values():
            counts = run["accepted_per_round"]
            cells.append(f"{counts[str(n)]:3d} {_bar(counts[str(n)] / max(sum(counts.values()), 1))}")
        table.add_row(name, *cells)
    return table


def show(report: dict[str, Any], console: Console) -> None:
    """Print the whole report."""
    console.print(continuation_panels(report))
    console.print(lane_table(report))
    console.print(acceptance_table(report))
    if report["form"] == "chunked":
        console.print(
            "The chunked form is within rounding of plain decoding: tokens may differ where logits nearly tie."
        )
    if report["ranks"] > 1:
        console.print(
            f"{report['ranks']} ranks shared the heads of every lane; plain decoding ran whole, in one process."
        )
    scratch, versions = report["scratch"], report["versions"]
    console.print(
        f"scratch to undo drafts: ring {_size(scratch['ring_bytes'])}, snapshots {_size(scratch['snapshot_bytes'])} "
        f"([bold]{scratch['ratio']:.1f}x[/bold])"
    )
    bits = report["model"]["bits_per_byte"]
    if bits:
        console.print(f"model: {bits['model']:.3f} bits per held-out byte (byte 3-gram: {bits['byte_3gram']:.3f})")
    console.print(
        f"device: {plain(report['device'])}, kernels: {report['kernels']}, torch {versions['torch']}, "
        f"triton {versions['triton']}, {report['seconds']:.0f} s"
    )
