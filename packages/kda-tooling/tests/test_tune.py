"""`kda tune`: candidates, the choice among them, tables that grow. Times are made up."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kda_backend.gate import LaneFigures, TableError, load_table
from kda_backend.gate.table import MOST_PROVENANCE
from kda_kernels import KdaShape, LaunchConfig, _launch
from kda_tooling.bench.arms import Arm, config_name
from kda_tooling.tuning import capturing, compiling, measure, run
from kda_tooling.tuning.candidates import Figures, candidates, capped, fits_heads, ruled_out
from kda_tooling.tuning.settings import TuneSettings
from tests.support.tuning import (
    CONFIGS,
    MACHINE,
    SMALL,
    Clock,
    usual,
    verdicts,
)

ROOT = Path(__file__).parents[3]


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
    # Measurements 1 to 6 are a survey and the first pass of each B (1, 3, 2), 7 to 9 the second pass (1, 2, 3).
    def slow_once(name: str, number: int) -> float:
        return usual(name, number) + (5 if "kda fused" in name and number == 8 else 0)

    assert verdicts(tuned(slow_once).table) == ["fused+ring", "unfused+ring", "fused+ring"]


def test_a_win_within_the_margin_is_none(tuned: Callable[..., Any]) -> None:
    def close(name: str, number: int) -> float:
        return 9.9 if "kda fused" in name else 10.0

    assert verdicts(tuned(close).table) == ["unfused+ring"] * 3
    assert verdicts(tuned(close, dataclasses.replace(SMALL, margin=0.0), fresh=True).table) == ["fused+ring"] * 3


def test_every_pass_has_inputs_of_its_own_and_the_finalists_only(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = measure.captured_arms, []

    def captured_arms(
        settings: TuneSettings, group: Any, batch: int, arms: list[Arm], l2: int, seed: int, *rest: Any, **more: Any
    ) -> Any:
        seen.append((seed, batch, len(arms)))
        return own(settings, group, batch, arms, l2, seed, *rest, **more)

    monkeypatch.setattr(measure, "captured_arms", captured_arms)
    tuned(usual)
    assert seen == [(0, 1, 6), (0, 3, 6), (0, 2, 6), (1, 1, 4), (1, 2, 4), (1, 3, 4)]


def test_between_surveyed_sizes_what_is_far_behind_at_both_is_not_tried(tuned: Callable[..., Any]) -> None:
    timed: list[int] = []

    def us(name: str, number: int) -> float:
        """Fused, tiles of 16 lose by half at both ends, tiles of 64 at one of them; measurement 5 is B = 2's survey."""
        timed.extend([number] * (number == 5 and "kda fused" in name))
        assert not ("kda fused" in name and "bv16" in name and number in (5, 6)), "surveyed at B = 2"
        slow = "bv16" in name or ("bv64" in name and number <= 2)
        return usual(name, number) * (1.5 if slow and "kda fused" in name else 1.0)

    tuned(us)
    assert len(timed) == 2


def test_a_configuration_is_kept_where_another_is_hardly_faster(tuned: Callable[..., Any]) -> None:
    def us(name: str, number: int) -> float:  # at B = 2, bv16 is 0.3 % ahead of bv32; at B = 3, 2 %
        at = {6: 0.997, 8: 0.997, 4: 0.98, 9: 0.98}.get(number, 1.01)
        return 10.0 * (at if "bv16" in name else 1.0 if "bv32" in name else 2.0)

    table = tuned(us).table
    assert [config_name(cell.config("fused+ring")) for cell in table.cells] == ["bv32.w1", "bv32.w1", "bv16.w1"]


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


