"""`kda compile-report`: the budget is red when exceeded, and the rules on compiled code are red when broken.

Kernels are compiled in processes of their own, without the interpreter and without a GPU. What is compiled here is a
small part; `nox -s compile` does all of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from typer.testing import CliRunner

from kda_kernels import FORMS, KdaShape, _launch
from kda_kernels.aot import TARGETS, capture
from kda_kernels.defaults import default_verify_config
from kda_kernels.interpreter import is_interpreted
from kda_tooling.cli import app
from kda_tooling.compiling import report as report_module
from kda_tooling.compiling.budget import LIMITS_FROM, BudgetError, load_budget, over_budget, write_budget
from kda_tooling.compiling.ptx_flow import UNTRACED, trace_ptx
from kda_tooling.compiling.report import CompiledKernel, compile_all, compiled_kernels
from kda_tooling.compiling.rules import (
    COUNTERS,
    FOLDED_BUFFERS,
    INDICES,
    LAYER_PARAMETERS,
    RING_BUFFERS,
    SNAPSHOT_BUFFERS,
    broken_rules,
    expected_stores,
)
from kda_tooling.compiling.specs import SPECS, Selection
from kda_tooling.compiling.stats import amd_stats, sass_opcodes

ROOT = Path(__file__).parent.parent
BUDGET = ROOT / "benchmarks" / "compile-budget.json"

SMALL = Selection(
    targets=("sm90",),
    kernels=(
        "fused", "recurrence", "conv", "fold", "scatter_snapshots", "scatter_conv", "gather_conv", "advance", "flush",
    ),
    configs=(
        "ring-K128-T1", "snapshots-K128-T1", "K128-T4", "K128-T4-nopdl", "ring-K128-T4-pending", "ring-K128-T4-compact",
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], CompiledKernel]:
    """(kernel, configuration) -> compiled code, of `SMALL`."""
    results = compile_all(SMALL)
    assert [f"{r.config}: {r.failure}" for r in results if r.failure] == []
    return {(one.kernel, one.config): one for one in compiled_kernels(results, SMALL)}


def stores(one: CompiledKernel) -> set[str]:
    assert one.inspection is not None
    return set(one.inspection.stores)


@pytest.mark.parametrize("kernel", ["fused", "recurrence"])
def test_ring_off_code_carries_no_ring_stores_and_ring_code_no_snapshot_stores(
    compiled: dict[tuple[str, str], CompiledKernel], kernel: str
) -> None:
    ring, snapshots = compiled[kernel, "ring-K128-T1"], compiled[kernel, "snapshots-K128-T1"]
    assert stores(ring) >= RING_BUFFERS
    assert not stores(ring) & SNAPSHOT_BUFFERS
    assert stores(snapshots) >= SNAPSHOT_BUFFERS
    assert not stores(snapshots) & RING_BUFFERS
    assert not (stores(ring) | stores(snapshots)) & {"conv_state", "ssm_state"}


def test_fold_on_verify_writes_the_state_and_its_flags_and_only_advance_moves_the_bookkeeping(
    compiled: dict[tuple[str, str], CompiledKernel],
) -> None:
    for kernel, own in (("fused", {"out", "window"}), ("recurrence", {"out"})):
        assert stores(compiled[kernel, "ring-K128-T4-pending"]) - COUNTERS == own | RING_BUFFERS | FOLDED_BUFFERS
    assert stores(compiled["flush", "K128-T4"]) - COUNTERS == FOLDED_BUFFERS
    assert stores(compiled["advance", "K128-T4"]) - COUNTERS == {"parity", "pending", "epoch"}
    assert expected_stores("fused", "ring") & FOLDED_BUFFERS == set(), "another verify may not"


def test_compact_verify_notes_its_inputs_and_writes_no_window(
    compiled: dict[tuple[str, str], CompiledKernel],
) -> None:
    noted = {"kept_inputs"}
    assert stores(compiled["fused", "ring-K128-T4-compact"]) - COUNTERS == {"out"} | noted | RING_BUFFERS
    assert stores(compiled["recurrence", "ring-K128-T4-compact"]) - COUNTERS == {"out"} | RING_BUFFERS
    assert stores(compiled["conv", "ring-K128-T4-compact"]) == {"y"} | noted
    assert stores(compiled["gather_conv", "K128-T4"]) - COUNTERS == {"conv_state"}
    assert "window" in stores(compiled["fused", "ring-K128-T1"])


def test_nothing_but_layer_parameters_is_read_before_the_pdl_wait(
    compiled: dict[tuple[str, str], CompiledKernel],
) -> None:
    waiting = {key: one for key, one in compiled.items() if "nopdl" not in key[1]}
    for key, one in waiting.items():
        assert one.inspection is not None
        assert one.inspection.waits >= 1, key
        # The recurrence follows the conv kernel, which writes no index; a caller vouches for others.
        ready = INDICES if key[0] == "recurrence" or key[1].endswith("-ready") else frozenset()
        assert set(one.inspection.early_loads) <= LAYER_PARAMETERS | ready, key
    # The rule would hold in a kernel that reads nothing early; these do, so that it is known to look at something.
    fused = waiting["fused", "ring-K128-T1"].inspection
    assert fused is not None
    assert {"A_log", "dt_bias"} <= set(fused.early_loads)


def test_without_pdl_there_is_no_wait(compiled: dict[tuple[str, str], CompiledKernel]) -> None:
    off = [one for (_, config), one in compiled.items() if "nopdl" in config]
    assert len(off) >= 2
    assert all(one.inspection is not None and one.inspection.waits == 0 for one in off)


def test_no_compiled_kernel_breaks_a_rule(compiled: dict[tuple[str, str], CompiledKernel]) -> None:
    assert {key: one.broken for key, one in compiled.items() if one.broken} == {}


def test_figures_are_of_the_compiled_code(compiled: dict[tuple[str, str], CompiledKernel]) -> None:
    fused, conv = compiled["fused", "ring-K128-T1"].stats, compiled["conv", "ring-K128-T1"].stats
    assert 16 <= conv.registers <= 255
    assert conv.shuffles == 0, "a causal conv reduces over nothing"
    assert fused.shuffles >= 3 * 3, "two norms and two dot products over K need at least three shuffles each"
    assert fused.instructions > fused.shuffles + fused.global_loads + fused.global_stores > 0


# --- the rules, on code that breaks them -------------------------------------------------------------------------

PTX_ARGUMENTS = {"conv_weight": "*bf16", "slots": "*i32", "n": "i32", "out": "*bf16", "raw_k": "*bf16"}
GOOD_PTX = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0
)
.reqntid 128
{
	.reg .b64 	%rd<17>;
// %bb.0:
	ld.param.b64 	%rd1, [k_param_0];
	ld.param.b64 	%rd2, [k_param_1];
	ld.param.s32 	%rd3, [k_param_2];
	ld.param.b64 	%rd4, [k_param_3];
	ld.param.b64 	%rd5, [k_param_4];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd6, %r1, 4, %rd1;
	// begin inline asm
	mov.u32 %r2, 0x0;
	@%p1 ld.global.b32 { %r2 }, [ %rd6 + 0 ];
	// end inline asm
	griddepcontrol.wait; // dummy %r9
	ld.global.b32 	%r3, [%rd2];
	setp.lt.s32 	%p2, %r3, 0;
	@%p2 bra 	$L__BB0_2;
$L__BB0_1:
	mul.wide.s32 	%rd7, %r3, 256;
	add.s64 	%rd8, %rd5, %rd7;
	@%p1 st.global.v2.b32 [ %rd8 + 0 ], { %r2, %r2 };
$L__BB0_2:
	st.global.b32 	[%rd4], %r2;
	griddepcontrol.launch_dependents;
	ret;
}
"""
WANTED = frozenset({"out", "raw_k"})


