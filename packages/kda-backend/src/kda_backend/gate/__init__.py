"""The dispatch gate: which lane a verify takes and how it is launched, from measured tables (docs/gate.md)."""

from kda_backend.gate.cells import Cell, CellKey, Closed, LaneFigures, judged, option_name
from kda_backend.gate.files import dump_table, load_table, write_table
from kda_backend.gate.table import Provenance, Table, TableError, table_name

__all__ = [
    "Cell",
    "CellKey",
    "Closed",
    "LaneFigures",
    "Provenance",
    "Table",
    "TableError",
    "dump_table",
    "judged",
    "load_table",
    "option_name",
    "table_name",
    "write_table",
]
