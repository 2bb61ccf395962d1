"""Decisions of the gate: what it does not take on trust, and that nothing but the question plays a part."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install hypothesis (dependency group `test`)"
)

from hypothesis import given
from hypothesis import strategies as st

from kda_backend import LANES, MODES, Target, conservative_lane
from kda_backend.gate import OPTIONS, SOURCES, Table, decide, decisions, folders, write_table
from kda_backend.gate.advice import tune_command
from kda_backend.gate.cells import MOST_TUNED_TOKENS
from kda_backend.gate.decisions import forget_decisions
from kda_backend.gate.env import process_settings
from kda_backend.gate.folders import forget
from kda_backend.lanes import lanes_of
from kda_kernels import FORMS, KdaShape, Ring
from tests.support.broken_tables import BROKEN
from tests.support.questions import H100, SM90, ask
from tests.support.tables import CLOSED, H200, SHAPE, a_cell, a_table, cells

pytestmark = pytest.mark.usefixtures("fresh_gate")


class TestTrust:
    @pytest.mark.parametrize("content", [content for content, _ in BROKEN.values()], ids=BROKEN)
    def test_a_broken_file_is_one_warning_and_no_crash(
        self, packaged: Path, content: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = packaged / a_table().file_name
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            for name in (H200, H100):
                for batch in (1, 2):
                    decision = ask(packaged, batch=batch, device_name=name)
                    rule, _ = conservative_lane("ring", batch, 4, SM90)
                    assert (decision.lane, decision.launch) == (rule, None)
        about = [record for record in caplog.records if str(path) in record.getMessage()]
        assert len(about) == 1
        assert len([record for record in caplog.records if "kda tune --" in record.getMessage()]) == 1
        assert len(caplog.records) == 2

    @pytest.mark.parametrize("kind", ["folder", "fifo", "/dev/zero"])
    def test_what_is_no_file_is_neither_read_nor_waited_for(self, packaged: Path, kind: str) -> None:
        path = packaged / a_table().file_name
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        assert ask(packaged).source == "default"
        assert "is no file" in ask(packaged).steps[1].said

    @pytest.mark.parametrize("kind", ["missing", "file"])
    def test_a_user_folder_that_is_none_is_one_warning(
        self, packaged: Path, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = tmp_path / "own"
        if kind == "file":
            folder.write_text("{}")
        write_table(a_table(a_cell()), packaged)
        for batch in (1, 2):
            assert ask(packaged, batch=batch, environ={"KDA_GATE_TABLES": str(folder)}).source == "packaged table"
        decision = ask(packaged, batch=3, environ={"KDA_GATE_TABLES": str(folder)})
        assert decision.steps[0].said.endswith(f"in {folder}, which is no folder")
        assert [record.getMessage() for record in caplog.records] == [f"the gate finds no folder of tables at {folder}"]

    @pytest.mark.parametrize("kind", ["endless link", "no search", "no listing"])
    def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
        self, packaged: Path, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
    ) -> None:
        own = tmp_path / "own"
        if kind == "endless link":
            own.symlink_to(own)
        else:
            own.mkdir()
            name, call = {"no search": ("lstat", os.lstat), "no listing": ("scandir", os.scandir)}[kind]

            def refused(path: Any) -> Any:  # root may look anywhere
                if str(path).startswith(str(own)):
                    raise PermissionError(13, "Permission denied", str(path))
                return call(path)

            monkeypatch.setattr(folders.os, name, refused)
        write_table(a_table(a_cell()), packaged)
        for draft_tokens in (4, 5):
            decision = ask(packaged, draft_tokens=draft_tokens, environ={"KDA_GATE_TABLES": str(own)})
        why = "Too many levels of symbolic links" if kind == "endless link" else "Permission denied"
        assert kind == "no listing" or decision.steps[0].said == f"{own} cannot be read: {why}"
        (record,) = [one for one in caplog.records if "kda tune" not in one.getMessage()]
        assert record.getMessage() == f"the gate cannot read the folder of tables {own}: {why}"

    def test_an_edited_verdict_is_one_warning_and_unfused(
        self, packaged: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        lost = cells({1: False, 2: False, 4: True})
        table = a_table(*(replace(cell, lane="fused+ring") for cell in lost))
        write_table(table, packaged)
        assert [ask(packaged, batch=batch).lane for batch in (1, 2, 4)] == ["unfused+ring"] * 2 + ["fused+ring"]
        (record,) = caplog.records
        assert "2 verdicts are not those of their figures" in record.getMessage()

    def test_a_closed_cell_is_unfused_and_says_by_what(self, packaged: Path) -> None:
        write_table(a_table(replace(a_cell(), lane="unfused+ring", closed=CLOSED)), packaged)
        decision = ask(packaged)
        assert decision.lane == "unfused+ring"
        assert "closed on 2026-11-29 by history.json" in decision.reason

    def test_a_table_of_another_architecture_under_this_device_s_name(
        self, packaged: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_table(a_table(a_cell(batch=2), arch="sm100"), packaged)
        assert ask(packaged, batch=2).source == "default"
        assert "is for sm100, this NVIDIA H200 is sm90" in caplog.records[0].getMessage()

    def test_a_missing_table_is_one_warning_with_the_command(
        self, packaged: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for batch in range(8):
            ask(packaged, batch=batch)
            ask(packaged, batch=batch, draft_tokens=3, mode="snapshots")
            ask(packaged, batch=batch, shape=KdaShape(2, 2))
        (record,) = caplog.records
        assert tune_command(SHAPE, 4) in record.getMessage()
        assert tune_command(SHAPE, 4) == "kda tune --heads 8 --hv-heads 8 --draft-tokens 4 --into tables"
        odd = tune_command(KdaShape(4, 8, 64, 128), 3, torch.float16)
        assert odd.startswith("kda tune --heads 4 --hv-heads 8 --head-k-dim 64 --dtype fp16 --draft-tokens 3")

    @pytest.mark.parametrize(
        ("changes", "missing", "options"),
        [
            (
                {"draft_tokens": 3},
                "T=3 not measured for recurrent, ring, plain, only 4",
                "--form recurrent --mode ring",
            ),
            ({"form": "chunked"}, "nothing measured for chunked, ring, plain", "--form chunked --mode ring"),
            ({"mode": "snapshots"}, "nothing measured for recurrent, snapshots", "--form recurrent --mode snapshots"),
            ({"option": "fold-on-verify"}, "nothing measured for", "--mode ring --option fold-on-verify"),
            ({"batch": 2}, "nothing measured at or below B=2, the least is B=4", "--form recurrent --mode ring"),
            ({"draft_tokens": 3, "safe_gate": False}, "T=3 not measured", "--mode ring --gate standard"),
        ],
        ids=str,
    )
    def test_what_a_table_lacks_is_one_warning_with_the_command(
        self, packaged: Path, changes: Any, missing: str, options: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_table(a_table(a_cell(batch=4)), packaged)
        assert ask(packaged, batch=4).source == "packaged table"
        assert caplog.records == []
        for batch in (1, 4, 16):
            asked = {"batch": batch} | changes
            ask(packaged, **asked)
            ask(packaged, **asked | {"batch": 0})
        (record,) = caplog.records
        assert missing in record.getMessage()
        tune = tune_command(SHAPE, changes.get("draft_tokens", 4))
        assert f"{tune.removesuffix(' --into tables')} --" in record.getMessage()
        assert f"{options} --into tables, then KDA_GATE_TABLES=tables" in record.getMessage()
        assert "T=9 not measured" in str(ask(packaged, batch=4, draft_tokens=9).steps)
        assert len(caplog.records) == 1, "one warning per process"

    def test_tuning_adds_to_the_user_s_own_tables(
        self, packaged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        own = tmp_path / "my tables"
        own.mkdir()
        write_table(a_table(a_cell()), own)
        ask(packaged, draft_tokens=3, environ={"KDA_GATE_TABLES": str(own)})
        assert f"--into '{own}', then KDA_GATE_TABLES='{own}'" in caplog.records[0].getMessage()

    @pytest.mark.parametrize(
        ("target", "said"), [(SM90, "what is known of other sm90 GPUs or the "), (Target("hip"), "the ")]
    )
    def test_what_chooses_until_then(
        self, packaged: Path, target: Target, said: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        ask(packaged, target=target)
        assert f"bfloat16: {said}conservative rule chooses the lanes" in caplog.records[0].getMessage()

    @pytest.mark.parametrize("target", [Target("interpreter"), Target("cpu")])
    def test_nobody_is_told_to_tune_where_kernels_are_not_compiled(
        self, packaged: Path, target: Target, caplog: pytest.LogCaptureFixture
    ) -> None:
        ask(packaged, target=target, device_name=str(target))
        ask(packaged, environ={"KDA_GATE": "off"})
        assert caplog.records == []

    def test_nobody_is_told_to_tune_more_tokens_than_kda_tune_takes(
        self, packaged: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ask(packaged, draft_tokens=MOST_TUNED_TOKENS + 1)
        assert caplog.records == []
        ask(packaged, draft_tokens=MOST_TUNED_TOKENS)
        assert len(caplog.records) == 1


class TestPurity:
    @given(
        mode=st.sampled_from(MODES), batch=st.integers(0, 300), T=st.integers(1, 20), form=st.sampled_from(FORMS),
        safe=st.booleans(), option=st.sampled_from(OPTIONS), ragged=st.booleans(), tree=st.booleans(),
        target=st.sampled_from([SM90, Target("cuda", 75), Target("hip"), Target("interpreter"), Target("cpu")]),
        lane=st.sampled_from(["", *LANES]), off=st.booleans(), noise=st.randoms(use_true_random=False),
    )  # fmt: skip
    def test_it_depends_on_its_arguments_alone(
        self, tmp_path_factory: pytest.TempPathFactory, mode: str, batch: int, T: int, form: str, safe: bool,
        option: str, ragged: bool, tree: bool, target: Target, lane: str, off: bool, noise: Any,
    ) -> None:  # fmt: skip
        """Neither what was asked before, nor the process's environment, its folder or what is remembered."""
        made = [
            a_cell(fused=bool(i % 2), batch=b, draft_tokens=t) for i, (t, b) in enumerate(
                (t, b) for t in (2, 4, 8) for b in (1, 16, 128))
        ]  # fmt: skip
        first, second = (tmp_path_factory.mktemp("tables") for _ in range(2))
        for folder in (first, second):
            write_table(a_table(*made), folder)
        environ = {"KDA_LANE": lane, "KDA_GATE": "off" if off else ""}
        given: dict[str, Any] = dict(
            mode=mode, batch=batch, draft_tokens=T, form=form, safe_gate=safe, option=option, ragged=ragged, tree=tree,
            target=target, environ=environ,
        )  # fmt: skip

        def answer(folder: Path) -> Any:
            try:
                decision = ask(folder, **given)
            except ValueError as refusal:
                return str(refusal)
            assert decision.source in SOURCES
            assert decision.lane in (*lanes_of(mode), "reference")
            assert decision.steps
            said = str(decision).replace(str(folder), "FOLDER")
            return decision.lane, decision.launch, decision.source, said

        expected = answer(first)
        for _ in range(3):
            ask(first, batch=noise.randint(0, 300), draft_tokens=noise.randint(1, 9))
        assert answer(first) == expected
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KDA_LANE", "fused")
            patch.setenv("KDA_GATE", "off")
            process_settings.cache_clear()
            forget_decisions()
            forget()
            assert answer(second) == expected
        process_settings.cache_clear()

    def test_a_file_is_read_once(self, packaged: Path) -> None:
        """A process keeps to what it read: a table that changes under it changes nothing, for any batch size."""
        write_table(a_table(a_cell()), packaged)
        first = ask(packaged)
        write_table(a_table(a_cell(fused=False)), packaged)
        assert ask(packaged) is first
        assert ask(packaged, batch=2).lane == "fused+ring"
        forget()
        forget_decisions()
        assert ask(packaged).lane == "unfused+ring"

    @pytest.mark.parametrize("there_at_first", [True, False])
    def test_a_table_that_goes_or_comes_later_changes_nothing(self, packaged: Path, there_at_first: bool) -> None:
        source = "packaged table" if there_at_first else "default"
        path = packaged / a_table().file_name
        if there_at_first:
            write_table(a_table(a_cell()), packaged)
        assert ask(packaged).source == source
        if there_at_first:
            path.unlink()
        else:
            write_table(a_table(a_cell()), packaged)
        assert ask(packaged, batch=2).source == source

    def test_D2_no_device_is_touched(self, packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def touched(*_: object, **__: object) -> None:
            raise AssertionError("the device was asked")

        for name in ("current_device", "get_device_capability", "get_device_name", "synchronize", "_lazy_init"):
            monkeypatch.setattr(torch.cuda, name, touched)
        write_table(a_table(a_cell()), packaged)
        assert ask(packaged).lane == "fused+ring"

    def test_a_remembered_decision_looks_at_nothing(self, packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What it costs is measured: `kda host-time`."""
        write_table(a_table(a_cell()), packaged)
        first = ask(packaged)
        monkeypatch.setattr(decisions, "_decide", None)
        monkeypatch.setattr(decisions, "_check", None)
        assert ask(packaged) is first

    def test_a_remembered_decision_is_a_look_up_whatever_was_given(
        self, packaged: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ring = Ring.allocate(SHAPE, slots=1, length=4, dtype=torch.bfloat16, device="meta")
        shorter = Ring.allocate(SHAPE, slots=1, length=3, dtype=torch.bfloat16, device="meta")
        asked: list[dict[str, Any]] = [
            {"environ": None}, {"environ": {}}, {"environ": None, "record": ring}, {"environ": None, "record": shorter},
        ]  # fmt: skip
        given: dict[str, Any] = dict(
            mode="ring", batch=1, draft_tokens=4, device_name=H200, target=SM90, tables=str(packaged)
        )
        first = [decide(SHAPE, **given, **each) for each in asked]
        assert [one.source for one in first] == ["default"] * 3 + ["fallback"]
        monkeypatch.setattr(decisions, "record_reason", None)
        calls: list[str] = []
        for each, before in zip(asked, first, strict=True):
            calls.clear()
            sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
            try:
                again = decide(SHAPE, **given, **each)
            finally:
                sys.setprofile(None)
            assert again is before
            assert len(calls) <= 4, calls

    def test_what_is_remembered_of_a_record_goes_with_it(self, packaged: Path) -> None:
        ring = Ring.allocate(SHAPE, slots=1, length=4, dtype=torch.bfloat16, device="meta")
        ask(packaged, record=ring)
        assert len(decisions._remembered_with) == 1
        del ring
        assert len(decisions._remembered_with) == 0
        wrong: Any = [1, 2]
        assert "needs a Ring, got list" in ask(packaged, record=wrong).reason

    def test_what_is_remembered_is_bounded(self, packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decisions, "MOST_REMEMBERED", 4)
        for batch in range(20):
            ask(packaged, batch=batch)
        assert len(decisions._remembered) <= 4


def test_a_large_table_is_taken(packaged: Path) -> None:
    table: Table = a_table(
        *(c for t in range(1, 17) for c in cells(dict.fromkeys(range(1, 101), True), draft_tokens=t))
    )
    write_table(table, packaged)
    assert len(table.cells) == 1600
    assert ask(packaged, batch=50, draft_tokens=16).source == "packaged table"
