"""asv as `benchmarks.store` uses it: runs of the suites on stored files, and what its result files may say.

asv's own result file would name the replaying interpreter's path and version, which have nothing to do with the
measurement and would split every graph: they are taken out, and the machine that measured is written in.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import SOURCE

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = "replay"
SUITES = {
    "verify": ("ring_latency", "ratios", "lane_latency"), "round": ("round_latency",), "commit": ("commit_latency",),
    "regret": ("gate_regret",), "host-time": ("host_calls",), "memory": ("ring_bytes",),
    "compile": ("compile_signals",),
}  # fmt: skip
"""Kind of file -> the modules whose suites it fills."""

VERSIONS = ("gpu", "sm", "driver", "torch", "triton")
"""What measurements of one commit must share to be one result."""


def run_asv(source: Path, machine: str, results: Path, *options: str, kinds: Iterable[str] = SUITES) -> None:
    """Run the suites of ``kinds`` on the file or folder ``source`` with asv, results below ``results``.

    Raises:
        subprocess.CalledProcessError: asv could not run, or a benchmark raised (exit code 2).
    """
    config = json.loads((ROOT / "asv.conf.json").read_text())
    config |= {"repo": str(ROOT), "benchmark_dir": str(ROOT / "benchmarks"), "results_dir": str(results)}
    asv = [sys.executable, "-m", "asv"]
    suites = "|".join(module for kind in kinds for module in SUITES[kind])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "asv.conf.json"
        path.write_text(json.dumps(config))
        # Registered by name only: a new kernel or more memory must not split a line of the graphs. In a home of its
        # own, so that nothing is left in the user's.
        env = os.environ | {SOURCE: str(source.resolve()), "HOME": folder}
        if "PYTHONPATH" in env:  # asv drops it
            env["ASV_PYTHONPATH"] = env["PYTHONPATH"]
        register = [*asv, "machine", "--yes", "--machine", machine, "--config", str(path)]
        subprocess.run(register, env=env, check=True, stdout=subprocess.DEVNULL)
        command = [*asv, "run", "--config", str(path), "--machine", machine, "-E", f"existing:{sys.executable}"]
        subprocess.run([*command, "--bench", f"^({suites})\\.", "--show-stderr", *options], env=env, check=True)


def normalised(data: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """asv's result with what belongs to the replaying interpreter taken out and the measuring machine written in."""
    return data | {
        "env_name": ENVIRONMENT, "python": "any", "params": data["params"] | {"python": "any"}, "durations": {},
        "measured": measured,
    }  # fmt: skip


def same_versions(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two measurements were made on the same GPU model with the same versions."""
    return all(one.get(name) == other.get(name) for name in VERSIONS)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The newer result of a commit, with the cells that only the older one has.

    Results of other versions (GPU, driver, torch, triton) are not mixed: the newer one then stands alone.
    """
    if not same_versions(old.get("measured", {}), new["measured"]) or old["result_columns"] != new["result_columns"]:
        return new
    columns = new["result_columns"]
    value, params, version = (columns.index(name) for name in ("result", "params", "version"))
    results = dict(old["results"])
    for name, row in new["results"].items():
        before = results.get(name)
        if before is not None and before[version] == row[version]:
            row = _joined(before, row, value, params)
        results[name] = row
    return new | {"results": results}


def _joined(old: list[Any], new: list[Any], value: int, params: int) -> list[Any]:
    """A benchmark's row with the cells that only the older one has, and their statistics."""
    known = {cell: number for number, cell in enumerate(itertools.product(*old[params]))}
    kept = {
        number: known[cell] for number, cell in enumerate(itertools.product(*new[params]))
        if cell in known and (new[value][number] is None or math.isnan(new[value][number]))
    }  # fmt: skip
    row = [*new]
    for column, (before, after) in enumerate(zip(old, new, strict=False)):
        if column != params and isinstance(before, list) and len(before) == len(known):
            # statistics that one of both has not at all are null
            cells = after if isinstance(after, list) else [None] * len(new[value])
            row[column] = [before[kept[number]] if number in kept else one for number, one in enumerate(cells)]
    return row


def without_empty(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` without benchmarks that have no value at all."""
    value = data["result_columns"].index("result")

    def filled(row: list[Any]) -> bool:
        return any(one is not None and not math.isnan(one) for one in row[value] or [])

    return data | {"results": {name: row for name, row in data["results"].items() if filled(row)}}
