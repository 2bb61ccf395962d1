"""Option values that several commands check alike. Refusals exit with 2 before anything runs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kda_tooling.names import LONG_NAMES, short_dtype
from kda_tooling.ranks import Ranks

if TYPE_CHECKING:
    from kda_kernels import KdaShape

LANES = ("unfused", "unfused+ring", "fused", "fused+ring")
"""`kda_backend.LANES`, here for options, so that ``--help`` need not import torch."""

FORMS = ("recurrent", "chunked")
"""`kda_kernels.FORMS`, here for the same reason."""


def _short(given: str) -> str:
    """The short name of an activation dtype by either name. Raises ``typer.BadParameter``."""
    if (name := short_dtype(given)) not in LONG_NAMES:
        raise refuse("--dtype", f"{given!r} is no activation type; allowed are bf16 and fp16 (bfloat16, float16).")
    return name


def _long(given: str) -> str:
    """The long name, likewise."""
    return LONG_NAMES[_short(given)]


_DTYPE_HELP = "Activations: bf16 or fp16."
ShortDtype = Annotated[str, typer.Option(help=_DTYPE_HELP, callback=_short)]
LongDtype = Annotated[str, typer.Option(help=_DTYPE_HELP, callback=_long)]
"""``--dtype`` by either name: "bf16" for the command that times, "bfloat16" for one that reads tables or allocates."""

MOST_HEADS = 1 << 20
MOST_TIMED_HEADS, MOST_TIMED_BATCH, MOST_TIMED_TOKENS = 1024, 4096, 64
"""Of commands that time kernels: the limits of `kda_tooling.bench.settings`, here for the same reason."""

_HEADS, _HV_HEADS = "Query/key heads, H.", "Value heads, HV; default: as --heads."
Heads = Annotated[int, typer.Option(max=MOST_HEADS, help=_HEADS)]
HvHeads = Annotated[int | None, typer.Option(max=MOST_HEADS, help=_HV_HEADS)]
TimedHeads = Annotated[int, typer.Option(max=MOST_TIMED_HEADS, help=_HEADS)]
TimedHvHeads = Annotated[int | None, typer.Option(max=MOST_TIMED_HEADS, help=_HV_HEADS)]
HeadKDim = Annotated[int, typer.Option(help="Key channels of a head, K: 64 or 128.")]
HeadVDim = Annotated[int, typer.Option(help="Value channels of a head, V: 64 or 128.")]

SHAPE_OPTIONS = {
    "num_heads": "--heads",
    "num_v_heads": "--hv-heads",
    "head_k_dim": "--head-k-dim",
    "head_v_dim": "--head-v-dim",
}
"""Fields of `kda_kernels.KdaShape`, whose errors name them, and the options that set them."""


def shape_of(heads: int, hv_heads: int | None, head_k_dim: int = 128, head_v_dim: int = 128) -> KdaShape:
    """The head layout that the options give. Raises ``typer.BadParameter`` in their words."""
    from kda_kernels import KdaShape

    try:
        return KdaShape(heads, heads if hv_heads is None else hv_heads, head_k_dim, head_v_dim)
    except ValueError as error:
        message = str(error)
        for name, option in SHAPE_OPTIONS.items():
            message = message.replace(name, option)
        raise typer.BadParameter(message) from None


def parse_lower_bound(value: str) -> float | None:
    """``--lower-bound``: a number, or None for the standard gate. Raises ``typer.BadParameter``."""
    if value.lower() in ("none", "standard"):
        return None
    try:
        return float(value)
    except ValueError:
        raise refuse("--lower-bound", f"{value!r} is neither a number nor 'none'.") from None


def interpreter_chosen() -> bool:
    """Whether the environment asks for Triton's interpreter, spelt as Triton allows."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "yes", "on", "y"}


def require_gpu(what: str, instead: str = "") -> None:
    """Refuse to time ``what`` where kernels are interpreted or no GPU is there; ``instead`` says what can be done."""
    if interpreter_chosen():
        raise typer.BadParameter(f"TRITON_INTERPRET is set: {what} times compiled kernels; unset it. {instead}".strip())
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter(f"{what} needs a CUDA device and torch sees none here. {instead}".strip())


def positive(value: float | None) -> float | None:
    """Typer callback for finite numbers above 0."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value} is not a finite number greater than 0.")
    return value


def refuse(option: str, message: str) -> typer.BadParameter:
    """The error to raise for an option whose value cannot be used."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def check_output_file(option: str, path: Path) -> None:
    """Refuse a file that could not be written after minutes of work. Raises ``typer.BadParameter``."""
    if str(path).startswith("-"):  # `--json --plot x.png` would write a file called --plot
        raise refuse(option, f"{path} looks like an option; give ./{path} if a file shall be called so.")
    if path.is_dir():
        raise refuse(option, f"{path} is a folder.")
    if not path.absolute().parent.is_dir():
        raise refuse(option, f"the folder {path.absolute().parent} is missing.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise refuse(option, f"{path} cannot be written.")


def check_output_folder(option: str, path: Path) -> None:
    """Refuse a folder that could neither be written nor made. Raises ``typer.BadParameter``."""
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise refuse(option, f"{nearest} is not a folder; give a folder, which is made where it is missing.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise refuse(option, f"the folder {nearest} cannot be written.")


def check_distinct(files: Mapping[str, Path | None]) -> None:
    """Refuse two options that name one file. Raises ``typer.BadParameter``."""
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise refuse(option, f"{path} is also the file of {other}: one would overwrite the other.")


def resolve_device(value: str) -> str:
    """``auto`` to the device to use, others checked. Raises ``typer.BadParameter``."""
    import torch

    if value == "auto":
        return "cuda" if torch.cuda.is_available() and not interpreter_chosen() else "cpu"
    try:
        device = torch.device(value)
    except (RuntimeError, ValueError):
        device = None
    kind = device.type if device else ""
    index = device.index if device and device.index is not None else 0
    if kind not in ("cpu", "cuda") or (kind == "cpu" and index):
        raise refuse("--device", f"{value!r} is not a device; allowed are auto, cpu, cuda, cuda:N.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise refuse("--device", f"{value!r} was asked for, but torch sees no GPU here; use --device cpu.")
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise refuse(
            "--device", f"{value!r} is not there: torch sees {torch.cuda.device_count()} GPUs, from cuda:0 on."
        )
    return "cpu" if kind == "cpu" else value  # cpu:0 is the CPU too, and what follows compares with its name


def device_of_rank(device: str, ranks: Ranks | None) -> str:
    """The rank's own device, for a device that `resolve_device` gave. Raises ``typer.BadParameter``."""
    if ranks is None or device == "cpu":
        return device
    import torch

    if device != "cuda":
        raise refuse(
            "--device", f"{device}: under torchrun every rank has a GPU of its own; give cuda, or leave it out."
        )
    if ranks.local >= torch.cuda.device_count():
        raise refuse(
            "--device", f"rank {ranks.rank} wants cuda:{ranks.local}, but torch sees {torch.cuda.device_count()} GPUs."
        )
    return f"cuda:{ranks.local}"


def choose_kernels(device: str) -> None:
    """Have Triton interpret kernels for the CPU and compile them for a GPU; it decides when it is first imported.

    Raises ``typer.BadParameter`` when that cannot be had any more.
    """
    if device == "cpu":
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        elif not interpreter_chosen():
            raise refuse("--device", "cpu needs TRITON_INTERPRET=1, set before anything imports triton.")
    elif interpreter_chosen():
        raise refuse("--device", f"{device} runs compiled kernels, but TRITON_INTERPRET is set; unset it.")
