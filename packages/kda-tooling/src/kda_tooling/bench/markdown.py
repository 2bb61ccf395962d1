"""The README's results table, generated from a sweep's JSON between two markers."""

from __future__ import annotations

from pathlib import Path

from kda_tooling.bench.report import cell_title, columns
from kda_tooling.bench.results import ArmResult, SweepResult

BEGIN = "<!-- results: begin (kda report) -->"
END = "<!-- results: end -->"


def _text(arm: ArmResult | None, bold: bool) -> str:
    if arm is None:
        return "-"
    return f"**{arm.median_us:.2f}**" if bold else f"{arm.median_us:.2f}"


def results_markdown(result: SweepResult, source: Path) -> str:
    """Tables of us per layer, one per draft length: each lane's fastest arm, best of a row in bold, and the floor."""
    m, shape = result.machine, result.settings["shape"]
    peers = " beside " + ", ".join(f"{n} {v}" for n, v in result.peers.items()) if result.peers else ""
    lines = [
        f"Microseconds per layer on one {m.gpu}, {m.date}{peers}: H = {shape['num_heads']}, "
        f"HV = {shape['num_v_heads']}, K = {shape['head_k_dim']}, V = {shape['head_v_dim']}, "
        f"{result.settings['dtype']}, CUDA-graph replays, L2-cold, arms interleaved in one run, PDL on in all; torch "
        f"{m.torch}, triton {m.triton}, commit {m.commit}. A lane's fastest launch configuration stands for it. "
        f"The floor is every mandatory byte of the ring lanes once, at this machine's copy bandwidth of "
        f"{m.copy_bytes_per_second / 1e12:.2f} TB/s. Data: `{source.as_posix()}`.",
        "",
    ]
    lanes = columns(result)
    titles = dict.fromkeys(cell_title(cell) for cell in result.cells)
    for title in titles:
        cells = [cell for cell in result.cells if cell_title(cell) == title]
        lines += [
            f"| {title} | " + " | ".join(f"{owner} {lane}" for owner, lane in lanes) + " | byte floor |",
            "|---|" + "---|" * (len(lanes) + 1),
        ]
        for cell in cells:
            best = {key: cell.best(key[0], lane=key[1]) for key in lanes}
            least = min((arm.median_us for arm in best.values() if arm), default=0.0)
            floors = [arm.floor_us for arm in cell.arms if arm.mode == "ring"]
            row = [_text(arm, arm is not None and arm.median_us == least) for arm in best.values()]
            lines.append(f"| B = {cell.batch} | " + " | ".join(row) + f" | {floors[0] if floors else 0.0:.2f} |")
        lines.append("")
    return "\n".join(lines)


def replace_results(text: str, result: SweepResult, source: Path) -> str:
    """``text`` with the part between the markers replaced.

    Raises:
        ValueError: a marker is missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the file lacks the markers {BEGIN!r} and {END!r}")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n{results_markdown(result, source)}{END}{after}"


