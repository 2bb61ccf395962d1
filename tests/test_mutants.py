"""The mutant runner: its table fits the sources; a stale, surviving or misdirected mutant is not taken for killed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.mutants import run
from tests.mutants.run import MUTANTS
from tests.mutants.table import Mutant

HARMLESS = Mutant(
    "harmless",
    "errors.py",
    '"""Faults that only the device can see',
    '"""Faults that the device can see',
    "test_signatures.py::test_no_op_takes_a_catch_all[fold]",
    "a docstring",
)
ASKED_FOR = (
    "ring-after-norm", "raw-k-by-every-v-head", "window-one-step-late", "accept-ignored-by-fold",
    "padded-row-not-skipped", "gate-formula-swapped", "beta-not-sigmoided", "wrong-k-head-in-gqa",
)  # fmt: skip


def test_the_table_holds_the_breaks_that_are_asked_for() -> None:
    assert set(ASKED_FOR) <= {mutant.name for mutant in MUTANTS}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies_to_the_sources(mutant: Mutant) -> None:
    text = (run.PACKAGES[mutant.package] / mutant.path).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, "edit the table with the sources"
    assert (run.ROOT / "tests" / mutant.test.partition("::")[0]).is_file()


def test_a_stale_mutant_is_an_error() -> None:
    outcome = run.judge(replace(HARMLESS, old="text that no source has"))
    assert outcome.outcome == "error"
    assert "occurs 0 times" in outcome.detail
    assert run.judge(replace(HARMLESS, path="_triton/nothing.py")).outcome == "error"


def test_a_mutant_that_nobody_notices_survives() -> None:
    assert run.judge(HARMLESS).outcome == "survived"


def test_a_test_that_does_not_exist_kills_nothing() -> None:
    assert run.judge(replace(HARMLESS, test="test_signatures.py::test_of_nothing")).outcome == "error"


def test_a_break_that_stops_the_import_kills_nothing() -> None:
    outcome = run.judge(replace(HARMLESS, new="raise RuntimeError('broken')\n" + HARMLESS.new))
    assert outcome.outcome == "error"


def test_mistyped_arguments_run_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--only", "ring-after-nrom"], ["--jobs", "0"], ["--jobs", "two"], ["--josn", "x"]):
        with pytest.raises(SystemExit) as stopped:
            run.main(arguments)
        assert stopped.value.code == 2
    assert "ring-after-nrom" in capsys.readouterr().err
