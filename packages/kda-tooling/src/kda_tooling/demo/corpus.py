"""Source text of the Python standard library: what the demo model learns from and what it never sees."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

DOCUMENT_START = 0
"""Byte put in front of every document; it does not occur in Python source."""

HELD_OUT = (
    "shlex",
    "csv",
    "calendar",
    "textwrap",
    "queue",
    "statistics",
    "heapq",
    "bisect",
    "fractions",
    "colorsys",
    "string",
    "sched",
    "configparser",
    "fnmatch",
    "graphlib",
    "zipfile",
    "difflib",
    "contextlib",
    "filecmp",
    "pprint",
)
"""Modules left out of training, in the order in which the demo looks for prompts. Long-lived modules of
different kinds (algorithms, parsers, arithmetic, formatting), none with a near copy elsewhere in the library."""

SKIPPED_FOLDERS = frozenset(
    {
        # Not the library itself, or not installed everywhere.
        "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "ensurepip", "lib-dynload",
        # Generated tables and vendored topics: bytes without grammar.
        "encodings", "pydoc_data", "unicode",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """Training text and held-out documents, each document as its raw bytes.

    ``train`` is every training document preceded by :data:`DOCUMENT_START`; ``held_out`` maps module names to text.
    """

    train: bytes
    held_out: dict[str, bytes]

    @property
    def held_out_bytes(self) -> int:
        """Bytes of all held-out documents together."""
        return sum(len(text) for text in self.held_out.values())


def stdlib_folder() -> Path:
    """Folder of the standard library that belongs to the running interpreter."""
    return Path(sysconfig.get_paths()["stdlib"])


def _top_module(relative: Path) -> str:
    return relative.parts[0].removesuffix(".py")


def source_files(folder: Path | None = None) -> list[Path]:
    """Every ``*.py`` of the library outside :data:`SKIPPED_FOLDERS`, sorted, held-out modules included."""
    folder = folder or stdlib_folder()
    files = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]) and not relative.parts[0].startswith("_sysconfigdata"):
            files.append(path)
    return files


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the library and split it by module: a held-out package is left out with everything in it.

    Raises ``FileNotFoundError`` when the interpreter has no library source (some minimal images ship only bytecode).
    """
    folder = folder or stdlib_folder()
    train: list[bytes] = []
    held_out: dict[str, bytes] = {}
    for path in source_files(folder):
        module = _top_module(path.relative_to(folder))
        text = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\0", b"")
        if not text:
            continue
        if module in HELD_OUT:
            held_out[module] = held_out.get(module, b"") + text
        else:
            train.append(bytes([DOCUMENT_START]) + text)
    if not train or not held_out:
        raise FileNotFoundError(
            f"folder={folder} holds {len(train)} training files and {len(held_out)} held-out modules; both are "
            "needed. Use a Python that is installed with its standard library source."
        )
    return Corpus(b"".join(train), held_out)


def read_held_out(module: str, folder: Path | None = None) -> bytes | None:
    """Text of one held-out module (its ``__init__`` for a package), or None when this Python lacks it."""
    folder = folder or stdlib_folder()
    for path in (folder / f"{module}.py", folder / module / "__init__.py"):
        if path.is_file():
            return path.read_bytes().replace(b"\r\n", b"\n").replace(b"\0", b"")
    return None
