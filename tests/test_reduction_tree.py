"""The canonical sum over K: the same bits in every layout, and exactly the tree that is documented.

On a GPU the device sums are compared with an exact emulation (rational arithmetic, one rounding per operation), in
plain Triton over tiles, warp counts and an odd pitch, and in Gluon with 8 lanes along K. Without a GPU the compiled
code is counted: a row costs 5 shuffles with 32 lanes along K, 3 per row with 8 lanes.
"""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_kernels._triton.arithmetic import dot_k, inverse_norm, l2_normalise


def round_to_float32(value: Fraction) -> float:
    """Round an exact value to the nearest fp32, ties to even (normal range)."""
    if value == 0:
        return 0.0
    exponent = 0
    magnitude = abs(value)
    while magnitude >= 2**24:
        magnitude, exponent = magnitude / 2, exponent + 1
    while magnitude < 2**23:
        magnitude, exponent = magnitude * 2, exponent - 1
    whole = magnitude.numerator // magnitude.denominator
    rest = magnitude - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    return float(np.copysign(whole * 2.0**exponent, float(value)))


def exact_tree_dot(x: np.ndarray, y: np.ndarray) -> float:
    """The documented tree: groups of 4 by fused multiply-adds, then halves at distance K/2, ..., 4."""
    xs, ys = [Fraction(float(v)) for v in x], [Fraction(float(v)) for v in y]
    partial = []
    for i in range(0, len(xs), 4):
        p = round_to_float32(xs[i] * ys[i])
        for j in range(1, 4):
            p = round_to_float32(xs[i + j] * ys[i + j] + Fraction(p))
        partial.append(p)
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [round_to_float32(Fraction(partial[i]) + Fraction(partial[i + half])) for i in range(half)]
    return partial[0]


@triton.jit
def triton_dots(x, x_pitch, y, dots, norms, K: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, K)
    rows = tl.load(x + r[:, None] * x_pitch + k[None, :])
    tl.store(dots + r, dot_k(rows, tl.load(y + k)[None, :]))
    tl.store(norms + r[:, None] * K + k[None, :], l2_normalise(rows))


