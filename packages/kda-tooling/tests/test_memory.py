"""`kda memory`: its figures are those of a pool, and arguments that make no sense are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from kda_backend import StatePool, memory_plan
from kda_kernels import KdaShape
from kda_tooling.cli import app
from kda_tooling.commands.memory import COMPACT, DEFAULTS, FOLDING, parse_bytes, readable

runner = CliRunner()


def words(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def figures(*arguments: str) -> dict[str, Any]:
    result = runner.invoke(app, ["memory", *arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 << 30), ("80 gib", 80 << 30), (" 1.5GB ", 1_500_000_000), ("512MiB", 512 << 20), ("3kb", 3000),
        ("3KiB", 3 << 10), ("2TB", 2 * 10**12), ("2TiB", 2 << 40), ("1000000", 1_000_000), ("7B", 7), ("0.5KiB", 512),
    ],
)  # fmt: skip
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert parse_bytes("--budget", text) == expected


@pytest.mark.parametrize(
    "text", ["", "80G", "GiB", "-1GiB", "+1GiB", "1e3", "nan", "inf", "0", "0GiB", "0.1B", "1,5GB", "80GiBs", "٣GiB",
             "80 Gi B", "9999999TiB", "9" * 400],
)  # fmt: skip
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes("--budget", text)


@pytest.mark.parametrize(
    ("amount", "text"), [(5, "5 B"), (1536, "1.50 KiB"), (80 << 30, "80.00 GiB"), (3 << 40, "3.00 TiB")]
)
def test_amounts_are_readable(amount: int, text: str) -> None:
    assert readable(amount) == text


def test_figures_are_those_of_the_pool_that_fits() -> None:
    """What is reported can be built, takes so many bytes, and one more request would not fit."""
    shape, budget = KdaShape(2, 4, 64, 128), 40_000_000
    report = figures(
        "--budget", str(budget), "--heads", "2", "--hv-heads", "4", "--head-k-dim", "64", "--head-v-dim", "128",
        "--layers", "3", "--draft-tokens", "5", "--ring-length", "6", "--spare-slots", "7", "--dtype", "float16",
        "--fold-on-verify", "--compact-window",
    )  # fmt: skip
    assert len(report["modes"]) == 6
    assert report["shape"] == vars(shape)
    assert not report["default_shape"]
    for mode, found in report["modes"].items():
        requests = found["requests"]
        assert requests > 1
        compact, mode = mode.endswith(COMPACT), mode.removesuffix(COMPACT)
        sizes: dict[str, Any] = {"num_layers": 3, "mode": mode, "dtype": torch.float16, "draft_tokens": 5}
        sizes["compact_window"] = compact
        if mode != "snapshots":
            sizes |= {"mode": "ring", "ring_length": 6, "fold_on_verify": mode == FOLDING}
        pool = StatePool(shape, **sizes, num_slots=requests + 7, max_batch=requests, device="meta")
        assert pool.num_bytes == found["total_bytes"] <= budget
        for name, group in (("ring", pool.ring), ("pending", pool.pending)):
            held = 0 if group is None else group.num_bytes
            assert found[f"{name}_bytes_per_slot"] * pool.num_slots == held
        more = memory_plan(shape, **sizes, num_slots=requests + 8, max_batch=requests + 1)
        assert more.total_bytes == found["total_bytes"] + found["bytes_per_request"] > budget


def test_the_default_shape_is_stated_and_can_be_named() -> None:
    by_default = figures("--budget", "80GiB")
    assert by_default["default_shape"]
    assert by_default == figures(
        "--budget", str(80 << 30), "--heads", str(DEFAULTS["heads"]), "--hv-heads", str(DEFAULTS["heads"]),
        "--layers", "20", "--head-k-dim", "128", "--head-v-dim", "128", "--draft-tokens", "4", "--dtype", "bfloat16",
    )  # fmt: skip
    ring, snapshots = (by_default["modes"][mode]["requests"] for mode in ("ring", "snapshots"))
    assert ring > 4 * snapshots
    output = words(runner.invoke(app, ["memory", "--budget", "80GiB"]).output)
    for part in (
        "Default shape: Kimi-Linear-48B-A3B on one GPU: 20 KDA layers, 32 heads of 128.",
        "20 KDA layers, H = 32, HV = 32, K = 128, V = 128, bfloat16, T = 4, L = 4",
        f"ring {ring} ",
        f"snapshots {snapshots} ",
    ):
        assert part in output
    assert "Default shape" not in words(runner.invoke(app, ["memory", "--budget", "80GiB", "--heads", "8"]).output)


def test_fold_on_verify_is_a_line_of_its_own_and_only_if_asked_for() -> None:
    plain, both = figures("--budget", "80GiB"), figures("--budget", "80GiB", "--fold-on-verify")
    assert {mode: both["modes"][mode] for mode in plain["modes"]} == plain["modes"]
    ring, folding = both["modes"]["ring"], both["modes"][FOLDING]
    assert folding["ring_bytes_per_slot"] == 2 * ring["ring_bytes_per_slot"]
    # 20 layers of 32 heads of 16 entries, and three numbers of each slot
    assert (ring["pending_bytes_per_slot"], folding["pending_bytes_per_slot"]) == (0, 4 * (20 * 32 * 16 + 3))
    output = words(runner.invoke(app, ["memory", "--budget", "80GiB", "--fold-on-verify"]).output)
    assert f"ring, fold on verify {folding['requests']} " in output
    assert "fold on verify" not in words(runner.invoke(app, ["memory", "--budget", "80GiB"]).output)


def test_a_budget_too_small_for_one_request() -> None:
    for found in figures("--budget", "1MiB")["modes"].values():
        assert (found["requests"], found["total_bytes"]) == (0, 0)
    result = runner.invoke(app, ["memory", "--budget", "1MiB", "--spare-slots", "3"])
    assert result.exit_code == 0
    needed = min(
        memory_plan(KdaShape(32, 32), 20, mode, torch.bfloat16, num_slots=4, max_batch=1, draft_tokens=4).total_bytes
        for mode in ("ring", "snapshots")
    )
    said = f"Not one request fits: the first beside 3 spare slots needs {readable(needed)}, --budget is 1.00 MiB.\n"
    assert result.stderr == said


@pytest.mark.parametrize(
    ("budget", "hint"),
    [("80", "80GiB"), ("80 B", "80GiB"), ("080b", None), ("80kB", None), ("9" * 12, None)],
    ids=["none", "B", "zero", "kB", "beyond"],
)
def test_a_forgotten_unit_is_asked_about(budget: str, hint: str | None) -> None:
    sizes = () if budget != "9" * 12 else ("--spare-slots", "100000")  # in GiB, more than an address can reach
    result = runner.invoke(app, ["memory", "--budget", budget, *sizes, "--json", "-"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["modes"]["ring"]["requests"] == 0
    assert result.stderr.endswith(f"; did you mean {hint}?\n" if hint else "B.\n")


def test_a_budget_that_one_mode_can_use_is_not_remarked_upon() -> None:
    plan = memory_plan(KdaShape(32, 32), 20, "ring", torch.bfloat16, num_slots=1, max_batch=1, draft_tokens=4)
    result = runner.invoke(app, ["memory", "--budget", str(plan.total_bytes), "--json", "-"])
    requests = {mode: found["requests"] for mode, found in json.loads(result.stdout)["modes"].items()}
    assert requests == {"ring": 1, "snapshots": 0}
    assert "Not one request fits" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--budget'"),
        (["--budget", "80 gigs"], "'80 gigs' is no amount of memory"),
        (["--budget", "0"], "less than one byte"),
        (["--budget", "1GiB", "--heads", "0"], "--heads must be at least 1, got 0"),
        (["--budget", "1GiB", "--heads", "3", "--hv-heads", "4"], "--hv-heads must be a multiple of --heads"),
        (["--budget", "1GiB", "--head-k-dim", "96"], "--head-k-dim must be one of (64, 128), got 96"),
        (["--budget", "1GiB", "--layers", "0"], "'--layers': Input should be greater than or equal to 1"),
        (["--budget", "1GiB", "--draft-tokens", "-1"], "'--draft-tokens': Input should be greater than or equal to 1"),
        (["--budget", "1GiB", "--draft-tokens", "4", "--ring-length", "3"], "3 is less than the 4 tokens"),
        (["--budget", "1GiB", "--spare-slots", "-1"], "'--spare-slots': Input should be greater than or equal to 0"),
        (["--budget", "1GiB", "--dtype", "fp32"], "'fp32' is no activation type; allowed are bf16 and fp16"),
        (["--budget", "1GiB", "--head", "8"], "No such option"),
        *(
            (["--budget", "1GiB", option, "1" + 320 * "0"], f"'{option}': Input should be less than or equal to")
            for option in ("--heads", "--hv-heads", "--layers", "--draft-tokens", "--ring-length", "--spare-slots")
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value[-2:]),
)
def test_wrong_arguments_exit_with_2(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["memory", *arguments])
    assert result.exit_code == 2
    assert message in words(result.output)


def test_a_file_gets_the_figures_and_people_the_table(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    result = runner.invoke(app, ["memory", "--budget", "80GiB", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text()) == figures("--budget", "80GiB")
    assert result.stdout == runner.invoke(app, ["memory", "--budget", "80GiB"]).stdout
    assert "Requests in 80.00 GiB" in runner.invoke(app, ["memory", "--budget", "80GiB", "--json", "-"]).stderr


@pytest.mark.parametrize(("file", "message"), [("", "is a folder"), ("missing/memory.json", "is missing")])
def test_where_figures_cannot_be_written_none_are_worked_out(
    file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kda_backend.memory_plan", None)
    result = runner.invoke(app, ["memory", "--budget", "80GiB", "--json", str(tmp_path / file)])
    assert result.exit_code == 2, (result.output, result.exception)
    assert message in words(result.output)
    assert not list(tmp_path.iterdir())


def test_the_largest_sizes_can_be_shown() -> None:
    sizes = [
        part for name in ("--heads", "--layers", "--draft-tokens", "--spare-slots") for part in (name, str(1 << 20))
    ]
    assert runner.invoke(app, ["memory", "--budget", "1GiB", *sizes]).exit_code == 0


def test_help_has_an_example() -> None:
    assert "kda memory --budget 80GiB" in words(runner.invoke(app, ["memory", "--help"]).output)
