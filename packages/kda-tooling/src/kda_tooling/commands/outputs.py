"""Where a command's data goes, a file or standard output ('-'), and where it then speaks to people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from kda_tooling.commands.options import check_distinct, check_output_file, refuse
from kda_tooling.names import TABLE_NAME
from kda_tooling.terminal import in_a_line

PIPE_WIDTH = 200
"""Columns where no terminal says how many there are: tables are not cropped to 80."""


def is_stdout(file: Path | None) -> bool:
    """Whether an output option names standard output."""
    return str(file) == "-"


class _Console(Console):
    """A console whose reader may leave (``| head -1``) without the exit code becoming 1, which is a verdict."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(2) from None


def console_for(*files: Path | None) -> Console:
    """Where people read: beside data on standard output, that is standard error."""
    stderr = any(map(is_stdout, files))
    console = _Console(stderr=stderr)
    return console if console.is_terminal else _Console(stderr=stderr, width=PIPE_WIDTH)


@contextmanager
def ended_early(what: str) -> Iterator[None]:
    """Refuse what fails while ``what`` runs (memory, a compiler, a disk) in one line: exit 2, since 1 is a verdict."""
    try:
        yield
    except (typer.Exit, typer.Abort):  # RuntimeErrors both
        raise
    except (RuntimeError, OSError) as error:
        raise typer.BadParameter(f"{what} ended early, {in_a_line(error)}") from None


def check_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None] | None = None) -> None:
    """Refuse output files that cannot be written or are named as a gate table, two that are one, and one also read.

    Args:
        outputs: option -> file.
        inputs: option or argument -> file that the command reads.

    Raises:
        typer.BadParameter: which option, and why.
    """
    if sum(map(is_stdout, outputs.values())) > 1:
        raise refuse(list(outputs)[-1], "standard output ('-') is taken by another option.")
    files = {option: file for option, file in outputs.items() if file is not None and not is_stdout(file)}
    for option, file in files.items():
        check_output_file(option, file)
        if TABLE_NAME.fullmatch(file.resolve().name):
            raise refuse(option, f"{file} has a gate table's name, and only kda tune writes those: name another file.")
    check_distinct({**(inputs or {}), **files})


def write_output(file: Path | None, text: str) -> None:
    """Write ``text`` to a file, to standard output, or nowhere.

    Raises:
        typer.BadParameter: the file cannot be written (a full disk, say): exit 2, since 1 may mean something else.
    """
    if is_stdout(file):
        typer.echo(text, nl=False)
    elif file is not None:
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be written: {error.strerror}; name another file.") from None


def write_json(file: Path | None, data: Any, one_a_line: str | None = None) -> None:
    """`write_output` of ``data`` as JSON, which knows neither NaN nor infinities.

    Args:
        file: as `write_output`.
        data: what to write.
        one_a_line: key of ``data`` whose value is a long list of many small things: each is put on one line.

    Raises:
        ValueError: ``data`` has a NaN or an infinity.
    """
    if one_a_line is None:
        write_output(file, json.dumps(data, allow_nan=False, indent=1) + "\n")
        return
    lines = ",\n  ".join(json.dumps(one, allow_nan=False) for one in data[one_a_line])
    head = json.dumps({name: value for name, value in data.items() if name != one_a_line}, allow_nan=False, indent=1)
    write_output(file, f'{head[:-2]},\n "{one_a_line}": [\n  {lines}\n ]\n}}\n')
