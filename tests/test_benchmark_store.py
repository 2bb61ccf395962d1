"""``python -m benchmarks.store``: which commit a file belongs to, what is stored of it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import asv_runs, records, source, store
from tests.support.history_files import EXAMPLE, FILES, text_of


@pytest.fixture
def record() -> records.Record:
    return records.record_of(EXAMPLE.read_text(), str(EXAMPLE))


def test_histories_are_per_gpu_model_or_compiler() -> None:
    assert store.machine_name("NVIDIA H200") == "NVIDIA_H200"
    assert store.machine_name("Some GPU/2 (80GB)") == "Some_GPU_2_80GB"
    assert store.machine_name(records.record_of(text_of("compile"), "").machine) == "compiler_triton_0_0_1"
    assert store.machine_name(records.record_of(text_of("memory"), "").machine) == "no_gpu"


def head() -> str:
    return store.resolved("HEAD")


@pytest.mark.parametrize(
    ("commit", "message"),
    [("unknown", "does not say at which commit"), (None, "does not say"), ("0123456789ab+changes", "committed tree")],
)
def test_a_file_of_an_uncommitted_tree_is_not_stored(commit: str | None, message: str, record: records.Record) -> None:
    with pytest.raises(ValueError, match=message):
        store.commit_of(dataclasses.replace(record, commit=commit), None)


def test_the_commit_is_said_by_the_file_or_its_folder_or_the_caller(record: records.Record, tmp_path: Path) -> None:
    silent, inside = dataclasses.replace(record, commit="unknown"), str(tmp_path / head()[:12] / "verify.json")
    assert store.commit_of(dataclasses.replace(record, commit=head()[:12]), None) == head()
    assert store.commit_of(dataclasses.replace(silent, where=inside), None) == head()
    assert store.commit_of(silent, "HEAD") == head()
    parent = store.resolved("HEAD^")
    with pytest.raises(ValueError, match="one of them is wrong"):
        store.commit_of(dataclasses.replace(record, commit=parent[:12], where=inside), None)


def test_the_commit_must_exist(record: records.Record) -> None:
    with pytest.raises(ValueError, match="is no commit of this repository"):
        store.commit_of(record, "0" * 40)


def test_files_of_one_commit_and_other_versions_are_not_mixed(record: records.Record) -> None:
    newer = dataclasses.replace(record, where="newer.json", measured=record.measured | {"triton": "3.9.9"})
    groups, unusable = store.grouped([record, newer], "HEAD")
    assert list(groups.values()) == [[record]]
    (message,) = unusable
    assert "newer.json" in message
    assert "other versions" in message


def test_what_is_stored_names_the_measuring_machine_and_no_path(record: records.Record) -> None:
    written = {
        "env_name": "existing-py_home_someone_bin_python", "python": "3.11", "durations": {"<build>": 1.0},
        "params": {"machine": "NVIDIA_H200", "python": "3.11"}, "results": {"a": [1]}, "commit_hash": "ab" * 20,
    }  # fmt: skip
    data = asv_runs.normalised(written, record.measured)
    assert "someone" not in json.dumps(data)
    assert data["params"] == {"machine": "NVIDIA_H200", "python": "any"}
    assert (data["results"], data["commit_hash"]) == ({"a": [1]}, "ab" * 20)
    assert data["measured"]["gpu"] == record.measured["gpu"]


def stored(version: str = "1", triton: str = "3.6.0", **results: list[float]) -> dict[str, Any]:
    return {
        "result_columns": ["result", "params", "version"], "measured": {"triton": triton},
        "results": {name: [values, [["1", "2"]], version] for name, values in results.items()},
    }  # fmt: skip


def test_a_later_file_of_a_commit_leaves_what_it_does_not_have() -> None:
    both = asv_runs.merged(stored(a=[1.0, 2.0], b=[5.0, 5.0]), stored(a=[math.nan, 3.0], c=[7.0, 7.0]))["results"]
    assert {name: row[0] for name, row in both.items()} == {"a": [1.0, 3.0], "b": [5.0, 5.0], "c": [7.0, 7.0]}


def test_statistics_stay_with_their_cells() -> None:
    def with_statistics(values: list[float], number: list[int] | None) -> dict[str, Any]:
        data = stored(a=values)
        data["result_columns"].append("stats_repeat")
        data["results"]["a"].append(number)
        return data

    old = with_statistics([1.0, 2.0], [9, 7])
    merged = asv_runs.merged(old, with_statistics([math.nan, 3.0], None))["results"]["a"]
    assert (merged[0], merged[3]) == ([1.0, 3.0], [9, None])
    merged = asv_runs.merged(old, with_statistics([math.nan, 3.0], [0, 5]))["results"]["a"]
    assert (merged[0], merged[3]) == ([1.0, 3.0], [9, 5])
    merged = asv_runs.merged(with_statistics([1.0, 2.0], None), with_statistics([math.nan, 3.0], [0, 5]))["results"]
    assert merged["a"][0] == [1.0, 3.0]
    assert merged["a"][3][1] == 5


def test_results_of_other_versions_are_replaced() -> None:
    old = stored(a=[1.0, 2.0], b=[1.0, 1.0])
    assert asv_runs.merged(old, new := stored(triton="3.7.1", a=[math.nan, 3.0])) == new
    row = asv_runs.merged(old, stored(version="2", a=[math.nan, 3.0]))["results"]["a"]
    assert math.isnan(row[0][0])


def test_a_benchmark_without_any_value_is_not_stored() -> None:
    kept = asv_runs.without_empty(stored(a=[math.nan, math.nan], b=[math.nan, 0.0]))
    assert list(kept["results"]) == ["b"]


def test_a_folder_of_commits_becomes_a_history(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One command, whatever lies in the folder: asv's own classes read what it wrote."""
    from asv.results import iter_results

    commits = [store.resolved(name) for name in ("HEAD", "HEAD^")]
    for commit in commits:
        folder = tmp_path / "measured" / commit[:12]
        folder.mkdir(parents=True)
        for kind in ("commit", "memory"):
            shutil.copy(FILES / f"{kind}.json", folder)
    (tmp_path / "measured" / "broken.json").write_text("{")
    results = tmp_path / "results"
    with pytest.raises(SystemExit) as stopped:
        store.main(["--json", str(tmp_path / "measured"), "--results", str(results)])
    assert stopped.value.code == 1
    assert "broken.json is not JSON" in capfd.readouterr().err
    found = {(one.params["machine"], one.commit_hash): one for one in iter_results(str(results))}
    assert set(found) == {(machine, c) for machine in ("Invented_not_measured", "no_gpu") for c in commits}
    one = found["Invented_not_measured", commits[0]]
    name = "commit_latency.CommitLatency.track_commit"
    assert set(one.get_all_result_keys()) == {name}
    value = one.get_result_value(name, one.get_result_params(name))
    assert [x for x in value if not math.isnan(x)] == pytest.approx([0.3 * (1 + 1 / 32), 0.9] * 2)
    assert set(json.loads((results / "benchmarks.json").read_text())) >= {name, "ring_bytes.RingBytes.track_head_step"}

    # again, with another file: what is there stays
    shutil.rmtree(tmp_path / "measured")
    store.main(["--json", str(FILES / "round.json"), "--commit", "HEAD", "--results", str(results)])
    again = {one.commit_hash: one for one in iter_results(str(results)) if one.params["machine"] != "no_gpu"}
    assert name in again[commits[0]].get_all_result_keys()
    assert "round_latency.RoundLatency.track_round" in again[commits[0]].get_all_result_keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run"], "--dry-run needs one --json"),
        (["--nonsense"], "unrecognized arguments"),
        (["--json", "none.json"], "none.json"),
        (["--json", str(EXAMPLE), "--keep", "x"], "--keep is for files measured here"),
    ],
)
def test_wrong_calls_store_nothing(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "run_asv", must_not_run)
    with pytest.raises(SystemExit) as stopped:
        store.main(arguments)
    assert stopped.value.code not in (0, None)
    assert message in capsys.readouterr().err + str(stopped.value.code)


