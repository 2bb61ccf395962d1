"""Fields of JSON objects held to the annotations of dataclasses; every error is a ValueError that names the field."""

from __future__ import annotations

import types
import typing
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

MOST_TEXT = 300


def _says(kind: Any) -> str:
    return "null" if kind is types.NoneType else getattr(get_origin(kind) or kind, "__name__", str(kind))


def _of_type(value: Any, kind: Any) -> bool:
    """Whether ``value``, read from JSON, is a ``kind`` with all its elements; a whole number is a float too."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_of_type(value, one) for one in inner)
    if origin in (list, tuple):
        return isinstance(value, list) and all(_of_type(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_of_type(one, inner[1]) for one in value.values())
    if kind is types.NoneType or kind is None:
        return value is None
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def check_type(name: str, value: Any, kind: Any, where: str) -> None:
    """ValueError unless ``value`` is of the annotated type ``kind``."""
    if not _of_type(value, kind):
        inner = [one for one in get_args(kind) if one is not ...]
        if get_origin(kind) in (types.UnionType, typing.Union):
            said = " or ".join(map(_says, inner))
        else:
            said = _says(kind) + (f" of {_says(inner[-1])}" if inner else "")
        raise ValueError(f"{where}: {name} must be {said.replace('tuple', 'list')}, got {shown(value)}")


def shown(value: Any) -> str:
    """``value`` in an error, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # whole numbers of thousands of digits have no decimal text
        return "a huge number"
    return text if len(text) <= MOST_TEXT else f"{text[:60]}... ({len(text)} characters)"


def check_text(name: str, value: str, where: str) -> None:
    """ValueError unless ``value`` is one line of printable text: it goes to terminals, tables and pictures."""
    if not value or not value.isprintable() or len(value) > MOST_TEXT:
        raise ValueError(f"{where}: {name} must be 1..{MOST_TEXT} printable characters, got {shown(value)}")


def check_number(name: str, value: float, least: float, most: float, where: str) -> None:
    """ValueError unless ``value`` is within ``least``..``most``; NaN is not."""
    if not least <= value <= most:
        limits = f"within {least:g}..{most:g}" if isinstance(most, float) else f"within {least}..{most}"
        raise ValueError(f"{where}: {name} must be {limits}, got {shown(value)}")


def checked_fields(cls: type, data: Any, where: str) -> dict[str, Any]:
    """``data`` as the keyword arguments of ``cls``: exactly its fields, each of its type, every text printable.

    Lists of dataclasses are left to the caller. ``where`` names the object in errors.

    Raises:
        ValueError: the message names the field.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
    hints = get_type_hints(cls)
    if set(data) != set(hints):
        raise ValueError(f"{where}: expected the keys {sorted(hints)}, got {sorted(data)}")
    for name, value in data.items():
        inner = get_args(hints[name])
        if inner and is_dataclass(inner[0]):
            continue
        check_type(name, value, hints[name], where)
        if hints[name] is str:
            check_text(name, value, where)
    return data
