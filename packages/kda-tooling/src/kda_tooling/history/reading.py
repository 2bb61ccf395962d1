"""asv's result files, read through asv's own classes; whatever is wrong with one is said with its name."""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kda_tooling.terminal import printable

MOST_BYTES = 64 << 20
"""Of a result file; one of this project has a few KB."""

MOST_CELLS = 100_000
"""Of one benchmark."""

IQR_TO_SIGMA = 0.7413
SKIPPED_FILES = ("machine.json", "benchmarks.json")
VERSIONS = ("torch", "triton", "driver", "gpu")
"""Of what `benchmarks.store` writes under ``measured``: a history is of one set of these."""

INSTALL = "python -m pip install 'asv>=0.6.6,<0.7'"

COUNTED_UNITS = ("registers", "bytes", "instructions", "shuffles", "kernels")
"""Units of what is counted, has no noise between runs and may be 0. Everything else is timed."""


class AsvMissing(ImportError):
    """asv is not installed; the message says how to install it."""


class Problem(NamedTuple):
    """A file that could not be used, or not all of it."""

    path: Path
    message: str

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.message}")


class CellName(NamedTuple):
    """A benchmark and the values of its parameters, as text."""

    benchmark: str
    params: tuple[str, ...]


class Value(NamedTuple):
    """A result: None failed, NaN was skipped, or is ``refused`` for the reason given."""

    value: float | None
    version: str | None
    spread: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class Described:
    """What benchmarks.json says of a benchmark: version, unit, names of its parameters, and its cells."""

    version: str | None
    unit: str
    param_names: tuple[str, ...]
    cells: frozenset[tuple[str, ...]]

    @property
    def counted(self) -> bool:
        """Whether its values are counts; its unit says it."""
        return self.unit.partition(" ")[0] in COUNTED_UNITS


