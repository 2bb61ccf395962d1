"""The checked-in limits of compiled kernels: read, written and compared.

The file holds limits, not measurements: registers and instructions have the slack of `LIMITS_FROM` on top, the other
figures none. Code generation changes with Triton, so a budget is good for the one version that it names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kda_tooling.compiling.report import CompiledKernel
from kda_tooling.compiling.specs import Selection, Specs

LIMITS_FROM: dict[str, Callable[[int], int]] = {
    "registers": lambda measured: measured + 8,
    "spills": lambda measured: measured,
    "shared": lambda measured: measured,
    "shuffles": lambda measured: measured,
    "instructions": lambda measured: measured + measured // 10,
}
"""Budgeted figure -> limit written for a measured value."""

UPDATE = "kda compile-report --write-budget"

Limits = dict[str, dict[str, dict[str, dict[str, int]]]]
"""target -> kernel -> configuration -> figure -> limit."""


class BudgetError(ValueError):
    """The budget cannot be used: missing, not readable, or written for another Triton version."""


def load_budget(path: Path, triton_version: str) -> Limits:
    """The limits in ``path``. Raises BudgetError if it is missing, malformed, or not for ``triton_version``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        written_for, limits = content["triton"], content["limits"]
        _check_limits(limits)
    except FileNotFoundError:
        raise BudgetError(
            f"there is no budget {path}: run in the repository root, or write one with `{UPDATE}`"
        ) from None
    except OSError as error:
        raise BudgetError(f"budget {path} cannot be read ({error.strerror}): give a file that can") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors
        raise BudgetError(f"budget {path} cannot be read ({error!r}): write it anew with `{UPDATE}`") from None
    if written_for != triton_version:
        raise BudgetError(
            f"budget {path} was written for triton {written_for}, this is triton {triton_version}, which generates "
            f"other code: install triton=={written_for}, or write a new budget with `{UPDATE}`"
        )
    return limits


def _check_limits(limits: Any) -> None:
    """ValueError unless ``limits`` is target -> kernel -> configuration -> figure -> whole number."""
    levels = ("a target", "a kernel", "a configuration", "a figure")

    def check(value: Any, depth: int, name: str) -> None:
        if depth == len(levels):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}: expected a whole number from 0 on, got {value!r}")
            return
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected an object, one entry for {levels[depth]}, got {type(value).__name__}")
        for key, inner in value.items():
            check(inner, depth + 1, f"{name}: {key}")

    check(limits, 0, "limits")


def write_budget(
    path: Path,
    measured: Iterable[CompiledKernel],
    triton_version: str,
    selection: Selection,
    *,
    keep: Specs | None = None,
) -> None:
    """Write limits for ``measured``; entries that ``selection`` did not ask for stay, and those of kernels of ``keep``.

    Raises:
        BudgetError: entries must stay but were written for another Triton version.
    """
    kept = {(target, label, one.name) for target, of in (keep or {}).items() for one in of for label in one.labels}
    whole = selection.everything and keep is None
    limits: Limits = {} if whole or not path.exists() else load_budget(path, triton_version)
    for entry in list(_entries(limits)):
        if selection.covers(*entry) and entry not in kept:
            target, kernel, config = entry
            del limits[target][kernel][config]
    for one in measured:
        stats = one.stats.to_dict()
        limits.setdefault(one.target, {}).setdefault(one.kernel, {})[one.config] = {
            figure: limit(stats[figure]) for figure, limit in LIMITS_FROM.items()
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_dump({"triton": triton_version, "written_by": UPDATE, "limits": limits}) + "\n")


def _entries(limits: Limits) -> Iterator[tuple[str, str, str]]:
    for target, by_kernel in limits.items():
        for kernel, by_config in by_kernel.items():
            for config in by_config:
                yield target, kernel, config


def _dump(value: Any, indent: str = "") -> str:
    """JSON with the innermost objects on one line each, so that a change of one kernel is a diff of one line."""
    if not isinstance(value, dict) or not any(isinstance(inner, dict) for inner in value.values()):
        return json.dumps(value)
    deeper = indent + " "
    rows = [f"{deeper}{json.dumps(key)}: {_dump(inner, deeper)}" for key, inner in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def over_budget(measured: Iterable[CompiledKernel], limits: Limits, selection: Selection) -> list[str]:
    """A sentence for each figure above its limit, each kernel without limits, and each limit without its kernel.

    Limits of kernels that ``selection`` did not ask for are not looked at.
    """
    problems, seen = [], set()
    for one in measured:
        name = f"{one.target} {one.kernel} {one.config}"
        seen.add((one.target, one.kernel, one.config))
        entry = limits.get(one.target, {}).get(one.kernel, {}).get(one.config)
        if entry is None:
            problems.append(f"{name}: has no budget; add it with `{UPDATE}`")
            continue
        for figure, value in one.stats.to_dict().items():
            limit = entry.get(figure)
            if limit is not None and value > limit:
                problems.append(f"{name}: {figure} {value}, over the budget of {limit} by {value - limit}")
    for target, kernel, config in _entries(limits):
        if selection.covers(target, kernel, config) and (target, kernel, config) not in seen:
            problems.append(
                f"{target} {kernel} {config}: in the budget but no longer compiled; remove it with `{UPDATE}`"
            )
    return problems
