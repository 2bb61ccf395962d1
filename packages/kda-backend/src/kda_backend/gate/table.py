"""Tables of measured verifies, one JSON file per device, head shape and activation dtype: name, contents, file.

Files are written by `kda tune` and never by hand; `kda_backend.gate.files` reads them and takes nothing on trust.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from kda_backend.gate.cells import LEAST_PASSES, MOST_PASSES, Cell, CellKey, one_line, one_of, whole
from kda_kernels import KdaShape
from kda_kernels.shapes import PDL_ARCH

SCHEMA = 1
"""Of the files that this version writes and reads."""

DTYPES = ("bfloat16", "float16")
MOST_MARGIN = 0.5
MOST_PROVENANCE = 2000
"""Characters of each text of a table's provenance."""
MOST_CELLS = 20_000


class TableError(ValueError):
    """A file that is no table of this schema; the message names the file, and the cell if one is at fault."""


@dataclass(frozen=True)
class Provenance:
    """Where a table's figures are from.

    Args:
        command: the `kda tune` command that made it.
        git_sha: commit of the measured code.
        date: ISO date.
        gpu, driver, torch, triton: device name and versions.
        timing: how it was timed, in a sentence.
        margin: share of unfused's time by which fused has to win each pass, 0 up to 0.5.
        passes: independent passes, at least 2.

    Raises:
        TypeError, ValueError: a text is no line, or a number out of range.
    """

    command: str
    git_sha: str
    date: str
    gpu: str
    driver: str
    torch: str
    triton: str
    timing: str
    margin: float
    passes: int

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name not in ("margin", "passes"):
                one_line(f"provenance.{each.name}", getattr(self, each.name), MOST_PROVENANCE)
        if isinstance(self.margin, bool) or not isinstance(self.margin, (int, float)):
            raise TypeError(f"provenance.margin must be a number, got {self.margin!r}")
        if not 0 <= self.margin < MOST_MARGIN:
            raise ValueError(f"provenance.margin must be a share within 0..{MOST_MARGIN}, got {self.margin}")
        whole("provenance.passes", self.passes, LEAST_PASSES, MOST_PASSES)


def table_name(shape: KdaShape, device_name: str, dtype: str) -> str:
    """File name of a table: ``H=8,HV=8,K=128,V=128,device_name=NVIDIA_H200,dtype=bfloat16.json``.

    Characters of ``device_name`` that are no letter, digit, point, plus or minus become underscores, as vLLM's and
    SGLang's users know it.
    """
    return f"{name_prefix(shape)}{file_device_name(device_name)}{name_suffix(dtype)}"


def name_prefix(shape: KdaShape) -> str:
    """What the names of all tables of a shape begin with."""
    return f"H={shape.num_heads},HV={shape.num_v_heads},K={shape.head_k_dim},V={shape.head_v_dim},device_name="


def name_suffix(dtype: str) -> str:
    """What the names of all tables of an activation dtype end in."""
    one_of("dtype", dtype, DTYPES)
    return f",dtype={dtype}.json"


def file_device_name(device_name: str) -> str:
    """A device's name in a file name."""
    one_line("device_name", device_name, 200)
    return re.sub(r"[^A-Za-z0-9.+-]", "_", device_name)


