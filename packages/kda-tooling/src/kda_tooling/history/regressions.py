"""Every cell's newest value judged by its history: regressions, lost cells, improvements, and what cannot be judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kda_tooling.history.detector import COUNTED_LEAST, WINDOWS, Detector, Verdicts
from kda_tooling.history.reading import CellName, Described, History, Run, Value

REGRESSION, LOST, IMPROVEMENT, UNJUDGED, FINE = "regression", "lost", "improvement", "not judged", "fine"
STATUSES = (REGRESSION, LOST, IMPROVEMENT, UNJUDGED, FINE)


@dataclass(frozen=True)
class Finding:
    """What one cell comes to at the newest commit.

    Args:
        status: one of `STATUSES`.
        name: benchmark and parameters.
        param_names: of the parameters.
        unit: of the values.
        machine, versions: whose history it is.
        said: why it is lost or not judged; empty else.
        before, after: medians of the baseline and of the newest ``window`` values; None where there are none.
        ratio: after over before; None where before is 0 or missing.
        threshold: the ratio above which it is a regression.
        window: newest values that were compared.
        noise: standard deviation of a value, as a share.
        baseline: values in the baseline.
        commits: (last commit before the change, first one after it); for others the newest commit twice.
    """

    status: str
    name: CellName
    param_names: tuple[str, ...]
    unit: str
    machine: str
    versions: tuple[tuple[str, str], ...]
    commits: tuple[str, str]
    said: str = ""
    before: float | None = None
    after: float | None = None
    ratio: float | None = None
    threshold: float | None = None
    window: int = 0
    noise: float | None = None
    baseline: int = 0

    @property
    def cell(self) -> str:
        """The parameters in words."""
        return ", ".join(f"{name}={value}" for name, value in zip(self.param_names, self.name.params, strict=False))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: finite numbers or null."""
        figures = self.before, self.after, self.ratio, self.threshold, self.noise
        before, after, ratio, threshold, noise = (one if _finite(one) else None for one in figures)
        return {
            "status": self.status, "benchmark": self.name.benchmark,
            "cell": dict(zip(self.param_names, self.name.params, strict=False)), "unit": self.unit,
            "machine": self.machine, "versions": dict(self.versions), "commits": list(self.commits), "said": self.said,
            "before": before, "after": after, "ratio": ratio, "threshold": threshold, "window": self.window,
            "noise": noise, "baseline": self.baseline,
        }  # fmt: skip


@dataclass(frozen=True)
class Report:
    """Findings of every cell of every machine at its newest commit, and what else was noticed."""

    history: History
    findings: list[Finding]
    notes: list[str]

    def of(self, status: str) -> list[Finding]:
        """The findings of one status, the largest change first."""
        found = [one for one in self.findings if one.status == status]
        return sorted(found, key=lambda one: -(math.inf if one.ratio is None else one.ratio))

    @property
    def exit_code(self) -> int:
        """1 with a regression or a lost cell; else 2 with a file that could not be used; else 0."""
        if self.of(REGRESSION) or self.of(LOST):
            return 1
        return 2 if self.history.problems or not self.history.runs else 0


def find_regressions(history: History, baseline: int = 20, max_age: int | None = None) -> Report:
    """Judge every machine's newest commit.

    Args:
        history: what was read.
        baseline: N, commits that the newest ones are compared with.
        max_age: measured commits by which a GPU's newest may be older than the history's; beyond it, its cells are
            lost. None: any number, which a note says. Machines without a GPU are noted alone: those that compile are
            named after a version of Triton, and end with it.

    Raises:
        ValueError: ``baseline`` or ``max_age`` is out of range.
    """
    Detector(baseline)
    if max_age is not None and max_age < 0:
        raise ValueError(f"max_age must be a count of commits, at least 0, or None, got {max_age}")
    findings: list[Finding] = []
    notes: list[str] = []
    for machine, runs in history.machines().items():
        age = history.age(runs[-1].commit)
        behind = "1 measured commit" if age == 1 else f"{age} measured commits"
        old = f"its newest measured commit, {runs[-1].commit[:12]}, is {behind} older than the history's"
        if age:
            notes.append(f"{machine}: {old}, {history.runs[-1].commit[:12]}")
        gone = max_age is not None and age > max_age and runs[-1].gpu is not None
        for versions in sorted({run.versions for run in runs}):
            mine = [run for run in runs if run.versions == versions]
            if mine[-1].commit == runs[-1].commit:
                found = _machine(history, runs, mine, baseline)
                findings += _lost(found, mine[-1], f"{old}; at most {max_age} may be") if gone else found
            else:
                notes.append(
                    f"{machine}: the history of {_versions(versions)} ends at {mine[-1].commit[:12]} and is not "
                    f"compared with the newest commit, {runs[-1].commit[:12]}"
                )
    return Report(history, findings, notes)


def _versions(versions: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions) or "no stated version"


def _lost(findings: list[Finding], newest: Run, why: str) -> list[Finding]:
    """The findings with what the newest run measured lost, but for regressions."""
    return [
        replace(one, status=LOST, said=why)
        if one.status != REGRESSION and one.name in newest.values and _finite(newest.values[one.name].value)
        else one
        for one in findings
    ]


