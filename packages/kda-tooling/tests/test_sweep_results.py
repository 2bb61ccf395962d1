"""A sweep's JSON: what is written is read back, and a file that is no sweep says what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda_tooling.bench import machine as machine_module
from kda_tooling.bench.results import ArmResult, Cell, SweepResult, load_results, parse_results
from kda_tooling.bench.settings import SweepSettings
from kda_tooling.bench.timing import Timing


def test_round_trip(example: SweepResult, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(example.to_json() + "\n")
    assert load_results(path) == example
    assert load_results(path).to_json() == example.to_json()


def test_one_line_per_arm(example: SweepResult) -> None:
    lines = [line for line in example.to_json().splitlines() if '"median_us"' in line]
    assert len(lines) == sum(len(cell.arms) for cell in example.cells)


def test_numbers_that_json_does_not_have_are_not_written(example: SweepResult) -> None:
    infinite = dataclasses.replace(example, settings={**example.settings, "lower_bound": -math.inf})
    with pytest.raises(ValueError, match="not JSON compliant"):
        infinite.to_json()


def remove(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: data.pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), "is not a sweep of schema 1: write one with kda sweep --json"),
        (remove("schema"), "is not a sweep of schema 1"),
        (remove("machine"), "expected machine, settings, peers and cells, got"),
        (lambda d: d.update(extra=1), "expected machine, settings, peers and cells"),
        (lambda d: d.update(cells=[]), "no cell was measured"),
        (lambda d: d.update(cells={}), "no cell was measured"),
        (lambda d: d.update(peers=["sglang"]), "peers must be an object"),
        (lambda d: d.update(machine=[]), "machine: expected an object, got list"),
        (lambda d: d["machine"].pop("gpu"), "machine: expected the keys"),
        (lambda d: d["machine"].update(sm="90"), "machine: sm must be int, got '90'"),
        (lambda d: d["settings"].pop("dtype"), "settings must have the keys"),
        (lambda d: d["settings"].update(shape=[8, 8]), "shape must have the keys"),
        (lambda d: d["cells"].__setitem__(1, 5), "cell 1: expected an object, got int"),
        (lambda d: d["cells"][1].pop("cold"), "cell 1: expected the keys"),
        (lambda d: d["cells"][0].update(batch=True), "cell 0: batch must be int, got True"),
        (lambda d: d["cells"][0].update(kind="fold"), "cell 0: kind must be one of verify, round, commit"),
        (lambda d: d["cells"][0].update(arms=[]), "cell 0: no arm was measured"),
        (lambda d: d["cells"][2]["arms"][1].pop("floor_us"), "cell 2: arm 1: expected the keys"),
        (lambda d: d["cells"][2]["arms"][1].update(median_us="3"), "median_us must be float, got '3'"),
        (lambda d: d["cells"][2]["arms"][1].update(median_us=0), "median_us must be within 1e-06..1e.09, got 0"),
        (lambda d: d["cells"][2]["arms"][1].update(median_us=math.nan), "median_us must be within .*, got nan"),
        (lambda d: d["cells"][2]["arms"][1].update(passes_us=[]), "one number per pass"),
        (lambda d: d["cells"][2]["arms"][1].update(passes_us=["1"]), "passes_us must be list of float"),
        (lambda d: d["cells"][2]["arms"][1].update(passes_us=[True]), "passes_us must be list of float"),
        (lambda d: d["cells"][2]["arms"][1].update(passes_us=[math.nan]), "passes_us must be within .*, got nan"),
        (lambda d: d["cells"][2]["arms"][1].update(median_us=10**400), "median_us must be within .*characters"),
        (lambda d: d["cells"][2]["arms"][1].update(floor_us=math.inf), "floor_us must be within .*, got inf"),
        (lambda d: d["cells"][2]["arms"][1].update(spread=math.nan), "spread must be within .*, got nan"),
        (lambda d: d["cells"][2]["arms"][1].update(mode="x"), "mode must be one of ring, snapshots, got 'x'"),
        (lambda d: d["cells"][2]["arms"][1].update(owner=""), "owner must be 1..300 printable characters, got ''"),
        (lambda d: d["cells"][2]["arms"][1].update(lane="\x1b[2J"), "lane must be 1..300 printable characters"),
        (lambda d: d["cells"][0].update(batch=0), "cell 0: batch must be within 1..4096, got 0"),
        (lambda d: d["cells"][0].update(draft_tokens=65), "cell 0: draft_tokens must be within 1..64, got 65"),
        (lambda d: d["cells"][0].update(accept=5), "cell 0: accept must be within 0..4, got 5"),
        (lambda d: d["cells"][0].update(layers=0), "cell 0: layers must be within"),
        (lambda d: d["cells"][0].update(skipped={"a": 5}), "cell 0: skipped must be dict of str"),
        (lambda d: d["cells"][0].update(skipped={"a": "\x07"}), "cell 0: a: skipped must be 1..300 printable"),
        (lambda d: d["machine"].update(sm=-5), "machine: sm must be within"),
        (lambda d: d["machine"].update(copy_bytes_per_second=0), "copy_bytes_per_second must be within"),
        (lambda d: d["machine"].update(copy_bytes_per_second=math.nan), "copy_bytes_per_second must be within"),
        (lambda d: d["peers"].update(sglang=5), "peers must be str, got 5"),
        (lambda d: d["settings"].update(lower_bound="x"), "settings: lower_bound must be float or null, got 'x'"),
        (lambda d: d["settings"].update(lower_bound=math.nan), "settings: lower_bound must be finite and below 0"),
        (lambda d: d["settings"].update(draft_tokens=None), "settings: draft_tokens must be list of int, got None"),
        (lambda d: d["settings"].update(batch_sizes=[0]), "settings: batch_sizes must be within 1..4096; got 0"),
        (lambda d: d["settings"].update(lanes=5), "settings: lanes must be list of str, got 5"),
        (lambda d: d["settings"].update(lanes=["x"]), "settings: lanes must name lanes of"),
        (lambda d: d["settings"].update(peers={"a": 1}), "settings: peers must be list of str"),
        (lambda d: d["settings"].update(hot="no"), "settings: hot must be bool, got 'no'"),
        (lambda d: d["settings"].update(dtype=3), "settings: dtype must be str, got 3"),
        (lambda d: d["settings"].update(kind="other"), "settings: kind must be one of"),
        (lambda d: d["settings"]["shape"].update(num_heads="x"), "settings: num_heads must be an int"),
    ],
)
def test_a_file_that_is_no_sweep_says_why(
    change: Callable[[dict[str, Any]], object], message: str, example: SweepResult, tmp_path: Path
) -> None:
    data = json.loads(example.to_json())
    change(data)
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as error:
        load_results(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"3", b"9" * 5000, b"[" * 100_000])
def test_a_file_that_is_no_json_object(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not (JSON|a sweep)"):
        load_results(path)


def test_whole_numbers_are_floats_too(example: SweepResult) -> None:
    data = json.loads(example.to_json())
    data["cells"][0]["arms"][0].update(median_us=3, passes_us=[3, 3, 3])
    assert parse_results(json.dumps(data), "here").cells[0].arms[0].median_us == 3


def test_the_fastest_arm_of_an_owner_mode_or_lane() -> None:
    def arm(name: str, us: float) -> ArmResult:
        owner, lane = name.split()[:2]
        mode = "ring" if lane.endswith("+ring") else "snapshots"
        return ArmResult(name, owner, lane, mode, us, 0.0, [us], 1.0)

    arms = [arm("kda fused", 1.0), arm("kda fused+ring", 4.0), arm("kda fused+ring bv8.w1", 3.0), arm("p fused", 2.0)]
    cell = Cell("verify", 4, 1, 0, 192, 1 << 28, True, arms, {})
    assert cell.best("kda") == arms[0]
    assert cell.best("kda", mode="ring") == cell.best("kda", lane="fused+ring") == arms[2]
    assert cell.best("p", mode="ring") is None
    assert cell.best("nobody") is None
    assert arms[3].over_floor == 2.0


def test_what_is_stored_of_an_arm_is_rounded_consistently() -> None:
    from kda_tooling.bench.arms import our_arms
    from kda_tooling.bench.sweep import arm_result

    arm = our_arms(SweepSettings().shape, ("fused+ring",), sweep_configs=False)[0]
    stored = arm_result(arm, Timing((2.000_04, 2.000_06, 2.1)), floor_us=1 / 3)
    assert stored.passes_us == [2.0, 2.0001, 2.1]
    assert stored.median_us == 2.0001
    assert stored.spread == pytest.approx((2.1 - 2.0001) / 2.0001, abs=1e-6)
    assert stored.floor_us == 0.3333


def test_the_commit_of_a_tree_without_git_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_GIT_SHA", "0123456789abcdef0123456789abcdef01234567")
    assert machine_module.git_commit() == "0123456789ab"


@pytest.mark.parametrize(
    ("tracked", "status", "expected"),
    [
        ("machine.py", None, "aaaaaaaaaaaa"), ("machine.py", " M a.py", "aaaaaaaaaaaa+changes"),
        (None, None, "unknown"),
    ],
)  # fmt: skip
def test_the_commit_of_a_checkout(
    tracked: str | None, status: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"ls-files": tracked, "rev-parse": "aaaaaaaaaaaa", "status": status}
    monkeypatch.delenv("KDA_GIT_SHA", raising=False)
    monkeypatch.setattr(machine_module, "_output", lambda *command: answers[command[3]])
    assert machine_module.git_commit() == expected


def test_a_missing_program_is_no_answer() -> None:
    assert machine_module._output("no-such-program-here") is None
