"""`kda tune`: candidates, the choice among them, tables that grow, refusals. Times are made up."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kda_backend.gate import Table, TableError, load_table
from kda_backend.gate.table import MOST_PROVENANCE
from kda_kernels import KdaShape, LaunchConfig, _launch
from kda_tooling.bench.arms import Arm, config_name
from kda_tooling.bench.bits import BitsDifferError
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.timing import Timing
from kda_tooling.cli import app
from kda_tooling.commands import tune as command_module
from kda_tooling.tuning import compiling, measure, run
from kda_tooling.tuning.candidates import Figures, candidates, capped, fits_heads, ruled_out
from kda_tooling.tuning.settings import TuneSettings

ROOT = Path(__file__).parents[3]
SHAPE = KdaShape(1, 2, 64, 64)
MACHINE = Machine(
    gpu="Some GPU", sm=90, l2_bytes=1, copy_bytes_per_second=1e12, driver="1", clocks="", torch="2", triton="3",
    python="3", commit="abc", date="2026-01-01",
)  # fmt: skip
SMALL = TuneSettings(
    shape=SHAPE, draft_tokens=(2,), batch_sizes=(1, 2, 3), forms=("recurrent",), modes=("ring",), finalists=2
)
REAL_CHECK, REAL_ROUNDS = measure.check, measure.two_rounds
CONFIGS = [LaunchConfig(16, 1), LaunchConfig(32, 1), LaunchConfig(64, 4)]


class Clock:
    """Stands in for graphs and their measurement: ``us`` gives the time of an arm, by its name, at its measurement."""

    def __init__(self, us: Callable[[str, int], float]) -> None:
        self.us = us
        self.runs: list[list[str]] = []

    def __call__(self, graphs: dict[str, Any], calls: int, *, passes: int) -> dict[str, Timing]:
        self.runs.append(list(graphs))
        return {name: Timing((self.us(name, len(self.runs)),) * passes) for name in graphs}


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., run.TuneResult]:
    """Tunes `SMALL` into the test's folder, on the CPU, with the times that it is given."""
    measure_group = measure.measure_group
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(1))
    monkeypatch.setattr(compiling, "candidates", lambda *_: CONFIGS)
    monkeypatch.setattr(compiling, "compile_one", lambda settings, group, lane, config, _: [(config, Figures(64, 0))])
    monkeypatch.setattr(measure, "check", lambda *_: None)
    monkeypatch.setattr(measure, "two_rounds", lambda *_: {})
    monkeypatch.setattr(measure, "capture", lambda calls: calls)
    monkeypatch.setattr(run, "measure_group", lambda *args, **rest: measure_group(*args, device="cpu", **rest))
    monkeypatch.setattr(run, "device_memory", lambda: 1 << 40)

    def tune(
        us: Callable[[str, int], float], settings: TuneSettings = SMALL, machine: Machine = MACHINE, **options: Any
    ) -> run.TuneResult:
        monkeypatch.setattr(measure, "measure_interleaved", Clock(us))
        monkeypatch.setattr(run, "describe_machine", lambda: machine)
        return run.run_tune(settings, tmp_path, **options)

    return tune


def usual(name: str, number: int) -> float:
    """Fused 8 us with tiles of 32, 9 with others, unfused 10 and 11."""
    return (8.0 if "fused" in name and "unfused" not in name else 10.0) + ("bv32" not in name)


def verdicts(table: Table) -> list[str]:
    return [table.verdict(cell) for cell in table.cells]


def test_the_fastest_configuration_of_every_lane_is_found_and_the_winner_named(tuned: Callable[..., Any]) -> None:
    result = tuned(usual)
    assert load_table(result.path) == result.table
    assert [cell.key.batch for cell in result.table.cells] == [1, 2, 3]
    assert verdicts(result.table) == ["fused+ring"] * 3
    for cell in result.table.cells:
        assert cell.lanes["fused+ring"].us == (8.0, 8.0)
        assert cell.lanes["unfused+ring"].us == (10.0, 10.0)
        assert cell.config("fused+ring") == LaunchConfig(32, 1)
    assert result.failures == []


