"""What the installed distribution has of the gate: the folder of packaged tables, and a file that comes back equal."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kda_backend.gate import CellKey, LaneFigures, Provenance, Table, judged, load_table, write_table
from kda_kernels import KdaShape, LaunchConfig

TEXTS = ("kda tune", "0123456789ab", "2026-11-29", "NVIDIA H200", "580.1", "2.11.0", "3.6.0", "CUDA-graph replays")


def test_the_packaged_tables_are_tables_by_their_names() -> None:
    folder = Path(str(files("kda_backend.gate.tables")))
    assert folder.is_dir()
    for path in folder.glob("*.json"):
        table = load_table(path)
        assert table.doubts == ()
        assert table.cells


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    lanes = {"unfused": LaneFigures((4.0, 4.1)), "fused": LaneFigures((2.0, 2.1), config=LaunchConfig(8))}
    cell = judged(CellKey("safe", "recurrent", "snapshots", "plain", 4, 8), lanes, 0.02)
    table = Table(KdaShape(1, 2, 64, 64), "NVIDIA H200", "sm90", "float16", Provenance(*TEXTS, 0.02, 2), (cell,))
    loaded = load_table(write_table(table, tmp_path))
    assert loaded == table
    assert loaded.verdict(loaded.cells[0]) == "fused"
