"""How near to exact the outputs are: both forms, and a peer's lanes, against an fp64 oracle on the same device.

The oracle starts where the contract stops rounding: from the 16-bit q, k and v after conv and SiLU (the unfused lane's
own conv output), and from the fp32 g and beta of the ring, all of which every arm shares bit for bit. From there it is
norm and delta rule, token by token, in fp64. So what is measured is the fp32 arithmetic after the ring record and the
last rounding to 16 bits.

Kernels store 16 bits only. What an error was *before* rounding is therefore taken from the torch reference in fp32 on
the same inputs, which sums in torch's order: it stands in for a form's arithmetic, it is not the kernel.
"""

from __future__ import annotations

import datetime
import itertools
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import triton

from kda_kernels import FORMS, MAX_CHUNKED_TOKENS, KdaShape
from kda_kernels.reference import delta_step, l2_normalise
from kda_kernels.reference_chunked import chunked_outputs
from kda_tooling.bench.arms import OURS, Arm, our_arms, peer_arms
from kda_tooling.bench.bits import check_bits
from kda_tooling.bench.machine import git_commit
from kda_tooling.bench.settings import DEFAULT_SHAPE, DTYPES, SweepSettings
from kda_tooling.peers import load_peer
from kda_tooling.problem import VerifyProblem, random_problems

SCHEMA = 1
MAX_BATCH = 64
"""Requests per problem: the fp64 copies of their state take tens of MiB, not GiB."""

MAX_OUTPUTS = 10**9

LEAST_JUDGED = 100_000
"""Of fewer outputs, one or two near zero, which are many ulps off in either form, would decide."""

LEAST_WITHIN_ULP = 0.9999
MOST_OVER_RECURRENT = 1.001
MOST_BEFORE_ROUNDING = 2.0

Progress = Callable[[int, int], None]
"""Called with T and the outputs measured so far."""


