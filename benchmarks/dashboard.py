"""The history as a page that opens without a network: ``python -m benchmarks.dashboard``.

asv's page loads its scripts from the network. Here the same versions come from npm, through the `npm` command as it is
configured, once; each file's hash is checked, and the page is rewritten to load them from beside it. Its data goes into
a script too, so that the page also opens from a folder, without a server.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / ".asv" / "html"
CACHE = ROOT / ".asv" / "npm"
STORED = Path(__file__).with_name("page") / "stored.js"
DATA = (".json", ".lst")
"""Endings of the files that the page asks for."""


@dataclass(frozen=True)
class Asset:
    """A file of an npm package that stands for what the page would load from the network.

    Args:
        package, version: on npm.
        path: of the file in the package.
        sha256: of the file.
        loads: end of the address in asv's page.
    """

    package: str
    version: str
    path: str
    sha256: str
    loads: str

    @property
    def name(self) -> str:
        """The file's name beside the page."""
        return Path(self.path).name


def _flot(part: str, sha256: str) -> Asset:
    return Asset("flot", "0.8.3", f"jquery.flot{part}.js", sha256, f"/jquery.flot{part}.min.js")


ASSETS = (
    Asset("jquery", "3.3.1", "dist/jquery.min.js",
          "160a426ff2894252cd7cebbdd6d6b7da8fcd319c65b70468f10b6690c45d02ef", "/jquery-3.3.1.min.js"),
    _flot("", "b7b931f273c38b1277b9c6c1f4e05c4ec09885a487bddaf3279e2d7e49a38e12"),
    _flot(".time", "a582c832adc7138a6b05aaf61f16ebac274701f1be4afea77e739a1c34b9c41a"),
    _flot(".selection", "e6c85f6c1ebe4b4da29d8ae238c7c5060283f05f7ef054f6b91817d02c092918"),
    _flot(".categories", "6e81664b28ea795c734906f4aa15614640a75ac7fbd399a7fb9084040698351a"),
    Asset("flot-orderbars", "1.0.0", "js/jquery.flot.orderBars.js",
          "39735b4f46f96ff4e082572401f47c55a2767b366fd1d1e821e44a8d830a12bf", "/jquery.flot.orderBars.js"),
    Asset("stupid-table-plugin", "1.1.3", "stupidtable.min.js",
          "4642380f28ebe9ed7cac251793b281ef8620c4386205d92788f9b12f5cceb4e0", "/stupidtable.min.js"),
    Asset("blueimp-md5", "2.19.0", "js/md5.min.js",
          "64d7ded388c562e4bde9e58ce205e5fa01b9734fcd434d496eb7b4fbfe9b927d", "/md5.min.js"),
    Asset("bootstrap", "3.1.1", "dist/js/bootstrap.min.js",
          "898d05a17f2cfc5120ddcdba47a885c378c0b466f30f0700e502757e24b403a1", "/bootstrap.min.js"),
    Asset("bootstrap", "3.1.1", "dist/css/bootstrap.min.css",
          "e9503448692b738dd260fbd7f7cabf2e11f09b600fa97e6eb3a56eba5b1a7e9b", "/bootstrap.min.css"),
)  # fmt: skip
"""npm has stupid-table-plugin from 1.1.3 on; the page asks for 1.0.1 and uses nothing that changed."""


class DashboardError(RuntimeError):
    """The page could not be built."""


def checked(asset: Asset, content: bytes) -> bytes:
    """``content``.

    Raises:
        DashboardError: it is not the file whose hash is pinned.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != asset.sha256:
        raise DashboardError(
            f"{asset.path} of {asset.package} {asset.version} has sha256 {found}, pinned is {asset.sha256}: the file "
            "was changed on its way; remove it and try again, and look into it if that does not help"
        )
    return content


def fetch(folder: Path, assets: tuple[Asset, ...] = ASSETS) -> None:
    """Put the assets into ``folder``, from npm where they are not there yet.

    Raises:
        DashboardError: npm is missing or failed, or a file is not the pinned one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [asset for asset in assets if not (folder / asset.name).is_file()]
    for package in dict.fromkeys(f"{asset.package}@{asset.version}" for asset in missing):
        wanted = [asset for asset in missing if package == f"{asset.package}@{asset.version}"]
        with tempfile.TemporaryDirectory() as downloads, tarfile.open(_pack(package, Path(downloads))) as archive:
            for asset in wanted:
                try:
                    member = archive.extractfile(f"package/{asset.path}")
                except KeyError:
                    member = None
                if member is None:
                    raise DashboardError(f"{package} has no file {asset.path}: correct the table of assets")
                (folder / asset.name).write_bytes(checked(asset, member.read()))
    for asset in assets:
        checked(asset, (folder / asset.name).read_bytes())


