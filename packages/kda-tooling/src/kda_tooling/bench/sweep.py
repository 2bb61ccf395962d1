"""Run a sweep on the current GPU: compile in parallel, check bits, time every arm of a cell interleaved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from kda_kernels import Ring, Snapshots

from kda_tooling.bench.arms import OURS, Arm, our_arms, peer_arms
from kda_tooling.bench.floor import Traffic, commit_traffic, verify_traffic
from kda_tooling.bench.machine import Machine, describe_machine
from kda_tooling.bench.results import ArmResult, Cell, SweepResult
from kda_tooling.bench.settings import SweepSettings
from kda_tooling.bench.timing import capture, measure_interleaved
from kda_tooling.peers import Peer, load_peer
from kda_tooling.problem import Problems, VerifyProblem, random_problems

COLD_FACTOR = 3
"""A rotation is cold when its state and inputs exceed this many times the L2."""

MIN_COLD_LAYERS = 4
HOT_LAYERS = 1
HOT_ROUNDS = 16
"""Calls per graph replay where one argument set is used over and over."""

OUTPUT_TOLERANCE = 1e-3
"""Relative norm of a peer's output against ours: other summation orders flip last places of 16-bit outputs."""


class BitsDifferError(RuntimeError):
    """Arms that must agree bit for bit do not; nothing was timed."""


def build_arms(settings: SweepSettings, problem: VerifyProblem, peers: list[Peer]) -> list[Arm]:
    """The arms of a cell, ours first."""
    arms = our_arms(settings.shape, settings.modes, settings.sweep_configs)
    for peer in peers:
        arms += peer_arms(peer, problem)
    return arms


def build_problems(settings: SweepSettings, draft_tokens: int, batch: int, layers: int, device: str) -> Problems:
    """Random problems with the records that the settings' arms need."""
    modes = {"ring" if mode.endswith("+ring") else "snapshots" for mode in settings.modes}
    return random_problems(
        settings.shape, layers=layers, batch=batch, draft_tokens=draft_tokens, dtype=settings.torch_dtype,
        device=device, lower_bound=settings.lower_bound, bias=settings.bias, seed=settings.seed,
        ring="ring" in modes or bool(settings.peers), snapshots="snapshots" in modes,
    )  # fmt: skip


def rotation_layers(settings: SweepSettings, draft_tokens: int, batch: int, l2_bytes: int) -> tuple[int, int]:
    """(layers, bytes of their state and inputs): enough to exceed `COLD_FACTOR` times the L2, or one layer if hot."""
    per_layer = verify_traffic(settings.shape, batch, draft_tokens, settings.torch_dtype, "ring").read
    if settings.hot:
        return HOT_LAYERS, per_layer
    layers = max(MIN_COLD_LAYERS, math.ceil(COLD_FACTOR * l2_bytes / per_layer) + 1)
    return layers, layers * per_layer


def floor_of(settings: SweepSettings, draft_tokens: int, batch: int, mode: str) -> Traffic:
    """Mandatory bytes per layer of the settings' kind."""
    accept = settings.accept_for(draft_tokens)
    verify = verify_traffic(settings.shape, batch, draft_tokens, settings.torch_dtype, mode)
    commit = commit_traffic(settings.shape, batch, accept, settings.torch_dtype, mode)
    return {"verify": verify, "commit": commit, "round": verify + commit}[settings.kind]


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int16 if t.element_size() == 2 else torch.int32)


def _written(problem: VerifyProblem, mode: str) -> dict[str, torch.Tensor]:
    record: Ring | Snapshots | None = problem.ring if mode == "ring" else problem.snapshots
    tensors = {"conv_window": problem.state.conv_window}
    if isinstance(record, Ring):
        tensors |= {name: getattr(record, name) for name in ("raw_v", "raw_k", "g", "beta")}
    elif record is not None:
        tensors["snapshots"] = record.states
    return tensors


