"""What the installed distribution promises: version, typing marker, the `kda` command with help for each subcommand."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import typer

import kda_tooling
from kda_tooling.cli import app


def test_version_is_the_distribution_s() -> None:
    assert kda_tooling.__version__ == importlib.metadata.version("kda-tooling")


def test_typed() -> None:
    assert (files("kda_tooling") / "py.typed").is_file()


def test_every_subcommand_says_what_it_does() -> None:
    commands = typer.main.get_command(app).commands
    names = "demo train-demo compile-report sweep accuracy host-time memory report doctor gate tune regressions"
    assert set(commands) == set(names.split())
    for name, command in commands.items():
        assert command.get_short_help_str(), f"kda {name} has no help"


def test_the_installed_command_runs() -> None:
    kda = Path(sys.executable).parent / "kda"
    result = subprocess.run([kda, "--help"], capture_output=True, text=True, check=True)
    assert "demo" in result.stdout
