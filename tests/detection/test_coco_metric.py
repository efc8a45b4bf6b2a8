"""COCO's metrics as black boxes, on cases known in closed form, for boxes and masks."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused, assert_warned

pytest.importorskip("pycocotools")
pytest.importorskip("torchvision")

from pycocotools import mask as rle

import metricopt_ext as mo
from helpers import coco_reference
from helpers.detectors import SMALL_IMAGES, small_detector
from metricopt_ext.data.halves import random_halves
from metricopt_ext.detection.coco_metric import coco_metric
from metricopt_ext.detection.tables import Kind
from metricopt_ext.errors import DataError, MetricError

SIDE = 50


def part_of_square(columns: float) -> Tensor:
    mask = torch.zeros(1, SIDE, SIDE)
    mask[0, :20, :20] = (torch.arange(400) < 20 * columns).view(20, 20)
    return mask


def truth(images: int = 4) -> dict[str, Any]:
    """One object in each image: a square of 20 pixels, of class 7 or 9."""
    corners = [[0, 0, 20, 0, 20, 20, 0, 20]]
    return {
        "images": [{"id": 10 + i, "width": SIDE, "height": SIDE} for i in range(images)],
        "annotations": [
            {
                "id": i + 1,
                "image_id": 10 + i,
                "category_id": 7 + 2 * (i % 2),
                "iscrowd": 0,
                "area": 400.0,
                "bbox": [0, 0, 20, 20],
                "segmentation": corners,
            }
            for i in range(images)
        ],
        "categories": [{"id": 7, "name": "a"}, {"id": 9, "name": "b"}],
    }


class Finder(nn.Module):
    """Finds in each image, a number in all its pixels, a part of the square."""

    def __init__(self, columns: float = 20) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.find(int(image[0, 0, 0])) for image in images]

    def find(self, index: int) -> dict[str, Tensor]:
        if index < 0:
            return {
                "boxes": torch.zeros(0, 4),
                "scores": torch.zeros(0),
                "labels": torch.zeros(0).long(),
                "masks": torch.zeros(0, 1, SIDE, SIDE),
            }
        return {
            "boxes": torch.tensor([[0.0, 0.0, self.columns, 20.0]]),
            "scores": torch.tensor([0.9]),
            "labels": torch.tensor([7 + 2 * (index % 2)]),
            "masks": part_of_square(self.columns)[None],
        }


def pictures(*numbers: int) -> list[Tensor]:
    return [torch.full((3, SIDE, SIDE), float(number)) for number in numbers]


def value(metric: Any, model: nn.Module) -> Any:
    found = metric.judge(model)
    return found.value, found.pairs and found.pairs[0]


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_an_overlap_of_three_quarters_hits_at_six_of_ten_ious(kind: Kind) -> None:
    images, model = pictures(0, 1, 2, 3), Finder(columns=15.2)
    assert value(coco_metric(images, truth(), kind=kind, name="AP50"), model)[0] == pytest.approx(1)
    assert value(coco_metric(images, truth(), kind=kind, name="AP"), model)[0] == pytest.approx(0.6)


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_halves_are_values_on_their_images_alone(kind: Kind) -> None:
    halves = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    metric = coco_metric(pictures(0, 1, -1, 3), truth(), kind=kind, halves=halves)
    # Of class a one of two objects is found: a precision of 1 at the recalls up to 0.5, 51 of 101.
    assert value(metric, Finder()) == (pytest.approx((51 / 101 + 1) / 2), (pytest.approx(1), pytest.approx(0.5)))
    nothing = coco_metric(pictures(-1, -1, -1, -1), truth(), kind=kind, halves=halves)
    assert value(nothing, Finder()) == (0, (0, 0))


def test_halves_are_random_ones_by_default() -> None:
    images = pictures(0, 1, 2, 3)
    by_default, none = (value(coco_metric(images, truth(), **given), Finder(15.2)) for given in ({}, {"halves": ()}))
    assert by_default == value(coco_metric(images, truth(), halves=random_halves(4, 0)), Finder(15.2))
    assert none == (by_default[0], ())
    assert coco_metric(images, truth()).function(Finder()) == pytest.approx(1)  # a number, for whoever calls it


# --- A Mask R-CNN of torchvision's -----------------------------------------------------------------------------------


@torch.no_grad()
def masks_of(model: Any) -> list[dict[str, Any]]:
    """What a detector finds in each picture, with the size of each, as pycocotools takes it."""
    return [
        {
            "image_id": i,
            "category_id": int(label),
            "score": float(score),
            "segmentation": rle.encode(np.asfortranarray((mask[0] >= 0.5).to(torch.uint8).numpy())),
        }
        for i, found in enumerate(model.eval()(SMALL_IMAGES))
        for label, score, mask in zip(found["labels"], found["scores"], found["masks"], strict=True)
    ]


def test_phi_of_a_mask_rcnn_is_searched_for_the_ap50_of_its_masks() -> None:
    """By its own loss, that of the masks included; each value is pycocotools' own. The truth is what one phi finds."""
    adapter = mo.attach_film(small_detector("MaskRCNN"), ["backbone.body.1"], dim=4)
    with adapter.using(torch.tensor([0.4, -0.3, 0.2, 0.1], dtype=torch.float64)) as model:
        objects = [each for each in masks_of(model) if rle.area(each["segmentation"]) > 0 and each["score"] > 0.5]
    content = {
        "images": [{"id": i, "width": each.shape[2], "height": each.shape[1]} for i, each in enumerate(SMALL_IMAGES)],
        "annotations": [{**each, "id": i, "iscrowd": 0, "area": 99.0} for i, each in enumerate(objects, start=1)],
        "categories": [{"id": 1}, {"id": 2}],
    }
    first = [each for each in objects if each["image_id"] == 0]
    target = {
        "boxes": torch.tensor([[4.0, 6, 30, 28]] * len(first)).double(),
        "labels": torch.tensor([each["category_id"] for each in first]),
        "masks": torch.from_numpy(rle.decode([each["segmentation"] for each in first])).permute(2, 0, 1),
    }
    losses: set[str] = set()

    def loss(model: Any, batch: Any) -> Any:
        parts = model.train()(*batch)
        losses.update(parts)
        return sum(parts.values())

    task = mo.FinetuneTask(
        adapter,
        loss=loss,
        batches=lambda seed, task, step: (SMALL_IMAGES[:1], [target]),
        metric=coco_metric(SMALL_IMAGES, content, kind="segm", name="AP50", halves=()),
        population=1,
    )
    run = mo.optimize_metric(task, queries=12)
    assert "loss_mask" in losses
    assert task.metric.ledger.spent == 12

    def value(model: Any) -> float:
        return coco_reference.average_precision(coco_reference.evaluated(content, masks_of(model), "segm"), "AP50")

    assert value(adapter.model) == pytest.approx(run.after, abs=1e-12)
    values = []
    for phi in run.points[:5]:
        with adapter.using(phi) as model:
            values.append(value(model))
    assert values == pytest.approx([1 - cost for cost in run.costs[:5]], abs=1e-12)
    assert len(set(values)) == 5


