"""The dispatch gate: which lane a verify takes and how it is launched, from measured tables (docs/gate.md)."""

from kda_backend.gate.cells import OPTIONS, Cell, CellKey, Closed, LaneFigures, judged, option_name
from kda_backend.gate.decisions import SOURCES, Decision, Step, decide, device_name_of
from kda_backend.gate.env import ENV
from kda_backend.gate.files import dump_table, load_table, write_table
from kda_backend.gate.table import Provenance, Table, TableError, table_name

__all__ = [
    "ENV",
    "OPTIONS",
    "SOURCES",
    "Cell",
    "CellKey",
    "Closed",
    "Decision",
    "LaneFigures",
    "Provenance",
    "Step",
    "Table",
    "TableError",
    "decide",
    "device_name_of",
    "dump_table",
    "judged",
    "load_table",
    "option_name",
    "table_name",
    "write_table",
]
