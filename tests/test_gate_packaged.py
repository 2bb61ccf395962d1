"""D1: whatever the packaged gate tables launch gives the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_backend import StatePool, Target
from kda_backend.gate import OPTIONS, Cell, Table, load_table, option_name
from kda_backend.gate.cells import COMPACT_WINDOW, FOLD_ON_VERIFY, GATES
from kda_backend.gate.folders import PACKAGED
from kda_backend.lanes import lanes_of
from kda_kernels import KdaShape, LaunchConfig
from tests.support.bits import assert_same_bits
from tests.support.grids import config_id
from tests.support.tables import a_cell, a_table
from tests.test_gate_pool import PORTABLE_PAIRS, layer_params

Kind = tuple[str, str, str, str, int]
"""(gate, form, mode, option, T) of a cell."""


def kinds_of(table: Table) -> dict[Kind, list[Cell]]:
    """Kind -> the cells of ``table`` that are of it."""
    found: dict[Kind, list[Cell]] = {}
    for cell in table.cells:
        key = cell.key
        found.setdefault((key.gate, key.form, key.mode, key.option, key.draft_tokens), []).append(cell)
    return found


Arms = list[tuple[str, LaunchConfig | None]]
"""Lanes and their configurations."""


def arms_of(table: Table, kind: Kind) -> Arms:
    """What ``table``'s cells of ``kind`` launch, each once."""
    figures = [pair for cell in kinds_of(table).get(kind, []) for pair in cell.lanes.items()]
    return list(dict.fromkeys((lane, each.config) for lane, each in figures if each.why is None))


def alike(table: Table) -> str:
    """Tables that differ in the number of heads and not in their ratio are one here: to a kernel a head is a place in
    memory, and `kda tune` has compared the bits of each at its own."""
    shape = table.shape
    name = f"HV/H={shape.num_v_heads // shape.num_heads},K={shape.head_k_dim},V={shape.head_v_dim}"
    return f"{name},{table.device_name},{table.dtype}"


TABLES = [load_table(path) for path in sorted(Path(PACKAGED).glob("*.json"))]


def packaged_kinds() -> dict[str, tuple[Table, Kind, Arms]]:
    """A test's name -> of tables that are `alike` the one with the fewest heads, a kind, and what all launch there."""
    found: dict[str, tuple[Table, Kind, Arms]] = {}
    for name in dict.fromkeys(map(alike, TABLES)):
        tables = [table for table in TABLES if alike(table) == name]
        fewest = min(tables, key=lambda table: table.shape.num_v_heads)
        for kind in dict.fromkeys(kind for table in tables for kind in kinds_of(table)):
            arms = list(dict.fromkeys(arm for table in tables for arm in arms_of(table, kind)))
            found["-".join([name, *kind[:-1], f"T{kind[-1]}"])] = fewest, kind, arms
    return found


KINDS = packaged_kinds()


def two_rounds(
    table: Table, kind: Kind, device: str, lane: str, config: LaunchConfig | None
) -> tuple[StatePool, list[torch.Tensor]]:
    """A pool as cells of ``kind`` are for, and two rounds of it: outputs, and the states that they lead to."""
    gate, form, mode, option, T = kind
    shape, generator = table.shape, torch.Generator().manual_seed(T)
    dtype: torch.dtype = getattr(torch, table.dtype)
    params = layer_params(shape, device, -5.0 if gate == "safe" else None, dtype)
    pool = StatePool(
        shape, num_layers=1, num_slots=3, max_batch=3, draft_tokens=T, mode=mode, dtype=dtype, device=device,
        fold_on_verify=FOLD_ON_VERIFY in option, compact_window=COMPACT_WINDOW in option,
    )  # fmt: skip
    for tensor in (pool.conv_state, pool.ssm_state):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    widths = (shape.conv_dim, shape.num_v_heads * shape.head_k_dim, shape.num_v_heads)
    outs = []
    for accepted in ([T, 1, max(1, T - 1)], [1, T, 0]):  # in the second, a fold on verify has something to replay
        inputs = [torch.randn(3 * T, width, generator=generator).to(device, dtype) for width in widths]
        pool.begin(torch.tensor([2, 0, 1], device=device), T)
        outs.append(pool.verify(0, *inputs, params, lane=lane, config=config, form=form))
        pool.commit(torch.tensor(accepted, device=device))
    pool.flush()
    return pool, [*outs, pool.ssm_state, pool.conv_state]


def every_arm_has_the_same_bits(table: Table, kind: Kind, arms: Arms, device: str) -> StatePool:
    """Each of ``arms`` against the portable unfused lane; the last pool."""
    expected: list[torch.Tensor] = []
    for lane, config in dict.fromkeys([(lanes_of(kind[2])[0], LaunchConfig()), *arms]):
        pool, outcome = two_rounds(table, kind, device, lane, config)
        expected = expected or outcome
        for ours, wanted in zip(outcome, expected, strict=True):
            assert_same_bits(ours, wanted, f"{lane}, {'default' if config is None else config_id(config)}")
    return pool


def test_D1_no_packaged_configuration_is_left_out() -> None:
    for table in TABLES:
        for cell in table.cells:
            key = cell.key
            name = "-".join([alike(table), key.gate, key.form, key.mode, key.option, f"T{key.draft_tokens}"])
            launched = {(lane, each.config) for lane, each in cell.lanes.items() if each.why is None}
            assert launched <= set(KINDS[name][2]), (table.file_name, key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_D1_every_lane_with_the_configurations_of_the_packaged_tables(name: str, device: str) -> None:
    table, kind, arms = KINDS[name]
    if table.arch != str(Target.of(torch.device(device))):
        pytest.skip(f"a table for {table.arch}, which other GPUs run")
    every_arm_has_the_same_bits(table, kind, arms, device)


@pytest.mark.parametrize(("gate", "option"), [*(("safe", option) for option in OPTIONS), ("standard", OPTIONS[-1])])
def test_D1_is_about_the_gate_and_the_option_of_the_cells(
    gate: str, option: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of packaged tables, on a table of every gate and option with portable configurations."""
    shape, pair = KdaShape(1, 1, 64, 64), PORTABLE_PAIRS[1]
    cells = [
        a_cell(gate=g, option=o, draft_tokens=2, batch=b, configs=pair)
        for g, o in itertools.product(GATES, OPTIONS) for b in (1, 4)
    ]  # fmt: skip
    table = a_table(*cells, shape=shape)
    kind = (gate, "recurrent", "ring", option, 2)
    assert len(kinds_of(table)) == len(GATES) * len(OPTIONS)
    assert len(kinds_of(table)[kind]) == 2
    bounds: list[float | None] = []
    own = StatePool.verify

    def verify(self: StatePool, layer: int, *given: Any, **more: Any) -> torch.Tensor:
        bounds.append(given[3].lower_bound)
        return own(self, layer, *given, **more)

    monkeypatch.setattr(StatePool, "verify", verify)
    pool = every_arm_has_the_same_bits(table, kind, arms_of(table, kind), device)
    assert set(bounds) == {-5.0 if gate == "safe" else None}
    assert len(bounds) == 2 * 3, "two rounds of the reference and of each arm"
    assert option_name(fold_on_verify=pool.pending is not None, compact_window=pool.compact_window) == option
