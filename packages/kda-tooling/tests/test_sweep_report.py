"""Tables, the README's block, and `kda report`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kda_tooling.bench import tables as table_module
from kda_tooling.bench.markdown import BEGIN, END, replace_block, results_block, results_markdown, summary_markdown
from kda_tooling.bench.results import SweepResult
from kda_tooling.bench.settings import SweepSettings
from kda_tooling.bench.tables import best_ratio, columns, header, tables
from kda_tooling.cli import app

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
PAGE = f"# Title\n\nbefore\n{BEGIN}\nstale\n{END}\nafter\n"


def printed(result: SweepResult, every_arm: bool = False) -> list[list[str]]:
    """The tables' rows as a terminal 250 columns wide shows them, cells stripped."""
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables(result, every_arm):
        console.print(table)
    lines = console.export_text().splitlines()
    return [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]


def rows(text: str) -> list[list[str]]:
    """The cells of a Markdown text's table rows."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_a_row_says_latency_spread_and_ratio_to_the_floor(example: SweepResult) -> None:
    lines = printed(example)
    assert ["verify, T = 4: us per layer ±spread, x byte floor"] in lines
    assert ["verify, T = 8: us per layer ±spread, x byte floor"] in lines
    heads = next(line for line in lines if line[0] == "B")
    assert heads == [
        "B", "layers", "floor, ring", "kda fused", "kda fused+ring", "kda unfused", "kda unfused+ring",
        "sglang fused+ring", "sglang unfused+ring", "best ours / best sglang",
    ]  # fmt: skip
    row = dict(zip(heads, next(line for line in lines if line[0] == "64"), strict=True))
    arm = example.cells[3].best("kda", lane="fused+ring")
    assert arm is not None
    assert row["kda fused+ring"] == f"{arm.median_us:.2f} ±1.0%  {arm.median_us / arm.floor_us:.2f}x"
    assert row["floor, ring"] == f"{arm.floor_us:.2f}"
    assert row["layers"] == "192"
    # the lane's fastest arm stands for it: bv16, not bv4
    assert row["sglang fused+ring"].startswith(f"{example.cells[3].arms[6].median_us:.2f} ")
    ratio = best_ratio(example.cells[3], "sglang")
    assert ratio == arm.median_us / min(a.median_us for a in example.cells[3].arms if a.owner == "sglang")
    assert row["best ours / best sglang"] == f"{ratio:.2f}"


def test_lanes_that_are_too_many_to_stand_side_by_side_are_listed(
    example: SweepResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    across = printed(example)
    monkeypatch.setattr(table_module, "MOST_COLUMNS", 5)
    down = printed(example)
    heads = next(line for line in across if line[0] == "B")
    for batch in ("1", "64"):
        row = dict(zip(heads, next(line for line in across if line[0] == batch), strict=True))
        at = next(line for line in down if line[0] == "lane").index(f"B = {batch}")
        for name in heads[2:]:
            assert next(line for line in down if line[0] == name)[at] == row[name]


def test_every_arm_has_a_row_of_its_own_on_demand(example: SweepResult) -> None:
    names = [line[0] for line in printed(example, every_arm=True)]
    for arm in example.cells[0].arms:
        assert names.count(arm.name) == 2


def test_our_columns_come_first_whatever_a_peer_is_called(example: SweepResult) -> None:
    arms = [dataclasses.replace(arm, owner=arm.owner.replace("sglang", "a-peer")) for arm in example.cells[0].arms]
    result = dataclasses.replace(example, cells=[dataclasses.replace(example.cells[0], arms=arms)])
    assert [owner for owner, _ in columns(result)] == ["kda"] * 4 + ["a-peer"] * 2


def test_missing_arms_and_hot_cells_are_shown(sweep_factory: Callable[..., SweepResult]) -> None:
    hot = sweep_factory(SweepSettings(hot=True, batch_sizes=(1, 4), lanes=("fused+ring",)))
    first = dataclasses.replace(
        hot.cells[0], arms=hot.cells[0].arms[:1], skipped={"sglang fused+ring": "it takes 3 draft tokens or more"}
    )
    lines = printed(dataclasses.replace(hot, cells=[first, hot.cells[1]]))
    row = next(line for line in lines if line[0] == "1")
    assert row[1] == "1 hot"
    assert row[-3:] == ["-", "-", "-"]
    assert any("not measured: sglang fused+ring: it takes 3 draft tokens or more" in line[0] for line in lines)


def test_the_header_names_machine_versions_and_peers(example: SweepResult) -> None:
    text = header(example)
    for part in ("Example GPU (sm90)", "SM 1, memory 2", "driver 1.2", "60 MiB", "4.30 TB/s", "2.11.0", "3.6.0",
                 "0123456789ab", "2026-01-31", "sglang 0.5.23"):  # fmt: skip
        assert part in text


def test_markdown_has_provenance_and_a_table_per_draft_length(example: SweepResult) -> None:
    text = results_markdown(example, "benchmarks/measured/x.json")
    for part in (
        "one Example GPU, 2026-01-31 beside sglang 0.5.23",
        "H = 8, HV = 8, K = 128, V = 128, bf16, safe gate -5; CUDA-graph replays, L2-cold, arms interleaved",
        "passes within 1.0 % of their median (typically 1.0 %), PDL on in every arm",
        "at the 4.30 TB/s that a device copy reached",
        "torch 2.11.0, triton 3.6.0, commit 0123456789ab",
        "Data: `benchmarks/measured/x.json`, measured with "
        "`kda sweep --batch-sizes 1 4 16 64 256 --draft-tokens 4 8 --peer sglang=peer`",
    ):
        assert part in text
    found = rows(text)
    assert [row[0] for row in found] == [
        "verify, T = 4", "---", *(f"B = {b}" for b in (1, 4, 16, 64, 256)),
        "verify, T = 8", "---", *(f"B = {b}" for b in (1, 4, 16, 64, 256)),
    ]  # fmt: skip
    assert len({len(row) for row in found}) == 1
    bold = [[cell for cell in row if cell.startswith("**")] for row in found if row[0].startswith("B =")]
    best = [min(arm.median_us for arm in cell.arms) for cell in example.cells]
    assert bold == [[f"**{us:.2f}**"] for us in best]


def test_markdown_of_other_settings(sweep_factory: Callable[..., SweepResult]) -> None:
    settings = SweepSettings(hot=True, kind="round", accept=2, lower_bound=None, lanes=("fused",))
    result = sweep_factory(settings)
    cells = [dataclasses.replace(c, arms=[a for a in c.arms if a.owner == "kda"]) for c in result.cells]
    old = dataclasses.replace(result.machine, sm=80)
    text = results_markdown(dataclasses.replace(result, machine=old, peers={}, cells=cells), "x.json")
    assert "L2-hot" in text
    assert "standard gate" in text
    assert "PDL" not in text
    assert "beside" not in text
    assert "| round, accept 2, T = 4 | kda fused | byte floor |" in text
    assert rows(text)[2][-1] == "-"  # the floor shown is that of ring lanes


def test_the_summary_has_ours_over_theirs_at_every_batch_size(
    example: SweepResult, sweep_factory: Callable[..., SweepResult]
) -> None:
    rounds = sweep_factory(SweepSettings(kind="round", batch_sizes=(1, 2)))
    text = summary_markdown([example, rounds])
    assert text.splitlines()[0] == (
        "Times of the fastest ring lanes, ours over theirs, below 1 where ours is faster (Example GPU: H = 8, HV = 8, "
        "K = 128, V = 128, bf16, L2-cold, 2026-01-31, sglang 0.5.23):"
    )
    head, _, *lines = rows(text)
    assert head == ["", "", *(f"B = {b}" for b in (1, 2, 4, 16, 64, 256))]
    assert [line[:2] for line in lines] == [
        [title, "best ours / best sglang"] for title in (*example.groups(), *rounds.groups())
    ]
    four = {cell.batch: best_ratio(cell, "sglang") for cell in example.groups()["verify, T = 4"]}
    assert lines[0][2:] == [f"{four[b]:.2f}" if b in four else "-" for b in (1, 2, 4, 16, 64, 256)]


def test_every_gpu_and_shape_has_a_summary_of_its_own(example: SweepResult, tmp_path: Path) -> None:
    other = dataclasses.replace(example, machine=dataclasses.replace(example.machine, gpu="Other GPU"))
    found = results_block([(example, tmp_path / "a.json"), (other, tmp_path / "b.json")], tmp_path / "README.md")
    titles = [line for line in found.splitlines() if line.startswith("Times of the fastest")]
    assert ["Other GPU" in title for title in titles] == [False, True]


def test_there_is_no_summary_without_a_peer(example: SweepResult, tmp_path: Path) -> None:
    ours = [dataclasses.replace(c, arms=[a for a in c.arms if a.owner == "kda"]) for c in example.cells]
    alone = dataclasses.replace(example, peers={}, cells=ours)
    assert summary_markdown([alone]) == ""
    assert results_block([(alone, tmp_path / "x.json")], tmp_path / "README.md").startswith("<details>")


def test_only_the_part_between_the_markers_is_replaced_and_again_the_same(example: SweepResult, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    block = results_block([(example, tmp_path / "data" / "x.json")], page)
    once = replace_block(PAGE, block)
    assert once.startswith(f"# Title\n\nbefore\n{BEGIN}\n")
    assert once.endswith(f"{END}\nafter\n")
    assert "stale" not in once
    assert replace_block(once, block) == once
    assert "`data/x.json`" in once
    assert once.count("Renewed by `kda report data/x.json --readme README.md`.") == 1


def test_odd_names_are_quoted_where_a_page_uses_them(example: SweepResult, tmp_path: Path) -> None:
    text = results_block([(example, tmp_path / "a b.json")], tmp_path / "R.md", tmp_path / "p [1] (a).png")
    assert "](p%20%5B1%5D%20%28a%29.png)" in text
    assert "`kda report 'a b.json' --readme R.md --plot 'p [1] (a).png'`" in text


@pytest.mark.parametrize(
    "text",
    ["nothing", f"{BEGIN} only", f"only {END}", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}", f"{BEGIN} {END} {END}"],
)
def test_missing_doubled_or_swapped_markers_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="once each, in this order"):
        replace_block(text, "new")


@pytest.fixture
def stored(example: SweepResult, sweep_factory: Callable[..., SweepResult], tmp_path: Path) -> Path:
    """A folder with two sweeps and a page."""
    (tmp_path / "verify.json").write_text(example.to_json())
    (tmp_path / "round.json").write_text(sweep_factory(SweepSettings(kind="round")).to_json())
    (tmp_path / "README.md").write_text(PAGE)
    return tmp_path


def test_report_renews_page_and_picture_by_one_command(stored: Path) -> None:
    arguments = ["report", str(stored / "verify.json"), str(stored / "round.json"), "--readme"]
    arguments += [str(stored / "README.md"), "--plot", str(stored / "sweep.png")]
    for _ in range(2):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert "verify, T = 8" in result.output
    assert "round, accept 3, T = 4" in result.output
    text = (stored / "README.md").read_text()
    assert text.count("](sweep.png)") == 1
    assert "`kda report verify.json round.json --readme README.md --plot sweep.png`" in text
    assert text.count("Microseconds per layer on one Example GPU") == 2
    assert (stored / "sweep.png").stat().st_size > 10_000


def test_what_is_outside_the_markers_keeps_its_bytes(stored: Path) -> None:
    page = stored / "README.md"
    page.write_bytes(
        b"\xef\xbb\xbf" + PAGE.replace("before", "be\rfore").replace("\n", "\r\n").encode() + b"caf\xe9\nend"
    )
    before = page.read_bytes()
    for _ in range(2):
        result = runner.invoke(app, ["report", str(stored / "verify.json"), "--readme", str(page)])
        assert result.exit_code == 0, result.output
    after = page.read_bytes()
    for marker, side in ((BEGIN.encode(), 0), (END.encode(), 1)):
        assert after.split(marker)[side] == before.split(marker)[side]
    inside = after.split(BEGIN.encode())[1].split(END.encode())[0]
    assert inside.count(b"\n") == inside.count(b"\r\n") > 5


def test_a_marker_in_a_name_does_not_double_it() -> None:
    with pytest.raises(ValueError, match="rename it"):
        replace_block(PAGE, f"a peer called {END}\n")


def test_names_are_shown_as_they_are(example: SweepResult, stored: Path) -> None:
    odd = "[/red] [bold]x"
    arms = [dataclasses.replace(arm, owner=odd, lane="$x^{$ |[/b]", name="[/i]") for arm in example.cells[0].arms[:1]]
    cell = dataclasses.replace(example.cells[0], arms=arms, skipped={"[/a]": "[/b] why"})
    machine = dataclasses.replace(example.machine, gpu=f"GPU {odd} $x^{{$")
    result = dataclasses.replace(example, machine=machine, peers={"[/p]": "1"}, cells=[cell])
    (stored / "odd.json").write_text(result.to_json())
    arguments = ["report", str(stored / "odd.json"), "--readme", str(stored / "README.md")]
    for extra in ([], ["--every-arm"]):
        shown = runner.invoke(app, [*arguments, "--plot", str(stored / "odd.png"), *extra])
        assert shown.exit_code == 0, (shown.output, shown.exception)
        for part in (f"GPU {odd}", "[/p] 1", "[/a]: [/b] why", "[/i]" if extra else f"{odd} $x^{{$ |[/b]"):
            assert part in shown.output, part
    assert len({len(row) for row in rows((stored / "README.md").read_text().replace("\\|", ""))}) == 1


def test_an_output_that_lacks_characters_still_shows_everything(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_runner = CliRunner(charset="ascii", env={"NO_COLOR": "1", "TERM": "dumb"})
    result = ascii_runner.invoke(app, ["report", str(stored / "verify.json")])
    assert result.exit_code == 0, result.exception
    assert "us per layer ~spread" in result.output


@pytest.mark.parametrize("where", ["file", "-"])
def test_report_writes_json(where: str, stored: Path, example: SweepResult) -> None:
    path, names = stored / "out.json", ("verify.json", "round.json")
    to = ["--json", str(path) if where == "file" else "-"]
    one = runner.invoke(app, ["report", str(stored / names[0]), *to])
    assert (one.stdout if where == "-" else path.read_text()) == example.to_json() + "\n"
    both = runner.invoke(app, ["report", *(str(stored / name) for name in names), *to])
    written = both.stdout if where == "-" else path.read_text()
    first, second = ((stored / name).read_text() for name in names)
    assert written == f"[\n{first},\n{second}\n]\n"
    assert [sweep["settings"]["kind"] for sweep in json.loads(written)] == ["verify", "round"]
    shown = both.stderr if where == "-" else both.stdout
    assert "verify, T = 8" in shown
    assert "round, accept 3, T = 4" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing argument"),
        ("DIR/none.json", "does not exist"),
        ("DIR", "is a directory"),
        ("DIR/README.md", "is not JSON"),
        ("DIR/verify.json --readme DIR/none.md", "does not exist"),
        ("DIR/verify.json --readme DIR/verify.json", "is also the file of RESULTS"),
        ("DIR/verify.json --readme DIR/round.json", "must have the markers"),
        (
            "DIR/verify.json --readme DIR/README.md --plot DIR/sweep.jpg",
            "'--plot': DIR/sweep.jpg must end in .png, .svg or .pdf",
        ),
        ("DIR/verify.json --plot -", "'--plot': - must end in .png, .svg or .pdf"),
        (
            "DIR/verify.json --readme DIR/README.md --plot DIR/none/sweep.png",
            "'--plot': the folder DIR/none is missing",
        ),
        ("DIR/verify.json --plot DIR/folder.png", "'--plot': DIR/folder.png is a folder"),
        ("DIR/verify.json --json DIR", "'--json': DIR is a folder"),
        ("DIR/verify.json --json DIR/none/out.json", "'--json': the folder DIR/none is missing"),
        ("DIR/verify.json --json DIR/verify.json", "'--json': DIR/verify.json is also the file of RESULTS"),
        ("DIR/verify.json DIR/round.json --json DIR/round.json", "is also the file of RESULTS"),
        ("DIR/verify.json --readme DIR/README.md --json DIR/README.md", "is also the file of --readme"),
        ("DIR/verify.json --json DIR/x.png --plot DIR/x.png", "is also the file of --json"),
        ("DIR/verify.json --nonsense", "No such option"),
    ],
)
def test_report_refuses_and_leaves_every_file_alone(arguments: str, message: str, stored: Path) -> None:
    (stored / "folder.png").mkdir()
    before = {path: path.read_bytes() if path.is_file() else None for path in stored.iterdir()}
    result = runner.invoke(app, ["report", *arguments.replace("DIR", str(stored)).split()])
    assert result.exit_code == 2, result.output
    assert message.replace("DIR", str(stored)) in " ".join(result.output.replace("│", " ").split())
    assert {path: path.read_bytes() if path.is_file() else None for path in stored.iterdir()} == before
