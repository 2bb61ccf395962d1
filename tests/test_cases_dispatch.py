"""Devices without kernels get a reason, the reference answers there, and a batch size compiles nothing new."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from typing import Any

import pytest
import torch

import kda_kernels
from kda_backend import StatePool
from kda_kernels import KdaShape, LaunchConfig, fold, scatter_conv, verify_fused, verify_unfused
from kda_kernels.defaults import FEW_HEADS, MANY_HEADS_STATE_FIRST, PORTABLE
from tests.support.cases import Case, make_problem
from tests.support.commits import fold_problem, with_layers
from tests.support.grids import config_id
from tests.test_gate_pool import layer_params

NO_INTERPRETER = """
import torch
from kda_kernels import verify_fused, verify_reason, verify_reference, verify_unfused, fold, fold_reference
from tests.support.cases import Case, make_problem
from tests.support.commits import fold_problem
problem = make_problem(Case(B=1, T=1, H=1, HV=1, K=64), "cpu")
reasons = []
for op in (verify_fused, verify_unfused):
    try:
        problem.run(op)
    except ValueError as error:
        reasons.append(str(error))
positional, keywords = problem.arguments("ring")
reasons.append(verify_reason(*positional, **keywords))
accept = torch.ones(1, dtype=torch.int32)
try:
    fold_problem(problem, accept)
except ValueError as error:
    reasons.append(str(error))
assert len(reasons) == 4, reasons
outcome = problem.run(verify_reference)
assert outcome["out"].isfinite().all() and outcome["out"].any()
fold_problem(outcome, accept, fold_reference)
print("\\n".join(reasons))
"""


def test_D7_cpu_without_interpreter_names_the_device_and_the_reference_answers() -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", NO_INTERPRETER], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for reason in done.stdout.splitlines():
        assert "'cpu'" in reason
        assert "TRITON_INTERPRET" in reason


def test_D7_pdl_where_it_does_not_exist_is_refused(device: str) -> None:
    """``pdl=True`` is a requirement; None asks for it where there is any."""
    if device == "cuda" and torch.cuda.get_device_capability() >= (9, 0):
        pytest.skip("this GPU has programmatic dependent launch")
    problem = make_problem(Case(B=1, T=1, H=1, HV=1, K=64), device)
    for op in (verify_fused, verify_unfused):
        with pytest.raises(ValueError, match=r"config\.pdl.*sm90"):
            problem.run(op, config=LaunchConfig(pdl=True))
    with pytest.raises(ValueError, match=r"config\.pdl"):
        fold_problem(problem, torch.ones(1, dtype=torch.int32, device=device), config=LaunchConfig(pdl=True))


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        (dict(block_v=24), ValueError, "block_v"),
        (dict(block_v=4), ValueError, "block_v"),
        (dict(num_warps=3), ValueError, "num_warps"),
        (dict(num_warps=16), ValueError, "num_warps"),
        (dict(block_v=16.0), TypeError, "block_v"),
        (dict(num_warps=True), TypeError, "num_warps"),
        (dict(pdl="yes"), TypeError, "pdl"),
    ],
)
def test_configurations_that_could_break_the_tree_cannot_be_named(
    arguments: dict[str, Any], error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=name):
        LaunchConfig(**arguments)


def compiled_variants() -> int:
    """Compiled variants of all kernels of the package in this process."""
    import triton

    total = 0
    for info in pkgutil.walk_packages(kda_kernels.__path__, "kda_kernels."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, triton.JITFunction) and value.__module__ == info.name:
                total += sum(len(caches[0]) for caches in value.device_caches.values())
    return total


@pytest.mark.gpu
@pytest.mark.parametrize("config", [PORTABLE, FEW_HEADS, MANY_HEADS_STATE_FIRST], ids=config_id)
@pytest.mark.parametrize("mode", ["ring", "snapshots"])
def test_D3_one_variant_for_every_batch_size(mode: str, config: LaunchConfig, device: str) -> None:
    """One per launch configuration. Neither B = 1 nor divisibility by 16 of B, or of any row count, may specialise."""
    largest = 257
    case = Case(B=largest, T=2, H=2, HV=2, K=64, spare_slots=1)
    problem = make_problem(case, device)
    variants = []
    for batch in (2, 1, 3, 8, 15, 16, 17, 31, 32, 33, 64, 256):
        tokens = slice(0, batch * case.T)
        for op in (verify_fused, verify_unfused):
            problem.run(
                op, mode, mixed_qkv=problem.mixed_qkv[tokens], a=problem.a[tokens], b=problem.b[tokens],
                slots=problem.slots[:batch], out=None, config=config,
            )  # fmt: skip
        accept = torch.ones(batch, dtype=torch.int32, device=device)
        own = problem.fork()
        ring = with_layers(own.ring)
        common: dict[str, Any] = dict(slots=problem.slots[:batch], accept_lens=accept, draft_tokens=case.T)
        fold(own["ssm_state"][None], ring, shape=own.shape, **common)
        scatter_conv(own["conv_state"][None], own["conv_window"][None], **common)
        # slices whose address is not a multiple of 16 bytes, as engines pass them
        if batch < largest:
            problem.run(
                verify_fused, mode, mixed_qkv=problem.mixed_qkv[tokens], a=problem.a[tokens], b=problem.b[tokens],
                slots=problem.slots[1 : batch + 1], out=None, config=config,
            )  # fmt: skip
        variants.append(compiled_variants())
    assert variants == [variants[0]] * len(variants), f"variants after each batch size: {variants}"


@pytest.mark.gpu
@pytest.mark.parametrize("config", [PORTABLE, FEW_HEADS], ids=config_id)
def test_D3_one_variant_for_every_layer_of_few_heads(config: LaunchConfig, device: str) -> None:
    """Two heads, three tokens and an odd number of slots: in b and beta, layers begin at multiples of 8 bytes."""
    shape, layers, T = KdaShape(2, 2, 64, 64), 4, 3
    pool = StatePool(shape, num_layers=layers, num_slots=3, max_batch=2, draft_tokens=T, mode="ring", device=device)
    params = layer_params(shape, device, -5.0, torch.bfloat16)
    tokens = 2 * T
    x = torch.randn(layers, tokens, shape.conv_dim, device=device, dtype=torch.bfloat16)
    a = torch.randn(layers, tokens, 2 * 64, device=device, dtype=torch.bfloat16)
    b = torch.randn(layers, tokens, 2, device=device, dtype=torch.bfloat16)
    assert pool.ring is not None
    assert {pool.ring.layer(i).beta.data_ptr() % 16 for i in range(layers)} == {0, 8}
    assert {layer.data_ptr() % 16 for layer in b} == {0, 8}
    for lane in ("fused+ring", "unfused+ring"):
        variants = []
        pool.begin(torch.tensor([2, 0], device=device), T)
        for layer in range(layers):
            pool.verify(layer, x[layer], a[layer], b[layer], params, lane=lane, config=config)
            variants.append(compiled_variants())
        pool.abandon()
        assert variants == [variants[0]] * layers, f"variants after each layer, {lane}: {variants}"