def rules(ptx: str, wanted: frozenset[str] = WANTED, *, pdl: bool = True) -> list[str]:
    return broken_rules(trace_ptx(ptx, PTX_ARGUMENTS), wanted, pdl=pdl)


def moved(ptx: str, line: str, *, before: str) -> str:
    """``ptx`` with ``line`` taken out and put before the line ``before``."""
    assert ptx.count(line) == 1
    assert ptx.count(before) == 1
    return ptx.replace(line, "").replace(before, line + "\n" + before)


WAIT = "\tgriddepcontrol.wait; // dummy %r9\n"


def test_rules_accept_code_that_keeps_them() -> None:
    assert rules(GOOD_PTX) == []
    flow = trace_ptx(GOOD_PTX, PTX_ARGUMENTS)
    assert flow.stored == {"out", "raw_k"}
    assert [sorted(access.arguments) for access in flow.early_loads] == [["conv_weight"]]


@pytest.mark.parametrize(
    ("ptx", "pdl", "sentence"),
    [
        pytest.param(
            moved(GOOD_PTX, "\tld.global.b32 \t%r3, [%rd2];\n", before=WAIT), True,
            "reads slots before waiting", id="index-read-before-the-wait",
        ),
        pytest.param(
            moved(GOOD_PTX, WAIT, before="\tst.global.b32 \t[%rd4], %r2;\n"), True,
            "only after a branch", id="wait-after-a-branch",
        ),
        pytest.param(
            moved(GOOD_PTX, "\tst.global.b32 \t[%rd4], %r2;\n", before=WAIT), True,
            "stores before waiting", id="store-before-the-wait",
        ),
        pytest.param(GOOD_PTX.replace(WAIT, ""), True, "never waits", id="no-wait"),
        pytest.param(GOOD_PTX, False, "although PDL is off", id="wait-with-pdl-off"),
        pytest.param(
            GOOD_PTX.replace("[%rd4], %r2", "[%rd2], %r2"), True, "stores through slots", id="store-to-an-input"
        ),
        pytest.param(GOOD_PTX.replace("[%rd4], %r2", "[%rd9], %r2"), True, UNTRACED, id="store-to-an-unknown-address"),
        pytest.param(
            GOOD_PTX.replace("\t@%p1 st.global.v2.b32 [ %rd8 + 0 ], { %r2, %r2 };\n", ""), True,
            "never stores to raw_k", id="ring-store-missing",
        ),
    ],
)  # fmt: skip
def test_rules_refuse_code_that_breaks_them(ptx: str, pdl: bool, sentence: str) -> None:
    assert any(sentence in broken for broken in rules(ptx, pdl=pdl)), rules(ptx, pdl=pdl)


