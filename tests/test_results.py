"""The README's results are what `kda report` makes of the committed measurements, table and picture alike."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from PIL import Image

from kda_tooling.bench.markdown import BEGIN, END, replace_block, results_block
from kda_tooling.bench.plot import data_digest, plot
from kda_tooling.bench.results import SweepResult, load_results

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "tests" / "data" / "invented_sweep.json"
COMMAND = re.compile(r"^Renewed by `kda report (?P<files>[^`]+?) --readme README\.md(?: --plot (?P<plot>[^`]+))?`\.$")


def check(root: Path) -> None:
    """AssertionError unless README.md below ``root`` shows what benchmarks/measured/ holds: nothing, if it is empty."""
    measured = sorted((root / "benchmarks" / "measured").glob("*.json"))
    results = {path: load_results(path) for path in measured}
    text = (root / "README.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1, "README.md lacks the markers of `kda report --readme`"
    block = text.split(BEGIN + "\n")[1].split(END)[0]
    if not measured:
        assert not block.strip(), "README.md shows results, but no measurement is committed"
        return
    commands = [match for line in block.splitlines() if (match := COMMAND.match(line))]
    assert len(commands) == 1, "README.md shows no results: run kda report on benchmarks/measured/*.json"
    shown = [root / name for name in commands[0]["files"].split()]
    assert set(shown) <= set(measured), "README.md shows results that are not committed"
    picture = root / commands[0]["plot"] if commands[0]["plot"] else None
    expected = results_block([(results[path], path) for path in shown], root / "README.md", picture)
    assert block == expected, f"README.md is not what its command makes: {commands[0][0]}"
    if picture is not None:
        with Image.open(picture) as image:
            drawn_from = image.text["Description"]  # type: ignore[attr-defined]
        assert drawn_from == data_digest([results[path] for path in shown]), f"{picture} shows older measurements"


def test_the_readme_shows_the_committed_measurements() -> None:
    check(ROOT)


@pytest.fixture
def result() -> SweepResult:
    return load_results(EXAMPLE)


@pytest.fixture
def tree(tmp_path: Path, result: SweepResult) -> Path:
    """A repository with one measurement, and README and picture made of it."""
    stored = tmp_path / "benchmarks" / "measured" / "one.json"
    stored.parent.mkdir(parents=True)
    stored.write_text(result.to_json())
    picture = tmp_path / "docs" / "sweep.png"
    picture.parent.mkdir()
    plot([result], picture)
    page = tmp_path / "README.md"
    page.write_text(replace_block(f"{BEGIN}\n{END}\n", results_block([(result, stored)], page, picture)))
    return tmp_path


def test_a_renewed_readme_passes(tree: Path) -> None:
    check(tree)


def test_a_number_changed_by_hand_is_noticed(tree: Path) -> None:
    page = tree / "README.md"
    text = page.read_text()
    assert "| **2.69** |" in text
    page.write_text(text.replace("| **2.69** |", "| **2.59** |"))
    with pytest.raises(AssertionError, match="is not what its command makes"):
        check(tree)


def test_a_newer_measurement_is_noticed(tree: Path, result: SweepResult) -> None:
    newer = dataclasses.replace(result, machine=dataclasses.replace(result.machine, date="2027-01-01"))
    (tree / "benchmarks" / "measured" / "one.json").write_text(newer.to_json())
    with pytest.raises(AssertionError, match="is not what its command makes"):
        check(tree)


def test_an_older_picture_is_noticed(tree: Path, result: SweepResult) -> None:
    plot([dataclasses.replace(result, peers={})], tree / "docs" / "sweep.png")
    with pytest.raises(AssertionError, match="older measurements"):
        check(tree)


def test_results_without_a_measurement_are_noticed(tree: Path) -> None:
    (tree / "benchmarks" / "measured" / "one.json").rename(tree / "one.json")
    with pytest.raises(AssertionError, match="no measurement is committed"):
        check(tree)


def test_a_measurement_that_is_not_shown_is_noticed(tree: Path) -> None:
    (tree / "README.md").write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(AssertionError, match="shows no results"):
        check(tree)


def test_a_measurement_of_another_schema_is_noticed(tree: Path) -> None:
    (tree / "benchmarks" / "measured" / "two.json").write_text("{}")
    with pytest.raises(ValueError, match="schema"):
        check(tree)
