"""Folders of gate tables: a file is read once per process, and one that is no table is warned about once."""

from __future__ import annotations

import functools
import logging
import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kda_backend.gate.files import load_table
from kda_backend.gate.table import Table, TableError, name_prefix, name_suffix, table_name
from kda_kernels import KdaShape

logger = logging.getLogger("kda_backend.gate")

PACKAGED = str(Path(__file__).parent / "tables")
"""The folder of the tables that come with this package."""

MOST_NAMES = 10_000
"""Names of a folder that are looked at in search of tables of one architecture."""


class Lookup(NamedTuple):
    """What became of a look for a table: the table, or None and what was found instead."""

    table: Table | None
    said: str


class TableFolder:
    """The tables of a folder, as they were when each was first asked for; one that was missing then stays so.

    Args:
        path: the folder. One that is not there holds no tables; nor does a file.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._read: dict[str, Lookup] = {}

    def exact(self, shape: KdaShape, device_name: str, dtype: str, arch: str) -> Lookup:
        """The table for exactly this device; ``arch`` is `str` of its `kda_backend.Target`."""
        name = table_name(shape, device_name, dtype)
        found = self._file(name)
        if found.table is not None and found.table.arch != arch:
            problem = f"{self.path / name} is for {found.table.arch}, this {device_name} is {arch}"
            warn_once(problem, "%s: it is left alone", problem)
            return Lookup(None, problem)
        return found

    def same_arch(self, shape: KdaShape, device_name: str, dtype: str, arch: str) -> Iterator[Table]:
        """Tables of other devices of one architecture, by file name."""
        own, prefix, suffix = table_name(shape, device_name, dtype), name_prefix(shape), name_suffix(dtype)
        for name in self._names:
            if name.startswith(prefix) and name.endswith(suffix) and name != own:
                table = self._file(name).table
                if table is not None and table.arch == arch:
                    yield table

    @functools.cached_property
    def _names(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return sorted(entry.name for entry in islice(entries, MOST_NAMES))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return []
        except OSError as problem:
            _warn_unreadable(self.path, problem)
            return []

    def _file(self, name: str) -> Lookup:
        if name not in self._read:
            self._read[name] = self._load(self.path / name)
        return self._read[name]

    @staticmethod
    def _load(path: Path) -> Lookup:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have such a name
            there = "" if path.parent.is_dir() else ", which is no folder"
            return Lookup(None, f"no {path.name} in {path.parent}{there}")
        except OSError as problem:
            _warn_unreadable(path.parent, problem)
            return Lookup(None, f"{path.parent} cannot be read: {problem.strerror}")
        try:
            table = load_table(path)
        except TableError as problem:
            warn_once(str(path), "the gate leaves a table alone that it cannot use: %s", problem)
            return Lookup(None, f"cannot be used: {problem}")
        if table.doubts:
            warn_once(
                str(path), "%s: %d verdicts are not those of their figures and count as unfused, the first: %s "
                "(tables are written by kda tune, not by hand)", path, len(table.doubts), table.doubts[0],
            )  # fmt: skip
        return Lookup(table, f"read {path}")


@functools.lru_cache(maxsize=64)
def folder(path: str) -> TableFolder:
    """The folder ``path``, whose files are read once per process."""
    if path != PACKAGED and _is_no_folder(path):
        warn_once(path, "the gate finds no folder of tables at %s", path)
    return TableFolder(path)


def _is_no_folder(path: str) -> bool:
    """Whether there is none; of one that cannot be looked at it is not known, and whoever looks into it warns."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:
        return False


def _warn_unreadable(path: Path, problem: OSError) -> None:
    warn_once(str(path), "the gate cannot read the folder of tables %s: %s", path, problem.strerror)


_warned: set[str] = set()


def warn_once(about: str, message: str, *arguments: object) -> None:
    """Log a warning, once per process and ``about``."""
    if about not in _warned:
        _warned.add(about)
        logger.warning(message, *arguments)


def forget() -> None:
    """Forget every file read and every warning given: tables are looked up anew."""
    folder.cache_clear()
    _warned.clear()
