"""Environment variables that switch something on or off: one set of words, SGLang's own among them."""

from __future__ import annotations

import os

ON = ("1", "true", "yes", "y", "on")
OFF = ("0", "false", "no", "n", "off")


def switched_on(name: str) -> bool:
    """Whether the environment variable ``name`` says so, in any case; not set or empty is as good as on.

    Raises:
        ValueError: its value is neither in `ON` nor in `OFF`.
    """
    value = os.environ.get(name, "")
    word = value.strip().lower()
    if word not in ("", *ON, *OFF):
        raise ValueError(
            f"{name} must be one of {', '.join(OFF)} or {', '.join(ON)}, got {value!r}: correct or unset it"
        )
    return word not in OFF
