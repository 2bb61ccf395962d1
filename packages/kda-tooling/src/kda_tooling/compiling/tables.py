"""What gate tables launch, as compile specs: every distinct kernel configuration, for the table's architecture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kda_backend.gate import Cell, Table, load_table
from kda_backend.gate.cells import COMPACT_WINDOW, FOLD_ON_VERIFY, GATES
from kda_kernels.aot import TARGETS
from kda_tooling.compiling.budget import Limits
from kda_tooling.compiling.specs import CompileSpec, Specs
from kda_tooling.names import short_dtype


def load_tables(folder: Path) -> list[Table]:
    """Every table in ``folder``, by name.

    Raises:
        TableError: a file there is no table.
    """
    return [load_table(path) for path in sorted(folder.glob("*.json"))]


def table_specs(tables: Iterable[Table]) -> Specs:
    """Target -> specs of every configuration that a cell of ``tables`` names, each once.

    Raises:
        ValueError: a table is of an architecture that nothing is compiled for.
    """
    found: dict[str, dict[CompileSpec, None]] = {}
    for table in tables:
        if table.arch not in TARGETS:
            raise ValueError(f"{table.file_name} is for {table.arch}; kernels are compiled for {', '.join(TARGETS)}")
        specs = found.setdefault(table.arch, {})
        for cell in table.cells:
            specs.update(dict.fromkeys(_specs(table, cell)))
    return {target: tuple(specs) for target, specs in found.items()}


def _specs(table: Table, cell: Cell) -> list[CompileSpec]:
    shape, key = table.shape, cell.key
    v = None if shape.head_v_dim == shape.head_k_dim else shape.head_v_dim
    return [
        CompileSpec(
            "verify_unfused" if lane.startswith("unfused") else "verify_fused", key.mode,
            heads=(shape.num_heads, shape.num_v_heads), head_dim=shape.head_k_dim, head_v_dim=v,
            draft_tokens=key.draft_tokens, dtype=short_dtype(table.dtype), safe_gate=key.gate == GATES[0],
            config=figures.config, chunked=key.form == "chunked", pending=FOLD_ON_VERIFY in key.option,
            compact=COMPACT_WINDOW in key.option,
        )
        for lane, figures in cell.lanes.items()
        if figures.config is not None
    ]  # fmt: skip


def not_in(limits: Limits, specs: Specs) -> Specs:
    """The specs with a kernel that ``limits`` has no entry for."""
    return {
        target: tuple(
            spec
            for spec in of_target
            if any(spec.name not in limits.get(target, {}).get(label, {}) for label in spec.labels)
        )
        for target, of_target in specs.items()
    }
