"""COCO's metrics as black boxes, on cases known in closed form, for boxes and masks."""

import math
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
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

import metricopt_ext as mo
from helpers import coco_reference
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
    return 1 - found.cost, found.halves and tuple(1 - cost for cost in found.halves)


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
    assert none == (by_default[0], None)
    assert coco_metric(images, truth()).function(Finder()) == pytest.approx(1)  # a number, for whoever calls it


# --- A Mask R-CNN of torchvision's -----------------------------------------------------------------------------

RNG = torch.Generator().manual_seed(0)
IMAGES = [torch.rand(3, SIDE, SIDE, generator=RNG, dtype=torch.float64) for _ in range(4)]
# In each image, an object of either class: a square without a corner.
OBJECTS = torch.zeros(2, SIDE, SIDE, dtype=torch.uint8)
OBJECTS[0, 2:24, 4:26] = OBJECTS[1, 26:48, 22:44] = 1
OBJECTS[0, 2:8, 4:10] = OBJECTS[1, 26:32, 22:28] = 0
TARGET = {
    "boxes": torch.tensor([[4.0, 2, 26, 24], [22, 26, 44, 48]], dtype=torch.float64),
    "labels": torch.tensor([1, 2]),
    "masks": OBJECTS,
}
ANNOTATIONS = {
    "images": [{"id": i, "width": SIDE, "height": SIDE} for i in range(4)],
    "annotations": [
        {
            "id": 2 * i + label,
            "image_id": i,
            "category_id": label,
            "iscrowd": 0,
            "area": 22.0**2 - 6**2,
            "segmentation": rle.encode(np.asfortranarray(OBJECTS[label - 1].numpy())),
        }
        for i in range(4)
        for label in (1, 2)
    ],
    "categories": [{"id": 1}, {"id": 2}],
}


@pytest.fixture
def mask_rcnn() -> Any:
    """Torchvision's Mask R-CNN on two convolutions, untrained, detecting at any score; phi is in its backbone."""
    torch.manual_seed(0)
    body = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    )
    body.out_channels = 16
    model = MaskRCNN(
        body,
        min_size=SIDE,
        max_size=SIDE,
        rpn_anchor_generator=AnchorGenerator(((24.0,),), ((1.0,),)),
        rpn_post_nms_top_n_train=20,
        rpn_post_nms_top_n_test=20,
        rpn_nms_thresh=0.9,
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 1),
        box_head=TwoMLPHead(16 * 3 * 3, 16),
        box_predictor=FastRCNNPredictor(16, 3),
        box_score_thresh=0.0,
        box_detections_per_img=20,
        box_nms_thresh=0.7,
        box_batch_size_per_image=16,
        mask_roi_pool=MultiScaleRoIAlign(["0"], 5, 1),
        mask_head=MaskRCNNHeads(16, (8,), 1),
        mask_predictor=MaskRCNNPredictor(8, 8, 3),
    )
    nn.init.constant_(model.roi_heads.mask_predictor.mask_fcn_logits.bias, 1.0)
    model = model.double().eval()
    return mo.attach_film(model, ["backbone.1", "backbone.4"], dim=4)


@torch.no_grad()
def mask_ap50(model: Any) -> float:
    results = [
        {
            "image_id": i,
            "category_id": int(label),
            "score": float(score),
            "segmentation": rle.encode(np.asfortranarray((mask[0] >= 0.5).to(torch.uint8).numpy())),
        }
        for i, found in enumerate(model.eval()(IMAGES))
        for label, score, mask in zip(found["labels"], found["scores"], found["masks"], strict=True)
    ]
    return coco_reference.average_precision(coco_reference.evaluated(ANNOTATIONS, results, "segm"), "AP50")


def test_phi_of_a_mask_rcnn_is_searched_for_the_ap50_of_its_masks(mask_rcnn: Any) -> None:
    """By its own loss, that of the masks included; each value is pycocotools' own."""
    losses: set[str] = set()

    def loss(model: Any, batch: Any) -> Any:
        parts = model.train()(*batch)
        losses.update(parts)
        return sum(parts.values())

    task = mo.FinetuneTask(
        mask_rcnn,
        loss=loss,
        batches=lambda seed, task, step: ([IMAGES[step % 4]], [TARGET]),
        metric=coco_metric(IMAGES, ANNOTATIONS, kind="segm", name="AP50", halves=list(torch.arange(4).view(2, 2))),
        population=1,
    )
    run = mo.optimize_metric(task, queries=16)
    assert "loss_mask" in losses
    assert task.metric.ledger.spent == 16
    assert mask_ap50(mask_rcnn.model) == pytest.approx(run.after, abs=1e-12)
    values = []
    for phi in run.points[:5]:
        with mask_rcnn.using(phi) as model:
            values.append(mask_ap50(model))
    assert values == pytest.approx([1 - cost for cost in run.costs[:5]], abs=1e-12)
    assert len(set(values)) == 5


# --- What annotations and detectors say in other words -----------------------------------------------------------


