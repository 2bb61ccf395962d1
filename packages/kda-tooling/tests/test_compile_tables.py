"""Compile reports of gate tables: which kernels they name, the budget that grows, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import triton
from typer.testing import CliRunner

from kda_backend.gate import CellKey, LaneFigures, Provenance, Table, judged, write_table
from kda_kernels import KdaShape, LaunchConfig
from kda_tooling.cli import app
from kda_tooling.compiling.specs import CompileSpec, Selection
from kda_tooling.compiling.tables import load_tables, not_in, table_specs

SHAPE = KdaShape(1, 2, 64, 64)
SMALL = LaunchConfig(16, 4, rows_per_thread=1)
WIDE = LaunchConfig(64, 4, rows_per_thread=4, max_registers=128)


def a_table(
    *cells: tuple[dict[str, Any], LaunchConfig | None, LaunchConfig],
    arch: str = "sm90",
    shape: KdaShape = SHAPE,
) -> Table:
    """A table with these cells: what their keys differ in, configurations of the unfused and the fused lane."""
    provenance = Provenance(
        command="kda tune", git_sha="abc", date="2026-01-01", gpu="Some GPU", driver="1", torch="2", triton="3",
        timing="made up", margin=0.02, passes=2,
    )  # fmt: skip
    usual = {"gate": "safe", "form": "recurrent", "mode": "ring", "option": "plain", "draft_tokens": 2, "batch": 1}
    built = []
    for key, unfused, fused in cells:
        own = CellKey(**usual | key)
        rounds = (9.0, 9.0) if own.option != "plain" else ()
        tail = "+ring" if own.mode == "ring" else ""
        lanes = {
            f"unfused{tail}": LaneFigures((9.0, 9.0), rounds, unfused),
            f"fused{tail}": LaneFigures((8.0, 8.0), rounds, fused),
        }
        built.append(judged(own, lanes, 0.02))
    return Table(shape, "Some GPU", arch, "bfloat16", provenance, tuple(built))


def names(table: Table) -> list[tuple[str, str]]:
    return [(spec.op, spec.name) for spec in table_specs([table])[table.arch]]


def test_every_distinct_configuration_is_named_once() -> None:
    table = a_table(({}, SMALL, WIDE), ({"batch": 2}, SMALL, WIDE), ({"batch": 4}, WIDE, WIDE))
    assert names(table) == [
        ("verify_unfused", "ring-K64-T2-H1-HV2-v16w4r1"),
        ("verify_fused", "ring-K64-T2-H1-HV2-v64w4r4m128"),
        ("verify_unfused", "ring-K64-T2-H1-HV2-v64w4r4m128"),
    ]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ({"gate": "standard"}, "ring-K64-T2-H1-HV2-standard-v16w4r1"),
        ({"form": "chunked"}, "ring-K64-T2-H1-HV2-v16w4r1-chunked"),
        ({"mode": "snapshots"}, "snapshots-K64-T2-H1-HV2-v16w4r1"),
        ({"option": "fold-on-verify"}, "ring-K64-T2-H1-HV2-v16w4r1-pending"),
        ({"option": "compact-window"}, "ring-K64-T2-H1-HV2-v16w4r1-compact"),
        ({"option": "fold-on-verify+compact-window"}, "ring-K64-T2-H1-HV2-v16w4r1-pending-compact"),
        ({"draft_tokens": 7}, "ring-K64-T7-H1-HV2-v16w4r1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_what_a_cell_was_measured_for_is_what_is_compiled(key: dict[str, Any], name: str) -> None:
    assert names(a_table((key, None, SMALL))) == [("verify_fused", name)]


def test_heads_of_other_sizes_are_compiled_as_such() -> None:
    (spec,) = table_specs([a_table(({}, None, SMALL), shape=KdaShape(1, 2, 128, 64))])["sm90"]
    assert (spec.head_dim, spec.head_v_dim, spec.name) == (128, 64, "ring-K128-V64-T2-H1-HV2-v16w4r1")


def test_what_the_budget_lacks_is_left() -> None:
    known, new = CompileSpec("verify_fused", "ring"), CompileSpec("verify_fused", "ring", draft_tokens=3)
    limits = {"sm90": {"fused": {known.name: {"registers": 1}}}}
    assert not_in(limits, {"sm90": (known, new)}) == {"sm90": (new,)}
    assert not_in({}, {"sm90": (known,)}) == {"sm90": (known,)}
    assert Selection(source={"sm90": (new,)}).specs() == [("sm90", new)]


def test_an_architecture_that_nothing_is_compiled_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is for sm75; kernels are compiled for sm80"):
        table_specs([a_table(({}, None, LaunchConfig()), arch="sm75")])


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["compile-report", *arguments], env={"COLUMNS": "250"})


def test_a_budget_grows_by_what_is_new_and_holds_all(tmp_path: Path) -> None:
    tables, budget = tmp_path / "tables", tmp_path / "budget.json"
    tables.mkdir()
    write_table(a_table(({}, None, SMALL)), tables)
    common = ["--tables", str(tables), "--budget", str(budget), "--jobs", "1"]
    assert run(*common, "--new", "--write-budget").exit_code == 0
    (first,) = json.loads(budget.read_text())["limits"]["sm90"]["fused"]
    write_table(a_table(({}, None, SMALL), ({"batch": 8}, None, WIDE)), tables)
    new = run(*common, "--new", "--write-budget")
    assert new.exit_code == 0
    assert "1 kernels compiled" in new.output
    entries = json.loads(budget.read_text())["limits"]["sm90"]["fused"]
    assert list(entries) == [first, "ring-K64-T2-H1-HV2-v64w4r4m128"]
    assert "0 kernels compiled" in run(*common, "--new").output
    assert run(*common, "--check").exit_code == 0
    entries[first]["registers"] = 1
    budget.write_text(json.dumps({"triton": triton.__version__, "limits": {"sm90": {"fused": entries}}}))
    over = run(*common, "--check")
    assert over.exit_code == 1
    assert f"{first}: registers" in " ".join(over.output.split())
    write_table(a_table(({"batch": 8}, None, WIDE)), tables)
    assert "no longer compiled" in run(*common, "--check").output
    assert "0 kernels compiled" in run(*common, "--new", "--write-budget").output
    assert run(*common, "--check").exit_code == 0, "what the tables no longer name is dropped"
    known = run(*common, "--new", "--config", "ring-K64-T2-H1-HV2-v64w4r4m128")
    assert known.exit_code == 0
    assert "0 kernels compiled" in known.output


def test_where_no_table_is_packaged_no_budget_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_backend.gate.folders.PACKAGED", str(tmp_path))
    result = run("--tables", "packaged", "--budget", str(tmp_path / "none.json"), "--check", "--json", "-")
    assert result.exit_code == 0
    assert "nothing to compile" in result.stderr
    data = json.loads(result.stdout)
    assert (data["kernels"], data["problems"], data["whole"]) == ([], [], False)


@pytest.mark.parametrize("given", ["{folder}", ""], ids=["a folder", "an unset variable"])
def test_a_folder_without_tables_is_refused(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("--tables", given.format(folder=tmp_path), "--budget", str(tmp_path / "none.json"), "--check")
    assert result.exit_code == 2
    assert "no table that names a kernel" in " ".join(result.output.replace("│", " ").split())


def test_json_on_standard_output_is_alone_there(tmp_path: Path) -> None:
    write_table(a_table(({}, None, SMALL)), tmp_path)
    result = run("--tables", str(tmp_path), "--jobs", "1", "--json", "-")
    assert result.exit_code == 0
    assert [one["target"] for one in json.loads(result.stdout)["kernels"]] == ["sm90"]
    assert "registers" in result.stderr
    assert not Path("-").exists()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for arguments, message in (
        (["--tables", str(tmp_path / "none")], "is no folder"),
        (["--new", "--check"], "give one of them"),
        (["--tables", str(tmp_path), "--new"], "must be named with tables of one's own"),
        (["--tables", str(tmp_path), "--write-budget"], "must be named with tables of one's own"),
        (["--target", "sm90", "--kernel", "fused", "--config", "K128-T4", "--check"], "nothing to compile"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in result.output
    (tmp_path / "broken.json").write_text("{")
    broken = run("--tables", str(tmp_path))
    assert broken.exit_code == 2
    assert "broken.json" in broken.output


def test_the_packaged_tables_can_be_compiled_ahead() -> None:
    from kda_backend.gate.folders import PACKAGED

    specs = table_specs(load_tables(Path(PACKAGED)))
    assert all(spec.config is not None for of_target in specs.values() for spec in of_target)
