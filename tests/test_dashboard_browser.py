"""The dashboard in a real browser without a network: `nox -s dashboard_test`. Skipped where there is no browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dashboard
from tests.support.histories import LATENCY, Repository, wobble

ROOT = Path(__file__).parent.parent
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: nox -s dashboard_test")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("KDA_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser on the PATH: none of {', '.join(NAMES)}")

BYTES = "ring_bytes.RingBytes.track_head_step"
SLOW = ("fused+ring", 4, 16)


def figures(place: tuple[Any, ...], number: int) -> float:
    """A latency; that of one cell grows by 30 % at the fifth of eight commits."""
    return 5.0 * wobble(number, place, 0.001) * (1.3 if place == SLOW and number >= 4 else 1.0)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dashboard of eight invented commits, the last of them also on a machine that measured something else."""
    folder = tmp_path_factory.mktemp("dashboard")
    repository = Repository(folder / "repository")
    repository.describe()
    repository.history(8, figures)
    repository.describe(BYTES, {"K": (128,)}, "bytes")
    repository.record(7, lambda place, number: 1028.0, name=BYTES, machine="no_gpu", measured={})
    return dashboard.build(repository.folder, repository.results, folder / "html")


class Page:
    """A page opened from the folder, offline, with everything that went wrong while it was shown."""

    def __init__(self, index: Path, page: Any) -> None:
        self.index, self.page, self.wrong = index, page, []
        page.on("requestfailed", self._failed)
        page.on("request", self._asked)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", lambda line: line.type == "error" and self.wrong.append(f"console: {line.text}"))

    def _failed(self, request: Any) -> None:
        # Leaving a page cancels what it still loads (its icon, on a busy machine): nothing is missing from the folder.
        if request.failure != "net::ERR_ABORTED":
            self.wrong.append(f"failed: {request.url}: {request.failure}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.wrong.append(f"asked the network: {request.url}")

    def open(self, where: str) -> Any:
        """Show a part of the page anew."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.index.as_uri()}#{where}")
        return self.page


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(chromium: Any, index: Path) -> Page:
    context = chromium.new_context(offline=True, viewport={"width": 1400, "height": 900})
    return Page(index, context.new_page())


@pytest.fixture
def shown(chromium: Any, planted: Path) -> Iterator[Page]:
    page = opened(chromium, planted)
    yield page
    assert page.wrong == []
    page.page.context.close()


PAINTED = """canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 200) colours.add([pixels[i], pixels[i + 1], pixels[i + 2]].join());
  return colours.size > 3;
}"""
LINES = "lines => JSON.stringify($('#main-graph').data('plot')?.getData().map(line => line.data.length)) === lines"


def test_the_grid_shows_each_benchmark_with_its_line(shown: Page) -> None:
    page = shown.open("/")
    tile = page.locator("#summarygrid-display .benchmark-container", has_text="RingLatency.track_verify")
    canvas = tile.locator("canvas.flot-base")
    canvas.wait_for()
    assert tile.count() == 1
    page.wait_for_function(PAINTED, arg=canvas.element_handle())


def test_a_graph_shows_the_commits_of_a_cell(shown: Page) -> None:
    page = shown.open(f"{LATENCY}?p-lane='fused%2Bring'&p-T=4&p-B=16")
    canvas = page.locator("#main-graph canvas.flot-base")
    canvas.wait_for()
    page.wait_for_function(PAINTED, arg=canvas.element_handle())
    page.wait_for_function(LINES, arg="[8]")


def test_a_benchmark_that_one_machine_lacks_is_shown_for_the_other(shown: Page) -> None:
    page = shown.open(BYTES)
    page.locator("#main-graph canvas.flot-base").wait_for()
    page.wait_for_function(LINES, arg="[1]")


def test_the_regression_list_names_the_slower_cell_and_its_commit(shown: Page) -> None:
    page = shown.open("/regressions")
    row = page.locator("#regressions-display table tbody tr", has_text="RingLatency")
    row.first.wait_for()
    (text,) = row.all_inner_texts()
    assert "'fused+ring', 4, 16" in text
    assert "1.30x" in text


def test_the_repositorys_own_history_opens(chromium: Any, tmp_path: Path) -> None:
    """What `nox -s dashboard` makes; with KDA_SCREENSHOT, its picture is kept."""
    page = opened(chromium, dashboard.build(ROOT, ROOT / "benchmarks" / "results", tmp_path / "html"))
    for where, content in (
        ("/", "#summarygrid-display canvas.flot-base"), ("/summarylist", "#summarylist-body table tbody tr"),
        (LATENCY, "#main-graph canvas.flot-base"),
    ):  # fmt: skip
        shown = page.open(where)
        shown.locator(content).first.wait_for()
    shown.wait_for_timeout(1000)
    picture = os.environ.get("KDA_SCREENSHOT")
    if picture:
        shown.screenshot(path=picture)
    assert page.wrong == []


def test_a_file_that_the_folder_lacks_is_noticed(chromium: Any, planted: Path, tmp_path: Path) -> None:
    """What the tests above rest on: they would fail if a script or the icon were missing."""
    folder = Path(shutil.copytree(planted.parent, tmp_path / "html"))
    (folder / "swallow.ico").unlink()
    page = opened(chromium, folder / planted.name)
    with page.page.expect_event("requestfailed"):
        page.open("/")
    page.page.wait_for_timeout(100)
    assert [line for line in page.wrong if "swallow.ico: net::ERR_FILE_NOT_FOUND" in line]
