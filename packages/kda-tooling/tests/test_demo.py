"""`kda demo` and `kda train-demo` as commands: refusals, exit codes, the report, the saved model."""

from __future__ import annotations

import json
import math
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kda_backend import LANES
from kda_tooling.cli import app
from kda_tooling.commands.demo import ASSETS
from kda_tooling.commands.options import resolve_device
from kda_tooling.demo import run as demo_module
from kda_tooling.demo import training
from kda_tooling.demo.corpus import HELD_OUT, read_held_out
from kda_tooling.demo.decoding import Decoded
from kda_tooling.demo.model import (
    MAX_ASSET_BYTES,
    KdaLanguageModel,
    ModelConfig,
    load_model,
    save_model,
    shipped_tensors,
)
from kda_tooling.demo.training import bits_of

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})


def words(output: str) -> str:
    """The output as one line, without the frame of an error."""
    return " ".join(output.replace("│", " ").split())


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = KdaLanguageModel(ModelConfig(num_layers=1, width=32, num_heads=1, mlp_width=32))
    save_model(model, folder / "demo_model.safetensors", {})
    return folder


@pytest.mark.parametrize("command", [[], ["demo"], ["train-demo"]], ids=lambda c: " ".join(["kda", *c]))
def test_help_has_an_example(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert ("Example" in result.output) == bool(command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bytes", "0"], "--bytes"),
        (["--bytes", "-3"], "--bytes"),
        (["--draft-tokens", "0"], "--draft-tokens"),
        (["--draft-tokens", "5", "--ring-length", "4"], "5 draft tokens do not fit a ring of 4 records"),
        (["--ring-length", "0"], "--ring-length"),
        (["--lanes", "fused,sideways"], "['sideways']; allowed are unfused"),
        (["--lanes", ","], "no lane"),
        (["--form", "x"], "'x' is not a form; allowed are recurrent, chunked"),
        (
            ["--form", "chunked", "--lanes", "fused,fused+ring"],
            "fused: --form chunked is of unfused+ring, fused+ring only",
        ),
        (["--form", "chunked", "--draft-tokens", "17"], "17 is more than the 16 tokens that --form chunked takes"),
        (["--prompts", "0"], "--prompts"),
        (["--prompts", "999"], "999 prompts were asked for"),
        (["--prompt-file", "no/such/file.py"], "is not a file"),
        (["--prompt-file", "EMPTY"], "is empty"),
        (["--prompt-file", "EMPTY", "--prompts", "2"], "'--prompts': 2 is about held-out modules"),
        (["--prompt-file", "EMPTY", "--prompt-bytes", "9"], "'--prompt-bytes': 9 is about held-out modules"),
        (["--model", "no/such/folder"], "does not exist; make one with"),
        (["--device", "toaster"], "'toaster' is not a device"),
        (["--device", "cpu:1"], "'cpu:1' is not a device"),
        (["--draft-tokens", "1000000000"], "'--draft-tokens': "),
        (["--ring-length", "1000000000"], "'--ring-length': "),
        (["--bytes", "1000000000"], "'--bytes': "),
        (["--json", "DIR"], "is a folder"),
        (["--json", "DIR/missing/report.json"], "is missing"),
        (["--json", "MODEL/demo_model.safetensors"], "is also the file of --model"),
        (["--json", "MODEL/demo_model.json"], "is also the file of --model"),
        (
            ["--prompt-file", "TEXT", "--prompt-file", "MODEL/demo_model.json", "--json", "TEXT"],
            "is also the file of --prompt-file",
        ),
        (["--nonsense"], "--nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_exit_with_2_before_anything_runs(
    arguments: list[str], message: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_run(*args: object) -> None:
        raise AssertionError("decoding started")

    monkeypatch.setattr(demo_module, "run_demo", must_not_run)
    empty = tmp_path / "empty.py"
    empty.touch()
    text = tmp_path / "text.py"
    text.write_text("kept")
    given = [str(empty) if argument == "EMPTY" else argument for argument in arguments]
    for name, path in {"DIR": tmp_path, "MODEL": tiny_folder, "TEXT": text}.items():
        given = [argument.replace(name, str(path)) for argument in given]
    if "--model" not in given:
        given += ["--model", str(tiny_folder)]
    result = runner.invoke(app, ["demo", *given])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
    assert text.read_text() == "kept"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--minutes", "inf"],
        ["--batch", "0"],
        ["--learning-rate", "-1"],
        ["--learning-rate", "inf"],
        ["--sequence", "100000000"],
        ["--sequence", "65536", "--batch", "64"],
        ["--seed", "99999999999999999999999"],
        ["--seed", "-1"],
    ],
    ids=" ".join,
)
def test_wrong_training_arguments_exit_with_2(arguments: list[str], tmp_path: Path) -> None:
    result = runner.invoke(app, ["train-demo", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["FILE", "FILE/below", "LOOSE_LINK"])
def test_where_no_model_can_be_saved_none_is_trained(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "train_demo", None)
    (tmp_path / "FILE").write_text("kept")
    (tmp_path / "LOOSE_LINK").symlink_to(tmp_path / "nowhere")
    result = runner.invoke(app, ["train-demo", "--device", "cpu", "--out", str(tmp_path / folder)])
    assert result.exit_code == 2, result.output
    assert "is not a folder" in words(result.output)
    assert (tmp_path / "FILE").read_text() == "kept"


@pytest.mark.parametrize(
    ("out", "file", "message"),
    [
        ("DIR", "DIR", "is a folder"),
        ("DIR", "DIR/missing/metadata.json", "is missing"),
        ("DIR", "DIR/demo_model.json", "is also the file of --out"),
        ("DIR", "DIR/demo_model.safetensors", "is also the file of --out"),
        ("DIR/new", "DIR/new", "is also the file of --out"),
    ],
)
def test_where_the_metadata_cannot_be_written_no_model_is_trained(
    out: str, file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "train_demo", None)
    paths = [one.replace("DIR", str(tmp_path)) for one in (out, file)]
    result = runner.invoke(app, ["train-demo", "--device", "cpu", "--out", paths[0], "--json", paths[1]])
    assert result.exit_code == 2, (result.output, result.exception)
    assert "'--json': " in words(result.output)
    assert message in words(result.output)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["loss", "bits"])
def test_a_diverged_model_is_not_saved(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "bits":
        monkeypatch.setattr(training, "bits_of", lambda model, documents: math.nan)
    else:
        plain = training.KdaLanguageModel.forward
        steps = iter(range(1000))

        def forward(self: KdaLanguageModel, tokens: torch.Tensor) -> torch.Tensor:
            # Diverges in the third step, the last one: the loss is looked at in every tenth.
            return plain(self, tokens) * (math.nan if next(steps) == 2 else 1.0)

        clock = iter([0.0, 0.0, 1.0, 2.0, 7.0, 7.0])
        monkeypatch.setattr(training.KdaLanguageModel, "forward", forward)
        monkeypatch.setattr(training.time, "monotonic", lambda: next(clock, 7.0))
        monkeypatch.setattr(training, "Progress", NoProgress)
    arguments = ["--minutes", "0.1" if where == "loss" else "0.0001", "--batch", "1", "--sequence", "64"]
    arguments += ["--json", "-"]
    result = runner.invoke(
        app, ["train-demo", "--out", str(tmp_path), "--device", "cpu", "--eval-bytes", "2000", *arguments]
    )
    assert result.exit_code == 1, (result.output, result.exception)
    assert "diverged, nothing is saved" in words(result.output)
    assert not result.stdout
    assert not list(tmp_path.iterdir())


class NoProgress:
    """In place of rich's progress bar, whose thread reads the clock that the test winds."""

    def __init__(self, *columns: object, **options: object) -> None:
        pass

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add_task(self, *arguments: object, **options: object) -> int:
        return 0

    update = add_task


def edited(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the model in ``folder`` with its JSON changed."""
    shutil.copytree(folder, to)
    metadata = json.loads((to / "demo_model.json").read_text())
    change(metadata)
    (to / "demo_model.json").write_text(json.dumps(metadata))
    return to


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.clear(), "its config must have the keys"),
        (lambda d: d.update(config=5), "its config must have the keys"),
        (lambda d: d["config"].update(width=33), "does not fit the config"),
        (lambda d: d["config"].update(width=10**30), "width must be a whole number within 1..65536"),
        (lambda d: d["config"].update(num_layers="3"), "num_layers must be a whole number within 1..1024, got '3'"),
        (lambda d: d["config"].update(head_dim=96), "head_dim must be a whole number of 64, 128, got 96"),
        (lambda d: d["config"].update(vocab=300), "vocab must be a whole number of 256, got 300"),
        (lambda d: d["config"].update(lower_bound=math.nan), "lower_bound must be a number below 0, got nan"),
        (lambda d: d.update(bits_per_byte={"model": "x"}), "its bits_per_byte must be"),
    ],
)
def test_a_model_whose_description_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = edited(tiny_folder, tmp_path / "model", change)
    result = runner.invoke(app, ["demo", "--model", str(folder)])
    assert result.exit_code == 2, (result.output, result.exception)
    assert message in words(result.output)


@pytest.mark.parametrize("broken", ["no json", "json text", "not UTF-8", "truncated", "empty", "nan"])
def test_a_model_that_cannot_be_read_is_refused(broken: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = edited(tiny_folder, tmp_path / "model", lambda metadata: None)
    weights, description = folder / "demo_model.safetensors", folder / "demo_model.json"
    if broken == "no json":
        description.unlink()
    elif broken in ("json text", "not UTF-8"):
        description.write_bytes(b"{" if broken == "json text" else b"\xff")
    elif broken == "nan":
        tensors = load_file(weights)
        tensors["out_norm"][3] = math.nan
        save_file(tensors, weights)
    else:
        weights.write_bytes(weights.read_bytes()[:1000] if broken == "truncated" else b"")
    result = runner.invoke(app, ["demo", "--model", str(folder)])
    assert result.exit_code == 2, (result.output, result.exception)
    assert str(folder / "demo_model") in "".join(words(result.output).split())


def test_a_model_with_numbers_that_json_lacks_is_not_saved(tmp_path: Path) -> None:
    model = KdaLanguageModel(ModelConfig(num_layers=1, width=32, num_heads=1, mlp_width=32))
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_model(model, tmp_path / "m.safetensors", {"bits": math.nan})
    with torch.no_grad():
        model.out_norm[0] = math.inf
    with pytest.raises(ValueError, match="not finite: out_norm"):
        save_model(model, tmp_path / "m.safetensors", {})
    assert not list(tmp_path.iterdir())


def test_a_prompt_sets_no_colours_titles_or_markup(tiny_folder: Path, tmp_path: Path, device: str) -> None:
    text = tmp_path / "[red]x[bold].md"
    text.write_bytes(b"\x1b]0;owned\x07 \x1b[31m [/b] [link=x] \x9b2J caf\xe9 \r\nab")
    arguments = ["--model", str(tiny_folder), "--prompt-file", str(text), "--bytes", "2", "--lanes", "fused"]
    for charset in ("utf-8", "ascii"):
        plain = CliRunner(charset=charset, env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
        result = plain.invoke(app, ["demo", *arguments, "--device", device, "--processes", "1"])
        assert result.exit_code == 0, (result.output, result.exception)
        assert "[red]x[bold].md" in result.output
        assert "[/b] [link=x]" in result.output
        assert not {one for one in result.output if unicodedata.category(one) == "Cc"} - {"\n"}


def test_the_first_cpu_is_the_cpu(tiny_folder: Path) -> None:
    assert resolve_device("cpu:0") == "cpu"


def test_a_small_run_end_to_end(tiny_folder: Path, tmp_path: Path, device: str) -> None:
    text = tmp_path / "mine.py"
    text.write_text("abcabcabcabcab")
    arguments = ["--model", str(tiny_folder), "--prompt-file", str(text), "--bytes", "5", "--draft-tokens", "3"]
    result = runner.invoke(app, ["demo", *arguments, "--device", device, "--processes", "1", "--json", "-"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["identical"] == dict.fromkeys(LANES, True)
    assert report["state_identical"] == dict.fromkeys(LANES, True)
    assert report["kernels"] == ("interpreter" if device == "cpu" else "compiled")
    assert report["plain"]["rounds"] == 4
    for lane in LANES:
        counts = report["lanes"][lane]["accepted_per_round"]
        assert sum(int(n) * count for n, count in counts.items()) == 4
    # One layer and head of 64x64: a snapshot is 16 KiB of fp32, a record k and v in bf16, g and beta in fp32.
    assert report["scratch"]["snapshot_bytes"] == 3 * 64 * 64 * 4
    assert report["scratch"]["ring_bytes"] == 3 * (2 * 64 * 2 + 64 * 4 + 4)
    assert report["prompts"][0]["prompt_bytes"] == 14


@pytest.mark.parametrize("broken", ["text", "state", "faults"])
@pytest.mark.parametrize("where", ["file", "-", None])
def test_a_differing_lane_exits_with_1(
    broken: str, where: str | None, tiny_folder: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode_all(settings: Any, requests: Sequence[Any], on_progress: Any) -> dict[str, Decoded]:
        results = {}
        for run in settings.runs():
            wrong = broken if run.name == "fused" else None
            results[run.name] = Decoded(
                [b"right" if wrong != "text" else b"wrong"] * len(requests),
                [[False] * 5] * len(requests),
                accepted={1: 4},
                seconds=1.0,
                faults="slot: 1" if wrong == "faults" else None,
                # -0.0 equals 0.0 as a number, not as bits.
                ssm_state=torch.tensor([-0.0 if wrong == "state" else 0.0]),
                conv_state=torch.zeros(1, dtype=torch.bfloat16),
            )
        return results

    monkeypatch.setattr(demo_module, "_decode_all", decode_all)
    path = tmp_path / "report.json"
    flags = [] if where is None else ["--json", str(path) if where == "file" else "-"]
    result = runner.invoke(app, ["demo", "--model", str(tiny_folder), "--device", device, *flags])
    assert result.exit_code == 1, result.output
    shown = result.stderr if where == "-" else result.stdout
    assert "differs from plain decoding, or its kernels counted faults" in words(shown)
    assert ("NO" in shown) == (broken != "faults")
    if where is not None:
        report = json.loads(result.stdout if where == "-" else path.read_text())
        assert report["identical"] == {lane: not (broken == "text" and lane == "fused") for lane in LANES}


def test_the_packaged_model_is_real_and_has_not_seen_the_prompts() -> None:
    model, metadata = load_model(ASSETS / "demo_model.safetensors")
    assert (ASSETS / "demo_model.safetensors").stat().st_size <= MAX_ASSET_BYTES
    bits = metadata["bits_per_byte"]
    assert bits["model"] < 0.75 * bits["byte_3gram"]
    assert set(HELD_OUT) == set(metadata["held_out_modules"])
    # The shipped weights still are what was measured: one module, far below any 3-gram (2.7), near the mean (1.6).
    text = read_held_out("shlex")
    assert text is not None
    assert bits_of(model, [text[:4096]]) / 4096 < 1.9


def test_the_packaged_model_speculates(device: str) -> None:
    arguments = ["--prompts", "1", "--prompt-bytes", "200", "--bytes", "8", "--lanes", "fused+ring"]
    result = runner.invoke(app, ["demo", *arguments, "--device", device, "--processes", "1", "--json", "-"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["identical"] == {"fused+ring": True}


@pytest.mark.gpu
def test_the_whole_demo_on_a_gpu() -> None:
    result = runner.invoke(app, ["demo", "--device", "cuda", "--json", "-"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["kernels"] == "compiled"
    for lane in LANES:
        accepted = report["lanes"][lane]["accepted_per_round"]
        assert accepted["1"] > 0, "no draft fails"
        assert accepted["2"] + accepted["3"] > 0, "no draft is accepted in part"
        assert accepted["4"] > 0, "no draft is accepted whole"


@pytest.mark.parametrize("where", ["file", "-"])
def test_training_writes_a_model_that_loads_and_its_measurements(where: str, tmp_path: Path) -> None:
    path = tmp_path / "metadata.json"
    arguments = ["--minutes", "0.0001", "--batch", "1", "--sequence", "64", "--eval-bytes", "2000"]
    arguments += ["--json", str(path) if where == "file" else "-"]
    result = runner.invoke(app, ["train-demo", "--out", str(tmp_path), "--device", "cpu", *arguments])
    assert result.exit_code == 0, result.output
    assert "held-out bits per byte: model" in words(result.stderr if where == "-" else result.stdout)
    metadata = json.loads(result.stdout if where == "-" else path.read_text())
    model, stored = load_model(tmp_path / "demo_model.safetensors")
    assert stored["bits_per_byte"] == metadata["bits_per_byte"]
    assert stored["safetensors_bytes"] == (tmp_path / "demo_model.safetensors").stat().st_size <= MAX_ASSET_BYTES
    assert 2.0 < metadata["bits_per_byte"]["byte_3gram"] < 4.0 < metadata["bits_per_byte"]["model"]
    assert str(tmp_path) not in metadata["command"]
    for option in ("--minutes 0.0001", "--batch 1", "--sequence 64", "--eval-bytes 2000", "--learning-rate 0.004"):
        assert option in metadata["command"]
    # Loaded values are exactly the stored ones.
    for name, tensor in shipped_tensors(model).items():
        assert torch.equal(tensor.float(), model.state_dict()[name]), name


def test_a_model_over_the_size_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Lower width, mlp_width or num_layers"):
        save_model(KdaLanguageModel(ModelConfig(mlp_width=640)), tmp_path / "m.safetensors", {})
    assert not list(tmp_path.iterdir())


def test_a_missing_model_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="kda train-demo"):
        load_model(tmp_path / "demo_model.safetensors")
