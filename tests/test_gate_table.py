"""Gate tables: what they hold, that a file comes back as it was written, and that nothing in one is taken on trust."""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install hypothesis (dependency group `test`)"
)

from hypothesis import given
from hypothesis import strategies as st

from kda_backend.gate import (
    CellKey,
    LaneFigures,
    Table,
    TableError,
    dump_table,
    judged,
    load_table,
    option_name,
    table_name,
    write_table,
)
from kda_backend.gate.cells import GATES, OPTIONS
from kda_backend.lanes import lanes_of
from kda_kernels import FORMS, KdaShape, LaunchConfig
from tests.support.broken_tables import BROKEN, WHOLE, edited
from tests.support.tables import CLOSED, FAST_CONFIG, H200, PROVENANCE, SHAPE, a_cell, a_key, a_table, cells

MEASURED = (2.61, 2.625)


def a_full_table() -> Table:
    """Cells of every kind."""
    unmeasured = {"unfused+ring": LaneFigures((4.0, 4.1)), "fused+ring": LaneFigures(why="launch failed: no memory")}
    odd = LaneFigures(MEASURED, config=LaunchConfig(8, 1, pdl=False, max_registers=64))
    return a_table(
        *cells({1: True, 64: False}),
        a_cell(batch=2, configs=(None, FAST_CONFIG)),
        a_cell(form="chunked", draft_tokens=16, configs=(None, LaunchConfig(128, 4))),
        a_cell(mode="snapshots", gate="standard"),
        *(a_cell(option=option) for option in OPTIONS[1:]),
        replace(a_cell(batch=4), lane="unfused+ring", closed=CLOSED),
        judged(a_key(batch=8), unmeasured, 0.02),
        judged(a_key(batch=16), {"unfused+ring": odd, "fused+ring": LaneFigures(MEASURED)}, 0.02),
    )


