"""What may be printed: data as text, never as markup or control codes, on terminals of any encoding."""

from __future__ import annotations

import codecs
import sys
import unicodedata

from rich.markup import escape

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
KEPT = "\n\t"

STAND_INS = {"█": "#", "…": ".", "·": "-", "±": "~", "µ": "u", "━": "-", "╸": "-", "╺": "-"}
"""One character each, so that columns stay where they are."""

ERRORS = "kda_tooling.stand_in"


def printable(text: str) -> str:
    """``text`` with every control and format character but newline and tab replaced, one for one.

    Text of a file or of a model may hold escape sequences that would set a terminal's title, colours or clipboard.
    """
    return "".join(
        REPLACEMENT if unicodedata.category(one) in ("Cc", "Cf", "Cs") and one not in KEPT else one for one in text
    )


def plain(text: object) -> str:
    """``text`` as rich shall show it: without control characters, its square brackets no markup."""
    return escape(printable(str(text)))


def in_a_line(error: BaseException) -> str:
    """The error's class and message, short enough for a row of a table."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(STAND_INS.get(one, "?") for one in error.object[error.start : error.end]), error.end


def tolerate_encodings() -> None:
    """Have stdout and stderr replace characters that their encoding lacks, instead of losing a finished report."""
    codecs.register_error(ERRORS, _stand_in)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=ERRORS)
