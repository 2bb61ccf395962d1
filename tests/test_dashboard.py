"""The dashboard: hashes of what is fetched, the page rewritten, broken results left out, and its refusals."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from benchmarks import dashboard
from benchmarks.dashboard import ASSETS, Asset, DashboardError
from tests.support.histories import Repository, wobble

CODE = b"window.invented = 1;\n"
INVENTED = Asset("invented", "1.0.0", "js/invented.js", hashlib.sha256(CODE).hexdigest(), "/invented.min.js")


def packed(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "package.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages asked for, while npm answers with the invented one."""
    asked: list[str] = []

    def pack(package: str, folder: Path) -> Path:
        asked.append(package)
        return packed(folder, {INVENTED.path: CODE})

    monkeypatch.setattr(dashboard, "_pack", pack)
    return asked


def test_every_script_of_asvs_page_is_replaced() -> None:
    import asv

    page = (Path(asv.__file__).parent / "www" / "index.html").read_text()
    assert len(dashboard.EXTERNAL.findall(page)) == len(ASSETS)
    local = dashboard.rewritten(page)
    assert not dashboard.EXTERNAL.findall(local)
    assert "integrity" not in local
    for asset in ASSETS:
        assert local.count(f'"vendor/{asset.name}"') == 1
    order = [local.index(name) for name in ("jquery.min.js", 'src="data.js"', 'src="stored.js"', 'src="asv.js"')]
    assert order == sorted(order)
    assert re.findall(r'(?:src|href)="(?:https?:)?//[^"]*"', local) == [
        'href="https://github.com/airspeed-velocity/asv/"'
    ], "a link for people, nothing that is loaded"


def test_names_beside_the_page_are_distinct() -> None:
    assert len({asset.name for asset in ASSETS}) == len(ASSETS)
    assert all(re.fullmatch(r"[0-9a-f]{64}", asset.sha256) for asset in ASSETS)


def test_a_page_that_loads_something_else_is_refused() -> None:
    page = '<script src="https://cdn.example/new.js"></script><script src="asv.js"></script>'
    with pytest.raises(DashboardError, match=r"loads https://cdn\.example/new\.js, which is not in the table"):
        dashboard.rewritten(page)
    with pytest.raises(DashboardError, match=r"does not load asv\.js"):
        dashboard.rewritten("<html></html>")


def test_assets_are_fetched_once(fetched: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        dashboard.fetch(tmp_path / "npm", (INVENTED,))
    assert fetched == ["invented@1.0.0"]
    assert (tmp_path / "npm" / "invented.js").read_bytes() == CODE


def test_a_file_of_another_hash_is_refused_and_not_kept(fetched: list[str], tmp_path: Path) -> None:
    with pytest.raises(DashboardError, match=r"invented 1\.0\.0 has sha256 .*, pinned is 0{64}"):
        dashboard.fetch(tmp_path, (dataclasses.replace(INVENTED, sha256="0" * 64),))
    assert not (tmp_path / "invented.js").exists()


def test_a_file_changed_after_it_was_fetched_is_refused(fetched: list[str], tmp_path: Path) -> None:
    dashboard.fetch(tmp_path, (INVENTED,))
    (tmp_path / "invented.js").write_bytes(CODE + b"evil();")
    with pytest.raises(DashboardError, match="pinned is"):
        dashboard.fetch(tmp_path, (INVENTED,))


def test_a_package_without_the_file_is_refused(fetched: list[str], tmp_path: Path) -> None:
    with pytest.raises(DashboardError, match=r"has no file js/other\.js"):
        dashboard.fetch(tmp_path, (dataclasses.replace(INVENTED, path="js/other.js"),))


def test_without_npm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DashboardError, match=r"no npm on the PATH.*install Node\.js"):
        dashboard.fetch(tmp_path, (INVENTED,))


def test_an_npm_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "no route")
    monkeypatch.setattr(shutil, "which", lambda name: "npm")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(DashboardError, match=r"could not fetch invented@1\.0\.0 \(exit code 1\): no route"):
        dashboard.fetch(tmp_path, (INVENTED,))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repository")
    made.describe()
    made.describe("never.Measured.track")
    made.history(3, lambda place, number: wobble(number, place))
    return made


def test_broken_results_are_named_and_the_rest_is_shown(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = repository.results / "NVIDIA_H200" / "00000000-replay.json"
    for content in ("", "{", "[]", '{"version": 2}', '{"version": 99}'):
        broken.write_text(content)
        folder = tmp_path / f"copy{len(content)}"
        folder.mkdir()
        assert dashboard.usable(repository.results, folder) == 3
        assert f"{broken} is left out" in capsys.readouterr().err
        assert not (folder / "NVIDIA_H200" / broken.name).exists()
    known = json.loads((folder / "benchmarks.json").read_text())
    assert "never.Measured.track" not in known
    assert "ring_latency.RingLatency.track_verify" in known


def test_the_data_is_kept_as_a_script(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the scripts of npm, which are faked: asv publishes, the page loads nothing from elsewhere."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for asset in ASSETS:
        (cache / asset.name).write_text("// invented")
    monkeypatch.setattr(dashboard, "fetch", lambda folder: None)
    index = dashboard.build(repository.folder, repository.results, tmp_path / "html", cache)
    text = (index.parent / "data.js").read_text()
    assert text.startswith("window.STORED = {")
    data = json.loads(text.removeprefix("window.STORED = ").removesuffix(";\n"))
    assert {"index.json", "info.json", "regressions.json"} <= set(data)
    assert any(name.startswith("graphs/") for name in data)
    assert json.loads(data["index.json"])["project"] == "kda-verify-kernels"
    assert {path.name for path in (index.parent / "vendor").iterdir()} == {asset.name for asset in ASSETS}


def test_without_results_it_says_how_to_store_some(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"there are no results in .*nox -s bench"):
        dashboard.main(["--results", str(tmp_path), "--out", str(tmp_path / "html")])
    with pytest.raises(SystemExit, match=r"benchmarks\.dashboard: .*benchmarks\.json"):
        dashboard.main(["--results", str(tmp_path / "none"), "--out", str(tmp_path / "html")])
