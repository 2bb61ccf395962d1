"""Which gate cell a cell of the history is, and that both names are the ones that ``benchmarks/`` uses."""

from __future__ import annotations

import importlib
import itertools

import pytest

import benchmarks
from benchmarks import store
from kda_backend import LANES
from kda_backend.gate import CellKey
from kda_kernels import KdaShape
from kda_tooling.history import gate_cells
from kda_tooling.history.gate_cells import DEFAULTS, NEEDED, GatePlace, gate_place, machine_name, of_machine
from kda_tooling.history.reading import CellName
from kda_tooling.names import long_dtype
from tests.support.histories import LATENCY, RING
from tests.support.tables import a_table

NAMES = ("lane", "T", "B")
KEY = CellKey("safe", "recurrent", "ring", "plain", 4, 16)
SHAPE = KdaShape(8, 8, 128, 128)


def place(*params: str, names: tuple[str, ...] = NAMES, benchmark: str = LATENCY) -> GatePlace | None:
    return gate_place(CellName(benchmark, params), names)


@pytest.mark.parametrize("name", gate_cells.VERIFY_BENCHMARKS)
def test_every_named_benchmark_exists_and_all_its_cells_are_gate_cells(name: str) -> None:
    module, suite, function = name.split(".")
    found = getattr(importlib.import_module(f"benchmarks.{module}"), suite)
    assert callable(getattr(found, function))
    assert set(NEEDED) <= set(found.param_names)
    assert found.unit.startswith("us per layer")
    for params in itertools.product(*found.params):
        cell = place(*map(str, params), names=tuple(found.param_names), benchmark=name)
        given = dict(zip(found.param_names, params, strict=True))
        assert cell is not None
        assert cell.lane == str(given["lane"]).split()[0]
        assert (cell.key.draft_tokens, cell.key.batch) == (given["T"], given["B"])


def test_the_defaults_are_what_the_suite_is_about() -> None:
    shape = benchmarks.SETTINGS["shape"]
    assert isinstance(shape, dict)
    assert KdaShape(*(int(DEFAULTS[one]) for one in ("H", "HV", "K", "V"))) == KdaShape(**shape)
    assert long_dtype(str(benchmarks.SETTINGS["dtype"])) == DEFAULTS["dtype"]
    assert (benchmarks.SETTINGS["lower_bound"] is not None) == (DEFAULTS["gate"] == "safe")
    assert not any(benchmarks.SETTINGS.get(option) for option in benchmarks.UNSET), "option plain"
    assert tuple(RING) == NAMES


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X (gfx942)"])
def test_machines_are_named_as_the_store_names_them(gpu: str) -> None:
    assert machine_name(gpu) == store.machine_name(gpu)
    table = a_table(device_name=gpu)
    assert of_machine(table, machine_name(gpu), None)
    assert of_machine(table, "elsewhere", gpu)
    assert not of_machine(table, machine_name(gpu), "another GPU")
    assert not of_machine(table, "another_GPU", None)


def test_a_lane_s_cell() -> None:
    assert place("fused+ring", "4", "16") == GatePlace(SHAPE, "bfloat16", KEY, "fused+ring")
    assert {place(lane, "4", "16").key.mode for lane in LANES} == {"ring", "snapshots"}  # type: ignore[union-attr]


def test_a_parameter_of_a_default_s_name_overrides_it() -> None:
    found = place(
        "fused+ring", "4", "16", "16", "32", "fp16", "standard", "chunked",
        names=("lane", "T", "B", "H", "HV", "dtype", "gate", "form"),
    )  # fmt: skip
    key = CellKey("standard", "chunked", "ring", "plain", 4, 16)
    assert found == GatePlace(KdaShape(16, 32, 128, 128), "float16", key, "fused+ring")


def test_a_sweep_s_column_states_the_form() -> None:
    found = place("fused+ring chunked", "4", "16")
    assert found is not None
    assert (found.lane, found.key.form) == ("fused+ring", "chunked")


@pytest.mark.parametrize(
    ("params", "names", "benchmark"),
    [
        (("fused+ring", "4", "16"), NAMES, "ratios.FusedOverUnfused.track_ring"),
        (("fused+ring", "4"), NAMES, LATENCY),
        (("4", "16"), ("T", "B"), LATENCY),
        (("reference", "4", "16"), NAMES, LATENCY),
        (("fused+ring", "four", "16"), NAMES, LATENCY),
        (("fused+ring", "0", "16"), NAMES, LATENCY),
        (("fused chunked", "4", "16"), NAMES, LATENCY),
        (("fused+ring fold-on-verify", "4", "16"), NAMES, LATENCY),  # a round decides there
        (("fused+ring chunked compact", "4", "16"), NAMES, LATENCY),
        (("fused+ring", "4", "16", "compact-window"), (*NAMES, "option"), LATENCY),
        (("fused+ring", "4", "16", "7"), (*NAMES, "H"), LATENCY),
    ],
)
def test_what_is_no_gate_cell_is_none(params: tuple[str, ...], names: tuple[str, ...], benchmark: str) -> None:
    assert place(*params, names=names, benchmark=benchmark) is None
