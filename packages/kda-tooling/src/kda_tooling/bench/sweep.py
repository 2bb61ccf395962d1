"""Run a sweep on the current GPU: compile in parallel, check bits, time every arm of a cell interleaved."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from kda_backend import lane_mode
from kda_tooling.bench.arms import Arm, commit_arms, our_arms, peer_arms
from kda_tooling.bench.bits import check_bits, check_commits
from kda_tooling.bench.floor import Traffic, commit_traffic, fold_on_verify_traffic, verify_traffic
from kda_tooling.bench.machine import Machine, describe_machine
from kda_tooling.bench.results import ArmResult, Cell, SweepResult
from kda_tooling.bench.settings import DEFAULT_FORMS, SweepSettings
from kda_tooling.bench.timing import Timing, capture, measure_interleaved
from kda_tooling.peers import Peer, load_peer
from kda_tooling.problem import Problems, VerifyProblem, random_problems, slot_count

COLD_FACTOR = 3
"""A rotation is cold when its state and inputs exceed this many times the L2."""

MIN_COLD_LAYERS = 4
HOT_LAYERS = 1
HOT_ROUNDS = 16
"""Calls per graph replay where one argument set is used over and over."""


def build_arms(settings: SweepSettings, problem: VerifyProblem, peers: list[Peer]) -> list[Arm]:
    """The arms of a cell, ours first."""
    nvidia = problem.slots.device.type == "cuda" and torch.version.hip is None
    arms = our_arms(
        settings.shape, settings.lanes, settings.sweep_configs, nvidia, settings.forms, settings.indices_ready,
        settings.fold_on_verify, settings.compact_window,
    )  # fmt: skip
    for peer in peers:
        arms += peer_arms(peer, problem)
    return arms


def _modes(settings: SweepSettings) -> set[str]:
    """Records that the settings' arms need; a peer's are rings."""
    return {lane_mode(lane) for lane in settings.lanes} | ({"ring"} if settings.peers else set())


def build_problems(settings: SweepSettings, draft_tokens: int, batch: int, layers: int, device: str) -> Problems:
    """Random problems with the records that the settings' arms need."""
    modes = _modes(settings)
    return random_problems(
        settings.shape, layers=layers, batch=batch, draft_tokens=draft_tokens, dtype=settings.torch_dtype,
        device=device, lower_bound=settings.lower_bound, bias=settings.bias, seed=settings.seed,
        ring="ring" in modes, snapshots="snapshots" in modes, fold_on_verify=settings.fold_on_verify,
        compact_window=settings.compact_window,
    )  # fmt: skip


def rotation_layers(settings: SweepSettings, draft_tokens: int, batch: int, l2_bytes: int) -> tuple[int, int]:
    """(layers, bytes of their state and inputs): enough to exceed `COLD_FACTOR` times the L2, or one layer if hot."""
    per_layer = verify_traffic(settings.shape, batch, draft_tokens, settings.torch_dtype, "ring", settings.bias).read
    if settings.hot:
        return HOT_LAYERS, per_layer
    layers = max(MIN_COLD_LAYERS, math.ceil(COLD_FACTOR * l2_bytes / per_layer) + 1)
    return layers, layers * per_layer


def floor_of(
    settings: SweepSettings,
    draft_tokens: int,
    batch: int,
    mode: str,
    fold_on_verify: bool = False,
    compact_window: bool = False,
) -> Traffic:
    """Mandatory bytes per layer of the settings' kind; ``fold_on_verify``, ``compact_window``: of a round with it."""
    accept = settings.accept_for(draft_tokens)
    if fold_on_verify:
        return fold_on_verify_traffic(
            settings.shape, batch, draft_tokens, accept, settings.torch_dtype, settings.bias, compact_window
        )
    verify = verify_traffic(
        settings.shape, batch, draft_tokens, settings.torch_dtype, mode, settings.bias, compact_window
    )
    commit = commit_traffic(settings.shape, batch, accept, settings.torch_dtype, mode, compact_window)
    return {"verify": verify, "commit": commit, "round": verify + commit}[settings.kind]


def cell_bytes(settings: SweepSettings, draft_tokens: int, batch: int, layers: int) -> int:
    """Device memory of one cell's `build_problems` and of the copies that its checks make.

    A lower bound: parameters and the outputs that each arm's graph keeps are left out.
    """
    shape, dtype = settings.shape, settings.torch_dtype
    modes = _modes(settings)
    tokens, slots = batch * draft_tokens, slot_count(batch)
    workspace = tokens * shape.conv_dim * dtype.itemsize
    inputs = tokens * (shape.conv_dim + shape.num_v_heads * (shape.head_k_dim + 1)) * dtype.itemsize
    outputs = tokens * shape.num_v_heads * shape.head_v_dim * dtype.itemsize
    window = tokens * shape.window_bytes_per_token(dtype)
    ring = slots * draft_tokens * shape.ring_bytes_per_token(dtype) if "ring" in modes else 0
    ring *= 3 if settings.fold_on_verify else 1  # two banks more
    snapshots = tokens * shape.snapshot_bytes_per_token() if "snapshots" in modes else 0
    copies = 1 if settings.kind == "verify" else 3  # check_commits keeps the states before and the first arm's after
    state = slots * shape.state_bytes_per_slot(dtype)
    checked = window + ring + snapshots  # check_bits keeps one layer's records
    return layers * (copies * state + inputs + outputs + window + ring + snapshots) + checked + workspace


