"""Decisions of the gate: every step of the look-up, every override and every refusal."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install hypothesis (dependency group `test`)"
)

from hypothesis import given
from hypothesis import strategies as st

from kda_backend import LANES, MODES, Target, conservative_lane
from kda_backend.gate import ENV, OPTIONS, Cell, decide, write_table
from kda_backend.gate.cells import GATES
from kda_backend.gate.env import Settings, settings_of
from kda_kernels import FORMS, KdaShape, LaunchConfig, Ring
from tests.support.questions import H100, SM90, ask
from tests.support.tables import CLOSED, FAST_CONFIG, H200, SHAPE, SLOW_CONFIG, a_cell, a_table, cells

pytestmark = pytest.mark.usefixtures("fresh_gate")

GATE_MD = Path(__file__).parent.parent / "docs" / "gate.md"


class TestLookUp:
    def test_without_any_table_the_conservative_rule_decides(self, packaged: Path) -> None:
        for batch in (0, 1, 2):
            decision = ask(packaged, batch=batch)
            rule, reason = conservative_lane("ring", batch, 4, SM90)
            assert (decision.lane, decision.launch, decision.reason) == (rule, None, reason)
            assert decision.source == "default"
            names = [step.name for step in decision.steps]
            assert names == ["user table", "packaged table", "same-sm table", "conservative rule"]

    @pytest.mark.parametrize("fused", [True, False])
    def test_the_packaged_table_of_exactly_this_device(self, packaged: Path, fused: bool) -> None:
        write_table(a_table(a_cell(fused=fused, batch=8)), packaged)
        decision = ask(packaged, batch=8)
        assert decision.lane == ("fused+ring" if fused else "unfused+ring")
        assert decision.launch == (FAST_CONFIG if fused else SLOW_CONFIG), "either lane has its own configuration"
        assert decision.source == "packaged table"
        assert "B=8: verify fused+ring" in decision.reason
        assert decision.steps[-1].name == "packaged table"

    def test_the_user_s_table_goes_before_the_packaged_one(self, packaged: Path, tmp_path: Path) -> None:
        own = tmp_path / "own"
        own.mkdir()
        write_table(a_table(a_cell(fused=False)), packaged)
        write_table(a_table(a_cell(fused=True)), own)
        decision = ask(packaged, environ={"KDA_GATE_TABLES": str(own)})
        assert (decision.lane, decision.source) == ("fused+ring", "user table")
        assert [step.name for step in decision.steps] == ["user table"]

    def test_what_the_user_s_table_lacks_is_looked_for_in_the_packaged_one(
        self, packaged: Path, tmp_path: Path
    ) -> None:
        own = tmp_path / "own"
        own.mkdir()
        write_table(a_table(a_cell(draft_tokens=8)), own)
        write_table(a_table(a_cell(fused=False)), packaged)
        decision = ask(packaged, environ={"KDA_GATE_TABLES": str(own)})
        assert (decision.lane, decision.source) == ("unfused+ring", "packaged table")
        assert "T=4 not measured for recurrent, ring, plain, only 8" in decision.steps[0].said

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"draft_tokens": 5}, "T=5 not measured for recurrent, ring, plain, only 4"),
            ({"form": "chunked"}, "nothing measured for chunked, ring, plain"),
            ({"mode": "snapshots"}, "nothing measured for recurrent, snapshots, plain"),
            ({"option": "fold-on-verify"}, "nothing measured for recurrent, ring, fold-on-verify"),
            ({"batch": 3}, "nothing measured at or below B=3, the least is B=4"),
            ({"dtype": torch.float16}, "no H=8,HV=8,K=128,V=128,device_name=NVIDIA_H200,dtype=float16.json"),
            ({"shape": KdaShape(4, 8)}, "no H=4,HV=8"),
            ({"device_name": "NVIDIA B200", "target": Target("cuda", 100)}, "device_name=NVIDIA_B200"),
        ],
        ids=str,
    )
    def test_everything_but_the_batch_size_must_match_exactly(self, packaged: Path, changes: Any, said: str) -> None:
        write_table(a_table(a_cell(batch=4)), packaged)
        assert ask(packaged, batch=4).source == "packaged table"
        decision = ask(packaged, **{"batch": 4} | changes)
        assert decision.source == "default"
        assert said in decision.steps[1].said

    @pytest.mark.parametrize("option", OPTIONS)
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("gate", GATES)
    def test_every_dimension_finds_its_own_cell(self, packaged: Path, gate: str, form: str, option: str) -> None:
        others = [
            a_cell(fused=False, gate=g, form=f, option=o) for g in GATES for f in FORMS for o in OPTIONS
            if (g, f, o) != (gate, form, option)
        ]  # fmt: skip
        write_table(a_table(a_cell(gate=gate, form=form, option=option), *others), packaged)
        for g in GATES:
            for f in FORMS:
                for o in OPTIONS:
                    fused = ask(packaged, safe_gate=g == "safe", form=f, option=o).lane == "fused+ring"
                    assert fused == ((g, f, o) == (gate, form, option))

    def test_the_standard_gate_takes_the_safe_gate_s_cells_where_it_has_none(self, packaged: Path) -> None:
        write_table(a_table(*cells({1: True, 8: True}), a_cell(gate="standard", batch=8, fused=False)), packaged)
        assert ask(packaged, safe_gate=False).lane == "fused+ring"
        assert ask(packaged, safe_gate=False, batch=8).lane == "unfused+ring"
        assert ask(packaged, safe_gate=True, batch=8).lane == "fused+ring"

    def test_the_standard_gate_s_own_cells_on_both_sides_of_a_batch_say_more_than_the_safe_gate_s(
        self, packaged: Path
    ) -> None:
        own = [a_cell(gate="standard", batch=b, fused=b < 8) for b in (4, 8, 16)]
        write_table(a_table(*cells({4: True, 8: True, 12: True, 16: True, 32: True, 64: True}), *own), packaged)
        taken = {b: ask(packaged, safe_gate=False, batch=b).lane == "fused+ring" for b in (4, 8, 12, 16, 32, 64)}
        assert taken == {4: True, 8: False, 12: False, 16: False, 32: True, 64: True}

    @pytest.mark.parametrize(
        ("cell", "why"),
        [
            (a_cell(batch=4, fused=False), None),
            (a_cell(batch=4, fused=True), None),
            (
                a_cell(batch=4, fused=False, unfused_us=(4.04, 4.04), fused_us=(4.0, 4.0)),
                "does not win by 2 %",
            ),
            (a_cell(batch=4, fused=False, unfused_us=(6.0, 4.0), fused_us=(4.0, 4.0)), "does not win by 2 %"),
            (replace(a_cell(batch=4, fused=False), lane="fused+ring"), "states fused+ring, which they do not support"),
            (replace(a_cell(batch=4, fused=True), lane="unfused+ring", closed=CLOSED), "closed on"),
        ],
    )
    def test_why_figures_in_favour_of_fused_are_not_enough(self, packaged: Path, cell: Cell, why: str | None) -> None:
        write_table(a_table(cell), packaged)
        said = ask(packaged, batch=4).reason
        for word in ("does not win", "do not support", "closed"):
            assert (word in said) == (why is not None and word in why)
        assert why is None or why in said

    def test_a_lane_that_was_not_measured_has_the_kernels_default(self, packaged: Path) -> None:
        write_table(a_table(a_cell(configs=(None, None))), packaged)
        assert ask(packaged).launch is None


class TestBuckets:
    @pytest.mark.parametrize(
        ("verdicts", "batch", "fused"),
        [
            ({1: True, 8: True, 64: False}, 1, True),
            ({1: True, 8: True, 64: False}, 7, True),  # between two fused ones
            ({1: True, 8: True, 64: False}, 8, True),  # measured itself
            ({1: True, 8: True, 64: False}, 9, False),  # between a fused and an unfused one
            ({1: True, 8: True, 64: False}, 63, False),
            ({1: True, 8: True, 64: False}, 64, False),
            ({1: True, 8: True, 64: False}, 4096, False),  # above the largest: the largest
            ({1: False, 8: True}, 7, False),
            ({1: False, 8: True}, 8, True),
            ({1: False, 8: True}, 9, True),
            ({1: False, 8: True}, 1 << 20, True),
        ],
    )
    def test_the_device_s_own_table(self, packaged: Path, verdicts: Any, batch: int, fused: bool) -> None:
        write_table(a_table(*cells(verdicts)), packaged)
        decision = ask(packaged, batch=batch)
        assert decision.lane == ("fused+ring" if fused else "unfused+ring")
        assert decision.source == "packaged table"

    def test_the_configuration_is_that_of_the_smallest_measured_batch_from_it_on(self, packaged: Path) -> None:
        pairs = {b: (LaunchConfig(8, w), LaunchConfig(16, w)) for b, w in ((1, 1), (8, 2), (64, 4))}
        write_table(a_table(*(a_cell(batch=b, fused=b < 64, configs=pair) for b, pair in pairs.items())), packaged)
        for batch, at, lane in ((1, 1, 1), (7, 8, 1), (8, 8, 1), (9, 64, 0), (63, 64, 0), (64, 64, 0), (999, 64, 0)):
            assert ask(packaged, batch=batch).launch == pairs[at][lane], batch

    @pytest.mark.parametrize(
        ("verdicts", "batch", "lane"),
        [
            ({1: True, 8: True, 64: True}, 1, "fused+ring"),
            ({1: True, 8: True, 64: True}, 4, "fused+ring"),
            ({1: True, 8: True, 64: True}, 64, "fused+ring"),
            ({1: True, 8: True, 64: True}, 65, None),  # nothing above
            ({1: True, 8: True, 64: False}, 8, None),  # its neighbour above disagrees
            ({1: False, 8: True, 64: True}, 8, None),  # and below
            ({1: True, 8: True, 64: False}, 7, "fused+ring"),
            ({1: True, 8: True, 64: False}, 9, None),
            ({1: False, 8: False, 64: True}, 1, "unfused+ring"),
            ({1: False, 8: False, 64: True}, 2, "unfused+ring"),
            ({8: True}, 8, None),
            ({2: False, 4: True, 6: True, 7: True, 8: True, 12: True, 16: True}, 7, "fused+ring"),
            ({2: False, 3: False, 4: True, 6: True, 7: True, 8: True, 12: True}, 7, "fused+ring"),
            ({2: False, 4: False, 6: True, 7: True, 8: True, 12: True, 16: True}, 7, None),  # from half as many on
            ({4: True, 6: True, 7: True, 8: True, 12: True, 14: False, 16: False}, 7, None),  # twice as many disagree
            ({4: True, 6: True, 7: True, 8: True, 12: True, 16: False}, 7, "fused+ring"),
            ({48: True, 56: True, 64: True}, 65, None),  # nothing above, whatever is near
            ({48: True, 56: True, 64: True}, 64, "fused+ring"),
        ],
    )
    def test_another_device_of_the_architecture(self, packaged: Path, verdicts: Any, batch: int, lane: Any) -> None:
        write_table(a_table(*cells(verdicts)), packaged)
        decision = ask(packaged, device_name=H100, batch=batch)
        rule, _ = conservative_lane("ring", batch, 4, SM90)
        assert decision.lane == (lane or rule)
        assert decision.source == "same-sm table"
        assert decision.launch == (FAST_CONFIG if decision.lane == "fused+ring" else SLOW_CONFIG)
        assert (decision.steps[-1].name == "conservative rule") == (lane is None)
        assert H200 in decision.reason

    def test_below_the_smallest_measured_batch_nothing_is_known(self, packaged: Path) -> None:
        write_table(a_table(*cells({8: True, 16: True})), packaged)
        for name in (H200, H100):
            decision = ask(packaged, device_name=name, batch=7)
            assert decision.source == "default"
            assert "the least is B=8" in str(decision.steps)

    def test_another_architecture_s_table_is_nothing_to_go_by(self, packaged: Path) -> None:
        write_table(a_table(*cells({1: True, 8: True}), device_name="NVIDIA B200", arch="sm100"), packaged)
        assert ask(packaged, batch=2).source == "default"
        assert ask(packaged, batch=2, target=Target("hip"), device_name="AMD MI300X").source == "default"

    def test_of_several_devices_the_first_by_name_that_knows(self, packaged: Path) -> None:
        write_table(a_table(*cells({1: False, 8: False}), device_name="NVIDIA GH200"), packaged)
        write_table(a_table(*cells({1: True, 8: True}, draft_tokens=6), device_name="NVIDIA A"), packaged)
        write_table(a_table(*cells({1: True, 8: True})), packaged)
        decision = ask(packaged, device_name=H100)
        assert decision.lane == "unfused+ring"
        assert [step.said.partition(":")[0] for step in decision.steps[2:]] == ["NVIDIA A", "NVIDIA GH200"]

    @given(
        verdicts=st.dictionaries(st.integers(1, 300), st.booleans(), min_size=1, max_size=7),
        batch=st.integers(0, 400), name=st.sampled_from([H200, H100]),
    )  # fmt: skip
    def test_fused_only_between_fused_ones(
        self, tmp_path_factory: pytest.TempPathFactory, verdicts: dict[int, bool], batch: int, name: str
    ) -> None:
        folder = tmp_path_factory.mktemp("tables")
        write_table(a_table(*cells(verdicts)), folder)
        decision = ask(folder, batch=batch, device_name=name)
        below = max((b for b in verdicts if b <= batch), default=None)
        above = min((b for b in verdicts if b >= batch), default=None)
        by_rule = decision.steps[-1].name == "conservative rule"
        if decision.lane == "fused+ring" and not by_rule:
            assert below is not None
            assert verdicts[below]
            assert above is None or verdicts[above]
            assert name == H200 or above is not None
        if below is None:
            assert by_rule
            assert decision.launch is None
        elif name == H200:
            wanted = verdicts[below] and (above is None or verdicts[above])
            assert decision.lane == ("fused+ring" if wanted else "unfused+ring")


class TestOverrides:
    @pytest.mark.parametrize("lane", [*LANES, "reference"])
    def test_a_lane_is_forced_and_keeps_its_measured_configuration(self, packaged: Path, lane: str) -> None:
        mode = "ring" if lane.endswith("ring") else "snapshots"
        write_table(a_table(a_cell(mode=mode, batch=4)), packaged)
        decision = ask(packaged, mode=mode, batch=5, environ={"KDA_LANE": lane})
        assert (decision.lane, decision.source) == (lane, "override")
        expected = {"fused": FAST_CONFIG, "unfused": SLOW_CONFIG, "reference": None}[lane.removesuffix("+ring")]
        assert decision.launch == expected
        assert decision.steps[0] == ("KDA_LANE", f"forces {lane}")

    @pytest.mark.parametrize(
        ("lane", "changes", "why"),
        [
            ("fused", {}, "this verify is of mode 'ring', whose lanes are unfused+ring and fused+ring"),
            ("unfused+ring", {"mode": "snapshots"}, "this verify is of mode 'snapshots'"),
            ("fused+ring", {"tree": True}, "these tokens have parents (a tree)"),
            ("fused+ring", {"ragged": True}, "these lengths differ (ragged)"),
            ("fused+ring", {"form": "chunked", "draft_tokens": 17}, "takes up to 16 draft tokens, got 17"),
            ("fused", {"mode": "snapshots", "form": "chunked"}, "never computes the states that snapshots hold"),
            ("unfused+ring", {"target": Target("cuda", 75)}, "kernels need sm80 or later, this is sm75"),
            ("fused+ring", {"target": Target("cpu")}, "this is 'cpu'"),
        ],
    )
    def test_an_impossible_lane_is_an_error_that_says_why(
        self, packaged: Path, lane: str, changes: Any, why: str
    ) -> None:
        with pytest.raises(ValueError, match=re.escape(why)) as refusal:
            ask(packaged, environ={"KDA_LANE": lane}, **changes)
        assert str(refusal.value).startswith(f"KDA_LANE={lane} forces a lane that is impossible here: ")

    @pytest.mark.parametrize("changes", [{"tree": True}, {"ragged": True}, {"target": Target("cpu")}])
    def test_a_possible_one_is_forced_where_fused_is_not(self, packaged: Path, changes: Any) -> None:
        lane = "reference" if "target" in changes else "unfused+ring"
        assert ask(packaged, environ={"KDA_LANE": lane}, **changes).source == "override"

    def test_switched_off_no_table_is_looked_at(self, packaged: Path) -> None:
        write_table(a_table(*cells({1: False, 8: True})), packaged)
        assert ask(packaged, batch=8).lane == "fused+ring"
        decision = ask(packaged, batch=8, environ={"KDA_GATE": "OFF"})
        assert (decision.lane, decision.launch, decision.source) == ("unfused+ring", None, "default")
        assert decision.steps[0] == ("KDA_GATE", "off: no table is looked at")
        assert ask(packaged, batch=8, environ={"KDA_GATE": "on"}) == ask(packaged, batch=8)

    @pytest.mark.parametrize(("name", "value"), [("KDA_LANE", "fastest"), ("KDA_GATE", "0"), ("KDA_GATE", "auto")])
    def test_a_mistyped_value_is_refused_with_those_allowed(self, packaged: Path, name: str, value: str) -> None:
        with pytest.raises(ValueError, match=f"^{name} must be .*, got '{value}': correct or unset it"):
            ask(packaged, environ={name: value})

    def test_capitals_are_as_good(self) -> None:
        assert settings_of({"KDA_LANE": " Fused+Ring ", "KDA_GATE": "On"}) == settings_of({"KDA_LANE": "fused+ring"})

    def test_empty_values_are_none(self) -> None:
        assert settings_of({variable.name: "" for variable in ENV}) == Settings()

    def test_the_process_s_environment_is_read_once(self, packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KDA_LANE", "unfused+ring")
        given: Any = dict(mode="ring", batch=1, draft_tokens=4, device_name=H200, target=SM90, tables=str(packaged))
        assert decide(SHAPE, **given).source == "override"
        monkeypatch.delenv("KDA_LANE")
        assert decide(SHAPE, **given).source == "override"
        assert decide(SHAPE, **given, environ={}).source == "default"

    def test_docs_and_code_list_the_same_variables(self) -> None:
        section = GATE_MD.read_text(encoding="utf-8").partition("## Environment variables")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(KDA_\w+)` \|", section, flags=re.MULTILINE)
        assert rows == [variable.name for variable in ENV]


class TestFallbacks:
    @pytest.mark.parametrize(
        ("changes", "lane", "reason"),
        [
            ({"tree": True}, "unfused+ring", "these tokens have parents (a tree)"),
            ({"tree": True, "mode": "snapshots"}, "unfused", "fused cannot take this, its kernel takes chains"),
            ({"ragged": True}, "unfused+ring", "these lengths differ (ragged)"),
            ({"form": "chunked", "draft_tokens": 17}, "unfused+ring", "takes up to 16 draft tokens, got 17"),
            ({"target": Target("cuda", 75)}, "reference", "kernels need sm80 or later, this is sm75"),
            ({"target": Target("cpu")}, "reference", "this is 'cpu'"),
            ({"target": Target("mps")}, "reference", "this is 'mps'"),
        ],
        ids=str,
    )
    def test_D4_D5_D7_what_fused_cannot_take_is_unfused_and_says_why(
        self, packaged: Path, changes: Any, lane: str, reason: str
    ) -> None:
        write_table(a_table(*(a_cell(mode=mode, draft_tokens=T) for mode in MODES for T in (4, 17))), packaged)
        assert ask(packaged).lane == "fused+ring"
        decision = ask(packaged, **changes)
        assert (decision.lane, decision.source, decision.launch) == (lane, "fallback", None)
        assert reason in decision.reason
        assert reason in decision.steps[-1].said

    def test_a_malformed_ring_is_not_for_the_fused_lane(self, packaged: Path) -> None:
        write_table(a_table(a_cell()), packaged)
        ring = Ring.allocate(SHAPE, slots=1, length=4, dtype=torch.bfloat16, device="meta")
        assert ask(packaged, record=ring).lane == "fused+ring"
        decision = ask(packaged, record=replace(ring, beta=ring.beta.bfloat16()))
        assert (decision.lane, decision.source) == ("unfused+ring", "fallback")
        assert "ring.beta must be float32, got bfloat16" in decision.reason

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"mode": "Ring"}, ValueError, "mode must be one of"),
            ({"mode": ["ring"]}, ValueError, "mode must be one of"),
            ({"form": "fast"}, ValueError, "form must be one of"),
            ({"option": "folded"}, ValueError, "option must be one of"),
            ({"batch": -1}, ValueError, "batch must be within 0"),
            ({"batch": 1.5}, TypeError, "batch must be a whole number"),
            ({"draft_tokens": 0}, ValueError, "draft_tokens must be within 1"),
            ({"device_name": ""}, ValueError, "device_name must be 1"),
            ({"dtype": torch.float32}, ValueError, "dtype must be one of"),
            ({"shape": (8, 8, 128, 128)}, TypeError, "shape must be a KdaShape, got tuple"),
            ({"target": "sm90"}, TypeError, "target must be a Target, got str"),
            ({"safe_gate": "standard"}, TypeError, "safe_gate must be True or False, got 'standard'"),
            ({"ragged": 1}, TypeError, "ragged must be True or False, got 1"),
            ({"tree": torch.ones(1)}, TypeError, "tree must be True or False, got tensor"),
        ],
        ids=str,
    )
    def test_D6_arguments_that_make_no_sense(self, packaged: Path, changes: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            ask(packaged, **changes)

    @pytest.mark.parametrize(
        "changes", [{"batch": True}, {"batch": 1.0}, {"batch": np.int64(1)}, {"ragged": 0}], ids=str
    )
    def test_what_equals_a_remembered_argument_is_refused_as_before(self, packaged: Path, changes: Any) -> None:
        ask(packaged)
        with pytest.raises(TypeError, match=f"{next(iter(changes))} must be"):
            ask(packaged, **changes)
