"""The ``kda`` command. torch and the kernels are imported inside the commands, so that ``--help`` stays quick."""

from __future__ import annotations

import errno
import os
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
from kda_tooling.terminal import tolerate_encodings

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Commands(TyperGroup):
    """The commands, whose output any terminal encoding takes, and a full disk ends in one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run; where standard output has no space left, exit with 2, since 1 may mean something else."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in NO_SPACE or error.filename is not None:
                raise
            _no_space(error)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the streams before the first word, help included, is printed."""
        tolerate_encodings()
        return super().make_context(*args, **kwargs)


def _no_space(error: OSError) -> NoReturn:
    """Say it, and have the interpreter flush what is left to nowhere."""
    typer.echo(f"output cannot be written: {error.strerror}", err=True)
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
