"""`kda accuracy`: its oracle, its counts, its judgement; on a GPU the chunked form's contract itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kda_kernels import KdaShape, reference_precision, verify_reference
from kda_tooling.bench import accuracy as module
from kda_tooling.bench.accuracy import (
    LEAST_JUDGED,
    AccuracySettings,
    Comparison,
    Difference,
    Errors,
    after_record,
    build_arms,
    measure,
    report_data,
    spacing,
)
from kda_tooling.cli import app
from kda_tooling.commands import accuracy as command
from kda_tooling.problem import VerifyProblem, random_problems

SHAPE = KdaShape(1, 2, 64, 128)
SMALL = AccuracySettings(draft_tokens=(1, 3), outputs=1500, shape=SHAPE)
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def words(output: str) -> str:
    """The output as one line, without the frame of an error."""
    return " ".join(output.replace("│", " ").split())


@pytest.fixture
def verified(device: str) -> VerifyProblem:
    """A problem after an unfused+ring verify: its workspace and ring are filled."""
    problem = random_problems(
        SHAPE, layers=1, batch=2, draft_tokens=3, dtype=torch.bfloat16, device=device, seed=3
    ).layers[0]
    build_arms(SMALL, problem)["kda recurrent"][0].verify(problem)
    return problem


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_the_oracle_is_the_reference_in_fp64(form: str, verified: VerifyProblem) -> None:
    """Two ways to one result: by request from mixed_qkv, and batched from what verify has stored."""
    p = verified
    exact = after_record(p, form, torch.float64)
    assert exact.dtype == torch.float64
    with reference_precision(torch.float64):
        out = verify_reference(
            p.mixed_qkv, p.a, p.b, shape=p.shape, params=p.params, state=p.state, record=p.record("ring"),
            slots=p.slots, draft_tokens=p.draft_tokens,
        )  # fmt: skip
    error = (out.double() - exact).abs()
    # half an ulp of its rounding; the fp32 g and beta that exact starts from are good to 1e-6
    assert bool((error <= spacing(exact, torch.bfloat16) / 2 + 1e-5 * exact.abs().max()).all())
    assert bool((error <= spacing(exact, torch.bfloat16) / 2).double().mean() > 0.99)


def test_the_two_forms_are_one_function_in_fp64(verified: VerifyProblem) -> None:
    one, other = (after_record(verified, form, torch.float64) for form in ("recurrent", "chunked"))
    assert float((one - other).norm() / one.norm()) < 1e-14
    one, other = (after_record(verified, form, torch.float32) for form in ("recurrent", "chunked"))
    assert 1e-9 < float((one - other).norm() / one.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_spacing_is_the_distance_of_neighbours(dtype: torch.dtype) -> None:
    values = torch.arange(0x7C00 if dtype == torch.float16 else 0x7F80, dtype=torch.int16).view(dtype).double()
    gaps = values.diff()
    assert torch.equal(spacing(values[:-1], dtype), gaps)
    assert torch.equal(spacing(-values[:-1] - gaps / 4, dtype), gaps)


def test_errors_are_summed_over_problems() -> None:
    exact = torch.tensor([1.0, 1.0, -2.0, 0.5], dtype=torch.float64)
    out = torch.tensor([1.0, 1 + 2**-7, -2 - 2**-5, 0.5], dtype=torch.bfloat16)
    errors = Errors()
    for part in (slice(0, 2), slice(2, 4)):
        errors.add(out[part], exact[part], spacing(exact[part], torch.bfloat16))
    assert (errors.outputs, errors.within, errors.max_ulps) == (4, 3, 2.0)
    assert errors.norm == pytest.approx(np.linalg.norm([2**-7, 2**-5]) / np.linalg.norm([1, 1, 2, 0.5]))
    errors = Errors()
    errors.add(torch.full((2,), float("nan")), exact[:2], spacing(exact[:2], torch.bfloat16))
    assert errors.within == 0


def test_differing_values_are_counted_by_the_nearer_side() -> None:
    exact = torch.tensor([1.0, 2.0, 3.0, 0.0, 5.0], dtype=torch.float64)
    one = torch.tensor([1.0, 2.5, 3.0, 0.0, 5.5])
    other = torch.tensor([1.5, 2.25, 3.0, -0.0, 4.5])
    difference = Difference()
    difference.add(one, other, exact)
    assert difference == Difference(differ=3, one_nearer=1, other_nearer=1, equally_near=1)


def comparison(within: int, ratio: float, before: float, outputs: int = 1_000_000) -> Comparison:
    def errors(norm: float, within: int = outputs) -> Errors:
        return Errors(outputs, within, 1.0, norm**2, 1.0)

    return Comparison(
        4, {"kda recurrent": errors(1e-3), "kda chunked": errors(ratio * 1e-3, within)},
        {"recurrent": errors(1e-7), "chunked": errors(before * 1e-7)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("within", "ratio", "before", "message"),
    [
        (999_900, 1.0009, 1.99, None),
        (999_899, 1.0, 1.0, "T = 4: 99.9899% of outputs within 1 ulp, at least 99.99%"),
        (1_000_000, 1.0011, 1.0, "error norm 1.00110x the recurrent form's, at most 1.001x"),
        (1_000_000, 1.0, 2.01, "error norm before rounding 2.01x"),
        (1_000_000, float("nan"), 1.0, "error norm nanx"),
    ],
)
def test_the_contract_is_judged(within: int, ratio: float, before: float, message: str | None) -> None:
    broken = comparison(within, ratio, before).broken_promises()
    assert broken is not None
    assert len(broken) == (0 if message is None else 1)
    assert message is None or message in broken[0]
    assert comparison(0, ratio, before, outputs=LEAST_JUDGED - 1).broken_promises() is None


def test_a_small_run_has_every_figure(device: str) -> None:
    steps: list[tuple[int, int]] = []
    found = measure(SMALL, device, lambda t, done: steps.append((t, done)))
    assert [one.draft_tokens for one in found] == [1, 3]
    assert steps == [(1, 1500), (3, 1500)]
    for one in found:
        assert list(one.arms) == ["kda recurrent", "kda chunked"]
        for errors in one.arms.values():
            assert errors.outputs >= 1500
            assert errors.within > 0.99 * errors.outputs
            assert 1e-3 < errors.norm < 2e-3, "bf16 rounding: uniform within half of 2^-8..2^-7"
        assert one.over_recurrent("kda chunked") == pytest.approx(1, abs=0.01)
        assert 1e-8 < one.before_rounding["chunked"].norm < 1e-6
        assert 0.3 < one.before_rounding_ratio < 3
        assert list(one.pairs) == [("kda recurrent", "kda chunked")]
        assert one.pairs["kda recurrent", "kda chunked"].differ < 0.01 * errors.outputs
    data = report_data(SMALL, found, device)
    assert json.loads(json.dumps(data, allow_nan=False)) == data | {
        "settings": json.loads(json.dumps(data["settings"]))
    }
    assert data["cells"][0]["broken_promises"] is None
    assert data["machine"]["kernels"] == ("interpreter" if device == "cpu" else "compiled")


def test_problems_follow_each_other_until_there_are_enough_outputs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BATCH", 2)
    (found,) = measure(AccuracySettings(draft_tokens=(2,), outputs=1025, shape=SHAPE), device)
    assert {errors.outputs for errors in found.arms.values()} == {2 * 2 * 2 * 2 * 128}


class Elsewhere:
    """A peer whose fused lane is ours with the last bit of one value flipped."""

    name, version = "sglang", "9"

    def verify_arms(self, problem: VerifyProblem) -> dict[str, Any]:
        arm = build_arms(SMALL, problem)["kda recurrent"][1]

        def flipped(p: VerifyProblem) -> torch.Tensor:
            out = arm.verify(p)
            out.view(torch.int16).view(-1)[0] ^= 1
            return out

        def rolling(p: VerifyProblem) -> torch.Tensor:
            out = arm.verify(p)
            p.state.conv_state.fill_(7.0)
            return out

        return {"unfused+ring": rolling, "fused+ring bv4": flipped, "fused+ring bv8": arm.verify}

    def not_taken(self, problem: VerifyProblem) -> dict[str, str]:
        return {}

    def commit(self, *arguments: object) -> None:
        raise AssertionError("not called")


def test_a_peer_s_lanes_are_compared_too(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "load_peer", lambda spec: Elsewhere())
    settings = AccuracySettings(draft_tokens=(3,), outputs=2000, shape=SHAPE, peers=(f"sglang={tmp_path}",))
    monkeypatch.setattr(module, "MAX_BATCH", 2)
    (found,) = measure(settings, device)
    assert list(found.arms) == ["kda recurrent", "kda chunked", "sglang unfused+ring", "sglang fused+ring"]
    assert len(found.pairs) == 6
    assert found.pairs["kda recurrent", "sglang unfused+ring"].differ == 0
    one_each = found.pairs["kda recurrent", "sglang fused+ring"]
    assert one_each.differ == 2, "one value in each of two problems"
    assert one_each.one_nearer == 2
    data = report_data(settings, [found], device)
    assert data["peers"] == {"sglang": "9"}
    assert data["settings"]["peers"] == ["sglang"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--outputs 0", "--outputs must be within 1..1000000000; got 0"),
        ("--draft-tokens 4 17", "--draft-tokens must be within 1..16; got 17"),
        ("--draft-tokens 0", "got 0"),
        ("--dtype fp32", "allowed are bf16 and fp16"),
        ("--lower-bound 1", "--lower-bound must be finite and below 0"),
        ("--lower-bound safe", "'safe' is neither a number nor 'none'"),
        ("--heads 3 --hv-heads 4", "--hv-heads must be a multiple of --heads"),
        ("--head-k-dim 96", "--head-k-dim must be one of (64, 128)"),
        ("--peer sglang=TMP/missing", "of an existing folder"),
        ("--peer sglang=TMP", "holds no sglang/kernels folder"),
        ("--json TMP/missing/x.json", "the folder"),
        ("--seed -1", "--seed must be at least 0"),
        ("--nonsense", "No such option"),
    ],
)
def test_wrong_arguments_exit_with_2_before_anything_runs(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_measure", None)
    result = runner.invoke(app, ["accuracy", *arguments.replace("TMP", str(tmp_path)).split()])
    assert result.exit_code == 2, result.output
    assert message in words(result.output)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("interpreted", [True, False], ids=["interpreter", "no GPU"])
def test_without_a_gpu_the_error_says_what_to_use_instead(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = runner.invoke(app, ["accuracy"])
    assert result.exit_code == 2
    said = "ask for at most 50000" if interpreted else "TRITON_INTERPRET=1 kda accuracy --outputs 5000"
    assert said in words(result.output)


def test_help_has_an_example() -> None:
    result = runner.invoke(app, ["accuracy", "--help"])
    assert result.exit_code == 0
    assert "kda accuracy --draft-tokens" in words(result.output)


@pytest.mark.parametrize("where", ["file", "-", None])
def test_the_report_goes_where_it_was_asked_to(
    where: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_device", lambda outputs: "cpu")
    monkeypatch.setattr(command, "_measure", lambda settings, device: [comparison(1_000_000, 1.0, 1.0)])
    path = tmp_path / "out.json"
    arguments = [] if where is None else ["--json", str(path) if where == "file" else "-"]
    result = runner.invoke(app, ["accuracy", *arguments])
    assert result.exit_code == 0, result.output
    shown = result.stderr if where == "-" else result.stdout
    assert "The chunked form keeps its contract" in words(shown)
    assert "kda chunked" in shown
    if where is not None:
        data = json.loads(result.stdout if where == "-" else path.read_text())
        assert data["cells"][0]["broken_promises"] == []


def test_a_contract_that_is_missed_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_device", lambda outputs: "cpu")
    monkeypatch.setattr(command, "_measure", lambda settings, device: [comparison(999_000, 1.0, 1.0)])
    result = runner.invoke(app, ["accuracy"])
    assert result.exit_code == 1
    assert "missed: T = 4: 99.9000% of outputs within 1 ulp" in words(result.output)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["safe", "standard"])
def test_the_chunked_form_keeps_its_contract(dtype: str, lower_bound: float | None) -> None:
    """At least 10^6 outputs at each T."""
    settings = AccuracySettings(draft_tokens=(2, 3, 4, 8, 16), dtype=dtype, lower_bound=lower_bound)
    for found in measure(settings):
        assert found.broken_promises() == []
        assert found.arms["kda chunked"].outputs >= 1_000_000