class TestFile:
    def test_the_name_is_the_one_that_users_of_vllm_and_sglang_know(self) -> None:
        name = "H=8,HV=8,K=128,V=128,device_name=NVIDIA_H200,dtype=bfloat16.json"
        assert table_name(SHAPE, "NVIDIA H200", "bfloat16") == a_table().file_name == name
        assert "device_name=AMD_Instinct_MI300X_OAM_x_,dtype=float16" in table_name(
            SHAPE, "AMD Instinct MI300X/OAM(x)", "float16"
        )
        assert "/" not in table_name(SHAPE, "../../etc", "bfloat16")
        with pytest.raises(ValueError, match="dtype must be one of"):
            table_name(SHAPE, H200, "float32")
        with pytest.raises(ValueError, match=r"device_name must be 1\.\."):
            table_name(SHAPE, "", "bfloat16")

    def test_what_was_written_is_read_back_equal(self, tmp_path: Path) -> None:
        table = a_full_table()
        path = write_table(table, tmp_path)
        assert path.name == table.file_name
        loaded = load_table(path)
        assert loaded == table
        assert dump_table(loaded) == path.read_text(encoding="utf-8") == dump_table(table)
        assert loaded.doubts == ()
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    def test_one_cell_a_line_sorted_whatever_their_order_was(self) -> None:
        table = a_full_table()
        shuffled = list(table.cells)
        random.Random(0).shuffle(shuffled)
        text = dump_table(replace(table, cells=tuple(shuffled)))
        assert text == dump_table(table)
        assert len([line for line in text.splitlines() if '"T": ' in line]) == len(table.cells)
        changed = dump_table(a_table(*table.cells[:-1], a_cell(mode="snapshots", gate="standard", fused=False)))
        assert sum(a != b for a, b in zip(text.splitlines(), changed.splitlines(), strict=True)) == 1
        assert json.loads(dump_table(a_table()))["cells"] == []

    def test_figures_are_nanoseconds_and_stay_so(self) -> None:
        figures = LaneFigures((2.61049999, 1 / 3))
        assert figures.us == (2.61, 0.333)
        assert LaneFigures(figures.us) == figures

    def test_a_configuration_states_what_is_not_the_absence_of_a_choice(self) -> None:
        text = dump_table(a_full_table())
        assert '"config": {"block_v": 64, "num_warps": 8, "rows_per_thread": 2, "state_first": true}' in text
        assert '"config": {"block_v": 8, "num_warps": 1, "pdl": false, "max_registers": 64}' in text
        assert '"unfused+ring": {"us": [4.0, 4.1]}, "fused+ring"' in text, "None is the kernels' default"

    def test_a_write_that_fails_leaves_the_file_that_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_table(a_table(), tmp_path)
        before = path.read_bytes()
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            write_table(a_full_table(), tmp_path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("chain", [1, 2])
    def test_a_link_stays_one_and_what_it_leads_to_is_replaced(self, tmp_path: Path, chain: int) -> None:
        kept, linked = tmp_path / "kept", tmp_path / "linked"
        kept.mkdir()
        linked.mkdir()
        target = write_table(a_table(), kept).rename(kept / "the table.json")
        link = linked / a_table().file_name
        for number in range(chain):
            one = link if number == chain - 1 else kept / f"link {number}"
            one.symlink_to(target)
            target = one
        assert write_table(a_full_table(), linked) == link
        assert link.is_symlink()
        assert (kept / "the table.json").read_text(encoding="utf-8") == dump_table(a_full_table())
        assert load_table(link) == a_full_table()
        assert list(linked.iterdir()) == [link]

    @given(st.lists(st.tuples(
        st.sampled_from(GATES), st.sampled_from(FORMS), st.sampled_from(OPTIONS), st.integers(1, 16),
        st.integers(1, 512), st.booleans(), st.floats(0.01, 1e5), st.floats(0.5, 2.0),
    ), max_size=6, unique_by=lambda one: one[:5]))  # fmt: skip
    def test_any_table_survives_its_file(self, tmp_path_factory: pytest.TempPathFactory, given: Any) -> None:
        made = [
            a_cell(gate=gate, form=form, option=option, draft_tokens=T, batch=B, unfused_us=(us, us * 1.01),
                   fused_us=(us * ratio, us * ratio), configs=(None, LaunchConfig(8) if small else None))
            for gate, form, option, T, B, small, us, ratio in given
        ]  # fmt: skip
        table = a_table(*made)
        assert load_table(write_table(table, tmp_path_factory.mktemp("tables"))) == table
        assert table.doubts == ()


class TestVerdict:
    @pytest.mark.parametrize(
        ("unfused", "fused", "margin", "wins"),
        [
            ((10.0, 10.0), (9.8, 9.8), 0.02, True),
            ((10.0, 10.0), (9.8, 9.801), 0.02, False),
            ((10.0, 10.0), (5.0, 9.9), 0.02, False),
            ((10.0, 10.0), (9.9, 5.0), 0.02, False),
            ((10.0, 10.0, 10.0), (5.0, 5.0, 10.0), 0.02, False),
            ((10.0, 10.0, 10.0), (5.0, 5.0, 5.0), 0.02, True),
            ((10.0, 10.0), (10.0, 9.0), 0.0, False),
            ((10.0, 10.0), (9.999, 9.999), 0.0, True),
            ((10.0, 20.0), (9.9, 19.0), 0.0, True),
            ((10.0, 20.0), (15.0, 15.0), 0.0, False),
        ],
    )
    def test_fused_must_win_every_pass_by_the_margin(self, unfused: Any, fused: Any, margin: float, wins: bool) -> None:
        cell = a_cell(unfused_us=unfused, fused_us=fused, margin=margin)
        assert cell.lane == cell.supported(margin) == cell.verdict(margin) == ("fused+ring" if wins else "unfused+ring")

    @pytest.mark.parametrize("option", OPTIONS[1:])
    @pytest.mark.parametrize("round_wins", [True, False])
    def test_a_round_decides_where_an_option_moves_cost_to_the_commit(self, option: str, round_wins: bool) -> None:
        slow, fast = (9.0, 9.0), (1.0, 1.0)
        lanes = {
            "unfused+ring": LaneFigures(fast if round_wins else slow, slow if round_wins else fast),
            "fused+ring": LaneFigures(slow if round_wins else fast, fast if round_wins else slow),
        }
        cell = judged(a_key(option=option), lanes, 0.02)
        assert cell.lane == ("fused+ring" if round_wins else "unfused+ring")
        with pytest.raises(ValueError, match="must have round_us"):
            judged(a_key(option=option), {lane: LaneFigures(fast) for lane in lanes}, 0.02)
        with pytest.raises(ValueError, match="has round_us, which option 'plain'"):
            judged(a_key(), lanes, 0.02)

    @pytest.mark.parametrize("missing", ["unfused+ring", "fused+ring"])
    def test_a_lane_that_was_not_measured_wins_nothing(self, missing: str) -> None:
        lanes = {lane: LaneFigures(MEASURED) for lane in lanes_of("ring")} | {missing: LaneFigures(why="no memory")}
        cell = judged(a_key(), lanes, 0.0)
        assert cell.lane == "unfused+ring"
        assert cell.ratio() is None

    def test_a_closed_cell_is_unfused_whatever_its_figures(self) -> None:
        won = a_cell()
        assert won.lane == "fused+ring"
        closed = replace(won, closed=CLOSED)
        assert closed.verdict(0.02) == closed.supported(0.02) == "unfused+ring"
        assert judged(won.key, won.lanes, 0.02, CLOSED).lane == "unfused+ring"
        assert judged(won.key, won.lanes, 0.02).lane == "fused+ring"

    @pytest.mark.parametrize("won", [True, False])
    def test_a_verdict_that_was_edited_counts_as_unfused(self, won: bool) -> None:
        cell = a_cell(fused=won)
        edited = replace(cell, lane="unfused+ring" if won else "fused+ring")
        table = a_table(edited)
        assert table.verdict(edited) == "unfused+ring"
        (doubt,) = table.doubts
        assert doubt == f"cell ({cell.key}) states {edited.lane}, its figures support {cell.lane}"

    def test_the_worst_pass_is_the_ratio(self) -> None:
        assert a_cell(unfused_us=(10.0, 20.0), fused_us=(5.0, 15.0)).ratio() == 0.75

    def test_the_standard_gate_takes_the_safe_gate_s_cell_where_it_has_none(self) -> None:
        own = a_cell(gate="standard", fused=False, batch=4)
        table = a_table(*cells({1: True, 4: True}), own)
        rest = {"form": "recurrent", "mode": "ring", "option": "plain", "draft_tokens": 4}
        assert list(table.buckets(gate="standard", **rest).values()) == [table.by_key[a_key()], own]
        assert [cell.key.gate for cell in table.buckets(gate="safe", **rest).values()] == ["safe", "safe"]
        assert table.buckets(gate="safe", **rest | {"draft_tokens": 5}) == {}

    def test_option_names(self) -> None:
        pairs = [(False, False), (True, False), (False, True), (True, True)]
        assert tuple(option_name(fold_on_verify=f, compact_window=c) for f, c in pairs) == OPTIONS


class TestBrokenFiles:
    @pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
    def test_is_refused_by_file_and_cell(self, content: bytes, message: str, tmp_path: Path) -> None:
        path = tmp_path / a_table().file_name
        path.write_bytes(content)
        with pytest.raises(TableError) as refusal:
            load_table(path)
        assert str(refusal.value).startswith(f"{path}: ")
        assert re.search(message, str(refusal.value)), refusal.value
        assert len(str(refusal.value)) < 2000

    def test_a_sound_one_is_not(self, tmp_path: Path) -> None:
        path = tmp_path / a_table().file_name
        path.write_bytes(edited(lambda data: None))
        assert load_table(path) == a_table(a_cell())

    @pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "dangling link", "unreadable", "/dev/zero"])
    def test_what_is_no_readable_file(self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / a_table().file_name
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "dangling link":
            path.symlink_to(tmp_path / "nowhere")
        elif kind == "/dev/zero":
            path.symlink_to("/dev/zero")
        elif kind == "unreadable":
            path.write_text(WHOLE)
            path.chmod(0)
            if os.access(path, os.R_OK):  # root reads any file
                monkeypatch.setattr(
                    Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
                )
        with pytest.raises(TableError, match=r"is no file|No such file|Permission denied"):
            load_table(path)

    @given(st.integers(0, len(WHOLE) - 1), st.characters(codec="ascii"))
    def test_one_changed_character_is_a_table_or_a_refusal(
        self, tmp_path_factory: pytest.TempPathFactory, position: int, character: str
    ) -> None:
        path = tmp_path_factory.mktemp("tables") / a_table().file_name
        path.write_text(WHOLE[:position] + character + WHOLE[position + 1 :], encoding="utf-8")
        try:
            table = load_table(path)
        except TableError:
            return
        assert table.file_name == path.name
        for cell in table.cells:
            assert table.verdict(cell) == "unfused+ring" or cell.supported(table.margin) == "fused+ring"


class TestDataclasses:
    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: a_table(cells=(a_cell(), a_cell(fused=False))), ValueError, "is there twice"),
            (lambda: a_table(shape=(8, 8)), TypeError, "shape must be a KdaShape"),
            (lambda: a_table(provenance={}), TypeError, "provenance must be a Provenance"),
            (lambda: replace(PROVENANCE, margin=0.5), ValueError, "within 0..0.5"),
            (lambda: LaneFigures((1.0, 2.0), config={"block_v": 8}), TypeError, "config must be a LaunchConfig"),
            (lambda: LaneFigures((1.0, 2.0), (1.0,)), ValueError, "as many passes as us"),
            (lambda: LaneFigures(), ValueError, "says why"),
            (lambda: LaneFigures((1.0, float("nan"))), ValueError, "above 0"),
            (lambda: CellKey("safe", "recurrent", "ring", "plain", 4, 0), ValueError, "B must be within"),
        ],
    )
    def test_refuse_what_a_file_could_not_hold(self, make: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            make()

    def test_a_shape_is_part_of_the_name(self) -> None:
        names = {table_name(KdaShape(h, hv, k, v), H200, d) for h, hv in ((8, 8), (4, 8)) for k in (64, 128)
                 for v in (64, 128) for d in ("bfloat16", "float16")}  # fmt: skip
        assert len(names) == 16