# --- What annotations and detectors say in other words -----------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "options", "names"),
    [
        (truth(), {"kind": "keypoints"}, ("kind='keypoints'", "bbox", "segm")),
        (truth(), {"name": "AP25"}, ("name='AP25'", "AP", "AP50", "AP75")),
        (truth(), {"halves": [torch.tensor([0]), torch.tensor([4])]}, ("halves", "4", "0")),
        (truth() | {"images": []}, {}, ("4", "images", "annotations", "0")),
        (truth() | {"annotations": []}, {}, ("4",)),
        (truth() | {"images": [{"id": 10 + i} for i in range(4)]}, {"kind": "segm"}, ("10",)),
    ],
)
def test_what_can_not_be_judged_is_refused(content: Any, options: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: coco_metric(pictures(0, 1, 2, 3), content, **options), DataError, *names)


def found(boxes: Any, labels: Any, **more: Any) -> dict[str, Any]:
    scores = torch.linspace(1, 0.5, len(labels))
    return {"boxes": torch.as_tensor(boxes), "labels": torch.as_tensor(labels), "scores": scores, **more}


WHOLE = Finder().find(0)


@pytest.mark.parametrize(
    ("seen", "kind", "names"),
    [
        (found([[0.0, 0, 20, 20]], [0]), "bbox", ("labels", "0", "categories", "7", "9")),
        (found([[0.0, 0, 0.4, 0.4]], [7]), "bbox", ("bbox",)),
        (found([[0.0, 0, 20, 20]], [7]), "segm", ("10",)),
        (WHOLE | {"masks": WHOLE["masks"][..., :40]}, "segm", ("masks", "50 x 40", "50 x 50")),
    ],
)
def test_detections_of_another_kind_are_refused(seen: Any, kind: Kind, names: tuple[str, ...]) -> None:
    """Masks of another size would hit nothing, without a word."""
    metric = coco_metric(pictures(0), truth(1), kind=kind, detect=lambda *_: seen)
    assert_refused(lambda: metric.judge(nn.Identity()), MetricError, *names)


def test_images_of_another_size_than_annotated_are_warned_of() -> None:
    assert_warned(lambda: coco_metric([torch.zeros(3, 7, 9)], truth(1)), "1", "10", "9", "7", SIDE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coco_metric([torch.zeros(3, 7, 9)], truth(1), detect=lambda *_: {})  # which may translate boxes
