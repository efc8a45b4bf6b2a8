"""Intervals over images: without a group the numbers are those of the other images, and the rest is arithmetic."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("PIL")

from metricopt_ext.detection.coco_summary import summarize
from metricopt_ext.detection.left_out import GROUPS, STUDENT, groups_of, interval
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet


def drawn(images: int, noise: float, rare: int | None = None) -> tuple[list[Detections], DetectionSet]:
    """Objects of three classes, the last of which is in one image if any, most found; crowds among them."""
    rng = torch.Generator().manual_seed(0)
    found, truth = [], []
    for i in range(images):
        corners = 300 * torch.rand(4, 2, generator=rng, dtype=torch.float64)
        sides = 10 + 120 * torch.rand(4, 2, generator=rng, dtype=torch.float64)
        boxes, labels = torch.cat([corners, corners + sides], 1), torch.randint(0, 2, (4,), generator=rng)
        if i == rare:
            labels[0] = 2
        crowd = torch.rand(4, generator=rng) < 0.1
        truth.append(Annotated(i, Path(f"{i}.png"), 500, 500, boxes, labels, torch.zeros(4, dtype=torch.bool), crowd))
        near = torch.randint(0, 4, (9,), generator=rng)
        moved = boxes[near] + noise * torch.randn(9, 4, generator=rng, dtype=torch.float64)
        found.append(Detections(moved, torch.rand(9, generator=rng), labels[near]))
    return found, DetectionSet(("a", "b", "c"), truth)


@pytest.mark.parametrize("images", [5, 43])
def test_without_a_group_the_numbers_are_those_of_the_other_images(images: int) -> None:
    found, truth = drawn(images, 6, rare=3)
    summary, groups = summarize(found, truth), groups_of(images)
    assert len(set(groups.tolist())) == min(images, GROUPS)
    for group in range(0, groups.max() + 1, 3):
        others = np.flatnonzero(groups != group).tolist()
        direct = summarize([found[i] for i in others], truth.subset(others))
        for name, value in direct.numbers.items():
            expected = np.nan if value is None else value
            assert summary.without[name][group] == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_the_interval_is_student_s_about_the_number() -> None:
    assert pytest.approx(STUDENT, abs=6e-5) == [stats.t.ppf(0.975, n) for n in range(1, GROUPS)]
    without = np.array([0.4, 0.5, 0.6, 0.7])
    error = math.sqrt(3 / 4 * sum((each - 0.55) ** 2 for each in without))
    low, high = interval(0.5, without, -math.inf, math.inf) or (0, 0)
    assert (low, high) == pytest.approx((0.5 - 3.1824 * error, 0.5 + 3.1824 * error))
    assert interval(0.5, without) == (0, 1)


def test_what_cannot_be_told_has_no_interval() -> None:
    assert interval(None, np.array([0.4, 0.5])) is None
    assert interval(0.5, np.array([0.4])) is None
    assert interval(0.5, np.array([0.4, np.nan])) is None  # without a group there is no such object
    assert interval(1.0, np.ones(5)) is None
    assert len(groups_of(1)) == 1
    assert len(groups_of(0)) == 0


def test_a_difference_is_paired_by_image() -> None:
    """The same detections with an equal loss in each image: the difference is surer than either number."""
    found, truth = drawn(60, 4)
    worse = [Detections(each.boxes + 4, each.scores, each.labels) for each in found]
    ours, theirs = summarize(found, truth), summarize(worse, truth)
    difference, ends = ours.differences(theirs)["AP"]
    assert difference == pytest.approx(ours.numbers["AP"] - theirs.numbers["AP"])
    low, high = ours.intervals()["AP"] or (0, 0)
    assert ends is not None
    assert 0 < ends[0] < difference < ends[1]
    assert ends[1] - ends[0] < 0.8 * (high - low)
    assert ours.differences(ours)["AP"] == (0, None)
