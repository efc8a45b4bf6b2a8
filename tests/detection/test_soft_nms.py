"""Soft-NMS against a loop over boxes, and views of an image against what is known of each."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")

from helpers.boxes import naive_iou
from metricopt_ext.detection.soft_nms import merged, mirrored, soft_nms


def by_hand(
    boxes: list[list[float]], scores: list[float], groups: list[int], sigma: float, threshold: float
) -> dict[int, float]:
    """The paper's pseudo-code, one box at a time; returns the score of each box that is left, by its row."""
    left = {}
    for group in set(groups):
        current = {row: score for row, score in enumerate(scores) if groups[row] == group}
        while current:
            best = max(current, key=lambda row: (current[row], -row))
            score = current.pop(best)
            if score <= threshold:
                break
            left[best] = score
            for row in current:
                current[row] *= math.exp(-(naive_iou(boxes[best], boxes[row]) ** 2) / sigma)
    return left


def random_boxes(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, generator=rng, dtype=torch.float64) * 30
    sides = torch.rand(count, 2, generator=rng, dtype=torch.float64) * 30
    scores = torch.rand(count, generator=rng, dtype=torch.float64).clamp(min=1e-3)
    return torch.cat([corners, corners + sides], 1), scores, torch.randint(4, (count,), generator=rng) * 7


@pytest.mark.parametrize(("count", "sigma", "threshold"), [(1, 0.5, 0.0), (60, 0.2, 0.05), (130, 0.5, 0.0005)])
def test_scores_are_those_of_the_papers_loop(count: int, sigma: float, threshold: float) -> None:
    boxes, scores, groups = random_boxes(count, seed=count)
    rows, lowered = soft_nms(boxes, scores, groups, sigma=sigma, threshold=threshold)
    expected = by_hand(boxes.tolist(), scores.tolist(), groups.tolist(), sigma, threshold)
    assert rows.tolist() == sorted(expected)
    assert count == 1 or len(rows) < count  # some fall below the threshold
    torch.testing.assert_close(
        lowered, torch.tensor([expected[row] for row in sorted(expected)], dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_no_more_boxes_of_a_group_are_taken_than_asked() -> None:
    boxes, scores, groups = random_boxes(130, seed=1)
    rows, lowered = soft_nms(boxes, scores, groups, sigma=0.5, threshold=0.0)
    some, theirs = soft_nms(boxes, scores, groups, sigma=0.5, threshold=0.0, most=5)
    best = [row for g in groups.unique() for row in rows[groups[rows] == g][lowered[groups[rows] == g].argsort()[-5:]]]
    assert some.tolist() == sorted(map(int, best))
    assert set(theirs.tolist()) <= set(lowered.tolist())


def view(boxes: Any, scores: Any, labels: Any) -> dict[str, Tensor]:
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float64),
        "scores": torch.tensor(scores, dtype=torch.float64),
        "labels": torch.tensor(labels),
    }


BOX, NEAR, FAR = [0.0, 0, 10, 10], [0.0, 0, 10, 8], [20.0, 20, 30, 30]


def test_views_compete_by_class_and_the_best_come_first() -> None:
    first = view([BOX, FAR], [0.6, 0.3], [1, 1])
    second = view([NEAR, FAR], [0.9, 0.5], [1, 2])
    (hard,) = merged([[first, second]], nms=0.5, sigma=0.0, threshold=0.0, most=9)
    assert hard["scores"].tolist() == [0.9, 0.5, 0.3]  # the first box overlaps the second view's by .8
    assert hard["labels"].tolist() == [1, 2, 1]
    assert hard["boxes"].tolist() == [NEAR, FAR, FAR]
    (soft,) = merged([[first, second]], nms=0.5, sigma=0.2, threshold=0.0, most=3)
    lowered = 0.6 * math.exp(-(0.8**2) / 0.2)
    assert lowered < 0.3
    torch.testing.assert_close(soft["scores"], torch.tensor([0.9, 0.5, 0.3], dtype=torch.float64), rtol=0, atol=0)
    (all_of_them,) = merged([[first, second]], nms=0.5, sigma=0.2, threshold=0.0, most=4)
    torch.testing.assert_close(all_of_them["scores"][3], torch.tensor(lowered, dtype=torch.float64), rtol=1e-14, atol=0)


def test_images_of_a_batch_do_not_compete() -> None:
    none = {"boxes": torch.zeros(0, 4).double(), "scores": torch.zeros(0).double(), "labels": torch.zeros(0).long()}
    images = [[view([BOX, NEAR], [0.6, 0.5], [3, 3])], [view([NEAR], [0.9], [3])], [none]]
    together = merged(images, nms=0.5, sigma=0.3, threshold=0.01, most=9)
    for each, alone in zip(together, images, strict=True):
        (expected,) = merged([alone], nms=0.5, sigma=0.3, threshold=0.01, most=9)
        for name in expected:
            assert torch.equal(each[name], expected[name])


def test_what_is_mirrored_twice_is_as_it_was() -> None:
    boxes = torch.tensor([[1.0, 2, 5, 6], [0, 0, 64, 32]])
    assert mirrored(boxes, 64).tolist() == [[59, 2, 63, 6], [0, 0, 64, 32]]
    assert torch.equal(mirrored(mirrored(boxes, 64), 64), boxes)
