"""The split of the library into training text and held-out modules, and the prompts read from the latter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kda_tooling.demo.corpus import DOCUMENT_START, HELD_OUT, load_corpus, read_held_out
from kda_tooling.demo.prompts import LONGEST_PROMPT, file_prompts, held_out_prompts, passage


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def test_split_by_module(tmp_path: Path) -> None:
    write(tmp_path, "os.py", "import sys\r\n")
    write(tmp_path, "json/decoder.py", "decode\n")
    write(tmp_path, "json/tests/case.py", "not this\n")
    write(tmp_path, "site-packages/other.py", "nor this\n")
    write(tmp_path, "textwrap.py", "wrap\n")
    write(tmp_path, "zipfile/__init__.py", "zip\n")
    write(tmp_path, "zipfile/_path/glob.py", "glob\n")
    corpus = load_corpus(tmp_path)
    start = bytes([DOCUMENT_START])
    assert corpus.train == start + b"decode\n" + start + b"import sys\n"
    assert corpus.held_out == {"textwrap": b"wrap\n", "zipfile": b"zip\nglob\n"}
    assert corpus.held_out_bytes == 14
    assert read_held_out("zipfile", tmp_path) == b"zip\n"
    assert read_held_out("csv", tmp_path) is None


def test_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="0 training files and 0 held-out modules"):
        load_corpus(tmp_path)


def test_held_out_text_of_this_python_is_not_in_its_training_text() -> None:
    corpus = load_corpus()
    assert len(corpus.held_out) >= 15
    assert set(corpus.held_out) <= set(HELD_OUT)
    for module, text in corpus.held_out.items():
        middle = text[len(text) // 2 :][:400]
        assert middle not in corpus.train, module


def test_prompts_come_from_held_out_modules_in_order() -> None:
    prompts = held_out_prompts(3, 200)
    present = [module for module in HELD_OUT if read_held_out(module)]
    assert [prompt.source for prompt in prompts] == present[:3]
    assert all(len(prompt.text) == 200 for prompt in prompts)
    with pytest.raises(ValueError, match="999 prompts were asked for"):
        held_out_prompts(999, 200)


def test_passage_ends_inside_a_line() -> None:
    text = b"a = 1\n" * 20 + b"    return value + 1\n" + b"b = 2\n" * 20
    cut = passage(text, 6 * 10)
    assert cut in text
    assert len(cut) == 60
    assert not cut.endswith(b"\n")


def test_file_prompts_take_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(b"x" * LONGEST_PROMPT + b"def f")
    (prompt,) = file_prompts([path])
    assert prompt.source == "mine.py"
    assert len(prompt.text) == LONGEST_PROMPT
    assert prompt.text.endswith(b"def f")
