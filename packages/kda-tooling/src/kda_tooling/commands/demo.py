"""`kda demo`: speculate with a small real model in every lane and compare with plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kda_tooling.commands.options import FORMS, LANES, choose_kernels, device_of_rank, refuse, resolve_device
from kda_tooling.commands.outputs import check_outputs, console_for, write_json
from kda_tooling.ranks import connected, started_ranks

ASSETS = Path(__file__).parent.parent / "assets"
PROMPTS = 3
PROMPT_BYTES = 768
MAX_DRAFT_TOKENS = 64
MAX_RING_LENGTH = 1024
MAX_BYTES = 1 << 16
RING_LANES = tuple(lane for lane in LANES if lane.endswith("+ring"))
MAX_CHUNKED_TOKENS = 16
"""`kda_kernels.MAX_CHUNKED_TOKENS`, here so that ``--help`` need not import torch."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        epilog="Examples: [bold]kda demo[/bold], [bold]kda demo --lanes fused+ring --bytes 24 --json -[/bold], "
        "[bold]kda demo --prompt-file my_module.py --draft-tokens 6[/bold], "
        "[bold]torchrun --nproc-per-node 2 -m kda_tooling demo[/bold]",
    )(demo)


def _lanes(value: str | None, form: str) -> tuple[str, ...]:
    if value is None:
        return RING_LANES if form == "chunked" else LANES
    lanes = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    unknown = [lane for lane in lanes if lane not in LANES]
    if unknown or not lanes:
        raise refuse("--lanes", f"{value!r} names {unknown or 'no lane'}; allowed are {', '.join(LANES)}.")
    others = [lane for lane in lanes if lane not in RING_LANES]
    if form == "chunked" and others:
        raise refuse("--lanes", f"{', '.join(others)}: --form chunked is of {', '.join(RING_LANES)} only.")
    return lanes


def demo(
    draft_tokens: Annotated[
        int, typer.Option(help="Tokens verified per round, the root included.", min=1, max=MAX_DRAFT_TOKENS)
    ] = 4,
    num_bytes: Annotated[int, typer.Option("--bytes", help="Bytes to decode per prompt.", min=1, max=MAX_BYTES)] = 48,
    lanes: Annotated[
        str | None, typer.Option(help="Comma-separated lanes to compare; default: every lane that has the form.")
    ] = None,
    form: Annotated[
        str, typer.Option(help="recurrent, or chunked (ring lanes): tokens that differ are counted, not forbidden.")
    ] = FORMS[0],
    prompts: Annotated[
        int | None, typer.Option(help=f"Prompts from held-out modules; default: {PROMPTS}.", min=1)
    ] = None,
    prompt_bytes: Annotated[
        int | None, typer.Option(help=f"Bytes of each of these prompts; default: {PROMPT_BYTES}.", min=1)
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="Continue this file's text instead (its last 4096 bytes); repeatable.")
    ] = None,
    ring_length: Annotated[
        int | None,
        typer.Option(help="Records per slot of the ring; default: the draft tokens.", min=1, max=MAX_RING_LENGTH),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu (Triton's interpreter), cuda or cuda:N.")] = "auto",
    model: Annotated[
        Path | None, typer.Option(help="Folder with another demo_model.safetensors and .json (kda train-demo).")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that share the runs on a CPU; default: one per core.", min=1)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report here ('-': standard output).")
    ] = None,
) -> None:
    """Decode real text with a small KDA model, plainly and with speculation in every lane, and compare them.

    Under torchrun the ranks share the heads in every lane (tensor parallelism), while plain decoding runs whole.
    Exit code 1 when a lane's text or state differs from plain decoding (in the recurrent form) or a kernel counted a
    fault, 2 for wrong arguments.
    """
    if form not in FORMS:
        raise refuse("--form", f"{form!r} is not a form; allowed are {', '.join(FORMS)}.")
    chosen = _lanes(lanes, form)
    if form == "chunked" and draft_tokens > MAX_CHUNKED_TOKENS:
        raise refuse(
            "--draft-tokens", f"{draft_tokens} is more than the {MAX_CHUNKED_TOKENS} tokens that --form chunked takes."
        )
    for option, value in (("--prompts", prompts), ("--prompt-bytes", prompt_bytes)):
        if prompt_file and value is not None:
            raise refuse(option, f"{value} is about held-out modules; --prompt-file gives others: leave one out.")
    if ring_length is not None and draft_tokens > ring_length:
        raise refuse(
            "--draft-tokens",
            f"{draft_tokens} draft tokens do not fit a ring of {ring_length} records; "
            f"allowed are 1..{ring_length}. Give fewer draft tokens or a longer --ring-length.",
        )
    weights = (model or ASSETS) / "demo_model.safetensors"
    if not weights.is_file():
        raise refuse("--model", f"{weights} does not exist; make one with `kda train-demo --out {weights.parent}`.")
    from kda_tooling.demo.prompts import file_prompts, held_out_prompts

    try:
        texts = (
            file_prompts(prompt_file)
            if prompt_file
            else held_out_prompts(prompts or PROMPTS, prompt_bytes or PROMPT_BYTES)
        )
    except (ValueError, OSError) as error:
        raise refuse("--prompt-file" if prompt_file else "--prompts", str(error)) from None
    try:
        ranks = started_ranks()
    except ValueError as error:
        raise refuse("torchrun", str(error)) from None
    if ranks and processes is not None:
        raise refuse("--processes", f"{processes}: under torchrun every rank is one process; leave it out.")
    reports = ranks is None or ranks.reports
    # One rank has the report and writes it; the others, on other machines perhaps, need not have its folder.
    written = json_file if reports else None
    for option, source in (
        ("--model", weights),
        ("--model", weights.with_suffix(".json")),
        *(("--prompt-file", file) for file in prompt_file or ()),
    ):
        check_outputs({"--json": written}, {option: source})
    device = device_of_rank(resolve_device(device), ranks)
    choose_kernels(device)
    from kda_tooling.demo.model import load_model

    try:
        config = load_model(weights)[0].config
    except (ValueError, OSError) as error:
        raise refuse("--model", str(error)) from None
    if ranks:
        from kda_backend.sharding import shard_reason
        from kda_tooling.demo.decoding import layer_shape

        reason = shard_reason(layer_shape(config), ranks.world)
        if reason is not None and not reports:
            raise typer.Exit(2)
        if reason is not None:
            raise refuse("torchrun --nproc-per-node", f"{reason}.")
    from kda_tooling.demo.report import run_with_progress, show
    from kda_tooling.demo.run import DemoSettings, passed

    console = console_for(json_file)
    console.quiet = not reports
    settings = DemoSettings(chosen, draft_tokens, num_bytes, ring_length, device, weights, processes, form, ranks)
    with connected(ranks, device):
        report = run_with_progress(settings, texts, console)
    write_json(written, report)
    show(report, console)
    if not passed(report):
        console.print("[bold red]A lane differs from plain decoding, or its kernels counted faults.[/bold red]")
        raise typer.Exit(1)
