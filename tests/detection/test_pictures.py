"""What the pictures of detections draw."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("PIL")

from PIL import Image

from helpers.boxes import naive_iou
from metricopt_ext.detection import pictures
from metricopt_ext.detection.pictures import box_iou, plot_detections
from metricopt_ext.detection.records import Annotated, Detections
from metricopt_ext.detection.toolkit import Example


def random_boxes(count: int, rng: torch.Generator) -> Tensor:
    corners = torch.randint(0, 60, (count, 2), generator=rng)
    return torch.cat([corners, corners + torch.randint(5, 40, (count, 2), generator=rng)], 1).float()


def annotated(boxes: Any, labels: Any = None, difficult: Any = None, crowd: Any = None) -> Annotated:
    boxes = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    none = torch.zeros(len(boxes), dtype=torch.bool)
    return Annotated(
        image_id="a",
        path=Path("a.png"),
        width=100,
        height=80,
        boxes=boxes,
        labels=none.long() if labels is None else torch.tensor(labels),
        difficult=none if difficult is None else torch.as_tensor(difficult),
        crowd=none if crowd is None else torch.as_tensor(crowd),
    )


def test_iou_equals_a_naive_loop() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = random_boxes(20, rng), random_boxes(30, rng)
    expected = [[naive_iou(one, other) for other in b.tolist()] for one in a.tolist()]
    torch.testing.assert_close(box_iou(a, b), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    flat = torch.tensor([[5.0, 5.0, 5.0, 9.0]])
    assert box_iou(flat, flat).tolist() == [[0]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    figures: list[Any] = []
    save = pictures.save_figure
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure) or save(figure, path))
    return figures


def boxes_in(axes: Any, colour: str) -> list[list[float]]:
    """The rectangles of a colour that a panel shows, as edges."""
    from matplotlib.colors import to_rgba

    return [
        [*patch.get_xy(), patch.get_x() + patch.get_width(), patch.get_y() + patch.get_height()]
        for patch in axes.patches
        if patch.get_edgecolor() == to_rgba(colour)
    ]


A, B, C, FAR = [10, 10, 30, 30], [50, 40, 90, 70], [60, 5, 80, 25], [0, 50, 9, 79]
EXAMPLE = Example(torch.zeros(3, 80, 100, dtype=torch.uint8), annotated([A, B, C], [0, 1, 1], [False, False, True]))


def found(*boxes: list[int], scores: list[float], labels: list[int]) -> Detections:
    return Detections(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), torch.tensor(scores), torch.tensor(labels)
    )


def test_detections_are_drawn_right_wrong_or_missed(tmp_path: Path, drawn: list[Any]) -> None:
    # Before: an object found twice, one with the wrong class, one below the score. After: all that are not difficult.
    before = found(A, A, B, FAR, scores=[0.6, 0.9, 0.8, 0.4], labels=[0, 0, 0, 1])
    after = found(A, B, scores=[0.9, 0.8], labels=[0, 1])
    path = plot_detections([EXAMPLE], [before], [after], ("cat", "dog"), tmp_path / "detections.png")
    assert Image.open(path).width > 300
    left, right = drawn[0].axes
    assert boxes_in(left, pictures.RIGHT) == [A]
    assert boxes_in(left, pictures.WRONG) == [B, A]
    assert boxes_in(left, pictures.MISSED) == [B]
    assert boxes_in(right, pictures.RIGHT) == [A, B]
    assert boxes_in(right, pictures.WRONG) == boxes_in(right, pictures.MISSED) == []
    assert [text.get_text() for text in left.texts] == ["cat 0.90", "cat 0.80", "cat 0.60"]


def test_nothing_found_is_drawn_as_missed(tmp_path: Path, drawn: list[Any]) -> None:
    none = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    plot_detections([EXAMPLE], [none], [none], ("cat", "dog"), tmp_path / "nothing.png")
    assert [boxes_in(axes, pictures.MISSED) for axes in drawn[0].axes] == [[A, B]] * 2
