"""Which cases the suite runs: a few small ones in the interpreter, a covering set at production shapes on a GPU.

A compiled kernel costs seconds, so the GPU set is not the full product of its eight factors: every pair of head layout
and T occurs, and over the set every pair of any two factors (`test_lanes_bits.py` proves it).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from kda_kernels import LaunchConfig
from tests.support.cases import Case

HEADS = ((4, 4), (8, 8), (16, 16), (2, 4), (4, 8), (8, 16), (1, 16))
DRAFT_TOKENS = (3, 4, 6, 8)

# Interpreter programs cost milliseconds per token: 3 rows, 4 tokens and 4 v heads at most.
INTERPRETER_CASES = (
    Case(B=2, T=3, H=1, HV=2, K=64, padded=(0,)),
    Case(B=3, T=4, H=2, HV=4, K=64, dtype=torch.float16, weight_dtype=torch.float32, bias=False, lower_bound=-5.0,
         padded=(1,), pitch=8),
    Case(B=2, T=2, H=1, HV=3, K=128, V=64, lower_bound=-5.0, bias=False),
    Case(B=1, T=4, H=1, HV=2, K=64, V=128, dtype=torch.float16, pitch=3),
    Case(B=3, T=1, H=2, HV=2, K=64, weight_dtype=torch.float32, padded=(2,)),
)  # fmt: skip


def _gpu_cases() -> tuple[Case, ...]:
    cases = []
    for i, (H, HV) in enumerate(HEADS):
        for j, T in enumerate(DRAFT_TOKENS):
            # Rows of a two-level orthogonal array over (i, j); each factor flips with a different pair of bits.
            i0, i1, i2, j0, j1 = i & 1, i >> 1 & 1, i >> 2 & 1, j & 1, j >> 1 & 1
            cases.append(
                Case(
                    B=4, T=T, H=H, HV=HV,
                    K=64 if i0 ^ j0 ^ i2 else 128,
                    dtype=torch.float16 if i1 ^ j1 else torch.bfloat16,
                    weight_dtype=torch.float32 if i0 ^ i1 ^ j1 else None,
                    lower_bound=-5.0 if j0 ^ j1 ^ i1 else None,
                    bias=not (i1 ^ j0),
                    padded=(2,) if i0 ^ j0 ^ j1 else (),
                )
            )  # fmt: skip
    return tuple(cases)


GPU_CASES = _gpu_cases()


def factors(case: Case) -> dict[str, Any]:
    """The case's level of each factor that the GPU set covers pairwise."""
    return dict(
        heads=(case.H, case.HV), T=case.T, K=case.K, dtype=case.dtype, weights=case.weight_dtype is None,
        gate=case.lower_bound is None, bias=case.bias, padded=bool(case.padded),
    )  # fmt: skip


def params(interpreter: Iterable[Case] = (), gpu: Iterable[Case] = ()) -> list[Any]:
    """pytest parameters: small cases run everywhere, the others carry the gpu mark; ids are the shapes."""
    return [pytest.param(case, id=case.id) for case in interpreter] + [
        pytest.param(case, id=case.id, marks=pytest.mark.gpu) for case in gpu
    ]


def every_config(V: int = 128) -> list[LaunchConfig]:
    """Every launch configuration that can be named for V; PDL and registers, which move no element, left alone."""
    found = []
    for block_v in range(1, V + 1):
        for num_warps in range(1, 33):
            for rows_per_thread in (None, *range(1, 9)):
                try:
                    found.append(LaunchConfig(block_v, num_warps, rows_per_thread=rows_per_thread))
                except ValueError:
                    continue
    return found


def config_id(config: LaunchConfig | None) -> str:
    if config is None:
        return "default"
    rows = "" if config.rows_per_thread is None else f"-r{config.rows_per_thread}"
    rows += "" if config.max_registers is None else f"-m{config.max_registers}"
    flags = ("-first" if config.state_first else "") + ("-prefetch" if config.prefetch else "")
    flags += "-blocks" if config.token_blocks else ""
    return f"bv{config.block_v}-w{config.num_warps}{rows}{flags}"
