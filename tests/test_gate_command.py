"""`kda gate explain` and `kda gate show`: what they print, draw and write, and which arguments they refuse."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kda_backend import MODES
from kda_backend.gate import OPTIONS, decide, write_table
from kda_backend.gate.cells import GATES, MOST_DRAFT_TOKENS
from kda_backend.gate.folders import PACKAGED
from kda_backend.lanes import Target
from kda_kernels import FORMS, KdaShape
from kda_tooling.cli import app
from kda_tooling.commands import gate as command
from kda_tooling.gate.grid import grids
from kda_tooling.gate.picture import draw
from kda_tooling.names import LONG_NAMES
from tests.support.broken_tables import BROKEN
from tests.support.tables import CLOSED, H200, SHAPE, a_cell, a_table, cells

pytestmark = pytest.mark.usefixtures("fresh_gate")

runner = CliRunner()
HERE = ["--device-name", H200, "--arch", "sm90"]


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, ["gate", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def explained(*arguments: str) -> dict[str, Any]:
    result = runner.invoke(app, ["gate", "explain", *arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def words(output: str) -> str:
    return " ".join(output.replace("│", " ").replace("┃", " ").split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tables"
    made.mkdir()
    closed = replace(a_cell(batch=64, fused=True), lane="unfused+ring", closed=CLOSED)
    write_table(a_table(*cells({1: True, 4: True, 16: False}), closed, *cells({1: False}, form="chunked")), made)
    return made


class TestExplain:
    def test_prints_every_step_and_what_it_said(self, folder: Path) -> None:
        output = words(run("explain", "--batch", "2", "--draft-tokens", "4", *HERE, "--tables", str(folder)))
        assert "NVIDIA H200 (sm90), H = 8, HV = 8, K = 128, V = 128, bfloat16, safe gate, recurrent, ring" in output
        assert "1 user table read" in output
        assert "fused+ring, source: user table; launch: block_v 64, num_warps 8, rows_per_thread 2" in output

    def test_json_is_the_decision(self, folder: Path) -> None:
        data = explained("--batch", "2", "--draft-tokens", "4", *HERE, "--tables", str(folder))
        expected = decide(
            SHAPE, mode="ring", batch=2, draft_tokens=4, device_name=H200, target=Target("cuda", 90),
            environ={"KDA_GATE_TABLES": str(folder)},
        )  # fmt: skip
        assert (data["lane"], data["source"], data["reason"]) == (expected.lane, expected.source, expected.reason)
        assert data["launch"] == {"block_v": 64, "num_warps": 8, "rows_per_thread": 2, "state_first": True}
        assert [(step["name"], step["said"]) for step in data["steps"]] == list(expected.steps)
        assert data["question"]["shape"]["num_heads"] == 8

    @pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp16", "float16"])
    def test_an_activation_dtype_by_either_name(self, folder: Path, name: str) -> None:
        data = explained("--batch", "2", "--draft-tokens", "4", *HERE, "--tables", str(folder), "--dtype", name)
        short = name in ("bf16", "fp16")
        assert data["question"]["dtype"] == (LONG_NAMES[name] if short else name)
        assert (data["source"] == "user table") == name.startswith("b")

    def test_without_a_table_the_rule_and_no_launch(self, tmp_path: Path) -> None:
        out = tmp_path / "why.json"
        shape = ["--heads", "2", "--hv-heads", "4", "--head-k-dim", "64", "--head-v-dim", "64"]
        output = words(run("explain", "--batch", "1", "--draft-tokens", "3", *shape, *HERE, "--json", str(out)))
        assert "fused+ring, source: default; launch: the kernels' own" in output
        data = json.loads(out.read_text())
        assert (data["lane"], data["launch"]) == ("fused+ring", None)

    @pytest.mark.parametrize(
        ("arguments", "lane", "said"),
        [
            (["--tree"], "unfused+ring", "these tokens have parents (a tree)"),
            (["--ragged"], "unfused+ring", "these lengths differ"),
            (["--mode", "snapshots", "--heads", "3"], "unfused", "no table gives a verdict"),
            (["--arch", "SM_75"], "reference", "kernels need sm80 or later, this is sm75"),
            (["--arch", "HIP"], "unfused+ring", "on hip"),
            (["--option", "fold-on-verify", "--gate", "standard", "--dtype", "float16"], "fused+ring", "lone request"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_what_falls_back_says_why(self, arguments: list[str], lane: str, said: str) -> None:
        data = explained("--batch", "1", "--draft-tokens", "4", *HERE, *arguments)
        assert data["lane"] == lane
        assert said in data["steps"][-1]["said"]

    def test_the_environment_counts(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        asked = ["--batch", "1", "--draft-tokens", "4", *HERE]
        monkeypatch.setenv("KDA_GATE_TABLES", str(folder))
        assert explained(*asked)["source"] == "user table"
        monkeypatch.setenv("KDA_LANE", "unfused+ring")
        assert explained(*asked)["source"] == "override"
        monkeypatch.setenv("KDA_LANE", "fused")
        assert "KDA_LANE=fused forces a lane that is impossible here" in words(run("explain", *asked, code=2))
        monkeypatch.setenv("KDA_LANE", "quick")
        assert "KDA_LANE must be one of" in words(run("explain", *asked, code=2))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--batch", "0"], "--batch"),
            (["--batch", "-3"], "--batch"),
            (["--batch", "four"], "--batch"),
            (["--draft-tokens", "0"], "--draft-tokens"),
            (["--heads", "0"], "--heads must be at least 1"),
            (["--hv-heads", "12"], "--hv-heads must be a multiple of --heads"),
            (["--head-k-dim", "96"], "--head-k-dim must be one of (64, 128)"),
            (["--mode", "rings"], "is none of ring, snapshots"),
            (["--form", "fast"], "is none of recurrent, chunked"),
            (["--option", "folded"], "is none of plain, fold-on-verify, compact-window"),
            (["--gate", "soft"], "is none of safe, standard"),
            (["--form", "chunked", "--draft-tokens", "17"], "'chunked' takes T up to 16, got 17"),
            (["--form", "chunked", "--mode", "snapshots"], "'chunked' goes with mode 'ring' only"),
            (["--option", "fold-on-verify", "--mode", "snapshots"], "goes with mode 'ring' only"),
            (["--dtype", "float32"], "allowed are bf16 and fp16"),
            (["--arch", "hopper"], "'hopper' is no architecture; allowed are sm80"),
            (["--arch", "sm9"], "is no architecture"),
            (["--device-name", ""], "device_name must be 1..200 printable"),
            (["--tables", "nowhere"], "nowhere"),
            (["--json", "nowhere/why.json"], "nowhere is missing"),
            (["--fast"], "No such option"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_wrong_arguments_exit_with_2_and_say_what_is_allowed(self, arguments: list[str], message: str) -> None:
        output = run("explain", "--batch", "1", "--draft-tokens", "4", *HERE, *arguments, code=2)
        assert message in words(output)

    def test_D6_what_must_be_named_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        asked = ["explain", "--batch", "1", "--draft-tokens", "4"]
        assert "torch sees no GPU here" in words(run(*asked, code=2))
        assert "must be given for the device 'NVIDIA H200'" in words(run(*asked, "--device-name", H200, code=2))
        assert "torch sees no GPU here" in words(run(*asked, "--arch", "sm90", code=2))
        assert "Missing option '--batch'" in words(run("explain", "--draft-tokens", "4", code=2))

    @pytest.mark.gpu
    def test_by_default_it_is_the_gpu_here(self) -> None:
        data = explained("--batch", "2", "--draft-tokens", "4")
        major, minor = torch.cuda.get_device_capability()
        assert data["question"]["device_name"] == torch.cuda.get_device_name()
        assert data["question"]["arch"] == f"sm{major}{minor}"

    def test_names_are_text_and_no_markup(self) -> None:
        output = run(
            "explain", "--batch", "1", "--draft-tokens", "4", "--device-name", "[red]GPU[/red]", "--arch", "90"
        )
        assert "[red]GPU[/red]" in output

    def test_options_are_those_of_the_library(self) -> None:
        assert (command.MODES, command.GATES, command.OPTIONS) == (MODES, GATES, OPTIONS)
        assert command.MOST_DRAFT_TOKENS == MOST_DRAFT_TOKENS


class TestShow:
    def test_a_table_in_the_terminal(self, folder: Path) -> None:
        output = words(run("show", "--device-name", H200, "--tables", str(folder)))
        assert "NVIDIA H200 (sm90), H = 8" in output
        assert "5 cells, 2 fused, 3 unfused; margin 2 % in each of 2 passes" in output
        assert "kda tune --heads 8 --hv-heads 8" in output
        assert "safe gate, recurrent, ring, plain" in output
        assert "safe gate, chunked, ring, plain" in output
        assert "B T=4 " in output
        assert " 1 F 0.50 4 F 0.50 16 U 1.50 64 U 0.50 x " in output.replace("├", "").replace("─", "")
        (by_file,) = folder.iterdir()
        assert words(run("show", str(by_file))) == output

    def test_several_tables_one_after_the_other(self, folder: Path, tmp_path: Path) -> None:
        write_table(a_table(a_cell(), shape=KdaShape(4, 8)), folder)
        files = [str(path) for path in sorted(folder.iterdir())]
        alone = [run("show", file) for file in files]
        assert run("show", *files) == "".join(alone)
        assert run("show", files[0], files[0]) == alone[0] * 2
        result = runner.invoke(app, ["gate", "show", *files, "--json", "-"])
        shown = [json.loads(runner.invoke(app, ["gate", "show", file, "--json", "-"]).stdout) for file in files]
        assert json.loads(result.stdout) == shown
        picture = ["--plot", str(tmp_path / "gate.png")]
        assert "draws one table, and 2 are given" in words(run("show", *files, *picture, code=2))
        assert "has a gate table's name" in words(run("show", *files, "--json", files[1], code=2))
        assert "nowhere.json" in words(run("show", *files, "nowhere.json", code=2))

    def test_json_has_verdicts_ratios_and_doubts(self, tmp_path: Path) -> None:
        edited = replace(a_cell(batch=2, fused=False, unfused_us=(4.0, 4.0)), lane="fused+ring")
        path = write_table(a_table(*cells({1: True}), edited), tmp_path)
        result = runner.invoke(app, ["gate", "show", str(path), "--json", "-"])
        data = json.loads(result.stdout)
        assert [(c["batch"], c["stated"], c["lane"], c["ratio"]) for c in data["cells"]] == [
            (1, "fused+ring", "fused+ring", 0.5),
            (2, "fused+ring", "unfused+ring", 1.5),
        ]
        assert len(data["doubts"]) == 1
        assert "unfused, edited by hand?" in words(result.stderr)
        assert "2 U 1.50 !" not in words(result.stdout)
        assert "U 1.50 !" in words(run("show", str(path)))

    def test_what_was_not_measured_has_no_ratio(self, tmp_path: Path) -> None:
        from kda_backend.gate import LaneFigures, judged
        from tests.support.tables import a_key

        lanes = {"unfused+ring": LaneFigures((4.0, 4.1)), "fused+ring": LaneFigures(why="no memory")}
        path = write_table(a_table(judged(a_key(), lanes, 0.02)), tmp_path)
        assert "U ?" in words(run("show", str(path), "--plot", str(tmp_path / "gate.png")))

    @pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
    def test_the_picture(self, folder: Path, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"gate.{suffix}"
        output = run("show", "--device-name", H200, "--tables", str(folder), "--plot", str(path))
        assert f"drew {path}" in output.replace("\n", "")
        assert path.stat().st_size > 5000

    def test_the_picture_frames_what_is_fused(self, folder: Path) -> None:
        from kda_backend.gate import load_table

        (path,) = folder.iterdir()
        table = load_table(path)
        figure = draw(table)
        panels = [axis for axis in figure.axes if axis.get_title(loc="left")]
        assert [axis.get_title(loc="left") for axis in panels] == [grid.title for grid in grids(table)]
        assert [len(axis.patches) for axis in panels] == [0, 2]
        texts = [[text.get_text() for text in axis.texts] for axis in panels]
        assert texts == [["U\n1.50"], ["F\n0.50", "F\n0.50", "U\n1.50", "U\n0.50 x"]]

    def test_no_panel_of_the_picture_lies_on_another(self) -> None:
        """Titles and labels included, in a table of wide and narrow grids."""
        narrow = [a_cell(option=option, form=form) for option in OPTIONS[1:] for form in FORMS]
        figure = draw(a_table(*(a_cell(batch=batch) for batch in range(1, 29)), *narrow))
        figure.canvas.draw()
        boxes = [axis.get_tightbbox().padded(-1.0) for axis in figure.axes]
        assert len(boxes) == 1 + len(narrow) + 1, "the colour bar too"
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        whole = figure.bbox
        assert all(whole.contains(box.x0, box.y0) and whole.contains(box.x1, box.y1) for box in boxes)

    def test_a_plain_pool_s_grids_come_first(self) -> None:
        table = a_table(*(a_cell(option=option, form=form) for option in OPTIONS for form in FORMS))
        options = [grid.title.rsplit(", ", 1)[1] for grid in grids(table)]
        assert options == [option for option in OPTIONS for _ in FORMS]

    @pytest.mark.parametrize("name", ["truncated", "us NaN", "schema 2", "other shape", "binary"])
    def test_a_broken_table_is_refused_by_name(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / a_table().file_name
        path.write_bytes(BROKEN[name][0])
        output = run("show", str(path), code=2)
        assert "dtype=bfloat16.json" in "".join(output.replace("│", "").split())

    def test_one_that_is_not_there_names_those_that_are(self, folder: Path) -> None:
        output = words(run("show", "--device-name", "NVIDIA B200", "--tables", str(folder), code=2))
        assert "there is no" in output
        assert "but these:" in output
        empty = folder / "empty"
        empty.mkdir()
        assert "no table at all" in words(run("show", "--device-name", H200, "--tables", str(empty), code=2))

    def test_a_table_without_cells(self, tmp_path: Path) -> None:
        path = write_table(a_table(), tmp_path)
        assert "no cells" in run("show", str(path))
        assert "has no cells to draw" in words(run("show", str(path), "--plot", str(tmp_path / "gate.png"), code=2))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nowhere.json"], "nowhere.json"),
            (["--plot", "gate.txt"], "must end in .png"),
            (["--plot", "nowhere/gate.png"], "nowhere is missing"),
            (["--json", "nowhere/gate.json"], "nowhere is missing"),
            (["--hv-heads", "9"], "--hv-heads must be a multiple"),
            (["--dtype", "int8"], "allowed are bf16 and fp16"),
            (["--device-name", "\n"], "device_name must be 1..200 printable"),
        ],
        ids=lambda value: " ".join(value).strip() if isinstance(value, list) else None,
    )
    def test_wrong_arguments_exit_with_2(self, folder: Path, arguments: list[str], message: str) -> None:
        output = run("show", "--device-name", H200, "--tables", str(folder), *arguments, code=2)
        assert message in words(output)

    def test_the_picture_must_not_overwrite_the_table(self, folder: Path) -> None:
        (path,) = folder.iterdir()
        link, before = folder / "link.json", path.read_text()
        link.symlink_to(path)
        for output in (path, link):
            assert "has a gate table's name" in words(run("show", str(path), "--json", str(output), code=2))
        assert path.read_text() == before

    @pytest.mark.parametrize("arguments", [["show"], ["explain", "--batch", "1", "--draft-tokens", "4"]])
    def test_nothing_is_written_onto_the_table_that_is_read(self, folder: Path, arguments: list[str]) -> None:
        """Wherever it lies: in the user's folder, or among the packaged ones."""
        (own,), (packaged, *_) = folder.iterdir(), sorted(Path(PACKAGED).iterdir())
        device = HERE if arguments[0] == "explain" else HERE[:2]
        for table in (own, packaged):
            before = table.read_bytes()
            said = runner.invoke(
                app, ["gate", *arguments, *device, "--json", str(table)], env={"KDA_GATE_TABLES": str(folder)}
            )
            assert said.exit_code == 2
            assert table.read_bytes() == before

    def test_every_ratio_of_a_packaged_table_fits_80_columns(self) -> None:
        said = runner.invoke(app, ["gate", "show", "--device-name", H200], env={"COLUMNS": "80"})
        assert "…" not in said.output
        assert said.output.count(" F ") + said.output.count(" U ") > 700

    def test_a_picture_that_cannot_be_written_is_refused(self, folder: Path) -> None:
        output = words(run("show", "--device-name", H200, "--tables", str(folder), "--plot", "/proc/x.png", code=2))
        assert "/proc/x.png" in output

    def test_other_heads_are_another_file(self, folder: Path) -> None:
        write_table(a_table(a_cell(), shape=KdaShape(4, 8)), folder)
        output = words(run("show", "--heads", "4", "--hv-heads", "8", "--device-name", H200, "--tables", str(folder)))
        assert "H = 4, HV = 8" in output
