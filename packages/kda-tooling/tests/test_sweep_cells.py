"""What a cell holds and how it is measured, with a fake clock for a GPU: rotation, memory, arms, compile jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_backend import StatePool
from kda_kernels import KdaShape, LaunchConfig
from kda_tooling.bench import sweep as sweep_module
from kda_tooling.bench import warmup
from kda_tooling.bench.arms import Arm, commit_arms, launch_configs, our_arms
from kda_tooling.bench.bits import BitsDifferError
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.results import SweepResult, load_results
from kda_tooling.bench.settings import SweepSettings
from kda_tooling.bench.sweep import (
    COLD_FACTOR,
    build_arms,
    build_problems,
    cell_bytes,
    check_memory,
    measure_cell,
    rotation_layers,
    run_sweep,
)  # fmt: skip
from kda_tooling.bench.timing import Replayable, measure_interleaved
from kda_tooling.problem import Problems, VerifyProblem, random_problems

TINY = KdaShape(1, 1, 64, 64)
H200_L2 = 60 << 20


class CountingGraph:
    """In place of a CUDA graph: how many calls it would replay."""

    def __init__(self, calls: Sequence[Callable[[], object]], rounds: int = 1) -> None:
        self.calls = len(calls) * rounds
        for call in calls:
            call()

    def replay(self) -> None:
        raise AssertionError("nothing is replayed without a GPU")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs whose replay takes 2 us per call, and an L2 so small that few tiny layers exceed it."""

    def stopwatch(graph: Replayable, replays: int) -> float:
        assert isinstance(graph, CountingGraph)
        return graph.calls * replays * 2e-6

    def measure(graphs: dict[str, Replayable], calls: int, passes: int) -> Any:
        return measure_interleaved(graphs, calls, passes=passes, stopwatch=stopwatch)

    def on_cpu(settings: SweepSettings, t: int, b: int, peers: list[Any], machine: Machine) -> Any:
        return measure_cell(settings, t, b, peers, machine, device="cpu")

    monkeypatch.setattr(sweep_module, "capture", CountingGraph)
    monkeypatch.setattr(sweep_module, "measure_interleaved", measure)
    monkeypatch.setattr(sweep_module, "measure_cell", on_cpu)


@pytest.fixture
def machine(sweep_factory: Callable[..., SweepResult]) -> Machine:
    return dataclasses.replace(sweep_factory().machine, l2_bytes=10_000)


@pytest.mark.parametrize("batch", [1, 4, 64, 256])
@pytest.mark.parametrize("draft_tokens", [1, 4, 8])
def test_a_rotation_exceeds_three_times_the_l2(draft_tokens: int, batch: int) -> None:
    settings = SweepSettings()
    layers, rotated = rotation_layers(settings, draft_tokens, batch, H200_L2)
    problem_bytes = rotated // layers
    assert rotated > COLD_FACTOR * H200_L2
    assert layers >= 4
    assert layers == 4 or (layers - 2) * problem_bytes <= COLD_FACTOR * H200_L2


def test_cold_at_one_request_takes_hundreds_of_layers() -> None:
    layers, _ = rotation_layers(SweepSettings(), 4, 1, H200_L2)
    assert 250 < layers < 400


def test_hot_is_one_layer_over_and_over() -> None:
    layers, rotated = rotation_layers(SweepSettings(hot=True), 4, 1, H200_L2)
    assert layers == 1
    assert rotated < H200_L2


@pytest.mark.parametrize("lanes", [("fused+ring",), ("fused",), ("fused", "unfused+ring")], ids=" ".join)
@pytest.mark.parametrize("kind", ["verify", "round"])
def test_the_memory_asked_for_is_what_is_allocated(kind: str, lanes: tuple[str, ...]) -> None:
    settings = SweepSettings(shape=KdaShape(1, 2, 64, 128), lanes=lanes, kind=kind, dtype="fp16")
    problems = build_problems(settings, 3, 5, 2, "cpu")
    held = [problems.state, problems.ring, problems.snapshots]
    allocated = sum(group.num_bytes for group in held if group is not None)
    allocated += sum(t.numel() * t.element_size() for p in problems.layers for t in (p.mixed_qkv, p.a, p.b))
    outputs = 2 * 15 * 2 * 128 * 2
    first = problems.layers[0]
    records = [group for group in (first.ring, first.snapshots) if group is not None]
    checked = first.state.conv_window.numel() * 2 + sum(group.num_bytes for group in records)
    state = sum(t.numel() * t.element_size() for t in (problems.state.ssm_state, problems.state.conv_state))
    copies = 2 * state if kind == "round" else 0
    workspace = first.workspace.numel() * 2
    assert cell_bytes(settings, 3, 5, 2) == allocated + workspace + outputs + checked + copies