def check_bits(problem: VerifyProblem, arms: list[Arm]) -> None:
    """Run every arm once on poisoned buffers and compare: records and windows, outputs of ours, with equal bits.

    A peer's output is compared within `OUTPUT_TOLERANCE`. ``state.conv_state`` is restored after each arm: SGLang's
    unfused lane rolls it.

    Raises:
        BitsDifferError: an arm differs; the message names arm and tensor.
    """
    conv_state = problem.state.conv_state.clone()
    expected: dict[str, torch.Tensor] = {}
    for arm in arms:
        tensors = _written(problem, arm.mode)
        for tensor in tensors.values():
            tensor.fill_(3.0)
        out = arm.verify(problem)
        problem.state.conv_state.copy_(conv_state)
        for name, tensor in tensors.items():
            if name not in expected:
                expected[name] = tensor.clone()
            elif not torch.equal(_bits(tensor), _bits(expected[name])):
                raise BitsDifferError(f"{arm.name}: {name} differs from that of {arms[0].name}")
        if "out" not in expected:
            expected["out"] = out.clone()
        elif arm.owner == OURS:
            if not torch.equal(_bits(out), _bits(expected["out"])):
                raise BitsDifferError(f"{arm.name}: output differs from that of {arms[0].name}")
        else:
            reference = expected["out"].float()
            relative = float((out.float() - reference).norm() / reference.norm())
            if not relative < OUTPUT_TOLERANCE:
                raise BitsDifferError(f"{arm.name}: output differs from ours by {relative:.1e} in norm")


def _calls(kind: str, arm: Arm, problems: Problems, accept_lens: torch.Tensor) -> list[Callable[[], Any]]:
    """What one replay of the arm runs: verify on every layer, the all-layer commit, or both."""
    verifies: list[Callable[[], Any]] = [lambda p=p: arm.verify(p) for p in problems.layers]  # type: ignore[misc]
    commit: list[Callable[[], Any]] = [lambda: arm.commit(problems, accept_lens)]
    return {"verify": verifies, "commit": commit, "round": verifies + commit}[kind]


def measure_cell(
    settings: SweepSettings, draft_tokens: int, batch: int, peers: list[Peer], machine: Machine
) -> Cell:
    """Check and time one cell on the current CUDA device.

    Raises:
        BitsDifferError: the arms disagree.
    """
    layers, rotated = rotation_layers(settings, draft_tokens, batch, machine.l2_bytes)
    problems = build_problems(settings, draft_tokens, batch, layers, "cuda")
    arms = build_arms(settings, problems.layers[0], peers)
    check_bits(problems.layers[0], arms)
    accept = settings.accept_for(draft_tokens)
    accept_lens = torch.full((batch,), accept, dtype=torch.int32, device="cuda")
    if settings.kind != "verify":
        unique = {(arm.owner, arm.mode): arm for arm in arms} if settings.kind == "commit" else {}
        arms = list(unique.values()) or arms
        for p in problems.layers:  # commits replay records: fill every layer's
            for arm in {arm.mode: arm for arm in arms}.values():
                arm.verify(p)
    rounds = HOT_ROUNDS if settings.hot else 1
    graphs = {arm.name: capture(_calls(settings.kind, arm, problems, accept_lens), rounds) for arm in arms}
    timings = measure_interleaved(dict(graphs), layers * rounds, passes=settings.passes)
    results = []
    for arm in arms:
        floor = floor_of(settings, draft_tokens, batch, arm.mode).microseconds(machine.copy_bytes_per_second)
        timing = timings[arm.name]
        results.append(
            ArmResult(
                arm.name, arm.owner, arm.lane, arm.mode, timing.median_us, timing.spread, list(timing.passes_us), floor
            )
        )
    return Cell(
        kind=settings.kind, draft_tokens=draft_tokens, batch=batch,
        accept=0 if settings.kind == "verify" else accept, layers=layers, rotated_bytes=rotated,
        cold=rotated > COLD_FACTOR * machine.l2_bytes, arms=results, skipped={},
    )  # fmt: skip


def run_sweep(settings: SweepSettings, on_cell: Callable[[int, int], None] = lambda t, b: None) -> SweepResult:
    """Measure every cell of ``settings`` on the current CUDA device; ``on_cell(T, B)`` is called before each."""
    peers = [load_peer(spec) for spec in settings.peers]
    machine = describe_machine()
    cells = []
    for draft_tokens, batch in settings.cells():
        on_cell(draft_tokens, batch)
        cells.append(measure_cell(settings, draft_tokens, batch, peers, machine))
        torch.cuda.empty_cache()
    described = asdict(settings) | {"peers": [spec.partition("=")[0] for spec in settings.peers]}
    return SweepResult(machine, described, {peer.name: peer.version for peer in peers}, cells)