@dataclass(frozen=True)
class Table:
    """Everything that was measured on one device for one head shape and activation dtype.

    Args:
        shape: head layout of a layer, or of a tensor-parallel shard of it.
        device_name: as torch.cuda.get_device_name says it.
        arch: `str` of the `kda_backend.Target`: "sm90".
        dtype: one of `DTYPES`.
        provenance: where the figures are from.
        cells: in any order; kept sorted by key. Two of one key are refused.

    Raises:
        TypeError, ValueError: a value is refused; the message names the cell.
    """

    shape: KdaShape
    device_name: str
    arch: str
    dtype: str
    provenance: Provenance
    cells: tuple[Cell, ...] = ()

    def __post_init__(self) -> None:
        for name, value, kind in (("shape", self.shape, KdaShape), ("provenance", self.provenance, Provenance)):
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
        one_line("device_name", self.device_name, 200)
        one_line("arch", self.arch, 40)
        one_of("dtype", self.dtype, DTYPES)
        if len(self.cells) > MOST_CELLS:
            raise ValueError(f"cells must be at most {MOST_CELLS}, got {len(self.cells)}")
        object.__setattr__(self, "cells", tuple(sorted(self.cells, key=lambda cell: cell.key)))
        for before, cell in zip(self.cells, self.cells[1:], strict=False):
            if before.key == cell.key:
                raise ValueError(f"cell ({cell.key}) is there twice")
        for cell in self.cells:
            self._check(cell)

    def _check(self, cell: Cell) -> None:
        """ValueError for a configuration that verify refuses on this table's device, or missing passes."""
        nvidia = re.fullmatch(r"sm([0-9]+)", self.arch)
        for lane, figures in cell.lanes.items():
            config = figures.config
            if figures.why is None and len(figures.us) < self.provenance.passes:
                raise ValueError(
                    f"cell ({cell.key}): {lane} has {len(figures.us)} passes of provenance.passes="
                    f"{self.provenance.passes}"
                )
            if config is not None and config.rows_per_thread is not None and nvidia is None:
                raise ValueError(
                    f"cell ({cell.key}): {lane} has rows_per_thread={config.rows_per_thread}, a kernel for NVIDIA "
                    f"GPUs, and arch is {self.arch!r}"
                )
            if config is not None and config.pdl and (nvidia is None or int(nvidia[1]) < PDL_ARCH):
                raise ValueError(f"cell ({cell.key}): {lane} has pdl=true, which {self.arch} does not have")

    @property
    def file_name(self) -> str:
        """The name that the table is found under."""
        return table_name(self.shape, self.device_name, self.dtype)

    @property
    def margin(self) -> float:
        """Of the verdicts; see `Provenance`."""
        return self.provenance.margin

    def verdict(self, cell: Cell) -> str:
        """The lane to take by ``cell``; see `Cell.verdict`."""
        return cell.verdict(self.margin)

    @functools.cached_property
    def by_key(self) -> Mapping[CellKey, Cell]:
        """Key -> cell."""
        return MappingProxyType({cell.key: cell for cell in self.cells})

    @functools.cached_property
    def doubts(self) -> tuple[str, ...]:
        """Cells whose stated verdict is not the one that their figures support, in words; those count as unfused."""
        return tuple(
            f"cell ({cell.key}) states {cell.lane}, its figures support {supported}"
            for cell in self.cells
            if cell.lane != (supported := cell.supported(self.margin))
        )

    def buckets(self, *, gate: str, form: str, mode: str, option: str, draft_tokens: int) -> Mapping[int, Cell]:
        """B -> cell, ascending, at exactly these values.

        The standard gate takes the safe gate's cells for every B at which it has none of its own: tables state it where
        it differs. Not where the B before and the B after are its own: those know more of the B between them.
        """
        safe, own = (self._rows.get((form, mode, option, draft_tokens, one), {}) for one in ("safe", gate))
        every = sorted({*safe, *own})
        between = {b for a, b, c in zip(every, every[1:], every[2:], strict=False) if a in own and c in own}
        return {b: own.get(b) or safe[b] for b in every if b in own or b not in between}

    @functools.cached_property
    def _rows(self) -> dict[tuple[str, str, str, int, str], dict[int, Cell]]:
        rows: dict[tuple[str, str, str, int, str], dict[int, Cell]] = {}
        for cell in self.cells:
            key = cell.key
            row = rows.setdefault((key.form, key.mode, key.option, key.draft_tokens, key.gate), {})
            row[key.batch] = cell
        return rows
