"""asv histories with invented figures, written by asv's own classes; with a git repository whose log orders them."""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DATE = "1795953600 +0000"
MACHINE, GPU = "NVIDIA_H200", "NVIDIA H200"
LATENCY = "ring_latency.RingLatency.track_verify"
LANES, STEPS, BATCHES = ("unfused+ring", "fused+ring"), (4, 8), (1, 4, 16, 64)
VERSIONS = {"gpu": GPU, "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}

Place = tuple[Any, ...]
Figures = Callable[[Place, int], float | None]
"""Parameters and number of the commit -> value: None failed, NaN was skipped."""

Params = Mapping[str, tuple[Any, ...]]
RING: Params = {"lane": LANES, "T": STEPS, "B": BATCHES}


class Repository:
    """A folder with git commits and an asv results folder, ``results``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, folder / "results"
        self.results.mkdir(parents=True)
        self.commits: list[str] = []
        self._tip: str | None = None
        self.described: dict[str, Any] = {}
        self._git("init", "--quiet", "--initial-branch", "main")

    def _git(self, *arguments: str, given: str = "") -> str:
        env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env, input=given).stdout.strip()

    def commit(self, count: int = 1) -> list[str]:
        """Make commits that change nothing, all of one date: only the log knows their order."""
        stream, parent = "", self._tip
        for number in range(len(self.commits), len(self.commits) + count):
            stream += f"commit refs/heads/main\ncommitter x <x> {DATE}\ndata <<.\ncommit {number}\n.\n"
            stream, parent = stream + (f"from {parent}\n" if parent else ""), None
        self._git("fast-import", "--quiet", given=stream)
        made = self._git("rev-list", "--topo-order", "--reverse", f"--max-count={count}", "main").split()
        self._tip = made[-1]
        self.commits += made
        return made

    def add(self, path: str) -> None:
        """Commit a file or folder, beside the commits that are numbered."""
        self._git("add", path)
        self._git("-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "-m", f"add {path}")
        self._tip = self._git("rev-parse", "HEAD")

    def describe(self, name: str = LATENCY, params: Params = RING, unit: str = "us", version: str = "1") -> None:
        """Add a benchmark to benchmarks.json."""
        self.described[name] = {
            "name": name, "param_names": list(params), "params": [list(map(repr, one)) for one in params.values()],
            "type": "track", "unit": unit, "version": version, "code": "",
        }  # fmt: skip
        (self.results / "benchmarks.json").write_text(json.dumps(self.described | {"version": 2}))

    def record(
        self,
        number: int,
        figures: Figures,
        *,
        name: str = LATENCY,
        machine: str = MACHINE,
        measured: Mapping[str, str] | None = None,
        version: str | None = None,
        spread: float = 0.0,
    ) -> Path:
        """Store the figures of commit ``number`` as asv would; the file."""
        from asv.results import Results

        about = self.described[name]
        folder = self.results / machine
        folder.mkdir(exist_ok=True)
        (folder / "machine.json").write_text(json.dumps({"machine": machine, "version": 1}))
        commit = self.commits[number]
        path = folder / f"{commit[:8]}-replay.json"
        results = Results({"machine": machine, "python": "any"}, {}, commit, 1_700_000_000_000, "any", "replay", {})
        if path.exists():
            results = Results.load(str(path))
        names = [list(map(ast.literal_eval, one)) for one in about["params"]]
        values = [figures(place, number) for place in itertools.product(*names)]
        results._results[name] = values
        results._benchmark_params[name] = about["params"]
        results._benchmark_version[name] = version or about["version"]
        results._stats[name] = [
            {"q_25": value * (1 - spread), "q_75": value * (1 + spread)}
            if spread and value is not None and math.isfinite(value)
            else None
            for value in values
        ]
        results.save(str(self.results))
        data = json.loads(path.read_text()) | {"measured": dict(VERSIONS if measured is None else measured)}
        path.write_text(json.dumps(data))
        return path

    def history(self, count: int, figures: Figures, **given: Any) -> None:
        """Make ``count`` commits and store the figures of each."""
        self.commit(count)
        for number in range(len(self.commits) - count, len(self.commits)):
            self.record(number, figures, **given)


def wobble(number: int, place: Place, share: float = 0.003) -> float:
    """A factor near 1 that looks like noise and is the same every time."""
    seed = hash((number, *(ord(letter) for one in place for letter in str(one))))
    return 1 + share * math.sin(seed % 9973)
