"""What a sweep knows of its own noise: stored in asv's columns, read back by asv and by `kda regressions`."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.ring_latency import RingLatency
from benchmarks.spread import STATISTICS, with_spread
from kda_tooling.history.reading import IQR_TO_SIGMA, CellName, read_history
from tests.support.histories import LATENCY, RING, Repository

KEY = ("fused+ring", 4, 16)
PASSES = [10.0, 10.2, 9.9, 10.1, 10.0, 10.3, 9.8, 10.0, 10.1]
RATIOS = "ratios.FusedOverUnfused.track_ring"
COLUMNS = ["result", "params", "version", "started_at", "duration", *STATISTICS, "samples", "profile"]


def result(*names: str) -> dict[str, Any]:
    params = [list(map(repr, one)) for one in RING.values()]
    return {"result_columns": COLUMNS, "results": {name: [[1.0] * 16, params, "1"] for name in names}}


@pytest.fixture
def record() -> records.Record:
    return records.Record("verify", "here", "gpu", None, {}, {KEY: 10.0}, {KEY: PASSES})


def place(key: tuple[Any, ...]) -> int:
    return list(itertools.product(*RING.values())).index(key)


def test_quartiles_and_range_of_the_passes(record: records.Record) -> None:
    row = with_spread(result(LATENCY), [record])["results"][LATENCY]
    found = {name: row[COLUMNS.index(name)] for name in STATISTICS}
    for values in found.values():
        assert [one is not None for one in values] == [number == place(KEY) for number in range(16)]
    low, _, high = statistics.quantiles(PASSES, method="inclusive")
    assert [found[name][place(KEY)] for name in STATISTICS] == [min(PASSES), max(PASSES), low, high, 1, 9]


def test_too_few_passes_have_no_interval(record: records.Record) -> None:
    few = replace(record, passes={KEY: PASSES[:3]})
    row = with_spread(result(LATENCY), [few])["results"][LATENCY]
    assert row[COLUMNS.index("stats_ci_99_a")][place(KEY)] is None
    assert row[COLUMNS.index("stats_q_75")][place(KEY)] == pytest.approx(10.1)
    one = replace(record, passes={KEY: PASSES[:1]})
    row = with_spread(result(LATENCY), [one])["results"][LATENCY]
    assert row[COLUMNS.index("stats_q_75")][place(KEY)] is None


def test_passes_of_several_files_are_taken_together(record: records.Record) -> None:
    row = with_spread(result(LATENCY), [record, record])["results"][LATENCY]
    assert row[COLUMNS.index("stats_repeat")][place(KEY)] == 18


def test_other_suites_get_none(record: records.Record) -> None:
    given = result(RATIOS, "round_latency.RoundLatency.track_round")
    assert with_spread(given, [record]) == given
    assert with_spread(given, []) == given


def test_a_sweep_s_file_has_the_passes_of_the_lane_s_fastest_arm() -> None:
    path = Path(__file__).parent / "data" / "history" / "verify.json"
    found = records.record_of(path.read_text(), str(path))
    assert set(found.passes) == set(found.values)
    for key, passes in found.passes.items():
        assert statistics.median(passes) == pytest.approx(found.values[key])


def test_asv_and_the_reader_find_it(record: records.Record, tmp_path: Path) -> None:
    from asv.results import Results

    repository = Repository(tmp_path / "repository")
    repository.describe()
    repository.commit()
    path = repository.record(0, lambda cell, _: 10.0)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(with_spread(data, [record])))
    stats = Results.load(str(path)).get_result_stats(LATENCY, [list(map(repr, one)) for one in RingLatency.params])
    assert sum(bool(one) for one in stats) == 1
    (run,) = read_history(repository.results).runs
    low, _, high = statistics.quantiles(PASSES, method="inclusive")
    spreads = {name.params: value.spread for name, value in run.values.items() if value.spread}
    assert spreads == {tuple(map(str, KEY)): pytest.approx(IQR_TO_SIGMA * (high - low) / 10)}
    assert CellName(LATENCY, ("unfused+ring", "4", "16")) in run.values