def test_a_win_in_one_pass_only_is_none(tuned: Callable[..., Any]) -> None:
    # Measurements 1 and 2 are the survey (B = 1 and 3), 3 to 5 the first pass, 6 to 8 the second.
    def slow_once(name: str, number: int) -> float:
        return usual(name, number) + (5 if "kda fused" in name and number == 7 else 0)

    assert verdicts(tuned(slow_once).table) == ["fused+ring", "unfused+ring", "fused+ring"]


def test_a_win_within_the_margin_is_none(tuned: Callable[..., Any]) -> None:
    def close(name: str, number: int) -> float:
        return 9.9 if "kda fused" in name else 10.0

    assert verdicts(tuned(close).table) == ["unfused+ring"] * 3
    assert verdicts(tuned(close, dataclasses.replace(SMALL, margin=0.0), fresh=True).table) == ["fused+ring"] * 3


def test_every_pass_has_inputs_of_its_own_and_the_finalists_only(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = measure.time_arms, []

    def time_arms(
        settings: TuneSettings, group: Any, batch: int, arms: list[Arm], l2: int, seed: int, *rest: Any
    ) -> Any:
        seen.append((seed, batch, len(arms)))
        return own(settings, group, batch, arms, l2, seed, *rest)

    monkeypatch.setattr(measure, "time_arms", time_arms)
    tuned(usual)
    assert seen == [(0, 1, 6), (0, 3, 6), *((seed, batch, 4) for seed in (1, 2) for batch in (1, 2, 3))]


def test_a_configuration_is_kept_where_another_is_hardly_faster(tuned: Callable[..., Any]) -> None:
    def us(name: str, number: int) -> float:  # at B = 2, bv16 is 0.3 % ahead of bv32; at B = 3, 2 %
        at = {4: 0.997, 7: 0.997, 5: 0.98, 8: 0.98}.get(number, 1.01)
        return 10.0 * (at if "bv16" in name else 1.0 if "bv32" in name else 2.0)

    table = tuned(us).table
    assert [config_name(cell.config("fused+ring")) for cell in table.cells] == ["bv32.w1", "bv32.w1", "bv16.w1"]


def test_other_bits_are_a_failure_that_is_told_and_never_timed(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_arm, wrong = measure.arm_of, LaunchConfig(32, 1)

    def arm_of(settings: TuneSettings, group: Any, lane: str, config: LaunchConfig) -> Arm:
        arm = own_arm(settings, group, lane, config)

        def last_place(problem: Any) -> torch.Tensor:
            out = arm.verify(problem)
            out.view(torch.int16).flatten()[0] ^= 1
            return out

        return dataclasses.replace(arm, verify=last_place) if (lane, config) == ("fused+ring", wrong) else arm

    monkeypatch.setattr(measure, "arm_of", arm_of)
    monkeypatch.setattr(measure, "check", REAL_CHECK)
    monkeypatch.setattr(measure, "two_rounds", REAL_ROUNDS)
    monkeypatch.setattr(compiling, "candidates", lambda *args: CONFIGS[1:] if "fused+ring" in args else CONFIGS[2:])
    result = tuned(usual, dataclasses.replace(SMALL, shape=KdaShape(1, 1, 64, 64), batch_sizes=(1,)))
    (failure,) = result.failures
    assert (failure.lane, failure.config, failure.broken) == ("fused+ring", wrong, True)
    assert "output" in failure.error
    assert [cell.config("fused+ring") for cell in result.table.cells] == [CONFIGS[2]]


def test_a_fold_on_verify_that_replays_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(SMALL, shape=KdaShape(1, 1, 64, 64), options=("fold-on-verify",), batch_sizes=(1,))
    (group,) = settings.groups()
    problems = measure.check_problems(settings, group, "cpu")
    accept_lens = torch.full((measure.CHECK_BATCH,), 1, dtype=torch.int32)
    reference, arm = (measure.arm_of(settings, group, lane, CONFIGS[2]) for lane in group.lanes)
    expected = measure.two_rounds(problems, reference, accept_lens)
    measure.check(problems, reference, expected, arm, accept_lens)

    def commit(problems: Any, accept_lens: torch.Tensor) -> None:  # one record more is pending
        arm.commit(problems, accept_lens + 1)

    with pytest.raises(BitsDifferError, match="differs from the reference configuration's"):
        measure.check(problems, reference, expected, dataclasses.replace(arm, commit=commit), accept_lens)


def test_compiling_gives_figures_and_names_what_fails() -> None:
    settings = dataclasses.replace(SMALL, batch_sizes=(1,))
    (group,) = settings.groups()
    assert compiling.compile_one(settings, group, "fused+ring", CONFIGS[2], device="cpu") == [
        (CONFIGS[2], Figures(0, 0))
    ]
    gluon = LaunchConfig(64, 4, rows_per_thread=4)  # not for the interpreter
    ((config, error),) = compiling.compile_one(settings, group, "fused+ring", gluon, device="cpu")
    assert config == gluon
    assert "rows_per_thread" in str(error)


def test_what_cannot_be_compiled_is_told_and_the_lane_says_why(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_one(settings: TuneSettings, group: Any, lane: str, config: LaunchConfig, target: str | None) -> Any:
        if lane == "fused+ring":
            raise RuntimeError("out of\nregisters")
        return [(config, Figures(64, 0))]

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    result = tuned(usual)
    assert verdicts(result.table) == ["unfused+ring"] * 3
    assert {one.error for one in result.failures} == {"RuntimeError: out of registers"}
    assert "out of registers" in result.table.cells[0].lanes["fused+ring"].why


def test_a_group_is_measured_while_the_next_is_compiled(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    of, measure_group = compiling.Compiling.of, run.measure_group

    def compiled(self: compiling.Compiling, group: Any) -> compiling.Compiled:
        order.append(f"compile T={group.draft_tokens}")
        return of(self, group)

    def measured(settings: Any, group: Any, *rest: Any, **more: Any) -> Any:
        order.append(f"measure T={group.draft_tokens}")
        return measure_group(settings, group, *rest, **more)

    monkeypatch.setattr(compiling.Compiling, "of", compiled)
    monkeypatch.setattr(run, "measure_group", measured)
    done: list[tuple[int, int]] = []
    tuned(usual, dataclasses.replace(SMALL, draft_tokens=(2, 3)), on_compiled=lambda *count: done.append(count))
    assert order == ["compile T=2", "measure T=2", "compile T=3", "measure T=3"]
    assert done == [(number, 12) for number in range(1, 13)]


def test_what_compilers_leave_in_the_cache_is_what_a_launch_finds(tmp_path: Path) -> None:
    """Compilers that do without the GPU: no kernel may be compiled again where it is timed."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.support.compiled_ahead"]
    done = subprocess.run(
        program, cwd=ROOT, env=env | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    candidates = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(candidates) == 4
    for one in candidates:
        assert one["registers"] > 20, one
        assert one["ahead"] > 0, one
        assert one["again"] == 0, one


def test_a_run_that_was_interrupted_goes_on(tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    both = dataclasses.replace(SMALL, draft_tokens=(2, 3))

    def stop(group: Any, done: int, of: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(usual, both, on_group=stop)
    groups: list[int] = []
    result = tuned(usual, both, resume=True, on_group=lambda group, done, of: groups.append(group.draft_tokens))
    assert groups == [3]
    assert {cell.key.draft_tokens for cell in result.table.cells} == {2, 3}
    assert {key.draft_tokens for key in result.measured} == {3}
    again = tuned(usual, both, resume=True)
    assert again.measured == []
    assert again.table == result.table


def test_cells_of_other_versions_do_not_stand_beside_new_ones(tuned: Callable[..., Any]) -> None:
    first = tuned(usual)
    newer = dataclasses.replace(MACHINE, triton="4")
    with pytest.raises(ValueError, match=r"triton 3, this run has 4.*--fresh"):
        tuned(usual, machine=newer)
    assert load_table(first.path) == first.table
    other_commit = tuned(
        usual, dataclasses.replace(SMALL, draft_tokens=(3,)), machine=dataclasses.replace(MACHINE, commit="def")
    )
    assert other_commit.table.provenance.git_sha == "abc; def"
    assert len(other_commit.table.cells) == 6
    assert len(tuned(usual, machine=newer, fresh=True).table.cells) == 3


def test_a_table_may_be_made_in_any_number_of_runs() -> None:
    """Its provenance names the newest of them, as many as fit."""
    said = "kda tune"
    for number in range(100):
        said = run._joined(said, f"kda tune --draft-tokens 2 3 4 5 6 7 8 --batch-sizes 1 2 4 8 16 --seed {number}")
        assert len(said) <= MOST_PROVENANCE
    assert said.endswith("--seed 98; kda tune --draft-tokens 2 3 4 5 6 7 8 --batch-sizes 1 2 4 8 16 --seed 99")
    assert len(said) > MOST_PROVENANCE - 100


@pytest.mark.parametrize("command", [["tune"], ["gate", "regret"], ["gate", "explain"]], ids=" ".join)
def test_a_terminal_of_80_columns_cuts_no_word_of_the_help(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "…" not in result.output


def test_an_unreadable_table_is_not_overwritten(tuned: Callable[..., Any]) -> None:
    path = tuned(usual).path
    path.write_text("{")
    with pytest.raises(TableError, match="JSON"):
        tuned(usual)
    assert path.read_text() == "{"


def test_changes_are_of_verdicts_and_of_what_was_measured(tuned: Callable[..., Any]) -> None:
    before = tuned(usual).table
    after = tuned(lambda name, number: usual(name, number) + (9 if "kda fused" in name and number in (3, 6) else 0))
    assert run.changes(after, before) == [
        "safe gate, recurrent, ring, plain, T=2, B=1: unfused+ring, the table says fused+ring"
    ]
    missing = dataclasses.replace(before, cells=before.cells[:2])
    assert run.changes(after, missing)[1:] == [
        "safe gate, recurrent, ring, plain, T=2, B=3: fused+ring, not in the table"
    ]


@pytest.mark.parametrize("lane", ["unfused+ring", "fused+ring"])
def test_candidates_are_launch_configurations_that_fit(lane: str) -> None:
    found = candidates(KdaShape(8, 8, 128, 128), 4, "recurrent", lane, nvidia=True)
    assert len(set(found)) == len(found) >= 12
    assert any(config.prefetch for config in found) is (lane == "unfused+ring")
    narrow = candidates(KdaShape(8, 8, 64, 64), 4, "recurrent", lane, nvidia=True)
    assert all(config.block_v <= 64 for config in narrow)
    for portable in (
        candidates(KdaShape(8, 8, 128, 128), 4, "recurrent", lane, nvidia=False),
        candidates(KdaShape(8, 8, 128, 128), 16, "chunked", lane, nvidia=True),
    ):
        assert all(config.rows_per_thread is None for config in portable)


def test_registers_are_capped_where_that_fits_another_program() -> None:
    tile = LaunchConfig(64, 4, rows_per_thread=4)
    assert capped(tile, Figures(150, 0)) == [dataclasses.replace(tile, max_registers=128)]  # 3 programs to 4
    assert capped(tile, Figures(180, 0)) == [dataclasses.replace(tile, max_registers=168)]  # 2 to 3
    assert capped(tile, Figures(128, 0)) == []
    assert capped(tile, Figures(150, 8)) == []
    wide = LaunchConfig(128, 8, rows_per_thread=4)
    assert capped(wide, Figures(200, 0)) == [dataclasses.replace(wide, max_registers=128)]  # 1 to 2
    assert ruled_out(Figures(128, 256)) is None
    assert "260 bytes" in str(ruled_out(Figures(128, 260)))


def test_tiles_are_tried_where_their_programs_suit_the_number_of_heads() -> None:
    shape = KdaShape(8, 8, 128, 128)
    every = candidates(shape, 4, "recurrent", "fused+ring", nvidia=True)

    def tried(batch: int) -> set[tuple[int, int]]:
        return {(one.block_v, one.num_warps) for one in every if fits_heads(one, every, 8 * batch, 128)}

    assert tried(1) == {(16, 4), (32, 4), (32, 8), (64, 8)}
    assert tried(16) >= {(32, 4), (64, 8), (64, 4), (128, 8)}
    assert tried(256) == {(32, 4), (64, 4), (64, 8), (128, 8)}
    portable = [LaunchConfig(*tile) for tile in ((8, 1), (32, 4))]
    assert all(fits_heads(one, portable, heads, 128) for one in portable for heads in (1, 1 << 20))
    lone = every[:1]
    assert fits_heads(lone[0], lone, 1 << 20, 128)


def test_a_table_says_how_to_make_it_again_and_not_where_it_lay(tuned: Callable[..., Any]) -> None:
    seen: list[TuneSettings] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_module, "require_gpu", lambda *_: None)
        patch.setattr(command_module, "_measure", lambda settings, *_: (seen.append(settings), 1 / 0))
        CliRunner().invoke(app, ["tune"])
    assert seen == [TuneSettings()], "the command's defaults are the settings'"
    assert TuneSettings().command == "kda tune"
    command = tuned(usual, dataclasses.replace(SMALL, gates=("standard",), margin=0.05)).table.provenance.command
    assert command == (
        "kda tune --heads 1 --hv-heads 2 --head-k-dim 64 --head-v-dim 64 --draft-tokens 2 --batch-sizes 1 2 3 "
        "--form recurrent --mode ring --gate standard --margin 0.05 --finalists 2"
    )
    again = CliRunner().invoke(app, command.split()[1:], env={"COLUMNS": "250"})
    assert "no such option" not in again.output.lower()
    assert "tuning" in again.output, "only the GPU is missing"


def test_figures_are_those_of_the_kernels_that_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Kernel:
        n_regs: int
        n_spills: int

    kernels = iter([Kernel(10, 3), Kernel(20, 1)])
    monkeypatch.setattr(_launch, "LAUNCHER", lambda *_: next(kernels))
    ordinary = _launch.LAUNCHER
    assert compiling._figures_of_launches(lambda: [_launch.LAUNCHER(), _launch.LAUNCHER()]) == Figures(20, 12)
    with contextlib.suppress(StopIteration):
        compiling._figures_of_launches(lambda: _launch.LAUNCHER())
    assert _launch.LAUNCHER is ordinary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3", "--hv-heads", "4"], "--hv-heads"),
        (["--form", "quick"], "--form must name some of recurrent, chunked; got quick"),
        (["--mode", "rings"], "--mode must name some of"),
        (["--option", "fold"], "--option must name some of plain"),
        (["--gate", "open"], "--gate must name some of safe, standard"),
        (["--form", "chunked", "--mode", "snapshots"], "leave nothing to measure"),
        (["--margin", "0.5"], "--margin must be a share"),
        (["--passes", "1"], "--passes must be within 2.."),
        (["--finalists", "0"], "--finalists must be within 1.."),
        (["--seed", "-1"], "--seed must be at least 0 and below 2**63"),
        (["--seed", str((1 << 63) - 1)], "--seed must be at least 0 and below 2**63"),
        (["--batch-sizes", "0"], "--batch-sizes must be within 1.."),
        (["--draft-tokens", "65"], "--draft-tokens must be within 1.."),
        (["--dtype", "fp8"], "fp8"),
        (["--resume", "--fresh"], "give one of them"),
        (["--check", "missing.json"], "missing.json"),
    ],
)
def test_wrong_arguments_are_refused_by_name_before_anything_runs(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "250"})
    assert result.exit_code == 2
    assert message in result.output


def test_the_command_prints_what_came_of_it(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kda_tooling.commands import tune as command

    before = tuned(usual)
    kept = tmp_path / "kept"
    kept.mkdir()
    before.path.rename(kept / before.path.name)
    slower = tuned(lambda name, number: usual(name, number) + (9 if "kda fused" in name else 0))
    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(command, "_measure", lambda *_: slower)
    arguments = ["tune", "--into", str(tmp_path), "--check", str(kept / before.path.name), "--json", "-"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
    assert result.exit_code == 1
    summary = json.loads(result.stdout)
    assert summary["lanes"] == {"unfused+ring": 3}
    assert len(summary["changes"]) == 3
    assert "cells measured: 3 (unfused+ring 3)" in result.stderr
    same = CliRunner().invoke(app, [*arguments[:3], "--check", str(slower.path)], env={"COLUMNS": "250"})
    assert same.exit_code == 0
