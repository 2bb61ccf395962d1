"""The SGLang plugin in SGLang's own hook registry: what it registers, when it does not, and what it says in the log."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_backend.sglang import commit, gate, plugin, register, reports, verify
from kda_backend.sglang.gate import can_run_fused_chain_verify
from kda_backend.sglang.plugin import TARGETS, drift
from kda_backend.sglang.reports import Reports
from kda_backend.sglang.signatures import declared_signature, difference
from kda_backend.sglang.verify import fused_kda_conv_gating_verify

WHEEL = Path(os.environ.get("KDA_SGLANG_WHEEL", Path(__file__).parents[3] / "peer"))
REGISTRY = WHEEL / "sglang" / "srt" / "plugins" / "hook_registry.py"
needs_wheel = pytest.mark.skipif(
    not REGISTRY.is_file(), reason=f"no {REGISTRY}: `nox -s sglang` fetches SGLang's wheel, or set KDA_SGLANG_WHEEL"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Reports:
    """New log memory, no settings from outside."""
    mine = Reports()
    for module in (commit, gate, plugin, verify):
        monkeypatch.setattr(module, "reports", mine)
    for name in ("KDA_SGLANG_PLUGIN", "KDA_SGLANG_FUSED", "SGLANG_OPT_FUSED_KDA_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    return mine


def stub_modules(monkeypatch: pytest.MonkeyPatch, root: Path) -> Any:
    """SGLang as far as hooks need it: its own hook_registry.py, and target modules with its functions' signatures."""

    def module(name: str, path: list[str] | None = None) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__path__ = path or []
        monkeypatch.setitem(sys.modules, name, made)
        return made

    module("sglang", [str(root)])
    for package in ("sglang.srt", "sglang.srt.plugins"):
        module(package)
    name = "sglang.srt.plugins.hook_registry"
    spec = importlib.util.spec_from_file_location(name, root / "srt" / "plugins" / "hook_registry.py")
    assert spec is not None
    assert spec.loader is not None
    registry = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, registry)
    spec.loader.exec_module(registry)
    return registry


def stub_targets(monkeypatch: pytest.MonkeyPatch, root: Path) -> dict[str, list[Any]]:
    """The modules that the hooks patch. Calls of a stub are recorded under its name."""
    calls: dict[str, list[Any]] = {}
    for target in TARGETS:
        parts = target.module.split(".")
        for end in range(2, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in sys.modules:
                made = types.ModuleType(package)
                made.__path__ = []
                monkeypatch.setitem(sys.modules, package, made)
        *classes, name = target.name.split(".")

        def stub(*args: Any, _name: str = name, **kwargs: Any) -> str:
            calls.setdefault(_name, []).append((args, kwargs))
            return f"SGLang's {_name}"

        stub.__signature__ = declared_signature(target.source(root), target.name)  # type: ignore[attr-defined]
        place = sys.modules[target.module]
        for class_name in classes:
            setattr(place, class_name, type(class_name, (), {}))
            place = getattr(place, class_name)
        setattr(place, name, stub)
    return calls


def hooked(target: plugin.Target) -> Any:
    found: Any = sys.modules[target.module]
    for part in target.name.split("."):
        found = getattr(found, part)
    return found


@needs_wheel
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_parameters_equal_those_in_sglangs_wheel(target: plugin.Target) -> None:
    declared = declared_signature(target.source(WHEEL / "sglang"), target.name)
    assert declared is not None
    assert difference(declared, target.hook) is None


@needs_wheel
def test_hooks_take_the_place_of_sglangs_functions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kda_backend.sglang")
    root = WHEEL / "sglang"
    registry = stub_modules(monkeypatch, root)
    before = set(sys.modules)
    register()
    assert not [name for name in set(sys.modules) - before if name.startswith("sglang.")], "imports nothing of SGLang's"
    calls = stub_targets(monkeypatch, root)
    registry.HookRegistry.apply_hooks()
    for target in TARGETS:
        assert inspect.getclosurevars(hooked(target)).nonlocals["hook"] is target.hook
    fused, can_run, after_verify = map(hooked, TARGETS)
    # What ours refuse goes on to SGLang's own functions, with all that was given; the gate says no.
    parameters = inspect.signature(fused_kda_conv_gating_verify).parameters
    refused = dict.fromkeys(parameters) | {"softplus_beta": 2.0}
    assert fused(**refused) == "SGLang's fused_kda_conv_gating_verify"
    assert calls.pop("fused_kda_conv_gating_verify") == [((), refused)]
    names = list(inspect.signature(can_run_fused_chain_verify).parameters)[1:]
    tensor = torch.zeros(2, 4)
    backend = sys.modules[TARGETS[1].module].KDAAttnBackend()  # type: ignore[attr-defined]
    assert not can_run(backend, **dict.fromkeys(names) | {"mixed_qkv": tensor, "draft_token_num": 2})
    assert not calls
    state = types.SimpleNamespace(replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None, replayssm_beta=None)
    given = {"state_batch_indices": tensor, "accept_lens": tensor, "last_correct_step_indices": tensor}
    after_verify(spec_state=state, **given)
    assert len(calls["commit_kda_replayssm_after_verify"]) == 1
    active = [record.message for record in caplog.records if "plugged into SGLang" in record.message]
    assert len(active) == 1
    assert f"kda-backend {importlib.metadata.version('kda-backend')}" in active[0]
    assert "conservative rule" in active[0]


def fake_sglang(root: Path, monkeypatch: pytest.MonkeyPatch, edit: dict[str, str] | None = None) -> list[Any]:
    """A ``sglang`` folder whose functions have our signatures, and a registry that lists what is registered."""
    for target in TARGETS:
        source = target.source(root)
        source.parent.mkdir(parents=True, exist_ok=True)
        *classes, name = target.name.split(".")
        parameters = declared_signature(Path(inspect.getfile(target.hook)), target.hook.__name__)
        lines = [f"def {name}{parameters}: ..."]
        for old, new in (edit or {}).items():
            lines = [line.replace(old, new) for line in lines]
        for class_name in classes:
            lines = [f"class {class_name}:", *("    " + line for line in lines)]
        source.write_text("\n".join(lines) + "\n")
    registered: list[Any] = []
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
        made: Any = types.ModuleType(name)
        made.__path__ = [str(root)]
        monkeypatch.setitem(sys.modules, name, made)
    made.HookType = types.SimpleNamespace(REPLACE="replace")
    made.HookRegistry = types.SimpleNamespace(register=lambda *args: registered.append(args))
    return registered


def test_register_registers_three_replacements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = fake_sglang(tmp_path, monkeypatch)
    assert drift(tmp_path) is None
    register()
    assert registered == [(target.path, target.hook, "replace") for target in TARGETS]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"null_block_id=-1": "null_block_id=0"}, "changed null_block_id=0"),
        ({"cache_ring=False": "cache_ring=False, tree=None"}, "new tree=None"),
        ({"draft_token_num, ": ""}, "gone draft_token_num"),
        ({"def commit_kda": "def kda"}, "defines no commit_kda_replayssm_after_verify"),
    ],
    ids=["default", "new", "gone", "renamed"],
)
def test_another_sglang_is_left_alone(
    edit: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered = fake_sglang(tmp_path, monkeypatch, edit)
    register()
    assert not registered
    assert said in caplog.text


def test_switch_and_failures_leave_sglang_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered = fake_sglang(tmp_path, monkeypatch)
    monkeypatch.setenv("KDA_SGLANG_PLUGIN", "0")
    register()
    assert not registered
    monkeypatch.delenv("KDA_SGLANG_PLUGIN")
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)  # an import of it fails
    register()
    assert "goes on without it" in caplog.text