@dataclass
class Run:
    """What one commit measured, on one machine with one set of versions.

    Args:
        machine: asv's machine name.
        gpu: the device's name as it calls itself, or None.
        versions: (name, value) of everything that a history must have in common.
        commit: full hash.
        date: of the commit, milliseconds since 1970.
        values: by cell.
    """

    machine: str
    gpu: str | None
    versions: tuple[tuple[str, str], ...]
    commit: str
    date: float
    values: dict[CellName, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """Every run that could be read, oldest commit first.

    Args:
        runs: at most one per machine, versions and commit.
        described: benchmark -> what benchmarks.json says; empty where that could not be read.
        problems: files that could not be used.
        order: "git" (the repository's log) or "date" (dates in the results: not all commits are in the log).
    """

    runs: list[Run]
    described: Mapping[str, Described]
    problems: list[Problem]
    order: str

    def machines(self) -> dict[str, list[Run]]:
        """Machine -> its runs, oldest commit first."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.machine, []).append(run)
        return dict(sorted(found.items()))

    def places(self) -> dict[str, int]:
        """Commit -> its place among those that were measured, the oldest is 0."""
        return {commit: index for index, commit in enumerate(dict.fromkeys(run.commit for run in self.runs))}

    def age(self, commit: str) -> int:
        """How many of the measured commits are newer than ``commit``, which is one."""
        places = self.places()
        return len(places) - 1 - places[commit]


def require_asv() -> None:
    """Raises `AsvMissing` where asv cannot be imported."""
    try:
        import asv.results  # noqa: F401
    except ImportError as error:
        raise AsvMissing(f"the history is read with asv, which cannot be imported ({error}): {INSTALL}") from None


def read_history(results: Path, repo: Path | None = None) -> History:
    """The history below ``results``, asv's results folder.

    Args:
        results: folder with benchmarks.json and one folder per machine.
        repo: folder of the repository whose log orders the commits; None: the one that ``results`` lies in.

    Raises:
        AsvMissing: asv is not installed.
        FileNotFoundError: there is no such folder.
    """
    require_asv()
    if not results.is_dir():
        raise FileNotFoundError(f"{results} is no folder of asv results")
    problems: list[Problem] = []
    described = _described(results, problems)
    runs: dict[tuple[object, ...], Run] = {}
    for path, machine in _result_files(results, problems):
        try:
            run = _run(path, machine, described, problems)
        except Exception as error:  # a file may hold anything, and asv's loader raises whatever comes of it
            problems.append(Problem(path, _said(error, path)))
            continue
        same = runs.setdefault((run.machine, run.versions, run.commit), run)
        if same is not run:
            same.values |= run.values
    ordered, order = _ordered(list(runs.values()), results if repo is None else repo)
    return History(ordered, described, problems, order)


def _said(error: Exception, path: Path) -> str:
    """The error in a line, without the path that asv puts into it."""
    kind = "" if isinstance(error, (ValueError, OSError, RuntimeError)) else f"{type(error).__name__}: "
    text = " ".join(str(error).replace(os.path.abspath(path), "the file").replace(str(path), "the file").split())
    return f"cannot be read: {kind}{text or type(error).__name__}"[:400]


def _result_files(results: Path, problems: list[Problem]) -> Iterator[tuple[Path, str]]:
    """(path, machine) of every result file, by path; folders without a usable machine.json are problems."""
    from asv import util
    from asv.machine import Machine

    for folder in sorted({path.parent for path in results.rglob("*.json") if path.name not in SKIPPED_FILES}):
        description = folder / "machine.json"
        try:
            data = util.load_json(str(description), api_version=Machine.api_version)
            machine = data.get("machine")
            if not isinstance(machine, str) or not machine.isprintable() or not machine:
                raise ValueError(f"its machine must be a name, got {machine!r}")
        except Exception as error:  # as above
            why = "is missing" if isinstance(error, FileNotFoundError) else _said(error, description)
            problems.append(Problem(description, f"{why}; the results beside it are left out"))
            continue
        for path in sorted(folder.glob("*.json")):
            if path.name not in SKIPPED_FILES:
                yield path, machine


def _described(results: Path, problems: list[Problem]) -> dict[str, Described]:
    from asv.benchmarks import Benchmarks
    from asv.config import Config

    config = Config()
    config.results_dir = str(results)
    path = results / "benchmarks.json"
    try:
        found = {}
        for name, one in Benchmarks.load(config).items():
            params = [[_parameter(value) for value in values] for values in one["params"]]
            if math.prod(map(len, params)) > MOST_CELLS:
                raise ValueError(f"{name} has more than {MOST_CELLS} cells")
            version, unit = one.get("version"), one.get("unit")
            found[name] = Described(
                None if version is None else str(version), "" if unit is None else str(unit),
                tuple(map(str, one["param_names"])), frozenset(itertools.product(*params)),
            )  # fmt: skip
    except Exception as error:  # as above
        problems.append(Problem(path, f"{_said(error, path)}; benchmarks have neither units nor versions"))
        return {}
    return found


def _parameter(text: Any) -> str:
    """A parameter's value: asv keeps its repr."""
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return str(text)


def _run(path: Path, machine: str, described: Mapping[str, Described], problems: list[Problem]) -> Run:
    from asv.results import Results

    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise ValueError(f"is no file of at most {MOST_BYTES >> 20} MiB")
    loaded = Results.load(str(path), machine_name=machine)
    commit, date = loaded.commit_hash, loaded.date
    if not isinstance(commit, str) or re.fullmatch(r"[0-9a-f]{7,64}", commit) is None:
        raise ValueError(f"its commit_hash must be a git hash, got {commit!r}")
    if isinstance(date, bool) or not isinstance(date, (int, float)) or not math.isfinite(date):
        raise ValueError(f"its date must be milliseconds, got {date!r}")
    measured = json.loads(path.read_text(encoding="utf-8")).get("measured") or {}
    versions = {str(name): str(value) for name, value in loaded.params.items() if name != "machine"}
    versions |= {str(name): str(value) for name, value in (loaded._requirements or {}).items()}
    versions |= {f"${name}": str(value) for name, value in (loaded.env_vars or {}).items()}
    versions |= {name: str(measured[name]) for name in VERSIONS if name in measured}
    run = Run(machine, measured.get("gpu"), tuple(sorted(versions.items())), commit, float(date))
    for name in sorted(loaded.get_all_result_keys()):
        try:
            values = _values(loaded, name, described.get(name))
        except Exception as error:  # as above: one bad benchmark leaves the others
            problems.append(Problem(path, f"{name} {_said(error, path)}"))
            continue
        run.values |= values
        refused = [(", ".join(cell.params), value.refused) for cell, value in values.items() if value.refused]
        if refused:
            (cell, why), *more = refused
            problems.append(Problem(path, f"{name} ({cell}) {why}" + f", as are {len(more)} more cells" * bool(more)))
    return run


def _values(loaded: Any, name: str, about: Described | None) -> dict[CellName, Value]:
    """The values of one benchmark."""
    params = loaded.get_result_params(name)
    if not isinstance(params, list) or not all(isinstance(one, list) for one in params):
        raise ValueError(f"its params must be lists, got {params!r}")
    count = math.prod(map(len, params))
    if count > MOST_CELLS:
        raise ValueError(f"it has more than {MOST_CELLS} cells")
    stored = loaded._results[name]
    if stored is not None and (not isinstance(stored, list) or len(stored) != count):
        raise ValueError(f"its parameters make {count} cells, its result has {shown_length(stored)}")
    version = loaded.benchmark_version.get(name)
    stats = loaded.get_result_stats(name, params) if loaded._stats.get(name) else [None] * count
    found = {}
    for combination, value, stat in zip(
        itertools.product(*params), loaded.get_result_value(name, params), stats, strict=True
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"its values must be numbers, got {value!r}")
        usable = value if value is None or math.isfinite(value) else math.nan
        refused = _refused(usable, about)
        usable = math.nan if refused else usable
        cell = CellName(name, tuple(_parameter(one) for one in combination))
        found[cell] = Value(usable, None if version is None else str(version), _spread(usable, stat), refused)
    return found


def _refused(value: float | None, about: Described | None) -> str:
    """Why this is no value; empty where it is one. Counts may be 0, and so may what has no known unit; times not."""
    may_be_0 = about is None or about.counted
    if value is None or math.isnan(value) or value > 0 or (value == 0 and may_be_0):
        return ""
    figure = f"{value:g} {about.unit if about else ''}".strip()
    return f"is {figure}, which must be {'at least' if may_be_0 else 'above'} 0"


def shown_length(value: Any) -> str:
    """How many there are of what should be a list."""
    return str(len(value)) if isinstance(value, list) else type(value).__name__


def _spread(value: float | None, stats: Any) -> float:
    """The run's own noise, as a share of ``value``, from asv's quartiles; 0 where it stored none."""
    if not stats or value is None or not value:
        return 0.0
    low, high = stats.get("q_25"), stats.get("q_75")
    if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in (low, high)):
        return 0.0
    return IQR_TO_SIGMA * abs(high - low) / abs(value)


def _ordered(runs: list[Run], repo: Path) -> tuple[list[Run], str]:
    """The runs by commit order, and what the order is from."""
    log = _log(repo)
    position = {commit: index for index, commit in enumerate(log)}
    if runs and all(run.commit in position for run in runs):
        return sorted(runs, key=lambda run: position[run.commit]), "git"
    return sorted(runs, key=lambda run: (run.date, run.commit)), "date"


def is_repository(folder: Path) -> bool:
    """Whether git takes ``folder`` for a repository, or a folder in one."""
    return _git(folder, "rev-parse", "--git-dir") is not None


def _log(repo: Path) -> list[str]:
    """Commits that HEAD of ``repo`` descends from, oldest first; none where git does not say."""
    return (_git(repo, "rev-list", "--topo-order", "--reverse", "HEAD") or "").split()


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints in ``folder``, or None where it fails or is missing."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout if result.returncode == 0 else None