def test_a_ring_store_is_refused_where_no_ring_is_wanted() -> None:
    assert rules(GOOD_PTX, frozenset({"out"})) == ["stores through raw_k, which it must not write"]


def test_a_pointer_chosen_at_run_time_counts_as_both() -> None:
    choosing = GOOD_PTX.replace(
        "\tst.global.b32 \t[%rd4]", "\tselp.b64 \t%rd10, %rd4, %rd5, %p2;\n\tst.global.b32 \t[%rd10]"
    )
    assert trace_ptx(choosing, PTX_ARGUMENTS).stores[-1].arguments == {"out", "raw_k"}


# --- figures -----------------------------------------------------------------------------------------------------


def test_sass_is_counted_without_padding_and_with_predicates() -> None:
    sass = (
        "\tFunction : k\n"
        "        /*0000*/                   LDC R1, c[0x0][0x28] ;        /* 0x00000a00ff017b82 */\n"
        "                                                                 /* 0x000fe20000000800 */\n"
        "        /*0010*/              @!P0 STG.E desc[UR12][R2.64], R9 ;  /* 0x0 */\n"
        "        /*0020*/             @!UP1 SHFL.BFLY PT, R5, R6, 0x10, 0x1f ;  /* 0x0 */\n"
        "        /*0030*/                   BRA 0x830;  /* 0x0 */\n"
        "        /*0040*/                   NOP;  /* 0x0 */\n"
    )
    assert sass_opcodes(sass) == ["LDC", "STG.E", "SHFL.BFLY", "BRA"]


