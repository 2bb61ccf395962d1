"""What the chunked form promises bit for bit: equal lanes, the recurrent form's records, and a token's independence of
neighbours, later tokens, padding and launch configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels import LaunchConfig, verify_fused, verify_unfused
from tests.support.bits import assert_same_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.grids import GPU_CASES, INTERPRETER_CASES, config_id, every_config, params
from tests.support.ops import KERNELS, RING, Verify
from tests.support.poisoned_shared import poison_shared_memory
from tests.test_lanes_bits import STATE, assert_same_buffers

LONG = (
    Case(B=2, T=5, H=2, HV=4, K=64, dtype=torch.float16, lower_bound=-5.0),
    Case(B=2, T=16, H=1, HV=1, K=128, padded=(1,)),
)
GPU_LONG = (
    Case(B=5, T=16, H=2, HV=4, K=128, padded=(1, 4)),
    Case(B=3, T=1, H=1, HV=1, K=128, padded=(0,)),
    Case(B=2, T=5, H=4, HV=4, K=128, V=64, pitch=8, weight_dtype=torch.float32, lower_bound=-5.0),
    Case(B=2, T=11, H=1, HV=3, K=64, V=128, dtype=torch.float16, bias=False),
)
RANGES = pytest.mark.filterwarnings("ignore:(overflow|invalid|underflow):RuntimeWarning")
PORTABLE = LaunchConfig()


@pytest.mark.parametrize("case", params((*INTERPRETER_CASES, *LONG), (*GPU_CASES, *GPU_LONG)))
def test_fused_equals_unfused(case: Case, device: str) -> None:
    problem = make_problem(case, device)
    fused = problem.run(verify_fused, form="chunked")
    # On a GPU the default is the Gluon kernel: the other lane goes through the portable one, so both are compared.
    unfused = problem.run(verify_unfused, form="chunked", config=PORTABLE if device == "cuda" else None)
    assert_same_buffers(fused, unfused)
    assert_same_buffers(fused, problem, ("snapshots", *STATE))
    for name in ("out", "conv_window", *RING):
        assert not torch.equal(fused.whole(name), problem.whole(name)), f"{name} was not written"


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("case", params((*INTERPRETER_CASES, *LONG), (*GPU_CASES[::4], *GPU_LONG)))
def test_records_and_windows_are_the_recurrent_form_s(case: Case, op: Verify, device: str) -> None:
    """So a commit leaves the same state whichever form verified. Whole buffers, canaries included."""
    problem = make_problem(case, device)
    chunked, recurrent = problem.run(op, form="chunked"), problem.run(op)
    assert_same_buffers(chunked, recurrent, ("conv_window", "snapshots", *RING, *STATE))
    for i in set(range(case.B)) - set(problem.live()):
        padded = chunked["out"][i * case.T : (i + 1) * case.T]
        assert_same_bits(padded, torch.zeros_like(padded), "output of a padded row")


def outputs(problem: Problem, op: Verify, tokens: int, **inputs: torch.Tensor) -> torch.Tensor:
    """[B, tokens, HV, V] of the first ``tokens`` tokens of each request, in a chunk of just these."""
    case = problem.case
    fork = problem.fork()

    def first(name: str) -> torch.Tensor:
        x = inputs.get(name, getattr(problem, name))
        return x.view(case.B, case.T, -1)[:, :tokens].reshape(case.B * tokens, -1)

    positional, keywords = fork.arguments(
        "ring", draft_tokens=tokens, out=None, form="chunked", **{name: first(name) for name in ("mixed_qkv", "a", "b")}
    )
    return op(*positional, **keywords).view(case.B, tokens, case.HV, case.V or case.K)


PREFIX_CASES = params(
    [Case(B=2, T=5, H=1, HV=2, K=64), Case(B=1, T=9, H=1, HV=1, K=128, dtype=torch.float16, lower_bound=-5.0)],
    [Case(B=4, T=16, H=4, HV=8, K=128), Case(B=4, T=16, H=4, HV=4, K=64, dtype=torch.float16, lower_bound=-5.0)],
)


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("case", PREFIX_CASES)
def test_a_token_does_not_depend_on_how_many_follow(case: Case, op: Verify, device: str) -> None:
    """Every T from 1 up: T is padded to 2, 4, 8 and 16, and no padding shows."""
    problem = make_problem(case, device)
    whole = outputs(problem, op, case.T)
    for tokens in range(1, case.T):
        assert_same_bits(outputs(problem, op, tokens), whole[:, :tokens].contiguous(), f"chunk of {tokens}")


@RANGES
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("broken", ["nan", "inf"])
@pytest.mark.parametrize("case", PREFIX_CASES)
def test_a_later_token_that_is_not_finite_reaches_no_earlier_one(
    case: Case, broken: str, op: Verify, device: str
) -> None:
    problem = make_problem(case, device)
    whole = outputs(problem, op, case.T)
    for name in ("mixed_qkv", "a", "b"):
        for start in (1, case.T - 2):
            bad = getattr(problem, name).clone()
            bad.view(case.B, case.T, -1)[:, start:] = float(broken)
            result = outputs(problem, op, case.T, **{name: bad})
            assert_same_bits(
                result[:, :start].contiguous(), whole[:, :start].contiguous(), f"{name} {broken} from {start}"
            )


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("case", params([Case(B=3, T=4, H=1, HV=2, K=64)], [Case(B=16, T=8, H=4, HV=8, K=128)]))
def test_a_request_does_not_depend_on_its_batch(case: Case, op: Verify, device: str) -> None:
    """Alone, and beside neighbours of other values or none at all."""
    problem = make_problem(case, device)
    together = problem.run(op, form="chunked")
    for i in range(case.B):
        tokens = slice(i * case.T, (i + 1) * case.T)
        alone = problem.run(
            op, form="chunked", slots=problem.slots[i : i + 1].clone(), mixed_qkv=problem.mixed_qkv[tokens],
            a=problem.a[tokens], b=problem.b[tokens], out=(out := torch.empty_like(problem["out"][tokens])),
            rows=torch.tensor([i], device=device),
        )  # fmt: skip
        assert_same_bits(out, together["out"][tokens], f"output of request {i} alone")
        slot = int(problem.slots[i])
        for name in RING:
            assert_same_bits(alone[name][slot], together[name][slot], name)
        others = problem.mixed_qkv.clone()
        others[: tokens.start] = float("nan")
        others[tokens.stop :] *= -3
        slots = problem.slots.clone()
        slots[(i + 1) % case.B] = -1
        beside = problem.run(op, form="chunked", mixed_qkv=others, slots=slots)
        assert_same_bits(beside["out"][tokens], together["out"][tokens], f"output of request {i} beside others")


FEW_CONFIGS = [LaunchConfig(block_v=8), LaunchConfig(block_v=32), LaunchConfig(block_v=64, num_warps=8)]


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("config", FEW_CONFIGS, ids=config_id)
def test_a_few_configurations(config: LaunchConfig, op: Verify, device: str) -> None:
    problem = make_problem(Case(B=1, T=3, H=1, HV=2, K=64), device)
    assert_same_buffers(
        problem.run(op, form="chunked", config=config), problem.run(verify_unfused, form="chunked", config=PORTABLE)
    )


K128, K64 = Case(B=2, T=3, H=2, HV=4, K=128), Case(B=2, T=4, H=2, HV=4, K=64, dtype=torch.float16, lower_bound=-5.0)
K128_LONG = Case(B=2, T=16, H=1, HV=2, K=128)
CORNERS = [
    LaunchConfig(block_v=v, num_warps=w, rows_per_thread=r)
    for v, w, r in ((8, 8, None), (64, 1, None), (128, 4, None), (8, 2, 1), (64, 4, 4), (128, 8, 4))
]
IN_BLOCKS = [
    LaunchConfig(v, w, rows_per_thread=r, max_registers=most, state_first=first, prefetch=prefetch, token_blocks=True)
    for v, w, r, most, first, prefetch in (
        (16, 4, 1, None, True, True), (32, 4, 2, None, False, False), (32, 8, 1, None, True, False),
        (64, 4, 4, None, False, True), (64, 8, 2, 80, False, False), (128, 8, 4, 112, True, False),
    )
]  # fmt: skip
BLOCKED = [
    replace(K128, T=5), replace(K128, T=8, padded=(1,), lower_bound=-5.0), Case(B=3, T=7, H=1, HV=3, K=128, V=64),
    Case(B=2, T=6, H=2, HV=2, K=64, V=64, dtype=torch.float16), replace(K128, T=4), replace(K128, T=1),
]  # fmt: skip
"""A last block of one token, of four, of three and of two; drafts that fit one block."""

ALL_CONFIGS: list[Any] = [
    pytest.param(case, config, id=f"{case.id}-{config_id(config)}")
    for case, configs in (
        (K128, every_config(128)), (K64, [c for c in CORNERS if c.block_v <= 64]), (replace(K128, T=8), CORNERS),
        (replace(K128, T=1), CORNERS), (K128_LONG, [c for c in CORNERS if c.rows_per_thread is None]),
        *((case, [c for c in IN_BLOCKS if c.block_v <= (case.V or case.K)]) for case in BLOCKED),
    )
    for config in configs
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize(("case", "config"), ALL_CONFIGS)
def test_every_configuration_that_can_be_named(case: Case, config: LaunchConfig, op: Verify, device: str) -> None:
    problem = make_problem(case, device)
    outcome = problem.run(op, form="chunked", config=config, indices_ready=config.prefetch)
    assert_same_buffers(outcome, problem.run(verify_unfused, form="chunked", config=PORTABLE))


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("config", [LaunchConfig(32, 4, rows_per_thread=2), *IN_BLOCKS[1:4:2]], ids=config_id)
@pytest.mark.parametrize("T", [1, 3, 5, 6, 7, 8])
def test_what_shared_memory_held_before_shows_in_no_bit(T: int, config: LaunchConfig, op: Verify, device: str) -> None:
    """In blocks of tokens, pairs after a token's block are never written."""
    problem = make_problem(Case(B=40, T=T, H=2, HV=4, K=128), device)
    expected = problem.run(verify_unfused, form="chunked", config=PORTABLE)
    problem.run(op, form="chunked", config=config)  # compiled, so that nothing runs between
    poison_shared_memory(device)
    assert_same_buffers(problem.run(op, form="chunked", config=config), expected)
