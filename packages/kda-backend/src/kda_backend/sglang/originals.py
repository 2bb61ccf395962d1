"""SGLang's own functions, which run where ours cannot."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

UNUSABLE = (AttributeError, IndexError, TypeError, ValueError)
"""What arguments that are not the expected ones raise: a check's refusal, or None where a tensor should be."""


def describe(refusal: BaseException) -> str:
    """A check's reason as it stands; of other errors, whose messages name no argument, the class too."""
    checked = isinstance(refusal, (TypeError, ValueError))
    return str(refusal) if checked else f"{type(refusal).__name__}: {refusal}"


def original(module: str, name: str) -> Callable[..., Any] | None:
    """The function that SGLang defined as ``module.name``, beneath all hooks; None where it is not hooked."""
    try:
        current = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    unwrapped = inspect.unwrap(current)
    return None if unwrapped is current else unwrapped
