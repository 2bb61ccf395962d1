"""The picture: what it shows, and that nothing in it overlaps or is cut off."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from kda_tooling.bench.plot import check_picture_path, data_digest, draw, plot
from kda_tooling.bench.results import SweepResult
from kda_tooling.bench.settings import SweepSettings

Factory = Callable[..., SweepResult]


def drawn(*results: SweepResult) -> Any:
    """The figure with its text laid out, so that boxes can be asked for."""
    figure: Any = draw(results)
    FigureCanvasAgg(figure).draw()
    return figure


def boxes(labels: list[Any]) -> list[Any]:
    return [label.get_window_extent() for label in labels if label.get_text()]


@pytest.mark.parametrize(
    "batch_sizes",
    [(1,), (1, 4, 16, 64), (1, 2, 4, 8, 16, 32, 64, 128, 256), tuple(range(1, 34)), (255, 256), (1, 4096)],
    ids=lambda sizes: f"{len(sizes)}",
)
@pytest.mark.parametrize("draft_tokens", [(4,), (3, 4, 6, 8)], ids=["one panel", "four panels"])
def test_no_label_overlaps_and_nothing_is_cut_off(
    batch_sizes: tuple[int, ...], draft_tokens: tuple[int, ...], sweep_factory: Factory
) -> None:
    figure = drawn(sweep_factory(SweepSettings(batch_sizes=batch_sizes, draft_tokens=draft_tokens)))
    page = figure.bbox
    panels = [axis for axis in figure.axes if axis.get_visible()]
    assert len(panels) == len(draft_tokens)
    for axis in panels:
        for labels in (axis.get_xticklabels(), axis.get_yticklabels()):
            for first, second in itertools.combinations(boxes(labels), 2):
                assert not first.overlaps(second)
        for box in [axis.get_tightbbox(), figure.legends[0].get_window_extent(), figure._suptitle.get_window_extent()]:
            assert page.x0 <= box.x0
            assert box.x1 <= page.x1
            assert page.y0 <= box.y0
            assert box.y1 <= page.y1
        assert not axis.get_tightbbox().overlaps(figure.legends[0].get_window_extent())


def test_every_lane_peer_and_the_floor_are_there_on_log_axes(example: SweepResult) -> None:
    figure = drawn(example)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [
        "kda fused", "kda fused+ring", "kda unfused", "kda unfused+ring", "sglang fused+ring", "sglang unfused+ring",
        "byte floor (ring)",
    ]  # fmt: skip
    for axis, t in zip(figure.axes, (4, 8), strict=True):
        assert axis.get_title() == f"verify, T = {t}"
        assert axis.get_xscale() == axis.get_yscale() == "log"
        assert len(axis.lines) == len(names)
        cells = [cell for cell in example.cells if cell.draft_tokens == t]
        floor = axis.lines[-1].get_ydata()
        assert list(floor) == [cell.best("kda", mode="ring").floor_us for cell in cells]  # type: ignore[union-attr]
        for line in axis.lines:
            assert min(line.get_ydata()) >= min(floor)
    assert "Example GPU" in figure._suptitle.get_text()
    assert "sglang 0.5.23" in figure._suptitle.get_text()


def test_a_lane_has_one_colour_and_owners_differ_by_line(example: SweepResult) -> None:
    lines = {line.get_label(): line for line in drawn(example).axes[0].lines}
    assert lines["kda fused+ring"].get_color() == lines["sglang fused+ring"].get_color()
    assert lines["kda fused+ring"].get_linestyle() == "-"
    assert lines["sglang fused+ring"].get_linestyle() == "--"
    assert len({lines[f"kda {lane}"].get_color() for lane in ("fused", "fused+ring", "unfused", "unfused+ring")}) == 4


def test_the_axis_says_hot_or_cold(sweep_factory: Factory) -> None:
    assert "L2-cold" in drawn(sweep_factory()).axes[0].get_ylabel()
    assert "L2-hot" in drawn(sweep_factory(SweepSettings(hot=True))).axes[0].get_ylabel()


def test_several_results_share_a_picture_only_if_they_can(example: SweepResult, sweep_factory: Factory) -> None:
    figure = drawn(example, sweep_factory(SweepSettings(kind="round")))
    titles = [axis.get_title() for axis in figure.axes if axis.get_visible()]
    assert titles == ["verify, T = 4", "verify, T = 8", "round, accept 3, T = 4"]
    other = dataclasses.replace(example, machine=dataclasses.replace(example.machine, gpu="another"))
    with pytest.raises(ValueError, match="one picture shows one GPU"):
        draw([example, other])


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_file_says_what_it_was_drawn_from(suffix: str, example: SweepResult, tmp_path: Path) -> None:
    path = tmp_path / f"sweep{suffix}"
    plot([example], path)
    digest = data_digest([example])
    if suffix == ".png":
        with Image.open(path) as image:
            assert image.text["Description"] == digest  # type: ignore[attr-defined]
            assert min(image.size) > 600
    else:
        assert digest.encode() in path.read_bytes()
    other = dataclasses.replace(example, peers={})
    assert data_digest([other]) != digest


@pytest.mark.parametrize("name", ["sweep.jpg", "sweep", "png"])
def test_types_that_cannot_be_drawn_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name} must end in \.png, \.svg or \.pdf"):
        check_picture_path(tmp_path / name)
    check_picture_path(tmp_path / f"{name}.PNG")
