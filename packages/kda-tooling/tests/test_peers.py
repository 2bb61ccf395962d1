"""Peers: the registry, what a tree must hold, and SGLang's real wheel where it is at hand.

Set KDA_SGLANG to an unpacked wheel (``pip download --no-deps sglang==0.5.23`` and unzip).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kda_kernels import KdaShape
from kda_tooling.peers import PEERS, load_peer
from kda_tooling.peers.sglang import FILES, FUSED_BLOCK_V, SglangPeer
from kda_tooling.problem import VerifyProblem, random_problems

# peer/ at the top of the checkout, which git ignores.
SGLANG = Path(os.environ.get("KDA_SGLANG") or Path(__file__).parents[3] / "peer")
needs_sglang = pytest.mark.skipif(
    not (SGLANG / "sglang" / "kernels").is_dir(),
    reason=f"no SGLang at {SGLANG}: unpack its wheel there or set KDA_SGLANG",
)


@pytest.fixture
def clean_modules() -> Iterator[None]:
    """Forget the peer's modules before and after: only one copy can be loaded in a process."""

    def forget() -> None:
        for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
            del sys.modules[name]

    forget()
    yield
    forget()


@pytest.fixture
def fake_tree(tmp_path: Path) -> Path:
    """A tree with every file that SGLang's loader asks for, each next to empty."""
    for name in FILES:
        file = tmp_path / "sglang" / "kernels" / "ops" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"NAME = {name!r}\nKDA_VERIFY_BLOCK_V = 4\n")
    return tmp_path


def problem(draft_tokens: int, head_v_dim: int = 128) -> VerifyProblem:
    return random_problems(
        KdaShape(1, 1, 64, head_v_dim), layers=1, batch=1, draft_tokens=draft_tokens, dtype=torch.bfloat16, device="cpu"
    ).layers[0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sglang", "NAME=PATH"),
        ("sglang=", "NAME=PATH"),
        ("", "NAME=PATH"),
        ("SGLang=/tmp", "peer must be one of sglang; got 'SGLang'"),
        ("sgland=/tmp", "peer must be one of sglang; got 'sgland'"),
        ("=/tmp", "got ''"),
    ],
)
def test_a_peer_that_is_not_registered(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_peer(spec)


def test_a_second_peer_is_an_entry_of_the_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Path] = []

    class Other:
        name, version = "other", "1"

    def load(path: Path) -> Other:
        given.append(path)
        return Other()

    monkeypatch.setitem(PEERS, "other", load)
    assert load_peer(f"other={tmp_path}=x").name == "other"
    assert given == [Path(f"{tmp_path}=x")]


def test_a_folder_without_sglang_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no sglang/kernels folder: unpack a wheel .*pip download"):
        load_peer(f"sglang={tmp_path}")


@pytest.mark.usefixtures("clean_modules")
@pytest.mark.parametrize("missing", FILES)
def test_a_missing_file_is_named_and_nothing_is_loaded(missing: str, fake_tree: Path) -> None:
    (fake_tree / "sglang" / "kernels" / "ops" / f"{missing}.py").unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks kernel files .*{missing}\.py"):
        load_peer(f"sglang={fake_tree}")
    assert not [name for name in sys.modules if name.startswith("sglang.kernels.ops.")]


@pytest.mark.usefixtures("clean_modules")
def test_the_tree_or_its_package_folder_both_do(fake_tree: Path) -> None:
    first = load_peer(f"sglang={fake_tree}")
    again = load_peer(f"sglang={fake_tree / 'sglang'}")
    assert (first.name, first.version, again.version) == ("sglang", "unknown", "unknown")


@pytest.mark.usefixtures("clean_modules")
@pytest.mark.parametrize("kind", ["VERSION", "metadata"])
def test_the_version_is_read_from_the_tree(kind: str, fake_tree: Path) -> None:
    if kind == "VERSION":
        (fake_tree / "VERSION").write_text("0.5.23\n")
    else:
        folder = fake_tree / "sglang-0.5.23.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: sglang\nVersion: 0.5.23\n")
    assert load_peer(f"sglang={fake_tree}").version == "0.5.23"


@pytest.mark.usefixtures("clean_modules")
def test_two_copies_in_one_process_are_refused(fake_tree: Path, tmp_path: Path) -> None:
    load_peer(f"sglang={fake_tree}")
    second = tmp_path / "second"
    second.mkdir()
    (fake_tree / "sglang").rename(second / "sglang")
    with pytest.raises(RuntimeError, match=r"is loaded from .* already"):
        load_peer(f"sglang={second}")


@pytest.mark.usefixtures("clean_modules")
def test_a_file_that_does_not_run_is_not_left_half_loaded(fake_tree: Path) -> None:
    file = fake_tree / "sglang" / "kernels" / "ops" / f"{FILES[-1]}.py"
    working = file.read_text()
    file.write_text("raise ImportError('an import of the engine')")
    with pytest.raises(ImportError, match="an import of the engine"):
        load_peer(f"sglang={fake_tree}")
    file.write_text(working)
    peer = load_peer(f"sglang={fake_tree}")
    assert isinstance(peer, SglangPeer)
    assert vars(peer._commit)["NAME"] == FILES[-1]


@pytest.mark.usefixtures("clean_modules")
def test_arms_that_a_problem_admits(fake_tree: Path) -> None:
    peer = load_peer(f"sglang={fake_tree}")
    wide = ["unfused+ring", *(f"fused+ring bv{v}" for v in FUSED_BLOCK_V)]
    assert list(peer.verify_arms(problem(4))) == wide
    assert list(peer.verify_arms(problem(3, head_v_dim=64))) == wide
    assert peer.not_taken(problem(3)) == {}
    assert list(peer.verify_arms(problem(2))) == ["unfused+ring"]
    assert peer.not_taken(problem(2)) == {"fused+ring": "its fused kernel takes at least 3 draft tokens"}


@needs_sglang
@pytest.mark.usefixtures("clean_modules")
def test_the_real_wheel_loads_without_its_engine() -> None:
    peer = load_peer(f"sglang={SGLANG}")
    assert isinstance(peer, SglangPeer)
    assert peer.version != "unknown"
    loaded = {name for name in sys.modules if name.startswith("sglang.srt")}
    assert all(getattr(sys.modules[name], "__file__", None) is None for name in loaded)
    arms = peer.verify_arms(problem(4))
    assert "unfused+ring" in arms
    assert "fused+ring bv4" in arms


@needs_sglang
def test_the_real_wheel_loads_where_kernels_are_compiled() -> None:
    """In a process of its own: kernels are defined compiled or interpreted when triton is imported."""
    code = (
        "import sys; from kda_tooling.peers import load_peer; peer = load_peer(sys.argv[1]);"
        "from triton.runtime.jit import JITFunction;"
        "print(sum(isinstance(value, JITFunction) for value in vars(peer._fused).values()))"
    )
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code, f"sglang={SGLANG}"], env=env, capture_output=True, text=True, check=True
    )
    assert int(result.stdout) > 0
