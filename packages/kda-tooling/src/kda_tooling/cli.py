"""The ``kda`` command. torch and the kernels are imported inside the commands, so that ``--help`` stays quick."""

from __future__ import annotations

import errno
import inspect
import os
import re
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kda_tooling.commands import (
    accuracy,
    compile_report,
    demo,
    doctor,
    gate,
    gate_history,
    host_time,
    memory,
    regressions,
    regret,
    rejudge,
    report,
    sweep,
    train_demo,
    tune,
)
from kda_tooling.terminal import printable, tolerate_encodings

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Commands(TyperGroup):
    """The commands. Any terminal's encoding takes their output, a full disk or a closed pipe ends them in one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run; without space for the output, exit with 2: 1 may be a verdict."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in NO_SPACE or error.filename is not None:
                raise
            typer.echo(f"output cannot be written: {error.strerror}", err=True)
            _end_without_output()

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what it refuses may be quoted from a file, and shall not steer the terminal."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has enough
            _end_without_output()
        except typer.BadParameter as error:
            error.message = printable(error.message)
            raise

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the streams before the first word, help included, is printed."""
        tolerate_encodings()
        return super().make_context(*args, **kwargs)


def _end_without_output() -> NoReturn:
    """Exit with 2, and have the interpreter flush what is left to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(2)


app = typer.Typer(
    cls=Commands,
    help="Tools around the Kimi Delta Attention verify kernels.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)

demo.register(app)
compile_report.register(app)
train_demo.register(app)
sweep.register(app)
tune.register(app)
report.register(app)
accuracy.register(app)
host_time.register(app)
memory.register(app)
doctor.register(app)
gate.register(app)
regret.register()
rejudge.register()
regressions.register(app)
gate_history.register()


for command in (*app.registered_commands, *gate.gate.registered_commands):
    if command.help is None and command.callback is not None:
        # rich would keep the line breaks within a docstring's paragraphs, and add those of the terminal
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command.callback) or "")


def _show_version(asked: bool) -> None:
    if asked:
        from kda_tooling import __version__

        typer.echo(f"kda {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Tools around the Kimi Delta Attention verify kernels."""
