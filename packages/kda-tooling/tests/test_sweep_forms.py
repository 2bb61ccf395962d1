"""Forms in a sweep: which arms there are, how they are checked, stored and compared; stored sweeps without them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import kda_kernels
from kda_kernels import KdaShape
from kda_tooling.bench import sweep as sweep_module
from kda_tooling.bench.arms import Arm, commit_arms, our_arms
from kda_tooling.bench.bits import BitsDifferError, check_bits, check_commits
from kda_tooling.bench.markdown import results_markdown
from kda_tooling.bench.plot import LANE_COLOURS
from kda_tooling.bench.results import ArmResult, SweepResult, parse_results
from kda_tooling.bench.settings import SweepSettings, command_of
from kda_tooling.bench.sweep import arm_result, build_arms, build_problems, run_sweep
from kda_tooling.bench.tables import best_ratio, ratio_columns, tables
from kda_tooling.bench.timing import Timing
from kda_tooling.cli import app
from kda_tooling.commands import options
from kda_tooling.commands import sweep as command

BOTH = ("recurrent", "chunked")
RING = ("unfused+ring", "fused+ring")
TINY = KdaShape(1, 1, 64, 64)
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, sweep_factory: Callable[..., SweepResult]) -> list[SweepSettings]:
    """Settings that reached the measurement, which is replaced."""
    reached: list[SweepSettings] = []

    def measure(settings: SweepSettings) -> SweepResult:
        reached.append(settings)
        return sweep_factory(settings)

    monkeypatch.setattr(command, "require_gpu", lambda *_: None)
    monkeypatch.setattr(command, "_measure", measure)
    return reached


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--form recurrent", {}),
        ("--form chunked", {"forms": ("chunked",), "lanes": RING}),
        ("--form chunked recurrent", {"forms": BOTH}),
        ("--form recurrent --form chunked --form chunked", {"forms": BOTH}),
        ("--form chunked --modes fused+ring", {"forms": ("chunked",), "lanes": ("fused+ring",)}),
        ("--form recurrent chunked --draft-tokens 16 --round", {"forms": BOTH, "draft_tokens": (16,), "kind": "round"}),
    ],
)
def test_the_forms_asked_for_are_measured(
    arguments: str, expected: dict[str, object], asked: list[SweepSettings]
) -> None:
    result = runner.invoke(app, ["sweep", *arguments.split()])
    assert result.exit_code == 0, result.output
    assert asked == [SweepSettings(**expected)]  # type: ignore[arg-type]
    described = json.loads(json.dumps(dataclasses.asdict(asked[0])))
    asked.clear()
    runner.invoke(app, command_of(described).split()[1:])
    assert asked == [SweepSettings(**expected)], "the command that a result names"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--form x", "--form must be of recurrent, chunked; got x"),
        ("--form chunked --modes fused", "--form chunked is of ring lanes: leave fused out of --modes"),
        ("--form recurrent chunked --modes fused unfused", "leave fused, unfused out of --modes"),
        ("--form chunked --modes fused fused+ring", "leave fused out of --modes or add the recurrent form"),
        ("--form recurrent chunked --draft-tokens 4 17", "at most 16 draft tokens; --draft-tokens has 17"),
        ("--form chunked --commit", "--form varies the verify kernels, and --commit times none"),
    ],
)
def test_forms_that_nothing_has_are_refused(arguments: str, message: str, asked: list[SweepSettings]) -> None:
    result = runner.invoke(app, ["sweep", *arguments.split()])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not asked


def test_the_forms_of_the_command_are_the_kernels() -> None:
    assert options.FORMS == kda_kernels.FORMS
    with pytest.raises(ValueError, match=r"--form must be of .*; got none"):
        SweepSettings(forms=())


def test_ring_lanes_have_an_arm_in_each_form() -> None:
    arms = our_arms(TINY, ("unfused", "fused+ring"), sweep_configs=False, forms=BOTH)
    assert [(arm.name, arm.lane, arm.form, arm.column) for arm in arms] == [
        ("kda unfused", "unfused", "recurrent", "unfused"),
        ("kda fused+ring", "fused+ring", "recurrent", "fused+ring"),
        ("kda fused+ring chunked", "fused+ring", "chunked", "fused+ring chunked"),
    ]
    names = [arm.name for arm in our_arms(TINY, ("fused+ring",), sweep_configs=True, forms=("chunked",))]
    assert len(set(names)) == len(names) > 1
    assert "kda fused+ring chunked bv8.w1" in names
    stored = arm_result(arms[2], Timing((1.0, 1.0, 1.0)), 0.5)
    assert (stored.name, stored.lane, stored.form) == ("kda fused+ring chunked", "fused+ring chunked", "chunked")
    assert [(arm.name, arm.form) for arm in commit_arms(arms[1:])] == [("kda ring commit", "recurrent")]


def flipped(arm: Arm, elements: int) -> Arm:
    """``arm`` with the last bit of its first outputs flipped."""

    def verify(p: object) -> torch.Tensor:
        out = arm.verify(p)  # type: ignore[arg-type]
        out.view(torch.int16).view(-1)[:elements] ^= 1
        return out

    return dataclasses.replace(arm, name=f"{arm.name} wrong", verify=verify)


def test_chunked_arms_are_equal_among_themselves_and_close_to_the_others(device: str) -> None:
    settings = SweepSettings(shape=TINY, forms=BOTH, kind="round")
    problems = build_problems(settings, 3, 2, 2, device)
    arms = build_arms(settings, problems.layers[0], [])
    assert [arm.name for arm in arms[4:]] == ["kda unfused+ring chunked", "kda fused+ring chunked"]
    check_bits(problems.layers[0], arms)
    check_bits(problems.layers[0], arms[::-1])
    check_commits(problems, arms, torch.tensor([3, 1], dtype=torch.int32, device=device))
    # A bit off is another form's right, but not another lane's.
    check_bits(problems.layers[0], [arms[1], flipped(arms[4], 1)])
    with pytest.raises(BitsDifferError, match=r"wrong: chunked output differs from that of kda unfused\+ring chunked"):
        check_bits(problems.layers[0], [*arms[:5], flipped(arms[5], 1)])
    wrong = dataclasses.replace(arms[4], name="kda wrong", verify=lambda p: arms[4].verify(p) * 1.01)
    with pytest.raises(BitsDifferError, match=r"kda wrong: output differs from that of kda unfused by"):
        check_bits(problems.layers[0], [arms[0], wrong])


def with_chunked(result: SweepResult) -> SweepResult:
    """``result`` with a chunked arm of the fused ring lane, at half its time."""

    def chunked(arm: ArmResult) -> ArmResult:
        passes = [us / 2 for us in arm.passes_us]
        return dataclasses.replace(
            arm, name=f"{arm.name} chunked", lane=f"{arm.lane} chunked", median_us=arm.median_us / 2, passes_us=passes
        )

    cells = [
        dataclasses.replace(
            cell, arms=[*cell.arms, *(chunked(arm) for arm in cell.arms if arm.name == "kda fused+ring")]
        )
        for cell in result.cells
    ]
    return dataclasses.replace(result, settings={**result.settings, "forms": list(BOTH)}, cells=cells)


def test_forms_are_compared_with_a_peer_apart(example: SweepResult) -> None:
    result = with_chunked(example)
    assert [heading for heading, _, _ in ratio_columns(example)] == ["best ours / best sglang"]
    headings = ["best ours / best sglang", "best ours chunked / best sglang"]
    assert [heading for heading, _, _ in ratio_columns(result)] == headings
    for before, cell in zip(example.cells, result.cells, strict=True):
        ratio = best_ratio(before, "sglang")
        assert ratio is not None
        assert best_ratio(cell, "sglang") == ratio
        assert best_ratio(cell, "sglang", "chunked") == pytest.approx(ratio / 2)
        assert best_ratio(before, "sglang", "chunked") is None
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables(result)[0])
    text, page = console.export_text(), results_markdown(result, "x.json")
    for heading in (*headings, "kda fused+ring chunked"):
        assert heading in text
        assert heading in page
    assert "--form recurrent chunked" in page
    assert "fused+ring chunked" in LANE_COLOURS


def test_sweeps_are_stored_and_read_with_and_without_forms(example: SweepResult) -> None:
    result = with_chunked(example)
    assert parse_results(result.to_json(), "here") == result
    without = dataclasses.replace(example, settings={k: v for k, v in example.settings.items() if k != "forms"})
    assert parse_results(without.to_json(), "here") == without
    assert "--form" not in command_of(without.settings)
    for forms, message in ((["x"], "settings: form must be of"), ("x", "forms must be list of str"), ([], "got none")):
        wrong = dataclasses.replace(example, settings={**example.settings, "forms": forms})
        with pytest.raises(ValueError, match=message):
            parse_results(wrong.to_json(), "here")


def test_a_sweep_of_the_usual_form_is_stored_as_before(
    monkeypatch: pytest.MonkeyPatch, sweep_factory: Callable[..., SweepResult]
) -> None:
    monkeypatch.setattr(sweep_module, "describe_machine", lambda: sweep_factory().machine)
    monkeypatch.setattr(sweep_module, "measure_cell", lambda *arguments: sweep_factory().cells[0])
    assert "forms" not in run_sweep(SweepSettings(batch_sizes=(1,))).settings
    assert run_sweep(SweepSettings(batch_sizes=(1,), forms=BOTH)).settings["forms"] == list(BOTH)
