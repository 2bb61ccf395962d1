"""Parameters of functions in source files that are read, never imported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any


def declared_signature(source: Path, name: str) -> inspect.Signature | None:
    """The signature of function ``name`` ("f" or "Class.f") in a Python file, without annotations; None: no such one.

    A default that is not a literal appears as its source text.
    """
    body = ast.parse(source.read_text(encoding="utf-8")).body
    *classes, function = name.split(".")
    for class_name in classes:
        found = [n for n in body if isinstance(n, ast.ClassDef) and n.name == class_name]
        if not found:
            return None
        body = found[-1].body
    functions = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == function]
    return _signature(functions[-1].args) if functions else None


def _signature(arguments: ast.arguments) -> inspect.Signature:
    positional: list[tuple[ast.arg, Any]] = [(a, Parameter.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    positional += [(a, Parameter.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parameters = [_parameter(a, kind, d) for (a, kind), d in zip(positional, defaults, strict=True)]
    if arguments.vararg is not None:
        parameters.append(_parameter(arguments.vararg, Parameter.VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg is not None:
        parameters.append(_parameter(arguments.kwarg, Parameter.VAR_KEYWORD, None))
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> Parameter:
    value: object = Parameter.empty
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = ast.unparse(default)
    return Parameter(argument.arg, kind, default=value)


def difference(declared: inspect.Signature, ours: Callable[..., Any]) -> str | None:
    """How the parameters of ``ours`` (names, order, kinds, defaults) differ from the ``declared`` ones, or None."""
    own = inspect.signature(ours)
    bare = own.replace(
        parameters=[p.replace(annotation=Parameter.empty) for p in own.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    if bare == declared:
        return None
    theirs, known = declared.parameters, bare.parameters
    parts = {
        "new": [str(p) for n, p in theirs.items() if n not in known],
        "gone": [n for n in known if n not in theirs],
        "changed": [str(theirs[n]) for n in known if n in theirs and theirs[n] != known[n]],
    }
    named = "; ".join(f"{what} {', '.join(names)}" for what, names in parts.items() if names)
    return f"parameters differ: {named or 'their order'}"