def check_memory(settings: SweepSettings, l2_bytes: int, device_bytes: int) -> int:
    """Refuse cells that cannot fit the device; returns the bytes of the largest.

    Raises:
        ValueError: a cell needs more than ``device_bytes``; the message names it.
    """
    most = 0
    for draft_tokens, batch in settings.cells():
        layers, _ = rotation_layers(settings, draft_tokens, batch, l2_bytes)
        needed = cell_bytes(settings, draft_tokens, batch, layers)
        if needed > device_bytes:
            raise ValueError(
                f"T = {draft_tokens}, B = {batch} needs {needed / 2**30:.1f} GiB or more of device memory for "
                f"{layers} layers and {device_bytes / 2**30:.1f} GiB are there: give smaller --batch-sizes or "
                "--draft-tokens, or --modes with ring lanes only"
            )
        most = max(most, needed)
    return most


def calls_of(kind: str, arm: Arm, problems: Problems, accept_lens: torch.Tensor) -> list[Callable[[], Any]]:
    """What one replay of the arm runs: verify on every layer, the all-layer commit, or both."""
    verifies: list[Callable[[], Any]] = [partial(arm.verify, p) for p in problems.layers]
    commit: list[Callable[[], Any]] = [lambda: arm.commit(problems, accept_lens)]
    return {"verify": verifies, "commit": commit, "round": verifies + commit}[kind]


def arm_result(arm: Arm, timing: Timing, floor_us: float) -> ArmResult:
    """What is stored of one arm: times in steps of 0.1 ns, the clock's own step being 0.5 us per replay."""
    passes = Timing(tuple(round(us, 4) for us in timing.passes_us))
    return ArmResult(
        name=arm.name, owner=arm.owner, lane=arm.column, mode=arm.mode, median_us=passes.median_us,
        spread=round(passes.spread, 6), passes_us=list(passes.passes_us), floor_us=round(floor_us, 4),
    )  # fmt: skip


def measure_cell(
    settings: SweepSettings,
    draft_tokens: int,
    batch: int,
    peers: list[Peer],
    machine: Machine,
    device: str = "cuda",
) -> Cell:
    """Check and time one cell on ``device``; anything but the current CUDA device needs a fake clock.

    Raises:
        BitsDifferError: the arms disagree.
    """
    layers, rotated = rotation_layers(settings, draft_tokens, batch, machine.l2_bytes)
    problems = build_problems(settings, draft_tokens, batch, layers, device)
    arms = build_arms(settings, problems.layers[0], peers)
    skipped = {f"{p.name} {name}": why for p in peers for name, why in p.not_taken(problems.layers[0]).items()}
    check_bits(problems.layers[0], arms)
    accept = settings.accept_for(draft_tokens)
    accept_lens = torch.full((batch,), accept, dtype=torch.int32, device=device)
    if settings.kind != "verify":
        check_commits(problems, arms, accept_lens)
    if settings.kind == "commit":
        arms = commit_arms(arms)
    rounds = HOT_ROUNDS if settings.hot else 1
    graphs = {arm.name: capture(calls_of(settings.kind, arm, problems, accept_lens), rounds) for arm in arms}
    timings = measure_interleaved(dict(graphs), layers * rounds, passes=settings.passes)
    results = []
    for arm in arms:
        floor = floor_of(settings, draft_tokens, batch, arm.mode, arm.fold_on_verify, arm.compact_window)
        results.append(arm_result(arm, timings[arm.name], floor.microseconds(machine.copy_bytes_per_second)))
    return Cell(
        kind=settings.kind, draft_tokens=draft_tokens, batch=batch,
        accept=0 if settings.kind == "verify" else accept, layers=layers, rotated_bytes=rotated,
        cold=rotated > COLD_FACTOR * machine.l2_bytes, arms=results, skipped=skipped,
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
    if settings.forms == DEFAULT_FORMS:
        del described["forms"]  # as results without this setting are stored: they are of the recurrent form
    if not settings.indices_ready:
        del described["indices_ready"]  # likewise
    if not settings.fold_on_verify:
        del described["fold_on_verify"]
    if not settings.compact_window:
        del described["compact_window"]
    described = json.loads(json.dumps(described))  # tuples to lists: equal to what is read back from JSON
    return SweepResult(machine, described, {peer.name: peer.version for peer in peers}, cells)
