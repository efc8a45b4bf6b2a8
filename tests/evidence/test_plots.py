"""Pictures of a run: what is drawn where, and that it becomes a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from metricopt_ext.evidence import plots
from metricopt_ext.evidence.method import METHODS
from metricopt_ext.evidence.plots import plot_finetuning, plot_methods, plot_value_function
from metricopt_ext.evidence.report import Report


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("draw", [plot_methods, plot_finetuning, plot_value_function])
def test_plots_are_pictures(report: Callable[..., Report], tmp_path: Path, draw: Any, seeds: int) -> None:
    path = tmp_path / "plot.png"
    assert draw(report(seeds=seeds), path) == path
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with Image.open(path) as image:
        assert min(image.size) > 200
        pixels = np.asarray(image.convert("RGB"))
    ours = np.array([int(METHODS["metricopt"].colour[i : i + 2], 16) for i in (1, 3, 5)])
    if draw is not plot_value_function:
        assert (np.abs(pixels - ours).sum(-1) == 0).sum() > 50  # MetricOpt's colour is there
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 10


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, in order."""
    saved: list[Any] = []

    def save(figure: Any, path: Any) -> Any:
        saved.append(figure)
        return path

    monkeypatch.setattr(plots, "save_figure", save)
    return saved


@pytest.mark.parametrize("maximize", [True, False])
def test_methods_are_dots_for_seeds_and_a_stroke_at_their_mean(
    report: Callable[..., Report], figures: list[Any], maximize: bool
) -> None:
    made = report(maximize=maximize)
    del made.records[1].outcomes["cma_es"]
    plot_methods(made, "methods.png")
    (axes,) = figures[0].axes
    titles = {tick.get_position()[1]: tick.get_text() for tick in axes.get_yticklabels()}
    dots, strokes = axes.lines[::2], axes.lines[1::2]
    assert len(dots) == len(strokes) == len(titles) == len(made.methods)
    shown = {}
    for dot, stroke in zip(dots, strokes, strict=True):
        (row,) = set(dot.get_ydata())
        assert np.mean(stroke.get_ydata()) == pytest.approx(row)
        assert list(stroke.get_xdata()) == pytest.approx([np.mean(dot.get_xdata())] * 2)
        assert dot.get_color() == stroke.get_color()
        shown[titles[row]] = (list(dot.get_xdata()), dot.get_color(), row)
    for place, name in enumerate(made.methods):  # the first of the table stands at the top
        assert shown[made.title(name)] == (made.values(name, "test"), METHODS[name].colour, len(titles) - 1 - place)
    assert f"({'higher' if maximize else 'lower'} is better)" in axes.get_xlabel()


def test_curves_are_means_over_the_seeds_that_have_them(report: Callable[..., Report], figures: list[Any]) -> None:
    made = report()
    del made.records[2].curves["metricopt"]
    plot_finetuning(made, "finetuning.png")
    (axes,) = figures[0].axes
    curves = {line.get_label(): line for line in axes.lines}
    assert set(curves) == {made.title("loss_finetune"), made.title("metricopt")}
    for name, records in (("loss_finetune", made.records), ("metricopt", made.records[:2])):
        line = curves[made.title(name)]
        expected = np.mean([record.curves[name] for record in records], axis=0)
        assert list(line.get_xdata()) == [0, 1, 2]
        np.testing.assert_allclose(line.get_ydata(), expected)
        assert line.get_color() == METHODS[name].colour
    spread = np.std([record.curves["loss_finetune"] for record in made.records], axis=0)
    mean = curves[made.title("loss_finetune")].get_ydata()
    corners = axes.collections[made.methods.index("loss_finetune") > made.methods.index("metricopt")].get_paths()[0]
    assert corners.vertices[:, 1].max() == pytest.approx((mean + spread).max())
    assert corners.vertices[:, 1].min() == pytest.approx((mean - spread).min())


def test_predictions_stand_beside_the_truth_for_each_seed(report: Callable[..., Report], figures: list[Any]) -> None:
    made = report()
    plot_value_function(made, "value_function.png")
    (axes,) = figures[0].axes
    *seeds, diagonal = axes.lines
    assert [line.get_label() for line in seeds] == ["seed 4", "seed 5", "seed 6"]
    for line, record in zip(seeds, made.records, strict=True):
        assert list(line.get_xdata()) == record.true
        assert list(line.get_ydata()) == record.predicted
    ends = [min(min(record.true) for record in made.records), max(max(record.true) for record in made.records)]
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == ends
    assert axes.get_title().endswith("Spearman 0.63")  # the mean of 0.1, 0.9 and 0.9
