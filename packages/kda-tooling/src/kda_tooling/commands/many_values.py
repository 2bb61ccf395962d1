"""Options that take several values after one flag: ``--batch-sizes 1 4 16``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class ManyValuesCommand(TyperCommand):
    """A command whose repeatable options also take their values in a row, up to the next flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite ``--option a b c`` as ``--option a --option b --option c`` for repeatable options."""
        repeatable = {
            name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts
        }
        expanded: list[str] = []
        current: str | None = None
        fresh = False
        for argument in args:
            if argument.startswith("-") and not _is_number(argument):
                name, separator, _ = argument.partition("=")
                current = name if name in repeatable and not separator else None
                fresh = current is not None
                expanded.append(argument)
            elif current is not None and not fresh:
                expanded += [current, argument]
            else:
                fresh = False
                expanded.append(argument)
        return super().parse_args(ctx, expanded)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
