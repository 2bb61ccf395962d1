"""Replays as Triton's own launcher sees them, and how many variants of a kernel batch sizes and slot counts make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run(module: str) -> list[Any]:
    """The JSON lines that a module of tests.support prints, run without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", f"tests.support.{module}"]
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_batch_size_and_slot_count_make_no_variants() -> None:
    programs = run("variants")
    assert {kernel for kernel, _ in programs} == {
        "verify_kernel", "verify_gluon_kernel", "conv_kernel", "fold_kernel", "fold_gluon_kernel", "scatter_kernel",
        "gather_kernel",
    }  # fmt: skip
    assert [(kernel, number) for kernel, number in programs if number != 1] == []


def test_a_replay_gives_triton_s_launcher_what_an_ordinary_launch_gives_it() -> None:
    ops = {name: rest for name, *rest in run("compiled_replays")}
    launches = {name: kernels for name, (kernels, _, _) in ops.items()}
    for record in ("Ring", "Snapshots"):
        for config, kernel in (("portable", "verify_kernel"), ("gluon", "verify_gluon_kernel")):
            assert launches[f"verify_fused {record} {config}"] == [f"function {kernel}"]
            assert launches[f"verify_unfused {record} {config}"] == ["function conv_kernel", f"function {kernel}"]
    for name, kernel in (
        ("fold portable", "fold_kernel"), ("fold gluon", "fold_gluon_kernel"), ("scatter_conv", "scatter_kernel"),
        ("scatter_snapshots", "scatter_kernel"), ("gather_conv", "gather_kernel"),
        ("verify_fused compact", "verify_gluon_kernel"),
    ):  # fmt: skip
        assert launches[name] == [f"function {kernel}"]
    for kind in ("ragged", "tree"):
        assert launches[f"verify_unfused {kind}"] == ["function conv_kernel", "function verify_kernel"]
    for name, (_, equal, equal_to_other_tensors) in ops.items():
        assert equal, name
        assert not equal_to_other_tensors, name
