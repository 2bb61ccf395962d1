"""A sweep's own noise in asv's result files: quartiles and range of the passes, in asv's columns for them.

asv draws and compares by them, and `kda regressions` takes them for the run's own noise.
"""

from __future__ import annotations

import ast
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .asv_runs import SUITES
from .records import Record

LEAST_PASSES = 8
"""From here on smallest and largest pass bound the median with 99 % confidence: both on one side has 2 / 2 ** n."""


def _quartile(number: int) -> Callable[[list[float]], float | None]:
    return lambda passes: statistics.quantiles(passes, method="inclusive")[number] if len(passes) > 1 else None


STATISTICS: Mapping[str, Callable[[list[float]], float | None]] = {
    "stats_ci_99_a": lambda passes: min(passes) if len(passes) >= LEAST_PASSES else None,
    "stats_ci_99_b": lambda passes: max(passes) if len(passes) >= LEAST_PASSES else None,
    "stats_q_25": _quartile(0), "stats_q_75": _quartile(2),
    "stats_number": lambda passes: 1, "stats_repeat": len,
}  # fmt: skip
"""asv's column -> its figure."""


def with_spread(data: dict[str, Any], records: Iterable[Record]) -> dict[str, Any]:
    """asv's result ``data`` with the statistics of every cell whose passes ``records`` have.

    Of a cell that several files measured: of all their passes. Ratios have none.
    """
    passes: dict[str, dict[Any, list[float]]] = {}
    for record in records:
        for key, one in record.passes.items():
            passes.setdefault(record.kind, {}).setdefault(key, []).extend(one)
    modules = {module: kind for kind, names in SUITES.items() for module in names if module != "ratios"}
    columns = data["result_columns"]
    results = {}
    for name, row in data["results"].items():
        known = passes.get(modules.get(name.partition(".")[0], ""), {})
        cells = itertools.product(*row[columns.index("params")]) if known else ()
        measured = [known.get(tuple(ast.literal_eval(one) for one in cell)) for cell in cells]
        if any(measured):
            row = [*row, *[None] * (len(columns) - len(row))]
            for column, figure in STATISTICS.items():
                row[columns.index(column)] = [None if one is None else figure(one) for one in measured]
        results[name] = row
    return data | {"results": results}
