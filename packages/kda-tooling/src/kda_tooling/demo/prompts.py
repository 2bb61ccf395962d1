"""Prompts of the demo: passages of held-out modules, or the user's own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kda_tooling.demo.corpus import HELD_OUT, read_held_out

LONGEST_PROMPT = 4096
"""Bytes of a user's file that are read, from its end: ingestion goes token by token in plain torch."""


@dataclass(frozen=True)
class Prompt:
    """Text to continue and where it comes from."""

    source: str
    text: bytes


def passage(text: bytes, length: int) -> bytes:
    """About ``length`` bytes from the middle of ``text``, cut in the middle of a line that follows a full one.

    The middle of a module is code rather than licence or introduction. Whatever is cut depends on the text only.
    """
    end = text.find(b"\n", min(len(text) // 2 + length // 2, len(text)))
    end = len(text) if end < 0 else end + 1
    # Stop inside the next line, after its indentation and first word: what follows is then open but not arbitrary.
    line_end = text.find(b"\n", end)
    line = text[end : line_end if line_end >= 0 else len(text)]
    word = len(line) - len(line.lstrip())
    while word < len(line) and (chr(line[word]).isalnum() or line[word] == ord("_")):
        word += 1
    end += word
    return text[max(end - length, 0) : end]


def held_out_prompts(count: int, length: int) -> list[Prompt]:
    """``count`` prompts of about ``length`` bytes from held-out modules in their fixed order.

    A module that this Python lacks is passed over for the next one. Raises ``ValueError`` when too few are left.
    """
    prompts: list[Prompt] = []
    for module in HELD_OUT:
        if len(prompts) == count:
            break
        text = read_held_out(module)
        if text is not None and len(text) >= length:
            prompts.append(Prompt(module, passage(text, length)))
    if len(prompts) < count:
        raise ValueError(
            f"{count} prompts were asked for, but this Python's library gives {len(prompts)} of {length} bytes. "
            "Ask for fewer or shorter ones, or give --prompt-file."
        )
    return prompts


def file_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """One prompt a file: its last :data:`LONGEST_PROMPT` bytes. Raises ``ValueError`` for a missing or empty file."""
    prompts: list[Prompt] = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a file. Give the path of a text file to continue.")
        text = path.read_bytes()[-LONGEST_PROMPT:]
        if not text:
            raise ValueError(f"{path} is empty. Give a file with at least one byte to continue from.")
        prompts.append(Prompt(path.name, text))
    return prompts
