"""The ``kda`` command. torch and the kernels are imported inside the commands, so that ``--help`` stays quick."""

from __future__ import annotations

import typer

from kda_tooling.commands import compile_report, demo, doctor, report, sweep, train_demo

app = typer.Typer(
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
report.register(app)
doctor.register(app)


@app.callback()
def main() -> None:
    """Tools around the Kimi Delta Attention verify kernels."""