def _machine(history: History, every: list[Run], runs: list[Run], baseline: int) -> list[Finding]:
    """Findings of ``runs``, those of one set of versions among ``every`` run of a machine, oldest first.

    Values are compared among ``runs`` alone. What the machine has measured is missed whatever the versions were: a new
    Triton that some kernel does not compile with is no reason to forget the kernel.
    """
    recent = [*every[-(baseline + WINDOWS[-1]) :], *runs[-(baseline + WINDOWS[-1]) :]]
    beside = {name for run in every if run.commit == runs[-1].commit for name in run.values}  # of other versions, too
    beside -= {name for run in runs for name in run.values}
    names = sorted({name for run in recent for name in run.values} - beside)
    findings = []
    by_benchmark: dict[str, list[tuple[CellName, list[tuple[str, float, float]]]]] = {}
    for name in names:
        about = history.described.get(name.benchmark)
        if history.described and (about is None or name.params not in about.cells):
            continue  # a benchmark or a parameter that was taken out on purpose
        series, said, status = _series(name, every, runs, about)
        if status == FINE:
            by_benchmark.setdefault(name.benchmark, []).append((name, series))
        else:
            findings.append(_finding(status, name, about, runs[-1], said))
    for benchmark, cells in by_benchmark.items():
        findings += _judged(cells, history.described.get(benchmark), runs, baseline)
    return findings


Series = list[tuple[str, float, float]]
"""(commit, value, spread), oldest first."""


def _series(name: CellName, every: list[Run], runs: list[Run], about: Described | None) -> tuple[Series, str, str]:
    """The values that may be compared with the newest, or why there are none; and `FINE`, `LOST` or `UNJUDGED`."""
    newest = runs[-1].values.get(name)
    if newest is None or not _finite(newest.value):
        return _without_value(name, newest, every, runs[-1])
    measured = _measured(name, runs[:-1])
    if about is not None and newest.version is not None and newest.version != about.version:
        return [], f"is of version {newest.version}; the benchmark's version is {about.version}", LOST
    same = [run for run in runs if _finite((value := run.values.get(name, newest)).value) and name in run.values
            and value.version == newest.version]  # fmt: skip
    series = [(run.commit, float(run.values[name].value or 0.0), run.values[name].spread) for run in same]
    if len(series) - 1 < len(measured) and len(series) <= WINDOWS[-1]:
        older = len(measured) - (len(series) - 1)
        return series, f"its version changed to {newest.version}: {older} older values are not compared", UNJUDGED
    return series, "", FINE


def _without_value(name: CellName, value: Value | None, every: list[Run], newest: Run) -> tuple[Series, str, str]:
    """As `_series`, of a cell that the newest run has no value of."""
    what = (
        "is missing" if value is None else value.refused or ("failed" if value.value is None else "was skipped (NaN)")
    )
    measured = [run for run in _measured(name, every) if run is not newest]
    if not measured:
        return [], f"{what}; never measured before", UNJUDGED
    last = measured[-1]
    other = "" if last.versions == newest.versions else f" with {_versions(last.versions)}"
    return [], f"{what} at the newest commit, last measured at {last.commit[:12]}{other}", LOST


def _measured(name: CellName, runs: list[Run]) -> list[Run]:
    return [run for run in runs if name in run.values and _finite(run.values[name].value)]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _detector(about: Described | None, baseline: int) -> Detector:
    counted = about is not None and about.counted
    return Detector(baseline, floor=0.0, least=COUNTED_LEAST) if counted else Detector(baseline)


def _judged(
    cells: Sequence[tuple[CellName, Series]], about: Described | None, runs: list[Run], baseline: int
) -> list[Finding]:
    """Findings of the cells of one benchmark that have a newest value."""
    longest = max(len(series) for _, series in cells)
    values = np.full((len(cells), longest), np.nan)
    for row, (_, series) in enumerate(cells):
        values[row, longest - len(series) :] = [value for _, value, _ in series]
    spread = np.array([float(np.median([one[2] for one in series])) for _, series in cells])
    verdicts = _detector(about, baseline).judge(values, spread)
    return [_from_verdict(name, series, about, runs[-1], verdicts, row) for row, (name, series) in enumerate(cells)]


def _from_verdict(
    name: CellName, series: Series, about: Described | None, newest: Run, verdicts: Verdicts, row: int
) -> Finding:
    if not verdicts.baseline[row]:
        return _finding(UNJUDGED, name, about, newest, f"too few values to compare: {len(series)}")
    before, after = float(verdicts.before[row]), float(verdicts.after[row])
    worse, better = bool(verdicts.worse[row]), bool(verdicts.better[row])
    status = REGRESSION if worse else IMPROVEMENT if better else FINE
    window = int(verdicts.window[row])
    commits = (newest.commit, newest.commit)
    if status != FINE:
        commits = _range(series, before, after)
    return _finding(
        status, name, about, newest, "", commits=commits, before=before, after=after,
        ratio=after / before if before else None, threshold=1 + float(verdicts.threshold[row]), window=window,
        noise=float(verdicts.noise[row]), baseline=int(verdicts.baseline[row]),
    )  # fmt: skip


def _range(series: Series, before: float, after: float) -> tuple[str, str]:
    """(last commit before the change, first after it): back from the newest while values are nearer to ``after``."""
    first = len(series) - 1
    while first > 1 and abs(series[first - 1][1] - after) < abs(series[first - 1][1] - before):
        first -= 1
    return series[first - 1][0], series[first][0]


def _finding(status: str, name: CellName, about: Described | None, newest: Run, said: str, **given: Any) -> Finding:
    names = tuple(f"p{i}" for i in range(1, len(name.params) + 1))
    if about is not None and len(about.param_names) == len(name.params):
        names = about.param_names
    given = {"commits": (newest.commit, newest.commit)} | given
    return Finding(status, name, names, "" if about is None else about.unit, newest.machine, newest.versions,
                   said=said, **given)  # fmt: skip