def _pack(package: str, folder: Path) -> Path:
    """Download a package with npm, running nothing of it."""
    npm = shutil.which("npm")
    if npm is None:
        raise DashboardError("there is no npm on the PATH, which fetches the page's scripts: install Node.js")
    command = [npm, "pack", package, "--pack-destination", str(folder), "--ignore-scripts", "--silent"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(folder.glob("*.tgz"))
    if done.returncode or len(found) != 1:
        raise DashboardError(f"npm could not fetch {package} (exit code {done.returncode}): {done.stderr.strip()}")
    return found[0]


EXTERNAL = re.compile(r'(?P<tag><(?:script|link)\b[^>]*?\b(?:src|href)=")(?P<url>https?://[^"]+)"(?P<rest>[^>]*)>')


def rewritten(page: str, assets: tuple[Asset, ...] = ASSETS) -> str:
    """asv's page, loading the assets from ``vendor/`` and the data from ``data.js``.

    Raises:
        DashboardError: the page loads something that is no asset: another version of asv than this was written for.
    """

    def local(match: re.Match[str]) -> str:
        for asset in assets:
            if match["url"].endswith(asset.loads):
                rest = re.sub(r'\s*\b(?:integrity|crossorigin|referrerpolicy)="[^"]*"', "", match["rest"])
                return f'{match["tag"]}vendor/{asset.name}"{rest}>'
        raise DashboardError(f"asv's page loads {match['url']}, which is not in the table of assets: add it there")

    page = EXTERNAL.sub(local, page)
    before = re.search(r"<script[^>]*\bsrc=\"asv\.js\"", page)
    if before is None:
        raise DashboardError("asv's page does not load asv.js: another version of asv than this was written for")
    scripts = '<script src="data.js"></script>\n    <script src="stored.js"></script>\n    '
    return page[: before.start()] + scripts + page[before.start() :]


def stored(folder: Path) -> str:
    """The script that holds every file of data below ``folder``."""
    files = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*")) if path.suffix in DATA
    }  # fmt: skip
    return f"window.STORED = {json.dumps(files)};\n"


def publish(repository: Path, results: Path, out: Path) -> None:
    """asv's page of the results, below ``out``.

    Raises:
        DashboardError: asv could not make it.
    """
    config = json.loads((ROOT / "asv.conf.json").read_text())
    known = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "--verify", "--quiet", "refs/heads/main"],
        capture_output=True, check=False,
    )  # fmt: skip
    config |= {"repo": str(repository), "results_dir": str(results), "html_dir": str(out)}
    if known.returncode:  # a checkout of one commit, as in CI, has no branch
        config["branches"] = ["HEAD"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "asv.conf.json"
        path.write_text(json.dumps(config))
        done = subprocess.run([sys.executable, "-m", "asv", "publish", "--config", str(path)], check=False)
    if done.returncode:
        raise DashboardError(f"asv publish failed with exit code {done.returncode}; what it said is above")


def usable(results: Path, folder: Path) -> int:
    """Copy what asv can read of the results into ``folder``; returns how many files of results those are.

    A broken file is named on standard error and left out: asv would stop at it. Benchmarks without any result are left
    out too: the page would ask for graphs that are not there.
    """
    from asv.results import Results

    names: set[str] = set()
    count = 0
    for path in sorted(results.glob("*/*.json")):
        target = folder / path.relative_to(results)
        target.parent.mkdir(exist_ok=True)
        if path.name != "machine.json":
            try:
                names |= set(Results.load(str(path), machine_name=path.parent.name).get_all_result_keys())
            except Exception as error:  # asv meets broken files with errors of any kind
                sys.stderr.write(f"{path} is left out, it cannot be read: {error!r}\n")
                continue
            count += 1
        shutil.copyfile(path, target)
    benchmarks = json.loads((results / "benchmarks.json").read_text(encoding="utf-8"))
    kept = {name: entry for name, entry in benchmarks.items() if name in names or name == "version"}
    (folder / "benchmarks.json").write_text(json.dumps(kept), encoding="utf-8")
    return count


def build(repository: Path, results: Path, out: Path, cache: Path = CACHE) -> Path:
    """Make the whole page; returns its index.html.

    Raises:
        DashboardError: it could not be made; the message says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not usable(results, Path(folder)):
            raise DashboardError(f"there are no results in {results}: python3 -m nox -s bench stores some")
        fetch(cache)
        publish(repository, Path(folder), out)
    index = out / "index.html"
    index.write_text(rewritten(index.read_text(encoding="utf-8")), encoding="utf-8")
    vendor = out / "vendor"
    vendor.mkdir()
    for asset in ASSETS:
        shutil.copyfile(cache / asset.name, vendor / asset.name)
    shutil.copyfile(STORED, out / STORED.name)
    (out / "data.js").write_text(stored(out), encoding="utf-8")
    return index


def main(arguments: list[str] | None = None) -> None:
    """The command; exits with a message where the page cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboard", description="Make the dashboard (docs/measuring.md)."
    )
    parser.add_argument("--repository", type=Path, default=ROOT, help="whose commits the results are of")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="the history's folder")
    parser.add_argument("--out", type=Path, default=OUT, help="where the page goes; what is there is removed")
    given = parser.parse_args(arguments)
    try:
        index = build(given.repository.resolve(), given.results.resolve(), given.out.resolve())
    except (DashboardError, OSError, tarfile.TarError) as error:
        sys.exit(f"benchmarks.dashboard: {error}")
    sys.stdout.write(f"{index}\n")


if __name__ == "__main__":
    main()
