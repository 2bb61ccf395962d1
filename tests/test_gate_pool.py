"""The dispatch gate under a state pool: lanes and configurations of its tables reach the kernels and change no bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_backend import StatePool, Target
from kda_backend.gate import OPTIONS, Table, device_name_of, write_table
from kda_backend.lanes import lanes_of
from kda_kernels import KdaShape, LaunchConfig, LayerParams
from tests.support.bits import assert_same_bits
from tests.support.tables import a_cell, a_table

pytestmark = pytest.mark.usefixtures("fresh_gate")

FORMS_OF_MODES = [("recurrent", "ring"), ("chunked", "ring"), ("recurrent", "snapshots")]
STEPS = 3
SMALL, LARGE = KdaShape(1, 2, 64, 64), KdaShape(2, 4, 128, 128)

PORTABLE_PAIRS = [(LaunchConfig(8, 1), LaunchConfig(16, 2)), (LaunchConfig(32, 2), LaunchConfig(64, 4)), (None, None)]
GLUON_PAIRS = [
    (LaunchConfig(16, 4, rows_per_thread=1), LaunchConfig(32, 4, rows_per_thread=2, state_first=True)),
    (LaunchConfig(8, 1), LaunchConfig(64, 8, rows_per_thread=2)),
    (LaunchConfig(64, 4, rows_per_thread=4), LaunchConfig(16, 1)),
    (None, LaunchConfig(128, 8, rows_per_thread=4, max_registers=128)),
]
"""(unfused, fused) configurations of the buckets, in turn."""


def own_table(shape: KdaShape, device: str, *given: Any) -> Table:
    """A table for the device that tests run on."""
    where = torch.device(device)
    return a_table(*given, shape=shape, device_name=device_name_of(where), arch=str(Target.of(where)))


def layer_params(
    shape: KdaShape, device: str, lower_bound: float | None, dtype: torch.dtype = torch.bfloat16
) -> LayerParams:
    generator = torch.Generator().manual_seed(5)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device)

    return LayerParams(
        normal(shape.conv_dim, 4).to(dtype), normal(shape.conv_dim).to(dtype), normal(shape.num_v_heads),
        normal(shape.num_v_heads * shape.head_k_dim), lower_bound=lower_bound,
    )  # fmt: skip


def one_round(
    shape: KdaShape, device: str, form: str, mode: str, batch: int, lower_bound: float | None = -5.0
) -> tuple[str, dict[str, torch.Tensor]]:
    """A round without a lane named: the lane that the gate took, and everything that the round wrote."""
    generator = torch.Generator().manual_seed(batch)
    pool = StatePool(
        shape, num_layers=1, num_slots=batch + 1, max_batch=batch, draft_tokens=STEPS, mode=mode, device=device
    )
    for tensor in (pool.conv_state, pool.ssm_state):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    rows = batch * STEPS
    widths = (shape.conv_dim, shape.num_v_heads * shape.head_k_dim, shape.num_v_heads)
    inputs = [torch.randn(rows, width, generator=generator).to(device, torch.bfloat16) for width in widths]
    slots = torch.randperm(batch, generator=generator).to(device, torch.int32)
    pool.begin(slots, STEPS)
    params = layer_params(shape, device, lower_bound)
    lane = pool.lane_choice(form, safe_gate=lower_bound is not None).lane
    out = pool.verify(0, *inputs, params, form=form)
    pool.commit(torch.randint(0, STEPS + 1, (batch,), generator=generator).to(device, torch.int32))
    wrote = {"out": out, "conv_state": pool.conv_state, "ssm_state": pool.ssm_state, "conv_window": pool.conv_window}
    record = {
        name: value[:, :batch] for name, value in vars(pool.record).items() if isinstance(value, torch.Tensor)
    }  # the last slot is nobody's
    return lane, wrote | record


def same_bits_in_both_lanes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shape: KdaShape, device: str, form: str, mode: str,
    batches: list[int], pairs: list[tuple[LaunchConfig | None, LaunchConfig | None]],
) -> None:  # fmt: skip
    """Rounds under a table of fused verdicts, under one of unfused ones, and under none: every bit the same."""
    from kda_backend.gate.decisions import forget_decisions
    from kda_backend.gate.env import process_settings

    buckets = [b for b in (1, 2, 4, 8, 16, 32, 64) if b <= batches[-1]]
    outcomes = []
    for fused in (True, False):
        cells = [
            a_cell(fused=fused, form=form, mode=mode, draft_tokens=STEPS, batch=b, configs=pairs[i % len(pairs)])
            for i, b in enumerate(buckets)
        ]
        own = folder / str(fused)
        own.mkdir()
        write_table(own_table(shape, device, *cells), own)
        monkeypatch.setenv("KDA_GATE_TABLES", str(own))
        process_settings.cache_clear()
        outcomes.append([one_round(shape, device, form, mode, batch) for batch in batches])
    monkeypatch.delenv("KDA_GATE_TABLES")
    process_settings.cache_clear()
    forget_decisions()
    outcomes.append([one_round(shape, device, form, mode, batch) for batch in batches])
    unfused_lane, fused_lane = lanes_of(mode)
    for batch, (lane, fused), (other, unfused), (_, neither) in zip(batches, *outcomes, strict=True):
        assert (lane, other) == (fused_lane, unfused_lane)
        for name in fused:
            assert_same_bits(fused[name], unfused[name], f"{name}, B={batch}")
            assert_same_bits(neither[name], unfused[name], f"{name}, B={batch}, without a table")


@pytest.mark.parametrize(("form", "mode"), FORMS_OF_MODES)
def test_changing_the_lane_changes_no_bit(
    form: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    same_bits_in_both_lanes(tmp_path, monkeypatch, SMALL, device, form, mode, [1, 2, 3], PORTABLE_PAIRS)


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "mode"), FORMS_OF_MODES)
def test_changing_the_lane_changes_no_bit_from_1_to_64(
    form: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    same_bits_in_both_lanes(tmp_path, monkeypatch, LARGE, device, form, mode, list(range(1, 65)), GLUON_PAIRS)


class TestPool:
    def pool(self, device: str, **changes: Any) -> StatePool:
        given: dict[str, Any] = dict(
            num_layers=2, num_slots=4, max_batch=4, draft_tokens=STEPS, mode="ring", device=device
        )
        return StatePool(SMALL, **given | changes)

    def test_lane_and_configuration_reach_the_kernels(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        configs = (LaunchConfig(8, 1), LaunchConfig(32, 2))
        made = [a_cell(batch=b, fused=b == 2, draft_tokens=STEPS, configs=configs) for b in (1, 2)]
        write_table(own_table(SMALL, device, *made), tmp_path)
        monkeypatch.setenv("KDA_GATE_TABLES", str(tmp_path))
        seen: list[tuple[str, LaunchConfig | None]] = []
        from kda_backend import pool as module

        for lane, op in list(module._VERIFY.items()):

            def note(*args: Any, _lane: str = lane, _op: Any = op, **keywords: Any) -> torch.Tensor:
                seen.append((_lane, keywords["config"]))
                return _op(*args, **keywords)

            monkeypatch.setitem(module._VERIFY, lane, note)
        for batch in (1, 2):
            one_round(SMALL, device, "recurrent", "ring", batch)
        assert seen == [("unfused+ring", configs[0]), ("fused+ring", configs[1])]

    def test_the_gate_is_asked_once_per_round_form_and_gate(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        from kda_backend import pool as module

        asked: list[dict[str, Any]] = []
        real = module.decide
        monkeypatch.setattr(module, "decide", lambda shape, **given: asked.append(given) or real(shape, **given))
        pool = self.pool(device)
        for batch in (1, 2):
            pool.begin(torch.arange(batch, device=device), STEPS)
            for _layer in range(2):
                for form in ("recurrent", "chunked"):
                    for safe in (True, False):
                        pool.lane_choice(form, safe_gate=safe)
        found = [(given["batch"], given["form"], given["safe_gate"]) for given in asked]
        assert found == list(itertools.product((1, 2), ("recurrent", "chunked"), (True, False)))
        assert {given["dtype"] for given in asked} == {torch.bfloat16}

    @pytest.mark.parametrize(
        ("folding", "compact", "option"),
        [(False, False, OPTIONS[0]), (True, False, OPTIONS[1]), (False, True, OPTIONS[2]), (True, True, OPTIONS[3])],
    )
    def test_the_pool_s_option_is_passed(
        self, folding: bool, compact: bool, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        cells = [
            a_cell(fused=one == option, option=one, batch=2, draft_tokens=STEPS, configs=(None, None))
            for one in OPTIONS
        ]
        write_table(own_table(SMALL, device, *cells), tmp_path)
        monkeypatch.setenv("KDA_GATE_TABLES", str(tmp_path))
        pool = self.pool(device, fold_on_verify=folding, compact_window=compact)
        pool.begin(torch.arange(2, device=device), STEPS)
        choice = pool.lane_choice()
        assert (choice.lane, choice.source) == ("fused+ring", "user table")

    def test_the_layer_s_gate_is_passed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        key: dict[str, Any] = dict(batch=2, draft_tokens=STEPS, configs=(None, None))
        table = own_table(SMALL, device, a_cell(**key), a_cell(gate="standard", fused=False, **key))
        write_table(table, tmp_path)
        monkeypatch.setenv("KDA_GATE_TABLES", str(tmp_path))
        assert one_round(SMALL, device, "recurrent", "ring", 2, -5.0)[0] == "fused+ring"
        assert one_round(SMALL, device, "recurrent", "ring", 2, None)[0] == "unfused+ring"

    def test_D5_a_ragged_batch_is_unfused_whatever_the_table_says(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        """Lengths [3, 1, 2] and two rows of nobody: they come out as zeros, records past a length stay."""
        write_table(own_table(SMALL, device, a_cell(draft_tokens=STEPS, configs=(None, None))), tmp_path)
        monkeypatch.setenv("KDA_GATE_TABLES", str(tmp_path))
        pool = self.pool(device)
        assert pool.ring is not None
        for tensor in vars(pool.ring).values():
            tensor.fill_(7.0)
        starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32, device=device)
        pool.begin(torch.arange(3, dtype=torch.int32, device=device), STEPS, starts=starts)
        choice = pool.lane_choice()
        assert (choice.lane, choice.launch, choice.source) == ("unfused+ring", None, "fallback")
        widths = (SMALL.conv_dim, SMALL.num_v_heads * 64, SMALL.num_v_heads)
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(8, width, generator=generator).to(device, torch.bfloat16) for width in widths]
        out = pool.verify(0, *inputs, layer_params(SMALL, device, -5.0))
        assert out[6:].count_nonzero() == 0
        assert out[:6].isfinite().all()
        for slot, length in enumerate((3, 1, 2)):
            for tensor in (pool.ring.raw_v, pool.ring.raw_k, pool.ring.g, pool.ring.beta):
                assert (tensor[0, slot, :, length:] == 7).all()
                assert not (tensor[0, slot, :, :length] == 7).all()

    def test_D4_a_tree_is_unfused_whatever_the_table_says(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        write_table(
            own_table(SMALL, device, a_cell(mode="snapshots", draft_tokens=STEPS, configs=(None, None))), tmp_path
        )
        monkeypatch.setenv("KDA_GATE_TABLES", str(tmp_path))
        pool = self.pool(device, mode="snapshots")
        parents = torch.tensor([[-1, 0, 0]], device=device)
        pool.begin(torch.arange(1, device=device), STEPS, parents=parents)
        choice = pool.lane_choice()
        assert (choice.lane, choice.source) == ("unfused", "fallback")
        assert "(a tree)" in choice.reason

    def test_a_lane_that_is_forced_and_impossible_leaves_the_round_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        monkeypatch.setenv("KDA_LANE", "fused")
        pool = self.pool(device)
        before = pool.ssm_state.clone()
        pool.begin(torch.arange(1, device=device), STEPS)
        inputs = [torch.zeros(STEPS, width, dtype=torch.bfloat16, device=device) for width in (SMALL.conv_dim, 128, 2)]
        with pytest.raises(ValueError, match="KDA_LANE=fused forces a lane that is impossible here"):
            pool.verify(0, *inputs, layer_params(SMALL, device, -5.0))
        assert not pool._current_round().verified
        assert torch.equal(pool.ssm_state, before)
        pool.verify(0, *inputs, layer_params(SMALL, device, -5.0), lane="fused+ring")

    def test_parameters_of_another_class_are_refused_by_name(self, device: str) -> None:
        pool = self.pool(device)
        pool.begin(torch.arange(1, device=device), STEPS)
        inputs = [torch.zeros(STEPS, width, dtype=torch.bfloat16, device=device) for width in (SMALL.conv_dim, 128, 2)]
        with pytest.raises(TypeError, match="params must be"):
            pool.verify(0, *inputs, None)  # type: ignore[arg-type]

    @pytest.mark.gpu
    def test_D2_a_decision_and_its_round_wait_for_no_device(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        """The table is read while a graph is captured, and the captured round replays to the eager one's bits."""
        pair = GLUON_PAIRS[0]
        write_table(own_table(SMALL, device, a_cell(batch=2, draft_tokens=STEPS, configs=(None, pair[1]))), tmp_path)
        monkeypatch.setenv("KDA_GATE_TABLES", str(tmp_path))
        inputs = [torch.randn(2 * STEPS, w, device=device).bfloat16() for w in (SMALL.conv_dim, 128, 2)]
        params = layer_params(SMALL, device, -5.0)
        slots, accept = torch.tensor([2, 0], device=device), torch.tensor([2, 3], device=device)

        def round_of(pool: StatePool) -> torch.Tensor:
            pool.begin(slots, STEPS)
            out = pool.verify(0, *inputs, params)
            pool.commit(accept)
            return out

        warm, captured = self.pool(device, num_layers=1), self.pool(device, num_layers=1)
        for pool in (warm, captured):
            pool.conv_state.zero_()
            pool.ssm_state.zero_()
        eager = round_of(warm)  # compiles
        states = warm.ssm_state.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.cuda.set_sync_debug_mode("error")
            try:
                out = round_of(captured)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        decision = captured._decide(
            batch=2, draft_tokens=STEPS, form="recurrent", safe_gate=True, ragged=False, tree=False
        )
        assert (decision.source, decision.launch) == ("user table", pair[1])
        assert_same_bits(out, eager, "out")
        assert_same_bits(captured.ssm_state, states, "ssm_state")