@dataclass(frozen=True)
class AccuracySettings:
    """What is measured: at least ``outputs`` outputs of each arm at every T. ``peers``: NAME=FOLDER.

    Raises:
        ValueError: a value is unknown or out of range; the message names the option.
    """

    draft_tokens: tuple[int, ...] = (4, 8)
    outputs: int = 1_000_000
    shape: KdaShape = DEFAULT_SHAPE
    dtype: str = "bf16"
    lower_bound: float | None = -5.0
    peers: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [t for t in self.draft_tokens if not 1 <= t <= MAX_CHUNKED_TOKENS]
        if wrong or not self.draft_tokens:
            said = ", ".join(map(str, wrong)) or "none"
            raise ValueError(f"--draft-tokens must be within 1..{MAX_CHUNKED_TOKENS}; got {said}")
        if not 1 <= self.outputs <= MAX_OUTPUTS:
            raise ValueError(f"--outputs must be within 1..{MAX_OUTPUTS}; got {self.outputs}")
        # What is common to both is refused in the same words.
        SweepSettings(
            shape=self.shape, dtype=self.dtype, lower_bound=self.lower_bound, peers=self.peers, seed=self.seed
        )

    def batch(self, draft_tokens: int) -> int:
        """Requests per problem: few for few outputs."""
        per_request = draft_tokens * self.shape.num_v_heads * self.shape.head_v_dim
        return min(MAX_BATCH, -(-self.outputs // per_request))


@dataclass
class Errors:
    """Errors of one arm, summed over problems."""

    outputs: int = 0
    within: int = 0
    max_ulps: float = 0.0
    error_squares: float = 0.0
    squares: float = 0.0

    def add(self, out: torch.Tensor, exact: torch.Tensor, ulp: torch.Tensor | None = None) -> None:
        """Count ``out`` against ``exact`` (fp64). ``ulp``: spacing of the stored dtype around each exact value."""
        error = (out.double() - exact).abs()
        self.outputs += error.numel()
        self.error_squares += float((error * error).sum())
        self.squares += float((exact * exact).sum())
        if ulp is not None:
            ulps = error / ulp
            self.within += int((ulps <= 1).sum())
            self.max_ulps = max(self.max_ulps, float(ulps.max()))

    @property
    def norm(self) -> float:
        """Norm of the error over the norm of the exact outputs."""
        return (self.error_squares / self.squares) ** 0.5


@dataclass
class Difference:
    """Values in which two arms differ, by which of the two is nearer to the exact one."""

    differ: int = 0
    one_nearer: int = 0
    other_nearer: int = 0
    equally_near: int = 0

    def add(self, one: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> None:
        """Count the values of ``one`` and ``other``, 16-bit, that are not the same number."""
        different = one != other
        error_one, error_other = ((x[different].double() - exact[different]).abs() for x in (one, other))
        self.differ += int(different.sum())
        self.one_nearer += int((error_one < error_other).sum())
        self.other_nearer += int((error_other < error_one).sum())
        self.equally_near += int((error_one == error_other).sum())


@dataclass
class Comparison:
    """All figures at one T. ``arms`` and ``before_rounding`` by name of arm and form, ``pairs`` by two arms' names."""

    draft_tokens: int
    arms: dict[str, Errors] = field(default_factory=dict)
    before_rounding: dict[str, Errors] = field(default_factory=dict)
    pairs: dict[tuple[str, str], Difference] = field(default_factory=dict)

    def over_recurrent(self, arm: str) -> float:
        """Error norm of an arm over that of our recurrent form."""
        return self.arms[arm].norm / self.arms[f"{OURS} recurrent"].norm

    @property
    def before_rounding_ratio(self) -> float:
        """Error norm of the chunked form before rounding over that of the recurrent form."""
        return self.before_rounding["chunked"].norm / self.before_rounding["recurrent"].norm

    def broken_promises(self) -> list[str] | None:
        """What the chunked form's contract (docs/arithmetic.md) says and these figures do not; None of too few."""
        chunked = self.arms[f"{OURS} chunked"]
        if chunked.outputs < LEAST_JUDGED:
            return None
        within, ratio = chunked.within / chunked.outputs, self.over_recurrent(f"{OURS} chunked")
        promises = (
            (within >= LEAST_WITHIN_ULP, f"{within:.4%} of outputs within 1 ulp, at least {LEAST_WITHIN_ULP:.2%}"),
            (ratio <= MOST_OVER_RECURRENT, f"error norm {ratio:.5f}x the recurrent form's, at most 1.001x"),
            (
                self.before_rounding_ratio <= MOST_BEFORE_ROUNDING,
                f"error norm before rounding {self.before_rounding_ratio:.2f}x the recurrent form's, at most 2x",
            ),
        )
        return [f"T = {self.draft_tokens}: {said}" for kept, said in promises if not kept]

    def to_data(self) -> dict[str, Any]:
        """The figures as plain data."""

        def arm(name: str, errors: Errors) -> dict[str, Any]:
            return {
                "arm": name, "outputs": errors.outputs, "within_1_ulp": errors.within / errors.outputs,
                "max_ulps": errors.max_ulps, "error_norm": errors.norm, "over_recurrent": self.over_recurrent(name),
            }  # fmt: skip

        return {
            "draft_tokens": self.draft_tokens,
            "arms": [arm(*item) for item in self.arms.items()],
            "error_norm_before_rounding": {form: errors.norm for form, errors in self.before_rounding.items()},
            "pairs": [{"one": one, "other": other, **asdict(d)} for (one, other), d in self.pairs.items()],
            "broken_promises": self.broken_promises(),
        }


def spacing(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring values of ``dtype`` around each x (fp64)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp(min=info.smallest_normal))[1] - 1
    return torch.ldexp(torch.full_like(x, info.eps), exponent)


def after_record(problem: VerifyProblem, form: str, dtype: torch.dtype) -> torch.Tensor:
    """Outputs [B*T, HV, V] in ``dtype`` from the conv output and the ring that an unfused+ring verify has left."""
    shape, tokens, batch = problem.shape, problem.draft_tokens, problem.batch
    h, hv, k_dim, v_dim = shape.num_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim
    slots, ring = problem.slots.long(), problem.record("ring")
    qkv = problem.workspace.to(dtype).view(batch, tokens, -1).transpose(0, 1)
    q, k, v = qkv.split([h * k_dim, h * k_dim, hv * v_dim], dim=2)

    def by_head(x: torch.Tensor) -> torch.Tensor:
        """[T, B, H*K] -> [T, B*HV, K], normalised."""
        normal = l2_normalise(x.reshape(tokens, batch, h, k_dim))
        return normal.repeat_interleave(hv // h, 2).flatten(1, 2)

    def recorded(x: torch.Tensor) -> torch.Tensor:
        """[slots, HV, L, ...] -> [T, B*HV, ...]."""
        return x[slots, :, :tokens].to(dtype).flatten(0, 1).transpose(0, 1)

    q, k = by_head(q) * problem.params.scale_for(shape), by_head(k)
    v, g, beta = v.reshape(tokens, batch * hv, v_dim), recorded(ring.g), recorded(ring.beta)
    S = problem.state.ssm_state[slots].to(dtype).flatten(0, 1)
    if form == "chunked":
        out = chunked_outputs(S, q, k, v, g, beta)
    else:
        steps = []
        for t in range(tokens):
            S = delta_step(S, k[t], v[t], g[t], beta[t])
            steps.append((S * q[t][:, None, :]).sum(-1))
        out = torch.stack(steps)
    return out.view(tokens, batch, hv, v_dim).transpose(0, 1).reshape(batch * tokens, hv, v_dim)


def build_arms(settings: AccuracySettings, problem: VerifyProblem) -> dict[str, list[Arm]]:
    """Name -> the arms that it stands for, whose outputs are equal bit for bit: both lanes of ours, one of a peer's."""
    ours = our_arms(settings.shape, ("unfused+ring", "fused+ring"), sweep_configs=False, forms=FORMS)
    named: dict[str, list[Arm]] = {}
    for arm in ours:
        named.setdefault(f"{OURS} {arm.form}", []).append(arm)
    for spec in settings.peers:
        for arm in peer_arms(load_peer(spec), problem):
            named.setdefault(f"{arm.owner} {arm.lane}", [arm])
    return named


def _measure_problem(found: Comparison, named: dict[str, list[Arm]], problem: VerifyProblem) -> None:
    """Add one problem's outputs to ``found``. The first arm is our unfused lane: its conv output feeds the oracle."""
    conv_state = problem.state.conv_state.clone()
    outputs = {}
    for name, arms in named.items():
        outputs[name] = arms[0].verify(problem)
        problem.state.conv_state.copy_(conv_state)  # SGLang's unfused lane rolls it
    exact = after_record(problem, "recurrent", torch.float64)
    ulp = spacing(exact, problem.mixed_qkv.dtype)
    for name, out in outputs.items():
        found.arms.setdefault(name, Errors()).add(out, exact, ulp)
    for form in FORMS:
        found.before_rounding.setdefault(form, Errors()).add(after_record(problem, form, torch.float32), exact)
    for one, other in itertools.combinations(outputs, 2):
        found.pairs.setdefault((one, other), Difference()).add(outputs[one], outputs[other], exact)


def measure(
    settings: AccuracySettings, device: str = "cuda", on_progress: Progress = lambda t, done: None
) -> list[Comparison]:
    """One `Comparison` per T of ``settings``, over as many random problems as give the outputs asked for.

    Raises:
        BitsDifferError: arms that must agree bit for bit do not, on the first problem.
    """
    comparisons = []
    for draft_tokens in settings.draft_tokens:
        found = Comparison(draft_tokens)
        batch = settings.batch(draft_tokens)
        for seed in itertools.count(settings.seed):
            problem = random_problems(
                settings.shape, layers=1, batch=batch, draft_tokens=draft_tokens, dtype=DTYPES[settings.dtype],
                device=device, lower_bound=settings.lower_bound, seed=seed,
            ).layers[0]  # fmt: skip
            named = build_arms(settings, problem)
            if seed == settings.seed:
                check_bits(problem, [arm for arms in named.values() for arm in arms])
            _measure_problem(found, named, problem)
            done = next(iter(found.arms.values())).outputs
            on_progress(draft_tokens, min(done, settings.outputs))
            if done >= settings.outputs:
                break
        comparisons.append(found)
    return comparisons


def report_data(settings: AccuracySettings, comparisons: list[Comparison], device: str) -> dict[str, Any]:
    """The report as JSON-able data: what was measured, on what, and the figures of every T."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "schema": SCHEMA,
        "machine": {
            "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
            "kernels": "compiled" if on_gpu else "interpreter",
            "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
            "commit": git_commit(), "date": datetime.date.today().isoformat(),
        },
        "settings": asdict(settings) | {"peers": [spec.partition("=")[0] for spec in settings.peers]},
        "peers": {peer.name: peer.version for peer in map(load_peer, settings.peers)},
        "cells": [found.to_data() for found in comparisons],
    }  # fmt: skip