def test_rounds_are_timed_apart_from_verifies(tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify would leave the next round's first verify nothing to fold."""
    runs: list[set[int]] = []
    own = Clock.__call__

    def clock(self: Clock, graphs: dict[str, Any], *given: Any, **more: Any) -> Any:
        runs.append({len(calls) for calls in graphs.values()})
        return own(self, graphs, *given, **more)

    monkeypatch.setattr(Clock, "__call__", clock)
    monkeypatch.setattr(capturing, "rotation_layers", lambda *_: (4, 0))
    table = tuned(usual, dataclasses.replace(SMALL, options=("fold-on-verify",), batch_sizes=(1,))).table
    assert runs == [{5}, {4}] * 3, "rounds have a commit more"
    assert all(cell.lanes["fused+ring"].round_us for cell in table.cells)


def test_before_rounds_are_captured_every_layer_has_records_and_an_arm_has_run_its_first_verify_and_the_commit(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are alike: their kernels are compiled and loaded by then."""
    runs: list[tuple[Any, Any]] = []
    monkeypatch.setattr(capturing, "rotation_layers", lambda *_: (3, 0))
    monkeypatch.setattr(capturing, "calls_of", lambda kind, arm, *_: [(arm.name, kind, at) for at in range(4)])
    monkeypatch.setattr(capturing, "run_once", runs.append)
    verified: list[str] = []
    own = capturing.arm_of

    def arm_of(*given: Any) -> Arm:
        return dataclasses.replace(own(*given), verify=lambda problem: verified.append(len(runs)))

    monkeypatch.setattr(capturing, "arm_of", arm_of)
    tuned(usual, dataclasses.replace(SMALL, options=("fold-on-verify",), batch_sizes=(1,)))
    assert len(runs) == 2 * (6 + 4)
    assert {tuple((kind, at) for _, kind, at in run) for run in runs} == {
        (("verify", 0), ("verify", 3)), (("round", 0), ("round", 3)),
    }  # fmt: skip
    assert verified == [0, 0, 0, 12, 12, 12]


def test_what_bits_are_compared_with_is_compiled_once_for_each_group(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(compiling, "compile_reference", lambda _, group, target: lengths.append(group.draft_tokens))
    tuned(usual, dataclasses.replace(SMALL, draft_tokens=(2, 3)))
    assert sorted(lengths) == [2, 3]


def test_what_compilers_leave_in_the_cache_is_what_a_launch_finds(tmp_path: Path) -> None:
    """Compilers that do without the GPU: no kernel may be compiled again where it is timed."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.support.compiled_ahead"]
    done = subprocess.run(
        program, cwd=ROOT, env=env | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    candidates = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(candidates) == 6, "two lanes and what bits are compared with, plain and with fold on verify"
    for one in candidates:
        assert one["registers"] is None or one["registers"] > 20, one
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


def test_an_unreadable_table_is_not_overwritten(tuned: Callable[..., Any]) -> None:
    path = tuned(usual).path
    path.write_text("{")
    with pytest.raises(TableError, match="JSON"):
        tuned(usual)
    assert path.read_text() == "{"


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


def test_tokens_are_taken_in_blocks_where_a_chunk_has_two() -> None:
    def tried(draft_tokens: int, form: str) -> list[LaunchConfig]:
        return candidates(KdaShape(8, 8, 128, 128), draft_tokens, form, "fused+ring", nvidia=True)

    assert not any(
        config.token_blocks for config in (*tried(8, "recurrent"), *tried(4, "chunked"), *tried(9, "chunked"))
    )
    blocks = [config for config in tried(5, "chunked") if config.token_blocks]
    assert [dataclasses.replace(config, token_blocks=False) for config in blocks] == tried(5, "recurrent")


def test_registers_are_capped_where_that_fits_another_program() -> None:
    tile = LaunchConfig(64, 4, rows_per_thread=4)
    assert capped(tile, Figures(150, 0)) == [dataclasses.replace(tile, max_registers=128)]  # 3 programs to 4
    assert capped(tile, Figures(180, 0)) == [dataclasses.replace(tile, max_registers=168)]  # 2 to 3
    assert capped(tile, Figures(128, 0)) == [dataclasses.replace(tile, max_registers=96)]  # 4 to 5, in whole eights
    assert capped(tile, Figures(97, 0)) == [dataclasses.replace(tile, max_registers=96)]  # 97 take as many as 104
    assert capped(tile, Figures(32, 0)) == []
    assert capped(tile, Figures(255, 0)) == [dataclasses.replace(tile, max_registers=168)]
    assert capped(tile, Figures(150, 8)) == []
    wide = LaunchConfig(128, 8, rows_per_thread=4)
    assert capped(wide, Figures(200, 0)) == [dataclasses.replace(wide, max_registers=128)]  # 1 to 2
    assert capped(wide, Figures(240, 0)) == []  # half its registers would spill
    assert ruled_out(Figures(128, 256)) is None
    assert "260 bytes" in str(ruled_out(Figures(128, 260)))


def test_tiles_are_tried_where_their_programs_suit_the_number_of_heads() -> None:
    shape = KdaShape(8, 8, 128, 128)
    every = candidates(shape, 4, "recurrent", "fused+ring", nvidia=True)

    def tried(batch: int) -> set[tuple[int, int]]:
        return {(one.block_v, one.num_warps) for one in every if fits_heads(one, every, 8 * batch, 128)}

    assert tried(1) == tried(16) == {(16, 4), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8)}
    assert tried(256) == {(32, 4), (64, 4), (64, 8), (128, 8)}
    portable = [LaunchConfig(*tile) for tile in ((8, 1), (32, 4))]
    assert all(fits_heads(one, portable, heads, 128) for one in portable for heads in (1, 1 << 20))
    lone = every[:1]
    assert fits_heads(lone[0], lone, 1 << 20, 128)


def test_with_snapshots_every_tile_is_tried_at_every_batch_size() -> None:
    settings = TuneSettings(forms=("recurrent",), draft_tokens=(4,))
    tried = {}
    for group in settings.groups():
        lane = group.lanes[1]
        every = candidates(settings.shape, 4, "recurrent", lane, nvidia=True)
        arms = [compiling.arm_of(settings, group, lane, config) for config in every]
        tried[group.mode] = [len(measure._tried(settings, group, arms, {}, batch)) for batch in (1, 256)], len(arms)
    assert tried["snapshots"] == ([12, 12], 12)
    assert tried["ring"] == ([12, 8], 12)


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


def test_kernels_run_in_a_turn_and_captures_do_not(tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inside, seen = ["none"], []

    def turn(kind: str) -> Callable[[str], Any]:
        @contextmanager
        def entered(device: str) -> Iterator[None]:
            assert inside[0] == "none"
            inside[0] = kind
            yield
            inside[0] = "none"

        return entered

    def noted(module: Any, name: str) -> None:
        own = getattr(module, name)

        def call(*args: Any, **rest: Any) -> Any:
            seen.append((f"{module.__name__}.{name}", inside[0]))
            return own(*args, **rest)

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(capturing, "gpu_turn", turn("alone"))
    for module in (capturing, measure):
        monkeypatch.setattr(module, "gpu_shared", turn("shared"))
    together = [
        (measure, "check"), (measure, "two_rounds"), (measure, "check_problems"), (capturing, "build_problems"),
        (capturing, "run_once"), (capturing, "_free"),
    ]  # fmt: skip
    bits = SimpleNamespace(run=lambda arm: seen.append(("bits", inside[0])))
    monkeypatch.setattr(capturing, "BitsCheck", lambda *_: bits)
    for one in (*together, (capturing, "record")):
        noted(*one)
    tuned(lambda name, number: seen.append(("clock", inside[0])) or 1.0)
    assert set(seen) == {
        *((f"{module.__name__}.{name}", "shared") for module, name in together),
        ("bits", "shared"), ("clock", "alone"), (f"{capturing.__name__}.record", "none"),
    }  # fmt: skip


def test_what_crosses_to_a_measuring_process_can(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = SMALL.groups()
    given = partial(run._timed_group, SMALL, 1), group, compiling.Compiled({"fused+ring": [LaunchConfig(32, 1)]}, [])
    assert pickle.loads(pickle.dumps(given))[1:] == given[1:]
    failure = compiling.Failure(group, "fused+ring", LaunchConfig(32, 1), "no", batch=2)
    figures = {1: {"fused+ring": LaneFigures((1.0, 2.0), (), LaunchConfig(32, 1))}}
    assert pickle.loads(pickle.dumps(measure.Measured(figures, [failure]))) == measure.Measured(figures, [failure])
    with pytest.raises(capturing.ContextLostError, match="lost"):
        raise pickle.loads(pickle.dumps(capturing.ContextLostError("lost")))


def test_processes_are_as_many_as_fit_the_largest_group(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(run, "check_memory", lambda sweep, l2, free: sweep.draft_tokens[0] * 10)
    monkeypatch.setattr(run, "process_count", lambda *given: asked.append(given) or 1)
    tuned(usual, dataclasses.replace(SMALL, draft_tokens=(3, 2)), processes=7)
    assert asked == [(7, 2, 30, 1 << 40)]