def must_not_run(*args: object, **kwargs: object) -> None:
    raise AssertionError("asv was run")


def test_a_file_that_cannot_be_stored_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "run_asv", must_not_run)
    with pytest.raises(SystemExit) as stopped:
        store.main(["--json", str(EXAMPLE)])
    assert stopped.value.code == 1
    assert f"not stored: {EXAMPLE} does not say at which commit" in capsys.readouterr().err


def test_a_changed_tree_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_GIT_SHA", "unknown")
    monkeypatch.setattr(source, "measure", must_not_run)
    with pytest.raises(SystemExit, match="measure a committed tree"):
        store.main([])


def test_a_measurement_that_fails_is_said_and_the_others_are_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def measure(kind: str, folder: Path) -> None:
        if kind == "compile":
            raise subprocess.CalledProcessError(2, ["kda"])
        shutil.copy(FILES / "memory.json", folder)

    kept: list[str] = []
    monkeypatch.setattr(source, "measurable", lambda: iter(("compile", "memory")))
    monkeypatch.setattr(source, "measure", measure)
    monkeypatch.setattr(store, "store", lambda group, machine, *rest: kept.append(machine) or Path("x"))
    with pytest.raises(SystemExit) as stopped:
        store.main(["--commit", "HEAD", "--keep", str(tmp_path)])
    assert stopped.value.code == 1
    assert kept == ["no_gpu"]
    assert "not stored: compile" in capsys.readouterr().err
    assert (tmp_path / head()[:12] / "memory.json").is_file()


def test_a_benchmark_that_raises_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise subprocess.CalledProcessError(2, ["python", "-m", "asv", "run"])

    monkeypatch.setattr(store, "run_asv", failing)
    with pytest.raises(SystemExit, match="asv failed with exit code 2"):
        store.main(["--json", str(EXAMPLE), "--dry-run"])
