"""Pictures of a run: what is drawn where, and that it becomes a picture."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

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


SIZE = SettingLine("size", "values", 1.0, 1.41, [0.84, 1.0, 1.41], [0.4, 0.5, 0.6])
FLIP = SettingLine("flip", "values", False, True, [False, True], [0.6, 0.7])
KIND = SettingLine("kind", "values", "hard", "soft", ["soft", "hard"], [0.6, 0.7])
SCORE = SettingLine("score_thresh", "logit", 0.05, 0.3, [0.01, 0.05, 0.2], [0.5, 0.6, 0.7])


def along(report: Callable[..., Report], *lines: list[SettingLine]) -> Report:
    """A report whose seeds have these lines."""
    made = report(seeds=len(lines))
    return replace(made, records=[replace(each, lines=own) for each, own in zip(made.records, lines, strict=True)])


def test_settings_are_a_picture(report: Callable[..., Report], tmp_path: Path) -> None:
    path = plot_settings(along(report, [SIZE, FLIP, KIND, SCORE]), tmp_path / "settings.png")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    for name in ("settings", "metricopt"):  # the lines, and what was kept
        colour = np.array([int(METHODS[name].colour[i : i + 2], 16) for i in (1, 3, 5)])
        assert (np.abs(pixels - colour).sum(-1) < 90).sum() > 50
