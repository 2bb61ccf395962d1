"""Processes that measure on one GPU take turns, and what goes wrong in one is said."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

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
def test_results_come_with_their_item_and_what_was_prepared(count: int) -> None:
    done = list(measured_in_processes([3, 1, 2], double, pair, count))
    assert sorted(done) == [(1, 2, (1, 2)), (2, 4, (2, 4)), (3, 6, (3, 6))]
    assert count > 1 or [item for item, *_ in done] == [3, 1, 2]


def test_turns_of_two_processes_do_not_overlap(tmp_path: Path) -> None:
    items = [tmp_path / "a", tmp_path / "b"]
    found = [result for *_, result in measured_in_processes(items, lambda item: None, turn_of, 2)]
    (one, began_one, ended_one), (two, began_two, ended_two) = sorted(found, key=lambda turn: turn[1])
    assert one != two
    assert began_two >= ended_one > began_one
    assert ended_two > began_two


def place_of(item: Path, prepared: None) -> tuple[str, float, float]:
    """When this process was in there: "a" and "b" together with others, "c" alone; "c" comes while "a" is in there."""
    give_up = time.monotonic() + 60
    folder, name = item.parent, item.name
    (folder / f"at work {os.getpid()}").touch()
    while len(list(folder.glob("at work *"))) < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    while name != "a" and not (folder / "entered").exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    if name == "b":  # behind "c", which waits
        time.sleep(0.3)
    with turn(folder / "the.turn", alone=name == "c"):
        began = time.monotonic()
        (folder / "entered").touch()
        time.sleep(1.0 if name == "a" else 0.2)
        return name, began, time.monotonic()


@pytest.mark.parametrize("third", ["b", "c"])
def test_those_that_are_not_alone_are_together_and_nobody_slips_in_before_one_that_waits(
    tmp_path: Path, third: str
) -> None:
    items = [tmp_path / name for name in ("a", "b", third)]
    found = {result[0]: result[1:] for *_, result in measured_in_processes(items, lambda item: None, place_of, 3)}
    (_, ended_a), (began_b, _) = found["a"], found["b"]
    if third == "b":
        assert began_b < ended_a
        return
    began_c, ended_c = found["c"]
    assert ended_a <= began_c
    assert ended_c <= began_b


def dies_in_its_turn(item: Path, prepared: None) -> None:
    with turn(item):
        os._exit(1)


def test_a_process_that_dies_in_its_turn_does_not_keep_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died"):
        list(measured_in_processes([tmp_path / "the.turn"] * 2, lambda item: None, dies_in_its_turn, 2))
    with turn(tmp_path / "the.turn"):
        pass


def test_with_one_process_an_error_comes_after_the_results_before_it() -> None:
    done = measured_in_processes([1, 2, 3], double, fails_at_two, 1)
    assert next(done) == (1, 2, 1)
    with pytest.raises(LookupError, match="no two"):
        next(done)


def late(item: int, prepared: int) -> int:
    if item == 1:
        time.sleep(3)
        raise LookupError("too late")
    return item


def test_what_ended_before_a_failure_is_given() -> None:
    found: list[int] = []
    done = (item for item, *_ in measured_in_processes([1, 2, 3, 4], double, late, 2))
    with pytest.raises(LookupError, match="too late"):
        found.extend(done)
    assert sorted(found) == [2, 3, 4]


def test_closing_it_begins_nothing_more_and_waits_for_no_preparation() -> None:
    ready, begun = threading.Event(), []

    def prepare(item: int) -> int:
        begun.append(item)
        if item > 1:
            ready.wait(60)
        return item

    with closing(measured_in_processes(range(1, 9), prepare, pair, 2)) as done:
        assert next(done)[0] == 1
        before = time.monotonic()
    assert time.monotonic() - before < 30
    ready.set()
    assert len(begun) <= 3


def test_a_process_that_dies_is_told_and_another_failure_is_not_taken_for_one() -> None:
    with pytest.raises(RuntimeError, match=r"one of 2 measuring processes died.*--processes 1"):
        list(measured_in_processes([1, 2], double, dies, 2))

    def prepare(item: int) -> int:
        raise BrokenProcessPool("compilers died")

    with pytest.raises(BrokenProcessPool, match="compilers died"):
        list(measured_in_processes([1, 2], prepare, pair, 2))


PARENT = """
import sys
from pathlib import Path
from kda_tooling.tuning.sharing import measured_in_processes
from worker import wait
if __name__ == "__main__":
    list(measured_in_processes([*map(Path, sys.argv[1:])], str, wait, 2))
"""
WORKER = """
import os, time
def wait(item, prepared):
    item.write_text(str(os.getpid()))
    time.sleep(120)
"""


def alive(process: int) -> bool:
    """Whether it runs; one that ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_measuring_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "worker.py").write_text(WORKER)
    files = [tmp_path / "one", tmp_path / "two"]
    parent = subprocess.Popen([sys.executable, "parent.py", *map(str, files)], cwd=tmp_path)
    try:
        give_up = time.monotonic() + 60
        while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < give_up:
            time.sleep(0.05)
        workers = [int(f.read_text()) for f in files]
        assert all(map(alive, workers))
    finally:
        parent.kill()
        parent.wait()
    give_up = time.monotonic() + 30
    while any(map(alive, workers)) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not any(map(alive, workers))


@pytest.mark.parametrize("alone", [True, False])
def test_a_turn_on_the_gpu_waits_for_what_ran_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alone: bool
) -> None:
    file, waited = tmp_path / "the.turn", []
    monkeypatch.setattr(sharing, "turn_file", lambda: file)

    def may(how: int) -> bool:
        with file.open("a+") as other:
            try:
                fcntl.flock(other, how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    monkeypatch.setattr("torch.cuda.synchronize", lambda: waited.append(may(fcntl.LOCK_EX)))
    with sharing.gpu_turn("cuda") if alone else sharing.gpu_shared("cuda"):
        assert may(fcntl.LOCK_SH) is not alone
        assert not may(fcntl.LOCK_EX)
        assert waited == []
    assert waited == [False], "once, before the turn is given away"
    assert may(fcntl.LOCK_EX)


def test_nobody_else_can_lock_a_user_s_turn_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sharing, "FOLDER", str(tmp_path / "kda"))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    assert sharing.turn_file() == tmp_path / "kda" / "GPU-1.turn"
    assert (tmp_path / "kda").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("asked", "groups", "needed", "cores", "count"),
    [
        (None, 20, 1, 16, 8), (None, 20, 1, 64, 8), (None, 20, 1, 7, 3), (None, 20, 1, 2, 1), (None, 3, 1, 64, 3),
        (None, 20, 40, 16, 2), (None, 20, 400, 16, 1), (8, 20, 1, 2, 8), (8, 20, 30, 2, 3), (None, 0, 0, 16, 1),
    ],
)  # fmt: skip
def test_as_many_processes_as_groups_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, groups: int, needed: int, cores: int, count: int
) -> None:
    monkeypatch.setattr(sharing, "usable_cores", lambda: cores)
    monkeypatch.setattr(sharing, "RESERVE", 2)
    assert process_count(asked, groups, needed, free_bytes=100) == count
