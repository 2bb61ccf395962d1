"""The chunked form in machine code, without a GPU: what it writes, that it spills nothing, what its helpers cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._triton.chunked import combine_queries, cumulative_decays, row_of, solve_chunk

ROOT = Path(__file__).parent.parent


@gluon.jit
def helpers_in_gluon(a, b, q, k, decay, beta, out, TP: gl.constexpr, T: gl.constexpr, K: gl.constexpr):
    """Every token of a tile in one thread: 32 lanes along K, the [TP, TP] tile whole in each."""
    PAIRS: gl.constexpr = gl.BlockedLayout([TP, TP], [1, 32], [1, 1], [1, 0])
    TOKENS: gl.constexpr = gl.BlockedLayout([TP, 4], [1, 32], [1, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, TOKENS)
    t = gl.arange(0, TP, gl.SliceLayout(1, PAIRS))[:, None]
    s = gl.arange(0, TP, gl.SliceLayout(0, PAIRS))[None, :]
    row = gl.arange(0, TP, ROWS)[:, None]
    cells = row * K + gl.arange(0, K, gl.SliceLayout(0, TOKENS))[None, :]
    M = solve_chunk(gl.load(a + t * TP + s), gl.load(b + t * TP + s), t, s, T)
    products = cumulative_decays(gl.load(decay + cells), row, T)
    w = combine_queries(gl.load(q + cells) * products, gl.load(k + cells), M * gl.load(beta + s), row, s, T, ROWS)
    gl.store(out + cells, w + row_of(w, row, T - 1)[None, :])


def describe(target: str, T: int, K: int) -> dict[str, Any]:
    """Figures of the portable kernel in the chunked form. Runs in a process without the interpreter."""
    from kda_kernels import LaunchConfig, verify_fused
    from kda_kernels.aot import capture
    from kda_tooling.compiling.rules import inspect
    from kda_tooling.compiling.stats import code_stats
    from tests.support.cases import Case, make_problem

    positional, keywords = make_problem(Case(B=1, T=T, H=1, HV=1, K=K), "cpu").arguments("ring", form="chunked")
    keywords["config"] = LaunchConfig()
    with capture(target) as compiled:
        verify_fused(*positional, **keywords)
    inspection = inspect(compiled[0], "fused", "ring")
    broken = list(inspection.broken) if inspection else []
    return {"stats": code_stats(compiled[0]).to_dict(), "broken": broken}


def describe_helpers(T: int) -> dict[str, Any]:
    """PTX of `helpers_in_gluon` for sm90. Runs in a process without the interpreter."""
    from kda_kernels.aot import capture

    x = torch.zeros(16 * 128)
    TP = max(2, 1 << (T - 1).bit_length())
    with capture("sm90"):
        code = helpers_in_gluon.warmup(
            x, x, x, x, x, x, x, TP=TP, T=T, K=128, grid=(1,), num_warps=1, enable_fp_fusion=False
        )
    return {"ptx": code.asm["ptx"]}


def run(call: str) -> dict[str, Any]:
    """``call`` of this module in a process whose kernels are compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = f"import json, tests.test_chunked_compiled as t; print(json.dumps(t.{call}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("target", "T", "K"), [("sm90", 4, 128), ("sm90", 8, 128), ("sm90", 3, 64), ("gfx942", 8, 128)]
)
def test_the_portable_kernel_writes_what_it_should_and_spills_nothing(target: str, T: int, K: int) -> None:
    found = run(f"describe({target!r}, {T}, {K})")
    assert found["broken"] == []
    assert found["stats"]["spills"] == 0


@pytest.mark.parametrize("T", [3, 8])
def test_in_gluon_what_one_thread_holds_costs_no_shuffle_and_no_select(T: int) -> None:
    """Rows and columns are chosen by selects and sums over an axis, which fold away: what is left is arithmetic."""
    ptx = run(f"describe_helpers({T})")["ptx"]
    assert len(re.findall(r"\bshfl\.", ptx)) == 0
    assert len(re.findall(r"\bselp\.", ptx)) == 0
    assert "bar.sync" not in ptx
    TP = max(2, 1 << (T - 1).bit_length())  # rows of padding are stored here, hence computed
    solve = sum(r * (TP - r) for r in range(1, T))
    combine = 4 * sum(TP - s for s in range(T))  # 4 values of K per thread
    assert len(re.findall(r"\bfma\.rn\.f32", ptx)) == solve + combine