def test_a_cell_that_cannot_fit_is_refused_by_name() -> None:
    settings = SweepSettings(batch_sizes=(1, 4096), draft_tokens=(4, 16))
    with pytest.raises(ValueError, match=r"T = 16, B = 4096 needs .* GiB or more .* and 100\.0 GiB are there"):
        check_memory(settings, H200_L2, 100 << 30)
    check_memory(dataclasses.replace(settings, batch_sizes=(1, 256)), H200_L2, 139 << 30)


@pytest.mark.parametrize("lane", ["fused", "fused+ring"])
def test_a_missing_record_is_an_error_not_another_mode_s_commit(lane: str) -> None:
    problems = build_problems(SweepSettings(shape=TINY, lanes=(lane,)), 2, 1, 1, "cpu")
    other = {"fused": "fused+ring", "fused+ring": "fused"}[lane]
    arm = our_arms(TINY, (other,), sweep_configs=False)[0]
    accept_lens = torch.ones(1, dtype=torch.int32)
    missing = rf"no {arm.mode}: build it with {arm.mode}=True"
    with pytest.raises(ValueError, match=missing):
        arm.commit(problems, accept_lens)
    with pytest.raises(ValueError, match=missing):
        arm.verify(problems.layers[0])


def test_our_arms_make_the_calls_that_the_pool_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels launched, and the specialisations that they are launched as: what is timed is what is served."""
    launched: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    def launcher(kernel: Any, grid: tuple[int, ...], args: Any, options: dict[str, Any]) -> None:
        launched.append((kernel.__name__, grid, options))

    monkeypatch.setattr("kda_kernels._launch.LAUNCHER", launcher)
    settings = SweepSettings(shape=TINY)
    problems = build_problems(settings, 2, 3, 2, "cpu")
    accept_lens = torch.ones(3, dtype=torch.int32)
    for arm in our_arms(TINY, settings.lanes, sweep_configs=False):
        pool = StatePool(TINY, num_layers=2, num_slots=4, max_batch=3, draft_tokens=2, mode=arm.mode)
        pool.begin(problems.layers[0].slots, 2)
        for layer, p in enumerate(problems.layers):
            pool.verify(layer, p.mixed_qkv, p.a, p.b, p.params, lane=arm.lane)
        pool.commit(accept_lens)
        served = launched.copy()
        launched.clear()
        for p in problems.layers:
            arm.verify(p)
        arm.commit(problems, accept_lens)
        assert launched == served, arm.name
        assert all(options.get("COUNT", True) for _, _, options in launched)
        launched.clear()


def test_problems_hold_what_the_arms_record() -> None:
    ring = build_problems(SweepSettings(shape=TINY, lanes=("fused+ring",)), 2, 1, 1, "cpu")
    shots = build_problems(SweepSettings(shape=TINY, lanes=("fused",)), 2, 1, 1, "cpu")
    assert (ring.ring is not None, ring.snapshots is not None) == (True, False)
    assert (shots.ring is not None, shots.snapshots is not None) == (False, True)


def test_a_peer_gets_a_ring_whatever_the_lanes(tmp_path: Path) -> None:
    settings = SweepSettings(shape=TINY, lanes=("fused",), peers=(f"sglang={tmp_path}",))
    assert build_problems(settings, 2, 1, 1, "cpu").ring is not None


def test_arms_have_one_name_each_and_their_lane_s_mode() -> None:
    arms = our_arms(KdaShape(8, 8), ("unfused", "fused+ring"), sweep_configs=True)
    configs = launch_configs(KdaShape(8, 8))
    assert [arm.name for arm in arms] == ["kda unfused", "kda fused+ring"] + [
        f"kda fused+ring bv{c.block_v}.w{c.num_warps}" for c in configs
    ]
    assert len({arm.name for arm in arms}) == len(arms)
    assert {arm.lane: arm.mode for arm in arms} == {"unfused": "snapshots", "fused+ring": "ring"}


def test_swept_configurations_keep_their_tile_in_registers() -> None:
    configs = launch_configs(KdaShape(8, 8, 128, 128))
    assert LaunchConfig(16, 1) in configs
    assert LaunchConfig(64, 1) not in configs
    assert {config.block_v for config in launch_configs(KdaShape(1, 1, 64, 64))} == {8, 16, 32, 64}


def test_on_nvidia_the_layouts_of_its_own_kernel_are_swept_too() -> None:
    shape = KdaShape(8, 8)
    portable, every = launch_configs(shape), launch_configs(shape, nvidia=True)
    assert portable == [config for config in every if config.rows_per_thread is None]
    assert LaunchConfig(32, 4, rows_per_thread=2) in every
    assert {config.rows_per_thread for config in every} == {None, 1, 2, 4}
    names = [arm.name for arm in our_arms(shape, ("fused+ring",), sweep_configs=True, nvidia=True)]
    assert "kda fused+ring bv32.w4.r2" in names
    assert len(set(names)) == len(names) == len(every) + 1


def test_an_unknown_lane_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of unfused, .*; got 'chunked'"):
        our_arms(TINY, ("chunked",), sweep_configs=False)


def test_commits_have_one_arm_per_owner_and_mode() -> None:
    arms = our_arms(TINY, ("unfused+ring", "fused+ring", "fused"), sweep_configs=True)
    assert [(arm.name, arm.lane, arm.mode) for arm in commit_arms(arms)] == [
        ("kda ring commit", "ring", "ring"), ("kda snapshots commit", "snapshots", "snapshots"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["verify", "round", "commit"])
@pytest.mark.usefixtures("fake_gpu")
def test_a_cell_is_measured_per_layer(kind: str, machine: Machine) -> None:
    settings = SweepSettings(shape=TINY, kind=kind, passes=3, lanes=("unfused+ring", "fused"))
    cell = measure_cell(settings, 2, 2, [], machine, device="cpu")
    layers, rotated = rotation_layers(settings, 2, 2, machine.l2_bytes)
    assert (cell.kind, cell.draft_tokens, cell.batch, cell.layers, cell.rotated_bytes) == (kind, 2, 2, layers, rotated)
    assert cell.cold
    assert cell.accept == (0 if kind == "verify" else 1)
    calls = {"verify": layers, "commit": 1, "round": layers + 1}[kind]
    assert [arm.median_us for arm in cell.arms] == pytest.approx([2.0 * calls / layers] * 2)
    assert all(len(arm.passes_us) == 3 and arm.spread == 0 for arm in cell.arms)
    names = ["kda ring commit", "kda snapshots commit"] if kind == "commit" else ["kda unfused+ring", "kda fused"]
    assert [arm.name for arm in cell.arms] == names
    floors = [sweep_module.floor_of(settings, 2, 2, mode).microseconds(4.3e12) for mode in ("ring", "snapshots")]
    assert [arm.floor_us for arm in cell.arms] == pytest.approx(floors, abs=1e-4)


@pytest.mark.parametrize("broken", ["verify", "commit"])
def test_nothing_is_timed_where_arms_disagree(broken: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(settings: SweepSettings, problem: VerifyProblem, peers: list[Any]) -> list[Arm]:
        arms = our_arms(settings.shape, settings.lanes, settings.sweep_configs)

        def verify(p: VerifyProblem) -> torch.Tensor:
            return arms[1].verify(p) + 1

        wrong = {"verify": verify, "commit": lambda problems, accept_lens: None}[broken]
        return [arms[0], dataclasses.replace(arms[1], **{broken: wrong})]

    def must_not_run(*arguments: object) -> None:
        raise AssertionError("something was timed")

    monkeypatch.setattr(sweep_module, "build_arms", build)
    monkeypatch.setattr(sweep_module, "capture", must_not_run)
    settings = SweepSettings(shape=TINY, kind="round", passes=3, lanes=("unfused+ring", "fused"))
    with pytest.raises(BitsDifferError, match=r"kda fused|kda snapshots commit"):
        measure_cell(settings, 2, 2, [], machine, device="cpu")


@pytest.mark.usefixtures("fake_gpu")
def test_hot_cells_say_so(machine: Machine) -> None:
    settings = SweepSettings(shape=TINY, passes=3, lanes=("unfused+ring",), hot=True)
    cell = measure_cell(settings, 2, 1, [], dataclasses.replace(machine, l2_bytes=H200_L2), device="cpu")
    assert (cell.layers, cell.cold) == (1, False)
    assert cell.arms[0].median_us == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["verify", "round"])
def test_the_floor_is_that_of_the_layer_measured(kind: str) -> None:
    floors = [sweep_module.floor_of(SweepSettings(kind=kind, bias=bias), 4, 16, "ring") for bias in (True, False)]
    assert floors[0].total - floors[1].total == SweepSettings().shape.conv_dim * 2


@pytest.mark.usefixtures("fake_gpu")
def test_a_round_s_floor_is_verify_plus_commit() -> None:
    settings = SweepSettings(kind="round")
    verify, commit = (dataclasses.replace(settings, kind=kind) for kind in ("verify", "commit"))
    for mode in ("ring", "snapshots"):
        both = sweep_module.floor_of(verify, 4, 16, mode) + sweep_module.floor_of(commit, 4, 16, mode)
        assert sweep_module.floor_of(settings, 4, 16, mode) == both


@pytest.mark.usefixtures("fake_gpu")
def test_a_sweep_visits_every_cell_and_can_be_stored(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sweep_module, "describe_machine", lambda: machine)
    settings = SweepSettings(shape=TINY, batch_sizes=(1, 2), draft_tokens=(1, 2), passes=3, lanes=("fused+ring",))
    seen: list[tuple[int, int]] = []
    result = run_sweep(settings, lambda t, b: seen.append((t, b)))
    assert seen == settings.cells() == [(cell.draft_tokens, cell.batch) for cell in result.cells]
    (tmp_path / "sweep.json").write_text(result.to_json())
    assert load_results(tmp_path / "sweep.json") == result


def test_every_variant_that_may_differ_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def default(
        shape: KdaShape, batch: int, draft_tokens: int, device: torch.device, *, fused: bool, **_: object
    ) -> LaunchConfig:
        return LaunchConfig(32 if batch < (16 if fused else 64) else 64)

    monkeypatch.setattr(warmup, "default_verify_config", default)
    settings = SweepSettings(batch_sizes=(4, 8, 16, 64), draft_tokens=(3, 8))
    ours, swept = our_arms(settings.shape, ("fused+ring",), sweep_configs=True)[:2]
    unfused = our_arms(settings.shape, ("unfused+ring",), sweep_configs=False)[0]
    peer = dataclasses.replace(ours, owner="sglang")
    jobs = warmup.compile_jobs(settings, {3: [ours, swept, peer], 8: [ours, swept, unfused]}, device="cpu")
    assert len(set(jobs)) == len(jobs)
    assert [batch for _, batch, _ in jobs] == sorted(batch for _, batch, _ in jobs), "one kernel's sizes are neighbours"
    found = {key: {b for t, b, index in jobs if (t, index) == key} for key in dict.fromkeys((t, i) for t, _, i in jobs)}
    # Ours where the default configuration changes, a named one once, a peer's at each batch size.
    assert found == {
        (3, 0): {4, 16},
        (3, 1): {4},
        (3, 2): {4, 8, 16, 64},
        (8, 0): {4, 16},
        (8, 1): {4},
        (8, 2): {4, 64},
    }


@pytest.mark.parametrize("failing", [None, 1])
def test_compilation_reports_each_arm_and_fails_with_the_first_error(
    failing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def compile_arm(settings: SweepSettings, t: int, b: int, index: int) -> str:
        if index == failing:
            raise RuntimeError("ptxas failed")
        return f"arm {index}"

    pools: list[int] = []

    def threads(count: int, mp_context: object) -> ThreadPoolExecutor:
        pools.append(count)
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(warmup, "_compile_arm", compile_arm)
    monkeypatch.setattr(warmup, "ProcessPoolExecutor", threads)
    done: list[str] = []
    jobs = [(4, 1, index) for index in range(3)]
    if failing is None:
        warmup.compile_all(SweepSettings(), jobs, done.append, workers=2)
        assert sorted(done) == ["arm 0", "arm 1", "arm 2"]
        assert pools == [2]
    else:
        with pytest.raises(RuntimeError, match="ptxas failed"):
            warmup.compile_all(SweepSettings(), jobs, done.append, workers=2)


def test_arms_of_peers_follow_ours() -> None:
    class Fake:
        name, version = "other", "1"

        def verify_arms(self, problem: VerifyProblem) -> dict[str, Callable[[VerifyProblem], torch.Tensor]]:
            return {"fused+ring bv4": lambda p: p.mixed_qkv}

        def not_taken(self, problem: VerifyProblem) -> dict[str, str]:
            return {}

        def commit(self, *arguments: object) -> None:
            raise AssertionError("not called")

    settings = SweepSettings(shape=TINY, lanes=("fused+ring",))
    problems: Problems = build_problems(settings, 2, 1, 1, "cpu")
    arms: list[Arm] = build_arms(settings, problems.layers[0], [Fake()])
    assert [(arm.name, arm.owner, arm.lane, arm.mode) for arm in arms] == [
        ("kda fused+ring", "kda", "fused+ring", "ring"), ("other fused+ring bv4", "other", "fused+ring", "ring"),
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_every_layer_of_a_problem_is_aligned_as_if_allocated_alone(batch: int) -> None:
    """Two heads of three tokens: packed, every other layer's b, rates and ring would begin 8 bytes off."""
    problems = random_problems(
        KdaShape(2, 2, 64, 64), layers=3, batch=batch, draft_tokens=3, dtype=torch.bfloat16, device="cpu",
        snapshots=True, fold_on_verify=True,
    )  # fmt: skip
    for layer in problems.layers:
        groups = [layer, layer.params, layer.state, layer.ring, layer.snapshots, layer.folding.banks]
        tensors = {
            (type(group).__name__, name): tensor
            for group in groups
            for name, tensor in vars(group).items()
            if isinstance(tensor, torch.Tensor)
        }
        assert len(tensors) > 15
        assert {name: tensor.data_ptr() % 16 for name, tensor in tensors.items()} == dict.fromkeys(tensors, 0)
