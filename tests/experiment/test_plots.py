"""Pictures of a run: what is drawn where, and that it becomes a picture."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from PIL import Image

from metricopt_ext.experiment import plots
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.plots import plot_finetuning, plot_methods, plot_settings, plot_value_function
from metricopt_ext.experiment.report import Report
from metricopt_ext.methods.setting_lines import SettingLine


@pytest.mark.slow
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
def test_methods_are_dots_for_seeds_and_a_line_at_their_mean(
    report: Callable[..., Report], figures: list[Any], maximize: bool
) -> None:
    made = report(maximize=maximize)
    del made.records[1].outcomes["cma_es"]
    plot_methods(made, "methods.png")
    (axes,) = figures[0].axes
    titles = {tick.get_position()[1]: tick.get_text() for tick in axes.get_yticklabels()}
    dots, strokes = axes.lines[::2], axes.lines[1::2]
    assert len(dots) == len(strokes) == len(axes.collections) == len(titles) == len(made.methods)
    shown = {}
    for dot, stroke, bar in zip(dots, strokes, axes.collections, strict=True):
        (row,) = set(dot.get_ydata())
        assert np.mean(stroke.get_ydata()) == pytest.approx(row)
        assert list(stroke.get_xdata()) == pytest.approx([np.mean(dot.get_xdata())] * 2)
        assert dot.get_color() == stroke.get_color()
        (ends,) = bar.get_segments()
        interval = scipy.stats.ttest_1samp(dot.get_xdata(), 0).confidence_interval(0.95)
        np.testing.assert_allclose(ends, [(interval.low, row), (interval.high, row)])
        shown[titles[row]] = (list(dot.get_xdata()), dot.get_color(), row)
    for place, name in enumerate(made.methods):  # the first of the table stands at the top
        assert shown[made.title(name)] == (made.values(name, "test"), METHODS[name].colour, len(titles) - 1 - place)
    assert f"({'higher' if maximize else 'lower'} is better)" in axes.get_xlabel()
    assert figures[0].get_suptitle().startswith("dots: seeds; vertical line: mean; bar: its 95% interval")
    assert not axes.texts  # nothing lies beyond the axis
    low, high = axes.get_xlim()
    assert all(low < x < high for dot in dots for x in dot.get_xdata())


@pytest.mark.parametrize(("third", "cut"), [(0.5, False), (0.7, True)])
def test_intervals_that_are_cut_are_said_to_be(
    report: Callable[..., Report], figures: list[Any], third: float, cut: bool
) -> None:
    levels = {name: [0.3, 0.3, 0.3] for name in report().methods}
    levels |= {"cma_es": [0.7, 0.7, 0.7], "metricopt": [0.5, 0.5, third]}
    plot_methods(report(levels), "methods.png")  # of 0.5, 0.5, 0.7 the interval goes from 0.28 to 0.85
    assert figures[0].get_suptitle().endswith(", cut off at the axis") == cut


def test_one_seed_has_no_interval_and_the_plot_says_so(report: Callable[..., Report], figures: list[Any]) -> None:
    plot_methods(report(seeds=1), "methods.png")
    plot_finetuning(report(seeds=1), "finetuning.png")
    assert not figures[0].axes[0].collections
    assert figures[0].get_suptitle() == "one seed, so no intervals"
    assert figures[1].axes[0].get_title() == "one seed"


@pytest.mark.parametrize("far", [-9.0, 9.0])
def test_a_much_worse_method_is_an_arrow_at_the_end_of_the_axis(
    report: Callable[..., Report], figures: list[Any], far: float
) -> None:
    made = report({"cma_es": [far, far - 0.25, far + 0.25]}, maximize=far < 0)
    plot_methods(made, "methods.png")
    (axes,) = figures[0].axes
    low, high = axes.get_xlim()
    others = [value for name in made.methods if name != "cma_es" for value in made.values(name, "test")]
    assert low < min(others) < max(others) < high
    assert high - low < 1.2 * (max(others) - min(others))
    (arrow,) = axes.texts
    assert arrow.get_text() == f"mean {far:.4f}"
    assert arrow.xy == (low if far < 0 else high, len(METHODS) - 1 - made.methods.index("cma_es"))
    assert figures[0].get_suptitle().endswith("arrow: beyond the axis")


@pytest.mark.parametrize("maximize", [True, False])
def test_a_much_better_method_is_never_cut_off(
    report: Callable[..., Report], figures: list[Any], maximize: bool
) -> None:
    best = 9.0 if maximize else -9.0
    plot_methods(report({"batchnorm_validation": [best] * 3}, maximize=maximize), "methods.png")
    (axes,) = figures[0].axes
    low, high = axes.get_xlim()
    assert not axes.texts
    assert low < best < high


def test_two_methods_far_off_stay_on_the_axis(report: Callable[..., Report], figures: list[Any]) -> None:
    plot_methods(report({"pretrained": [-9.0] * 3, "loss_finetune": [-9.1] * 3}), "methods.png")
    (axes,) = figures[0].axes
    assert not axes.texts
    assert axes.get_xlim()[0] < -9.1


def test_curves_are_means_over_the_seeds_that_have_them(report: Callable[..., Report], figures: list[Any]) -> None:
    made = report()
    del made.records[2].curves["metricopt"]
    plot_finetuning(made, "finetuning.png")
    (axes,) = figures[0].axes
    curves = {line.get_color(): line for line in axes.lines if len(line.get_xdata()) == 3}
    assert set(curves) == {METHODS[name].colour for name in ("loss_finetune", "metricopt")}
    for name, records in (("loss_finetune", made.records), ("metricopt", made.records[:2])):
        line = curves[METHODS[name].colour]
        expected = np.mean([record.curves[name] for record in records], axis=0)
        assert list(line.get_xdata()) == [0, 1, 2]
        np.testing.assert_allclose(line.get_ydata(), expected)
    spread = np.std([record.curves["loss_finetune"] for record in made.records], axis=0)
    mean = curves[METHODS["loss_finetune"].colour].get_ydata()
    (corners,) = axes.collections[0].get_paths()
    assert corners.vertices[:, 1].max() == pytest.approx((mean + spread).max())
    assert corners.vertices[:, 1].min() == pytest.approx((mean - spread).min())
    assert not axes.get_legend()  # it stands below, where no band can lie


@pytest.mark.parametrize(
    ("kept", "often"),
    [
        (("metricopt", "metricopt", "metricopt"), "kept"),
        (("start", "metricopt", "metricopt"), "kept in 2 of 3 seeds"),
        (("start", "loss_finetune", "start"), "not kept"),
    ],
)
def test_the_path_says_how_often_it_was_kept_and_a_mark_what_was(
    report: Callable[..., Report], figures: list[Any], kept: tuple[str, ...], often: str
) -> None:
    made = report()
    records = [replace(record, kept=name) for record, name in zip(made.records, kept, strict=True)]
    made = replace(made, records=records)
    plot_finetuning(made, "finetuning.png")
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "loss finetune",
        f"MetricOpt's path, {often}",
        "what the guard kept",
    ]
    (mark,) = (line for line in figures[0].axes[0].lines if line.get_marker() == "D")
    assert list(mark.get_xdata()) == [2]
    assert list(mark.get_ydata()) == pytest.approx([np.mean(made.values("metricopt", "validation"))])


def test_predictions_stand_beside_the_truth_for_each_seed(report: Callable[..., Report], figures: list[Any]) -> None:
    made = report()
    plot_value_function(made, "value_function.png")
    (axes,) = figures[0].axes
    *seeds, diagonal = axes.lines
    assert [line.get_label() for line in seeds] == ["seed 4", "seed 5", "seed 6"]
    assert diagonal.get_label() == "predicted = true"
    for line, record in zip(seeds, made.records, strict=True):
        assert list(line.get_xdata()) == record.true
        assert list(line.get_ydata()) == record.predicted
    ends = [min(min(record.true) for record in made.records), max(max(record.true) for record in made.records)]
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == ends
    assert axes.get_title().endswith("Spearman 0.63")  # the mean of 0.1, 0.9 and 0.9


SIZE = SettingLine("size", "values", 1.0, 1.41, [0.84, 1.0, 1.41], [0.4, 0.5, 0.6])
FLIP = SettingLine("flip", "values", False, True, [False, True], [0.6, 0.7])
KIND = SettingLine("kind", "values", "hard", "soft", ["soft", "hard"], [0.6, 0.7])
SCORE = SettingLine("score_thresh", "logit", 0.05, 0.3, [0.01, 0.05, 0.2], [0.5, 0.6, 0.7])


def along(report: Callable[..., Report], *lines: list[SettingLine]) -> Report:
    """A report whose seeds have these lines."""
    made = report(seeds=len(lines))
    return replace(made, records=[replace(each, lines=own) for each, own in zip(made.records, lines, strict=True)])


def test_each_setting_is_a_panel_with_a_line_for_each_seed(report: Callable[..., Report], figures: list[Any]) -> None:
    other = replace(SIZE, values=[1.0, 1.19, 1.41], metric=[0.3, 0.2, 0.1], chosen=1.0)
    plot_settings(along(report, [SIZE, FLIP, KIND, SCORE], [other]), "settings.png")
    panels = figures[0].axes
    assert [axes.get_xlabel() for axes in panels] == ["size", "flip", "kind", "score_thresh"]
    size, flip, kind, score = panels
    assert [tick.get_text() for tick in size.get_xticklabels()] == ["0.84", "1", "1.19", "1.41"]
    assert [tick.get_text() for tick in flip.get_xticklabels()] == ["False", "True"]
    assert [tick.get_text() for tick in kind.get_xticklabels()] == ["soft", "hard"]
    assert score.get_xscale() == "logit"
    first, began, kept, second, *marks = [line.get_xydata().tolist() for line in size.lines]
    assert first == [[0, 0.4], [1, 0.5], [3, 0.6]]
    assert (began, kept) == ([[1, 0.5]], [[3, 0.6]])
    assert second == [[1, 0.3], [2, 0.2], [3, 0.1]]
    assert marks == [[[1, 0.3]], [[1, 0.3]]]  # what was kept is what it was
    assert [line.get_marker() for line in size.lines] == [".", "o", "D"] * 2
    assert len(score.lines) == 2  # what was kept is elsewhere
    assert score.lines[0].get_xydata().tolist() == [[0.01, 0.5], [0.05, 0.6], [0.2, 0.7]]
    assert size.get_ylabel().endswith("(higher is better)")
    assert figures[0].get_suptitle() == "one line per seed; ring: before; diamond: kept"


def test_settings_are_a_picture(report: Callable[..., Report], tmp_path: Path) -> None:
    path = plot_settings(along(report, [SIZE, FLIP, KIND, SCORE]), tmp_path / "settings.png")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    for name in ("settings", "metricopt"):  # the lines, and what was kept
        colour = np.array([int(METHODS[name].colour[i : i + 2], 16) for i in (1, 3, 5)])
        assert (np.abs(pixels - colour).sum(-1) < 90).sum() > 50