@pytest.mark.parametrize("word", ["0", "false", "No", " n ", "off", "OFF"])
def test_words_for_off(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = fake_sglang(tmp_path, monkeypatch)
    monkeypatch.setenv("KDA_SGLANG_PLUGIN", word)
    monkeypatch.setenv("SGLANG_OPT_FUSED_KDA_VERIFY", word)
    register()
    assert not registered
    assert "switches fused verify off" in str(gate._use_ours(types.SimpleNamespace()))


@pytest.mark.parametrize("word", ["", "1", "True", "yes", " y", "on"])
def test_words_for_on(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = fake_sglang(tmp_path, monkeypatch)
    monkeypatch.setenv("KDA_SGLANG_PLUGIN", word)
    register()
    assert len(registered) == len(TARGETS)


@pytest.mark.parametrize("word", ["flase", "2", "disabled"])
def test_an_unknown_word_is_named_and_leaves_sglang_as_it_is(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered = fake_sglang(tmp_path, monkeypatch)
    monkeypatch.setenv("KDA_SGLANG_PLUGIN", word)
    monkeypatch.setenv("SGLANG_OPT_FUSED_KDA_VERIFY", word)
    register()
    assert not registered
    (warned,) = caplog.records
    assert (warned.levelname, repr(word) in warned.message) == ("WARNING", True)
    assert "KDA_SGLANG_PLUGIN must be one of 0, false, no, n, off or 1," in warned.message
    with pytest.raises(ValueError, match="SGLANG_OPT_FUSED_KDA_VERIFY must be one of"):  # which the question reports
        gate._use_ours(types.SimpleNamespace())


def test_active_line_waits_until_info_is_logged(fresh: Reports, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="kda_backend.sglang")
    fresh.active("a rule")
    assert not caplog.records
    caplog.set_level(logging.INFO, logger="kda_backend.sglang")
    fresh.hook_runs()
    fresh.hook_runs()
    assert [record.message.endswith("decided by a rule") for record in caplog.records] == [True]


def test_reasons_are_bounded(fresh: Reports, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kda_backend.sglang")
    for i in range(2 * reports.LIMIT):
        fresh.not_taken(f"reason {i}")
    assert len(caplog.records) == reports.LIMIT


def test_the_entry_point_is_register() -> None:
    (found,) = (e for e in importlib.metadata.entry_points(group="sglang.srt.plugins") if e.name == "kda")
    assert found.load() is register