def test_amd_figures_come_from_assembly_and_metadata() -> None:
    amdgcn = (
        "k:\n\ts_load_dwordx2 s[2:3], s[0:1], 0x0\n\ts_nop 0\n\tds_swizzle_b32 v4, v2 offset:swizzle(SWAP,16)\n"
        "\tv_mov_b32_dpp v2, v2 row_shr:8 row_mask:0xf\n\tbuffer_load_dwordx4 v[2:5], v2, s[0:3], 0 offen\n"
        "\ts_barrier\n\tglobal_store_dword v[0:1], v2, off\n\ts_endpgm\n.Lfunc_end0:\n\tv_after_the_end\n"
        "    .group_segment_fixed_size: 0\n    .private_segment_fixed_size: 0\n"
        "    .vgpr_count:     21\n    .vgpr_spill_count: 2\n"
    )
    stats = amd_stats(amdgcn, shared=64)
    assert (stats.registers, stats.spills, stats.shared, stats.shuffles) == (21, 8, 64, 2)
    assert (stats.instructions, stats.barriers, stats.global_loads, stats.global_stores) == (7, 1, 1, 1)


# --- the budget --------------------------------------------------------------------------------------------------

VERSION = triton.__version__


def test_a_budget_goes_red_when_one_entry_is_lowered(
    tmp_path: Path, compiled: dict[tuple[str, str], CompiledKernel]
) -> None:
    measured, file = list(compiled.values()), tmp_path / "budget.json"
    write_budget(file, measured, VERSION, SMALL)
    limits = load_budget(file, VERSION)
    assert over_budget(measured, limits, SMALL) == []
    for figure, from_measured in LIMITS_FROM.items():
        lowered = json.loads(json.dumps(limits))
        entry = lowered["sm90"]["fused"]["ring-K128-T1"]
        value = getattr(compiled["fused", "ring-K128-T1"].stats, figure)
        assert entry[figure] == from_measured(value)
        entry[figure] = value - 1
        assert over_budget(measured, lowered, SMALL) == [
            f"sm90 fused ring-K128-T1: {figure} {value}, over the budget of {value - 1} by 1"
        ]


def test_the_command_exits_by_the_budget(tmp_path: Path) -> None:
    file, runner = tmp_path / "budget.json", CliRunner()
    command = ["compile-report", "--target", "gfx942", "--kernel", "scatter_conv", "--budget", str(file), "--jobs", "1"]
    assert runner.invoke(app, [*command, "--check"]).exit_code == 2
    written = runner.invoke(app, [*command, "--write-budget"])
    assert written.exit_code == 0, written.output
    content = json.loads(file.read_text())
    content["limits"]["gfx942"]["scatter_conv"]["K128-T4"]["instructions"] = 10
    file.write_text(json.dumps(content))
    report = tmp_path / "report.json"
    red = runner.invoke(app, [*command, "--check", "--json", str(report)])
    assert red.exit_code == 1, red.output
    assert re.search(r"gfx942 scatter_conv K128-T4: instructions \d+, over the budget of 10 by \d+", red.output)
    assert "--write-budget" in red.output
    data = json.loads(report.read_text())
    assert data["kernels"][0]["registers"] > 0
    assert data["commit"]
    assert data["whole"] is False, "a part of what is compiled says nothing of how much that is"


def test_a_kernel_without_limits_and_limits_without_a_kernel_are_named(
    compiled: dict[tuple[str, str], CompiledKernel],
) -> None:
    one = compiled["fold", "K128-T4"]
    entry = dict.fromkeys(LIMITS_FROM, 10**6)
    only = Selection(kernels=("fold",))
    assert over_budget([one], {}, only) == [
        "sm90 fold K128-T4: has no budget; add it with `kda compile-report --write-budget`"
    ]
    stale = {"sm90": {"fold": {"K128-T4": entry, "K128-T99": entry}, "conv": {"K128-T99": entry}}}
    assert over_budget([one], stale, only) == [
        "sm90 fold K128-T99: in the budget but no longer compiled; remove it with `kda compile-report --write-budget`"
    ]


