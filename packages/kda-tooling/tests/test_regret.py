"""`kda gate regret`: which arms are timed, what regret is, and when it is too much. Times are made up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kda_backend.gate import LaneFigures, Provenance, Table, TableError, judged, write_table
from kda_backend.gate.decisions import forget_decisions
from kda_backend.gate.folders import forget
from kda_kernels import KdaShape, LaunchConfig
from kda_tooling.bench.machine import Machine
from kda_tooling.bench.timing import Timing
from kda_tooling.cli import app
from kda_tooling.commands import regret as command
from kda_tooling.tuning import capturing, compiling, regret
from kda_tooling.tuning.candidates import Figures
from kda_tooling.tuning.settings import TuneSettings, usual_batch_sizes
from tests.support.tables import H200_MULTIPROCESSORS

pytestmark = pytest.mark.usefixtures("h200_multiprocessors")

SHAPE = KdaShape(1, 2, 64, 64)
MACHINE = Machine(
    gpu="Some GPU", sm=90, l2_bytes=1, copy_bytes_per_second=1e12, driver="1", clocks="", torch="2", triton="3",
    python="3", commit="abc", date="2026-01-01",
)  # fmt: skip
SETTINGS = TuneSettings(shape=SHAPE, draft_tokens=(2,), batch_sizes=(1, 3), forms=("recurrent",), modes=("ring",))
(GROUP,) = SETTINGS.groups()
SLOW, QUICK = LaunchConfig(16, 1), LaunchConfig(64, 4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    """A table with fused+ring at B = 1 and unfused+ring, its other configuration, from B = 2 on."""
    forget()
    forget_decisions()
    provenance = Provenance(
        command="kda tune", git_sha="abc", date="2026-01-01", gpu=MACHINE.gpu, driver="1", torch="2", triton="3",
        timing="made up", margin=0.02, passes=2,
    )  # fmt: skip
    cells = tuple(
        judged(
            GROUP.key(batch),
            {"unfused+ring": LaneFigures((us,) * 2, (), SLOW), "fused+ring": LaneFigures((8.0,) * 2, (), QUICK)},
            0.02,
        )
        for batch, us in ((1, 10.0), (2, 7.0))
    )
    write_table(Table(SHAPE, MACHINE.gpu, "sm90", "bfloat16", provenance, cells), tmp_path)
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., regret.RegretResult]:
    """Measures `SETTINGS` with these times."""
    own = capturing.captured_arms
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(1))
    monkeypatch.setattr(compiling, "compile_one", lambda settings, group, lane, config, _: [(config, Figures(64, 0))])
    monkeypatch.setattr(capturing, "run_once", lambda calls: None)
    monkeypatch.setattr(capturing, "record", lambda calls: calls)
    monkeypatch.setattr(regret, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(regret, "count_of", lambda *_: 1)
    monkeypatch.setattr(regret, "gpu_turn", lambda _: nullcontext())
    monkeypatch.setattr(regret, "captured_arms", lambda *args, **rest: own(*args, device="cpu", **rest))

    def run(us: dict[str, float], settings: TuneSettings = SETTINGS) -> regret.RegretResult:
        def clock(graphs: dict[str, Any], calls: int, *, passes: int, **_: Any) -> dict[str, Timing]:
            return {name: Timing((us[name.split("|")[0].removeprefix("kda ")],)) for name in graphs}

        monkeypatch.setattr(capturing, "measure_interleaved", clock)
        return regret.measure_regret(settings, folder, processes=1)

    return run


TIMES = {"unfused+ring bv16.w1": 10.0, "fused+ring bv64.w4": 8.0}


def test_the_choice_is_timed_beside_all_that_the_table_knows(measured: Callable[..., Any]) -> None:
    one, three = measured(TIMES).cells
    assert (one.lane, one.config, one.us, one.best, one.share) == (
        "fused+ring",
        "bv64.w4",
        8.0,
        "kda fused+ring bv64.w4",
        0,
    )
    assert one.over_unfused == pytest.approx(-0.2)
    assert (three.batch, three.lane, three.us, three.best_us) == (3, "unfused+ring", 10.0, 8.0)
    assert three.share == pytest.approx(0.25)
    assert three.over_unfused == 0
    assert one.over_peer is None


@pytest.mark.parametrize(
    ("fused", "wrong"),
    [
        (10.0, []),
        (9.8, []),
        (9.6, ["only 50.0% of the cells are within 3% of the best"]),
        (9.0, ["only 50.0%", "B=3: unfused+ring bv16.w1 is 11.1% over kda fused+ring bv64.w4"]),
        (10.4, ["only 50.0%", "B=1: fused+ring bv64.w4 is 4.0% over our unfused lane"]),
    ],
)
def test_too_slow_is_said(measured: Callable[..., Any], fused: float, wrong: list[str]) -> None:
    found = command.too_slow(measured(TIMES | {"fused+ring bv64.w4": fused}))
    assert len(found) == len(wrong)
    assert all(part in line for part, line in zip(wrong, found, strict=True))


def test_it_judges_the_sizes_that_tables_have_and_some_between(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(command, "_measure", lambda settings, *_: (seen.append(settings.batch_sizes), 1 / 0))
    for arguments in ([], ["--heads", "12"], ["--batch-sizes", "3", "2"]):
        CliRunner().invoke(app, ["gate", "regret", *arguments])
    eight, twelve, given = seen
    assert given == (2, 3)
    for sizes, heads in ((eight, 8), (twelve, 12)):
        of_tables = usual_batch_sizes(KdaShape(heads, heads), H200_MULTIPROCESSORS)
        assert sizes == tuple(sorted({*of_tables, *command.BETWEEN}))
    assert not set(command.BETWEEN) & set(usual_batch_sizes(KdaShape(8, 8), H200_MULTIPROCESSORS))


def test_the_standard_gate_is_measured_by_the_cells_that_it_is_served_by(measured: Callable[..., Any]) -> None:
    result = measured(TIMES, dataclasses.replace(SETTINGS, gates=("safe", "standard")))
    assert [(cell.group, cell.batch) for cell in result.cells] == [
        (f"recurrent ring T=2{gate}", batch) for gate in ("", " standard gate") for batch in (1, 3)
    ]
    safe, standard = result.cells[:2], result.cells[2:]
    assert [(one.lane, one.config, one.us) for one in standard] == [(one.lane, one.config, one.us) for one in safe]
    assert result.left_out == []


def test_what_the_table_has_nothing_of_is_named(measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(TIMES, dataclasses.replace(SETTINGS, modes=("ring", "snapshots"), draft_tokens=(2, 5)))
    assert len(result.cells) == 2
    assert result.left_out == ["recurrent snapshots T=2", "recurrent ring T=5", "recurrent snapshots T=5"]
    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(command, "_measure", lambda *_: result)
    shown = CliRunner().invoke(app, ["gate", "regret", "--json", "-"], env={"COLUMNS": "250"})
    assert json.loads(shown.stdout)["left_out"] == result.left_out
    assert "left out, the table has nothing of them: recurrent snapshots T=2; recurrent ring T=5" in shown.stderr


def test_no_table_and_an_empty_one_are_refused(measured: Callable[..., Any], folder: Path) -> None:
    with pytest.raises(ValueError, match="no cell of what is asked for"):
        measured(TIMES, dataclasses.replace(SETTINGS, draft_tokens=(5,)))
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(TableError):
        measured(TIMES)


def test_the_command_exits_by_the_verdict(measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    for fused, code in ((10.0, 0), (9.0, 1)):
        result = measured(TIMES | {"fused+ring bv64.w4": fused})
        monkeypatch.setattr(command, "_measure", lambda *_, result=result: result)
        shown = CliRunner().invoke(app, ["gate", "regret", "--json", "-"], env={"COLUMNS": "250"})
        assert shown.exit_code == code
        assert len(json.loads(shown.stdout)["cells"]) == 2
        assert ("too slow" in shown.stderr) is bool(code)


def test_a_run_that_ends_early_exits_with_2_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_regret(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error:\nout of memory")

    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(regret, "measure_regret", measure_regret)
    result = CliRunner().invoke(app, ["gate", "regret"], env={"COLUMNS": "250"})
    assert result.exit_code == 2
    assert "measuring ended early, RuntimeError: CUDA error: out of memory" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--form", "x"], "--form must name"), (["--batch-sizes", "0"], "--batch-sizes"), (["--dtype", "fp8"], "fp8")],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["gate", "regret", *arguments], env={"COLUMNS": "250"})
    assert result.exit_code == 2
    assert message in result.output


def test_a_run_that_is_stopped_leaves_the_groups_before_it(
    measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    both = dataclasses.replace(SETTINGS, gates=("safe", "standard"))
    written, own = tmp_path / "regret.json", regret.measure_regret

    def stopped(*given: Any, on_group: Callable[..., None], **rest: Any) -> regret.RegretResult:
        def stop(so_far: regret.RegretResult, done: int, of: int) -> None:
            on_group(so_far, done, of)
            raise RuntimeError("stopped")

        return own(both, folder, processes=1, on_group=stop)

    measured(TIMES)
    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(regret, "measure_regret", stopped)
    result = CliRunner().invoke(app, ["gate", "regret", "--json", str(written)])
    assert result.exit_code == 2
    assert [cell["group"] for cell in json.loads(written.read_text())["cells"]] == ["recurrent ring T=2"] * 2
