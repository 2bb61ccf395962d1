"""SGLang's own functions, which run where ours cannot."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any


def original(module: str, name: str) -> Callable[..., Any] | None:
    """The function that SGLang defined as ``module.name``, beneath all hooks; None where it is not hooked."""
    try:
        current = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    unwrapped = inspect.unwrap(current)
    return None if unwrapped is current else unwrapped