def test_a_partial_write_keeps_the_other_entries(
    tmp_path: Path, compiled: dict[tuple[str, str], CompiledKernel]
) -> None:
    file = tmp_path / "budget.json"
    write_budget(file, compiled.values(), VERSION, Selection())
    one = compiled["fold", "K128-T4"]
    cheaper = replace(one, stats=replace(one.stats, registers=16))
    write_budget(file, [cheaper], VERSION, Selection(kernels=("fold",), configs=("K128-T4",)))
    limits = load_budget(file, VERSION)["sm90"]
    assert limits["fold"]["K128-T4"]["registers"] == 24
    assert {(kernel, config) for kernel in limits for config in limits[kernel]} == set(compiled)


def test_a_budget_of_another_triton_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "budget.json"
    file.write_text(json.dumps({"triton": "3.1.4", "limits": {}}))
    with pytest.raises(BudgetError, match=r"written for triton 3\.1\.4, this is triton .*install triton==3\.1\.4"):
        load_budget(file, VERSION)
    file.write_text("{}")
    with pytest.raises(BudgetError, match="cannot be read"):
        load_budget(file, VERSION)


def test_the_checked_in_budget_covers_every_configuration_for_the_pinned_triton() -> None:
    pinned = re.search(r"^triton==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    limits = load_budget(BUDGET, pinned.group(1))
    wanted = {(target, label, spec.name) for target, specs in SPECS.items() for spec in specs for label in spec.labels}
    there = {
        (target, kernel, config) for target in limits for kernel in limits[target] for config in limits[target][kernel]
    }
    assert there == wanted
    assert set(limits) == set(TARGETS)


@pytest.mark.parametrize("pending", [False, True], ids=["", "pending"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("draft_tokens", [4, 8])
def test_every_default_configuration_is_compiled(
    draft_tokens: int, form: str, pending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both lanes; one of them stands for both, where the other's default is the same."""
    monkeypatch.setattr(_launch, "TARGET_OVERRIDE", ("cuda", 90))
    shape = KdaShape(8, 8, 128, 128)
    chosen = {
        default_verify_config(
            shape,
            batch,
            draft_tokens,
            torch.device("cpu"),
            form=form,
            fused=fused,
            pending=pending,
        )
        for batch in (1, 2, 3, 8, 9, 16, 17, 24, 25, 256)
        for fused in (False, True)
    }
    compiled = {
        spec.config
        for spec in SPECS["sm90"]
        if (spec.draft_tokens, spec.chunked, spec.pending) == (draft_tokens, form == "chunked", pending)
    }
    assert chosen <= compiled


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "--write-budget"], "'--check': excludes --write-budget"),
        (["--json", "FOLDER"], "is a folder"),
        (["--json", "FOLDER/missing/report.json"], "is missing"),
        (["--check", "--budget", "FOLDER/none.json"], "'--budget': there is no budget"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_compiled(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_run(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(report_module, "compile_all", must_not_run)
    given = [argument.replace("FOLDER", str(tmp_path)) for argument in arguments]
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["compile-report", *given])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--target", "--kernel", "--config"])
def test_an_unknown_name_is_refused_by_name(option: str) -> None:
    result = CliRunner().invoke(app, ["compile-report", option, "sm91"])
    assert result.exit_code == 2
    said = re.sub(r"[│\s]+", " ", result.output)  # in a box, wrapped
    assert f"{option} must be one of" in said
    assert "got 'sm91'" in said


def test_an_unknown_target_cannot_be_captured() -> None:
    with pytest.raises(ValueError, match=r"target must be one of sm80, .*; got 'sm91'"), capture("sm91"):
        pass


@pytest.mark.skipif(not is_interpreted(), reason="kernels run compiled here")
def test_the_interpreter_cannot_compile() -> None:
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), capture("sm90"):
        pass