@gluon.jit
def gluon_dots(
    x, x_pitch, y, dots, norms,
    K: gl.constexpr, ROWS: gl.constexpr, PER_THREAD: gl.constexpr, LANES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([PER_THREAD, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    r = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    k = gl.arange(0, K, gl.SliceLayout(0, layout))
    rows = gl.load(x + r[:, None] * x_pitch + k[None, :])
    vectors = gl.load(y + r[:, None] * 0 + k[None, :])
    gl.store(dots + r, gl.convert_layout(dot_k(rows, vectors), gl.SliceLayout(1, layout)))
    inverse = gl.convert_layout(inverse_norm(dot_k(rows, rows)), gl.SliceLayout(1, layout))
    gl.store(norms + r[:, None] * K + k[None, :], rows * inverse[:, None])


def problem(k: int, rows: int, pitch: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of magnitudes over many binades, so that a changed order changes bits."""
    generator = torch.Generator().manual_seed(k)
    scale = 2.0 ** torch.randint(-6, 7, (rows, k), generator=generator)
    x = torch.zeros(rows, pitch)
    x[:, :k] = torch.randn(rows, k, generator=generator) * scale
    return x.to(device), torch.randn(k, generator=generator).to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 128])
def test_every_layout_gives_the_documented_tree(k: int) -> None:
    rows = 64
    expected = None
    reference_norms = None
    for pitch in (k, k + 1, k + 16):
        x, y = problem(k, rows, pitch, "cuda")
        if expected is None:
            values, vector = x[:, :k].cpu().numpy(), y.cpu().numpy()
            expected = torch.tensor([exact_tree_dot(row, vector) for row in values], device="cuda")
        arms = [("triton", per, warps) for per in (1, 2, 4, 16, 64) for warps in (1, 2, 4, 8)]
        arms += [("gluon", per, warps) for per in (1, 2, 4) for warps in (1, 2, 4)]
        for kind, per, warps in arms:
            for lanes in (8, 16, 32) if kind == "gluon" else (0,):
                if lanes and lanes * 4 > k:
                    continue
                dots, norms = torch.full((rows,), float("nan"), device="cuda"), torch.zeros(rows, k, device="cuda")
                if kind == "triton":
                    triton_dots[(rows // per,)](
                        x, pitch, y, dots, norms, K=k, ROWS=per, num_warps=warps, enable_fp_fusion=False
                    )
                else:
                    tile = min(rows, per * (32 // lanes) * warps)
                    gluon_dots[(rows // tile,)](
                        x, pitch, y, dots, norms, K=k, ROWS=tile, PER_THREAD=per, LANES=lanes, WARPS=warps,
                        num_warps=warps, enable_fp_fusion=False,
                    )  # fmt: skip
                name = f"{kind} pitch={pitch} per={per} warps={warps} lanes={lanes}"
                assert torch.equal(dots.view(torch.int32), expected.view(torch.int32)), name
                if reference_norms is None:
                    reference_norms = norms
                assert torch.equal(norms.view(torch.int32), reference_norms.view(torch.int32)), name


def test_the_exact_tree_emulation_is_a_dot_product() -> None:
    x, y = problem(128, 4, 128, "cpu")
    for row in x:
        exact = float(np.dot(row.double().numpy(), y.double().numpy()))
        # 4 + 5 roundings on the longest path, each at most half an ulp of the sum of magnitudes.
        bound = 9 * 2.0**-24 * float((row.double() * y.double()).abs().sum())
        assert abs(exact_tree_dot(row.numpy(), y.numpy()) - exact) <= bound


def test_interpreted_tree_agrees_with_the_emulation() -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter's separately rounded products are checked where kernels are interpreted")
    x, y = problem(64, 4, 64, "cpu")
    dots, norms = torch.zeros(4), torch.zeros(4, 64)
    triton_dots[(1,)](x, 64, y, dots, norms, K=64, ROWS=4)
    bound = 9 * 2.0**-24 * (x.double() * y.double()).abs().sum(1)
    exact = torch.tensor([exact_tree_dot(row.numpy(), y.numpy()) for row in x])
    # The interpreter rounds products before adding (no fma in numpy): twice the rounding bound covers both.
    assert bool(((dots - exact).abs() <= 2 * bound).all())


_COUNT_SHUFFLES = """
import re, subprocess, sys, tempfile, os
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
import tests.test_reduction_tree as t
pointers = {name: "*fp32" for name in ("x", "y", "dots", "norms")}
signature = {"x": "*fp32", "x_pitch": "i32", "y": "*fp32", "dots": "*fp32", "norms": "*fp32"}
attrs = {(i,): [["tt.divisibility", 16]] for i in range(5)}
tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
def shuffles(source, warps):
    options = {"num_warps": warps, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code); file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"SHFL", text))
print("triton", shuffles(ASTSource(t.triton_dots, signature, {"K": 128, "ROWS": 16}, attrs), 4))
constants = {"K": 128, "ROWS": 64, "PER_THREAD": 4, "LANES": 8, "WARPS": 4}
print("gluon", shuffles(GluonASTSource(t.gluon_dots, signature, constants, attrs), 4))
"""


def test_compiled_shuffle_counts() -> None:
    """16 rows over 4 warps are 4 rows a warp; the kernels sum each row twice (dot and norm)."""
    import os
    import subprocess
    import sys

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", _COUNT_SHUFFLES], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    counts = dict(re.findall(r"(\w+) (\d+)", result.stdout))
    # 5 shuffles per row with 32 lanes along K: 4 rows x 2 sums. 8 lanes: 3 shuffles for each of a thread's 4 rows x 2.
    assert counts == {"triton": str(5 * 4 * 2), "gluon": str(3 * 4 * 2)}
