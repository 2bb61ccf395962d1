"""`kda gate`: why the dispatch gate takes a lane, and what its tables say."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from kda_tooling.commands.memory import MOST
from kda_tooling.commands.options import FORMS, HeadKDim, Heads, HeadVDim, HvHeads, LongDtype, refuse, shape_of
from kda_tooling.commands.outputs import check_outputs, console_for, is_stdout, write_json
from kda_tooling.terminal import plain

if TYPE_CHECKING:
    import torch

    from kda_backend import Target
    from kda_backend.gate import Decision, Table
    from kda_kernels import KdaShape

MOST_DRAFT_TOKENS = 4096
MODES = ("ring", "snapshots")
GATES = ("safe", "standard")
OPTIONS = ("plain", "fold-on-verify", "compact-window", "fold-on-verify+compact-window")
"""`kda_backend.MODES` and the rest of `kda_backend.gate.cells`, here so that ``--help`` need not import torch."""

OPTION_WORDS = f"{', '.join(OPTIONS[:3])}, or the last two joined by +"
"""`OPTIONS` in words that fit the help of a terminal of 80 columns, which cuts longer ones off."""

gate = typer.Typer(
    help="The dispatch gate: why it takes a lane, and what its tables say (docs/gate.md).", no_args_is_help=True
)

DeviceName = Annotated[str | None, typer.Option(help="As torch names the GPU: 'NVIDIA H200'; default: the GPU here.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the same as JSON here ('-': standard output).")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    gate.command(
        epilog="Examples: [bold]kda gate explain --batch 4 --draft-tokens 4[/bold], [bold]kda gate explain --batch 4 "
        "--draft-tokens 4 --device-name 'NVIDIA H200' --arch sm90 --json -[/bold]"
    )(explain)
    gate.command(
        epilog="Examples: [bold]kda gate show --heads 8 --device-name 'NVIDIA H200'[/bold], [bold]kda gate show "
        "tables/*.json[/bold], [bold]kda gate show --device-name 'NVIDIA H200' --plot gate.png[/bold]"
    )(show)
    app.add_typer(gate, name="gate")


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise refuse(option, f"{value!r} is none of {', '.join(allowed)}.")


def _gpu_here(option: str, instead: str) -> torch.device:
    """The GPU of this process. Raises ``typer.BadParameter`` where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise refuse(option, f"torch sees no GPU here; {instead}.")
    return torch.device("cuda", torch.cuda.current_device())


def _device_name(given: str | None) -> str:
    from kda_backend.gate import device_name_of

    return given if given is not None else device_name_of(_gpu_here("--device-name", "name one, such as 'NVIDIA H200'"))


def _target(arch: str | None, device_name: str | None) -> Target:
    """The target of ``--arch``, or of the GPU here."""
    from kda_backend import Target

    if arch is None:
        if device_name is not None:
            raise refuse("--arch", f"must be given for the device {device_name!r}: sm90, sm100 and so on, or hip.")
        return Target.of(_gpu_here("--arch", "give --device-name 'NVIDIA H200' --arch sm90, say"))
    if (name := arch.lower()) in ("hip", "interpreter"):
        return Target(name)
    match = re.fullmatch(r"(?:sm_?)?([1-9][0-9]{1,2})", name, re.ASCII)
    if match is None:
        raise refuse("--arch", f"{arch!r} is no architecture; allowed are sm80, sm90 and so on, hip, interpreter.")
    return Target("cuda", int(match[1]))