def changed(**fields: Any) -> dict[str, Any]:
    """The annotations with fields of each replaced, or left out where the value is ``...``."""
    content = truth()
    for place, entry in enumerate(content["annotations"]):
        for key, field in fields.items():
            if field is ...:
                del entry[key]
            else:
                entry[key] = field(place) if callable(field) else field
    return content


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("fields", [{"id": 7}, {"id": ..., "iscrowd": ..., "area": ...}, {"area": 1e12}])
def test_ids_and_areas_of_annotations_do_not_matter(kind: Kind, fields: dict[str, Any]) -> None:
    images, model = pictures(0, 1, 2, 3), Finder(columns=15.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value(coco_metric(images, changed(**fields), kind=kind), model)[0] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("content", "options", "names"),
    [
        (changed(), {"kind": "keypoints"}, ("kind='keypoints'", "bbox", "segm")),
        (changed(), {"name": "AP25"}, ("name='AP25'", "AP", "AP50", "AP75")),
        (changed(), {"halves": [torch.tensor([0]), torch.tensor([4])]}, ("halves", "4", "0")),
        (changed() | {"images": []}, {}, ("4", "images", "annotations", "0")),
        (changed() | {"annotations": []}, {}, ("4",)),
        ("instances.json", {}, ("annotations", "instances.json")),
        (changed(segmentation=...), {"kind": "segm"}, ("1", "segmentation")),
        (changed(iscrowd="yes"), {}, ("0", "yes", "1")),
        (changed(bbox=[2, 2, 22, 22]), {}, ("4", "bbox")),
        (changed(bbox=[0, 0, 0.5, 0.5]), {}, ("annotations", "bbox")),
        (changed(category_id=8), {}, ("0", "category_id", "7", "9")),
        (changed() | {"images": [{"id": i // 2} for i in range(4)]}, {}, ("id", "0")),
        (changed() | {"images": [{"id": 10 + i} for i in range(4)]}, {"kind": "segm"}, ("10",)),
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
        (found([[0.0, 0, math.nan, 20]], [7]), "bbox", ("10",)),
        (found([[10.0, 10, 20, 20, 0]], [7]), "bbox", ("boxes", "(1, 5)", "4")),
        (found([[0.0, 0, 20, 20]], [7], scores=[math.inf]), "bbox", ("10",)),
        (found([[0.0, 0, 20, 20]], [7]), "segm", ("10",)),
        (WHOLE | {"masks": WHOLE["masks"][..., :40]}, "segm", ("masks", "50 x 40", "50 x 50")),
        (WHOLE | {"masks": WHOLE["masks"][:, :, None]}, "segm", ("masks", "(1, 1, 1, 50, 50)")),
    ],
)
def test_detections_of_another_kind_are_refused(seen: Any, kind: Kind, names: tuple[str, ...]) -> None:
    """Masks of another size would hit nothing, without a word."""
    metric = coco_metric(pictures(0), truth(1), kind=kind, detect=lambda *_: seen)
    assert_refused(lambda: metric.judge(nn.Identity()), MetricError, *names)


def test_detected_boxes_by_their_sides_are_refused() -> None:
    content = {
        "images": [{"id": 1}],
        "annotations": [{"image_id": 1, "category_id": 3, "bbox": [8, 4, 10, 10]}],
        "categories": [{"id": i} for i in (1, 2, 3)],
    }
    metric = coco_metric(pictures(0), content, detect=lambda *_: found([[8.0, 4, 10, 10]], [3]), name="AP50")
    names = ("AP50", "1.000", "0.000", "left, top, width, height")
    assert_refused(lambda: metric.judge(nn.Identity()), MetricError, *names)


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_outputs_in_bfloat16_are_judged(kind: Kind) -> None:
    seen = {key: each.bfloat16() if each.is_floating_point() else each for key, each in WHOLE.items()}
    metric = coco_metric(pictures(0), truth(1), kind=kind, detect=lambda *_: seen, halves=())
    assert value(metric, nn.Identity())[0] == pytest.approx(1)


def test_annotations_of_other_images_are_counted() -> None:
    content = truth()
    content["images"] = content["images"][:2]
    metric = assert_warned(lambda: coco_metric(pictures(0, 1), content), "2", "annotations")
    assert value(metric, Finder())[0] == pytest.approx(1)


def test_detections_that_do_not_count_are_counted_once() -> None:
    boxes = [[0.0, 0.0, 20.0, 20.0]] * 103
    metric = coco_metric(pictures(0), truth(1), detect=lambda *_: found(boxes, [7] * 102 + [8]), halves=())
    with pytest.warns(UserWarning, match="don't count|does not count") as caught:
        assert value(metric, nn.Identity())[0] == pytest.approx(1)
    assert [str(each.message) for each in caught] == [
        "1 detection of 1 class that the annotations don't have don't count: 8",
        "COCO does not count 2 detections beyond the 100 best of a class in an image",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value(metric, nn.Identity())


def test_images_of_another_size_than_annotated_are_warned_of() -> None:
    assert_warned(lambda: coco_metric([torch.zeros(3, 7, 9)], truth(1)), "1", "10", "9", "7", SIDE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coco_metric([torch.zeros(3, 7, 9)], truth(1), detect=lambda *_: {})  # which may translate boxes
