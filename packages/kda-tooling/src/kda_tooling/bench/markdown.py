"""The README's results block, generated from sweeps' JSON between two markers."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from kda_kernels.shapes import PDL_ARCH
from kda_tooling.bench.results import ArmResult, Cell, SweepResult
from kda_tooling.bench.settings import command_of
from kda_tooling.bench.tables import best_ratio, columns, ratio_columns

BEGIN = "<!-- results: begin (kda report) -->"
END = "<!-- results: end -->"


def _text(arm: ArmResult | None, bold: bool) -> str:
    if arm is None:
        return "-"
    return f"**{arm.median_us:.2f}**" if bold else f"{arm.median_us:.2f}"


def _provenance(result: SweepResult, source: str) -> str:
    m, shape, settings = result.machine, result.settings["shape"], result.settings
    peers = " beside " + ", ".join(f"{n} {v}" for n, v in result.peers.items()) if result.peers else ""
    gate = "standard gate" if settings["lower_bound"] is None else f"safe gate {settings['lower_bound']:g}"
    pdl = ", PDL on in every arm" if m.sm >= PDL_ARCH else ""
    spreads = [arm.spread * 100 for cell in result.cells for arm in cell.arms]
    return (
        f"Microseconds per layer on one {m.gpu}, {m.date}{peers}: H = {shape['num_heads']}, "
        f"HV = {shape['num_v_heads']}, K = {shape['head_k_dim']}, V = {shape['head_v_dim']}, {settings['dtype']}, "
        f"{gate}; CUDA-graph replays, {'L2-hot' if settings['hot'] else 'L2-cold'}, arms interleaved in one run, "
        f"passes within {max(spreads):.1f} % of their median (typically {statistics.median(spreads):.1f} %){pdl}. "
        "A lane's fastest measured arm stands for it: of ours the default launch configuration"
        f"{' and every other' if settings['sweep_configs'] else ''}, of a peer what its version lets one choose; bold: "
        "fastest of the row. The floor is every mandatory "
        f"byte of the ring lanes once, at the {m.copy_bytes_per_second / 1e12:.2f} TB/s that a device copy reached. "
        f"torch {m.torch}, triton {m.triton}, commit {m.commit}. Data: `{source}`, measured with "
        f"`{command_of(settings)}`."
    )


def summary_markdown(results: Sequence[SweepResult]) -> str:
    """Our fastest ring lane's time over each peer's at every batch size; nothing where no peer's was measured.

    Args:
        results: sweeps of one subject.
    """
    rows = [
        (title, heading, {cell.batch: best_ratio(cell, peer, form) for cell in cells})
        for result in results
        for title, cells in result.groups().items()
        for heading, peer, form in ratio_columns(result)
    ]
    rows = [row for row in rows if any(ratio is not None for ratio in row[2].values())]
    if not rows:
        return ""
    batches = sorted({batch for _, _, ratios in rows for batch in ratios})
    peers = {f"{name} {version}" for result in results for name, version in result.peers.items()}
    known = [results[0].subject, *sorted({result.machine.date for result in results}), *sorted(peers)]
    lines = [
        f"Times of the fastest ring lanes, ours over theirs, below 1 where ours is faster ({', '.join(known)}):",
        "",
        "| | | " + " | ".join(f"B = {batch}" for batch in batches) + " |",
        "|---|---|" + "--:|" * len(batches),
    ]
    for title, heading, ratios in rows:
        texts = [title, heading.replace("|", r"\|"), *(_ratio(ratios.get(batch)) for batch in batches)]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join([*lines, ""])


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(result: SweepResult, title: str, cells: list[Cell]) -> list[str]:
    lanes, ratios = columns(result), ratio_columns(result)
    heads = [title, *(f"{owner} {lane}" for owner, lane in lanes), "byte floor"]
    heads += [heading for heading, _, _ in ratios]
    heads = [head.replace("|", r"\|") for head in heads]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    lines += [_row(cell, lanes, [(peer, form) for _, peer, form in ratios]) for cell in cells]
    return lines


def _row(cell: Cell, lanes: list[tuple[str, str]], ratios: list[tuple[str, str]]) -> str:
    best = [cell.best(owner, lane=lane) for owner, lane in lanes]
    least = min(arm.median_us for arm in best if arm)
    texts = [f"B = {cell.batch}", *(_text(arm, arm is not None and arm.median_us == least) for arm in best)]
    texts.append("-" if cell.ring_floor_us is None else f"{cell.ring_floor_us:.2f}")
    for peer, form in ratios:
        texts.append(_ratio(best_ratio(cell, peer, form)))
    return "| " + " | ".join(texts) + " |"


def results_markdown(result: SweepResult, source: str) -> str:
    """What was measured and how in one paragraph, then a table per kind and draft length.

    Args:
        result: the sweep.
        source: its JSON file, as the page names it.
    """
    lines = [_provenance(result, source), ""]
    for title, cells in result.groups().items():
        lines += [*_table(result, title, cells), ""]
    return "\n".join(lines)


def results_block(results: Sequence[tuple[SweepResult, Path]], page: Path, picture: Path | None = None) -> str:
    """The text between the markers of ``page``: ours over the peers' times, the picture, every table folded away, and
    how to renew it all.

    Args:
        results: sweeps and the files they were read from.
        page: the Markdown file; paths are written relative to its folder.
        picture: the image to show, or None.
    """

    def relative(path: Path) -> str:
        return Path(os.path.relpath(path, page.parent)).as_posix()

    command = ["kda", "report", *(relative(source) for _, source in results), "--readme", page.name]
    subjects = dict.fromkeys(result.subject for result, _ in results)
    parts = [summary_markdown([result for result, _ in results if result.subject == one]) for one in subjects]
    if picture is not None:
        parts.append(f"![Latency against batch size: lanes, peers and byte floor]({quote(relative(picture))})\n")
        command += ["--plot", relative(picture)]
    parts.append("<details><summary>Every lane in microseconds, the byte floor, and how it was measured</summary>\n")
    parts += [results_markdown(result, relative(source)) for result, source in results]
    return "\n".join([*filter(None, parts), f"</details>\n\nRenewed by `{shlex.join(command)}`.\n"])


def replace_block(text: str, block: str) -> str:
    """``text`` with the part between the markers replaced by ``block``; the block gets the marker's line end.

    Raises:
        ValueError: a marker is missing, doubled, or they stand in the wrong order; or the block holds one.
    """
    if BEGIN in block or END in block:
        raise ValueError(f"the results hold a marker, {BEGIN!r} or {END!r}, as a name: rename it")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the file must have the markers {BEGIN!r} and {END!r} once each, in this order")
    before, rest = text.split(BEGIN)
    newline = "\r\n" if rest.startswith("\r\n") else "\n"
    inside = f"\n{block}".replace("\n", newline)
    return f"{before}{BEGIN}{inside}{END}{rest.split(END)[1]}"
