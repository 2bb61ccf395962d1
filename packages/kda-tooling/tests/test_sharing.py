"""Processes that measure on one GPU take turns, and what goes wrong in one is said."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kda_tooling.tuning import sharing
from kda_tooling.tuning.sharing import measured_in_processes, process_count, turn


def double(item: int) -> int:
    return 2 * item


def turn_of(item: Path, prepared: None) -> tuple[int, float, float]:
    """The process, and when its turn began and ended; waits for the other one before it, so that both are at work."""
    item.touch()
    give_up = time.monotonic() + 60
    while len(list(item.parent.glob("?"))) < 2 and time.monotonic() < give_up:
        time.sleep(0.01)
    with turn(item.with_name("the.turn")):
        began = time.monotonic()
        time.sleep(0.3)
        return os.getpid(), began, time.monotonic()


def pair(item: int, prepared: int) -> tuple[int, int]:
    return item, prepared


def fails_at_two(item: int, prepared: int) -> int:
    if item == 2:
        raise LookupError("no two")
    return item


def dies(item: int, prepared: int) -> int:
    os._exit(1)


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_in_order_with_what_was_prepared(count: int) -> None:
    done = list(measured_in_processes([3, 1, 2], double, pair, count))
    assert done == [(6, (3, 6)), (2, (1, 2)), (4, (2, 4))]


def test_turns_of_two_processes_do_not_overlap(tmp_path: Path) -> None:
    items = [tmp_path / "a", tmp_path / "b"]
    found = [result for _, result in measured_in_processes(items, lambda item: None, turn_of, 2)]
    (one, began_one, ended_one), (two, began_two, ended_two) = sorted(found, key=lambda turn: turn[1])
    assert one != two
    assert began_two >= ended_one > began_one
    assert ended_two > began_two


def dies_in_its_turn(item: Path, prepared: None) -> None:
    with turn(item):
        os._exit(1)


def test_a_process_that_dies_in_its_turn_does_not_keep_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died"):
        list(measured_in_processes([tmp_path / "the.turn"] * 2, lambda item: None, dies_in_its_turn, 2))
    with turn(tmp_path / "the.turn"):
        pass


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_is_raised_after_the_results_before_it(count: int) -> None:
    done = measured_in_processes([1, 2, 3], double, fails_at_two, count)
    assert next(done) == (2, 1)
    with pytest.raises(LookupError, match="no two"):
        next(done)


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"one of 2 measuring processes died.*--processes 1"):
        list(measured_in_processes([1, 2], double, dies, 2))


@pytest.mark.parametrize(
    ("asked", "groups", "needed", "cores", "count"),
    [
        (None, 20, 1, 16, 4), (None, 20, 1, 7, 2), (None, 20, 1, 2, 1), (None, 3, 1, 64, 3), (None, 20, 40, 16, 2),
        (None, 20, 400, 16, 1), (8, 20, 1, 2, 8), (8, 20, 30, 2, 3), (None, 0, 0, 16, 1),
    ],
)  # fmt: skip
def test_as_many_processes_as_groups_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, groups: int, needed: int, cores: int, count: int
) -> None:
    monkeypatch.setattr(sharing, "usable_cores", lambda: cores)
    assert process_count(asked, groups, needed, device_bytes=100) == count