def explain(
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Requests in the batch, B.")],
    draft_tokens: Annotated[int, typer.Option(min=1, max=MOST_DRAFT_TOKENS, help="Tokens verified per request, T.")],
    heads: Heads = 8,
    hv_heads: HvHeads = None,
    head_k_dim: HeadKDim = 128,
    head_v_dim: HeadVDim = 128,
    mode: Annotated[str, typer.Option(help=f"State mode: {' or '.join(MODES)}.")] = MODES[0],
    form: Annotated[str, typer.Option(help=f"Form of the output: {' or '.join(FORMS)}.")] = FORMS[0],
    option: Annotated[str, typer.Option(help=f"Of the pool: {OPTION_WORDS}.")] = OPTIONS[0],
    gate: Annotated[str, typer.Option(help="safe (the layers have a lower bound) or standard.")] = GATES[0],
    ragged: Annotated[bool, typer.Option("--ragged", help="The requests' lengths differ.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="The tokens have parents.")] = False,
    device_name: DeviceName = None,
    arch: Annotated[str | None, typer.Option(help="sm90, sm100, ... or hip; default: that of the GPU here.")] = None,
    dtype: LongDtype = "bf16",
    tables: Annotated[
        Path | None,
        typer.Option(help="The user's folder of tables; default: KDA_GATE_TABLES.", exists=True, file_okay=False),
    ] = None,
    json_file: Json = None,
) -> None:
    """Print which lane the gate takes, how it is launched, and every step on the way with what it said.

    Environment variables count as in a served process.
    """
    for name, value, allowed in (
        ("--mode", mode, MODES), ("--form", form, FORMS), ("--option", option, OPTIONS), ("--gate", gate, GATES),
    ):  # fmt: skip
        _one_of(name, value, allowed)
    check_outputs({"--json": json_file})
    import torch

    from kda_backend.gate import CellKey, decide
    from kda_backend.gate.env import TABLES

    try:
        CellKey(gate, form, mode, option, draft_tokens, batch)  # the gate leaves what no lane takes to the op's refusal
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None
    shape, target = shape_of(heads, hv_heads, head_k_dim, head_v_dim), _target(arch, device_name)
    question: dict[str, Any] = {
        "mode": mode, "batch": batch, "draft_tokens": draft_tokens, "device_name": _device_name(device_name),
        "form": form, "safe_gate": gate == "safe", "option": option, "ragged": ragged, "tree": tree,
    }  # fmt: skip
    environ = dict(os.environ) | ({} if tables is None else {TABLES: str(tables)})
    try:
        decision = decide(shape, **question, target=target, dtype=getattr(torch, dtype), environ=environ)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    question |= {"arch": str(target), "dtype": dtype, "shape": asdict(shape)}
    if not is_stdout(json_file):
        _show_decision(question, decision, console_for(json_file))
    write_json(json_file, {"question": question, **_decision_data(decision)})


def _decision_data(decision: Decision) -> dict[str, Any]:
    from kda_backend.gate.cells import config_fields

    return {
        "lane": decision.lane, "launch": None if decision.launch is None else config_fields(decision.launch),
        "source": decision.source, "reason": decision.reason,
        "steps": [step._asdict() for step in decision.steps],
    }  # fmt: skip


def _show_decision(question: dict[str, Any], decision: Decision, console: Console) -> None:
    shape = question["shape"]
    console.print(
        plain(
            f"{question['device_name']} ({question['arch']}), H = {shape['num_heads']}, HV = {shape['num_v_heads']}, "
            f"K = {shape['head_k_dim']}, V = {shape['head_v_dim']}, {question['dtype']}, "
            f"{'safe' if question['safe_gate'] else 'standard'} gate, {question['form']}, {question['mode']}, "
            f"{question['option']}, T = {question['draft_tokens']}, B = {question['batch']}"
            + ", ragged" * question["ragged"] + ", a tree" * question["tree"]
        ),
        highlight=False,
    )  # fmt: skip
    table = RichTable(show_header=True)
    for column in ("", "step", "what it said"):
        table.add_column(column, overflow="fold")
    for number, step in enumerate(decision.steps, 1):
        table.add_row(str(number), plain(step.name), plain(step.said))
    console.print(table)
    fields = _decision_data(decision)["launch"]
    launch = "the kernels' own" if fields is None else ", ".join(f"{name} {value}" for name, value in fields.items())
    console.print(f"[bold]{plain(decision.lane)}[/bold], source: {plain(decision.source)}; launch: {plain(launch)}",
                  highlight=False)  # fmt: skip


def show(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...", help="Tables; or name one by heads and device.", exists=True, dir_okay=False
        ),
    ] = None,
    heads: Heads = 8,
    hv_heads: HvHeads = None,
    head_k_dim: HeadKDim = 128,
    head_v_dim: HeadVDim = 128,
    device_name: DeviceName = None,
    dtype: LongDtype = "bf16",
    tables: Annotated[
        Path | None, typer.Option(help="Folder to look in; default: the packaged tables.", exists=True, file_okay=False)
    ] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the picture here (.png, .svg, .pdf).")] = None,
    json_file: Json = None,
) -> None:
    """Show tables: the lane taken at each T and B, and fused over unfused time there.

    As JSON, one table is an object, several are a list of them.
    """
    read: list[Path | None] = [*files] if files else [None]
    for file in read:
        check_outputs({"--plot": picture, "--json": json_file}, {"FILE": file})
    if picture is not None and len(read) > 1:
        raise refuse("--plot", f"draws one table, and {len(read)} are given.")
    from kda_backend.gate import load_table
    from kda_tooling.gate.grid import as_data
    from kda_tooling.gate.picture import plot

    if not files:
        shape = shape_of(heads, hv_heads, head_k_dim, head_v_dim)
        files = [_named_table(tables, shape, _device_name(device_name), dtype)]
    try:
        loaded: list[Table] = [load_table(file) for file in files]
        if picture is not None:
            plot(loaded[0], picture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise refuse("--plot", f"{picture} cannot be written: {error.strerror}; name another file.") from None
    for table in loaded:
        _show_table(table, None if is_stdout(json_file) else console_for(json_file))
    if picture is not None:
        typer.echo(f"drew {picture}", err=True)
    data = [as_data(table) for table in loaded]
    write_json(json_file, data if len(data) > 1 else data[0])


def _show_table(table: Table, console: Console | None) -> None:
    """Its doubts on standard error, and where there is a ``console`` the table there."""
    from kda_tooling.gate.grid import LEGEND, heading, rich_tables

    for doubt in table.doubts:
        Console(stderr=True).print(f"[yellow]unfused, edited by hand?[/yellow] {plain(doubt)}", highlight=False)
    if console is not None:
        console.print(plain(heading(table)), highlight=False)
        for grid in rich_tables(table):
            console.print(grid)
        console.print(LEGEND if table.cells else "no cells", highlight=False, style="dim")


def _named_table(folder: Path | None, shape: KdaShape, device_name: str, dtype: str) -> Path:
    """The file of the table for these heads. Raises ``typer.BadParameter`` if it is not there."""
    from kda_backend.gate import table_name
    from kda_backend.gate.folders import PACKAGED

    where = Path(PACKAGED) if folder is None else folder
    try:
        path = where / table_name(shape, device_name, dtype)
    except ValueError as error:
        raise refuse("--device-name", str(error)) from None
    if not path.is_file():
        there = sorted(each.name for each in where.glob("*.json"))
        listed = "no table at all" if not there else "these: " + "; ".join(there[:20])
        raise typer.BadParameter(
            f"there is no {path.name} in {where}, but {listed}. 'kda tune --into tables' with these heads measures "
            "one on this GPU; then --tables tables."
        )
    return path
