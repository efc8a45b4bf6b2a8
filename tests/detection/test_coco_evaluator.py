"""Numbers batch by batch: those of pycocotools by way of torchmetrics, and what its own tests ask for."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("PIL")

from metricopt_ext.detection.ap50 import METRICS, RECALLS
from metricopt_ext.detection.coco_evaluator import CocoEvaluator
from metricopt_ext.errors import DataError, MetricError

Images = list[dict[str, Tensor]]


def found(*boxes: Sequence[float], labels: Sequence[int], scores: Sequence[float]) -> dict[str, Tensor]:
    return {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels), "scores": torch.tensor(scores)}


def there(*boxes: Sequence[float], labels: Sequence[int]) -> dict[str, Tensor]:
    return {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels)}


NOTHING = {"boxes": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
NO_OBJECT = {key: NOTHING[key] for key in ("boxes", "labels")}
LARGE, MOVED = [214.0, 41.0, 562.0, 285.0], [258.0, 41.0, 606.0, 285.0]  # which overlap by 0.7755


def computed(preds: Images, target: Images, **options: Any) -> dict[str, Any]:
    evaluator = CocoEvaluator(**options)
    evaluator.update(preds, target)
    return {name: value.tolist() for name, value in evaluator.compute().items()}


def drawn(seed: int, images: int = 8, masks: bool = False) -> tuple[Images, Images]:
    """Objects of five classes, some crowds and told areas, found with errors, with equal scores; an empty image."""
    rng = np.random.default_rng(seed)
    preds, target = [], []
    for i in range(images):
        n = int(rng.integers(1, 9)) if i else 0
        corners = rng.integers(0, 200, (n, 2))
        boxes = np.concatenate([corners, corners + rng.choice([12, 33, 60, 110, 200], (n, 2))], axis=1)
        labels, near = rng.integers(3, 8, n), rng.integers(0, n, 3 * n) if n else np.zeros(0, dtype=int)
        guesses = boxes[near] + rng.integers(-4, 5, (3 * n, 4))
        own: dict[str, Any] = {"scores": rng.integers(0, 9, 3 * n) / 8, "labels": labels[near], "boxes": guesses}
        known = {"labels": labels, "boxes": boxes, "iscrowd": rng.random(n) < 0.2, "area": 500 * rng.integers(0, 5, n)}
        if masks:
            own["masks"], known["masks"] = (rng.random((len(each["labels"]), 12, 9)) < 0.5 for each in (own, known))
        preds.append({name: torch.from_numpy(np.asarray(each)) for name, each in own.items()})
        target.append({name: torch.from_numpy(np.asarray(each)) for name, each in known.items()})
    return preds, target


def by_torchmetrics(batches: Sequence[tuple[Images, Images]], **options: Any) -> Mapping[str, Tensor]:
    torchmetrics = pytest.importorskip("torchmetrics.detection")
    # Its own default thresholds are rounded to float32, and pycocotools' are not.
    options.setdefault("iou_thresholds", list(METRICS["AP"]))
    options.setdefault("rec_thresholds", RECALLS["coco"].tolist())
    metric = torchmetrics.MeanAveragePrecision(**options)
    for preds, target in batches:
        metric.update(preds, target)
    return metric.compute()


@pytest.mark.parametrize(
    "options",
    [
        {"class_metrics": True},
        {"average": "micro", "class_metrics": True},
        {"iou_thresholds": [0.25, 0.5, 0.75], "rec_thresholds": [0.25, 0.5, 0.75]},
        {"iou_thresholds": [0.1, 0.2]},
        {"max_detection_thresholds": [1, 2, 100]},
        {"box_format": "xywh"},
        {"box_format": "cxcywh"},
        {"iou_type": "segm", "class_metrics": True},
    ],
)
def test_numbers_are_torchmetrics_s(options: dict[str, Any]) -> None:
    pytest.importorskip("pycocotools")
    masks = "segm" in options.get("iou_type", "")
    batches = [drawn(seed, masks=masks) for seed in range(3)]
    evaluator = CocoEvaluator(**options)
    for preds, target in batches:
        evaluator.update(preds, target)
    ours, theirs = evaluator.compute(), by_torchmetrics(batches, **options)
    assert {name: value.double().tolist() for name, value in ours.items()} == {
        name: pytest.approx(value.double().tolist(), abs=1e-6) for name, value in theirs.items()
    }


def test_boxes_and_masks_may_be_compared_at_once() -> None:
    """Each as if alone; torchmetrics takes the areas of masks for the objects' in both."""
    pytest.importorskip("pycocotools")
    preds, target = drawn(0, masks=True)
    both = computed(preds, target, iou_type=("bbox", "segm"))
    for kind in ("bbox", "segm"):
        alone = computed(preds, target, iou_type=kind)
        assert {name: both[f"{kind}_{name}"] for name in alone if name != "classes"} == {
            name: value for name, value in alone.items() if name != "classes"
        }
    assert both["classes"] == alone["classes"]
    assert both["bbox_map"] != both["segm_map"]


def test_one_object_found_beside_it() -> None:
    """It overlaps by 0.7755, so it is found at 6 of the 10 IoUs; once more in an empty image, it is false there."""
    numbers = computed([found(MOVED, labels=[0], scores=[0.536])], [there(LARGE, labels=[0])])
    for name in ("map", "map_large", "mar_1", "mar_10", "mar_100", "mar_large"):
        assert numbers[name] == pytest.approx(0.6, abs=1e-12)
    assert numbers["map_50"] == numbers["map_75"] == pytest.approx(1)
    for name in ("map_small", "map_medium", "mar_small", "mar_medium", "map_per_class", "mar_100_per_class"):
        assert numbers[name] == -1
    twice = [found(MOVED, labels=[0], scores=[0.536])] * 2
    assert computed(twice, [there(LARGE, labels=[0]), NO_OBJECT])["map"] == pytest.approx(0.6, abs=1e-12)
    surer = [found(MOVED, labels=[0], scores=[0.5]), found(MOVED, labels=[0], scores=[0.6])]
    assert computed(surer, [there(LARGE, labels=[0]), NO_OBJECT])["map"] == pytest.approx(0.3, abs=1e-12)


def test_one_of_two_objects_is_found() -> None:
    box = [10.0, 20, 15, 25]
    half = computed([found(box, labels=[0], scores=[0.9]), NOTHING], [there(box, labels=[0])] * 2)
    assert half["map"] == pytest.approx(51 / 101)
    other = computed([found(box, labels=[0], scores=[0.9]), NOTHING], [there(box, labels=[0]), there(box, labels=[1])])
    assert other["map"] == pytest.approx(0.5)
    assert other["classes"] == [0, 1]


def test_where_nothing_counts_numbers_are_less_than_0() -> None:
    images: list[tuple[Images, Images]] = [
        ([], []),
        ([NOTHING], [NO_OBJECT]),
        ([found(MOVED, labels=[4], scores=[0.5])], [NO_OBJECT]),
    ]
    for preds, target in images:
        numbers = computed(preds, target, class_metrics=True)
        assert {numbers[name] for name in numbers if "class" not in name} == {-1}
    assert computed([NOTHING], [there(LARGE, labels=[4])])["map"] == 0
    unequal = computed([found(MOVED, labels=[0], scores=[0.5])], [there(LARGE, labels=[0])], iou_thresholds=[0.1, 0.2])
    assert (unequal["map"], unequal["map_50"], unequal["map_75"]) == (pytest.approx(1), -1, -1)


@pytest.mark.parametrize(("box_format", "value"), [("xyxy", 1), ("xywh", 0), ("cxcywh", 0)])
def test_boxes_are_of_the_format(box_format: Any, value: int) -> None:
    """As corners the boxes overlap by 0.25, as sides by 0.143; within [0, 1] they are taken as they are."""
    preds, target = [found([0.5, 0.5, 1, 1], labels=[0], scores=[1.0])], [there([0, 0, 1, 1], labels=[0])]
    assert computed(preds, target, box_format=box_format, iou_thresholds=[0.2])["map"] == pytest.approx(value)


def test_more_detections_count_on_demand() -> None:
    preds = [found(*[MOVED] * 101, LARGE, labels=[0] * 102, scores=[0.9] * 101 + [0.1])]
    with pytest.warns(UserWarning, match=r"does.*best.*max_detection_thresholds"):
        few = computed(preds, [there(LARGE, labels=[0])])
    more = computed(preds, [there(LARGE, labels=[0])], max_detection_thresholds=[1, 10, 1000])
    assert few["mar_100"] == pytest.approx(0.6)
    assert (more["mar_10"], more["mar_1000"]) == (pytest.approx(0.6), pytest.approx(1))


def test_thresholds_may_be_arrays_and_tensors() -> None:
    preds, target = drawn(0)
    ious, most = [0.5, 0.75], [1, 10, 100]
    expected = computed(preds, target, iou_thresholds=ious, max_detection_thresholds=most)
    given = {"iou_thresholds": torch.tensor(ious), "max_detection_thresholds": np.array(most)}
    assert computed(preds, target, **given) == expected


def test_a_buffer_may_be_filled_again() -> None:
    """What was given is kept, not what became of it."""
    preds, target = drawn(0)
    evaluator = CocoEvaluator()
    for own, known in zip(preds, target, strict=True):
        evaluator.update([own], [known])
        for each in (*own.values(), *known.values()):
            each.zero_()
    assert {name: value.tolist() for name, value in evaluator.compute().items()} == computed(*drawn(0))


def test_masks_are_of_0_and_1_and_of_one_size() -> None:
    pytest.importorskip("pycocotools")
    square = torch.zeros(1, 8, 8, dtype=torch.float32)
    square[:, 2:5, 2:5] = 1
    known = [{"labels": torch.tensor([0]), "masks": square}]
    own = {"labels": torch.tensor([0]), "scores": torch.tensor([0.5])}
    assert computed([{**own, "masks": square}], known, iou_type="segm")["map"] == pytest.approx(1)
    for masks, message in (
        (square * 0.9, r"preds\[0\] has masks of the type torch.float32, not of 0 and 1; give masks > 0.5"),
        (square[:, :7], r"target\[0\] and its preds have masks of \(7, 8\) and \(8, 8\) pixels; resize them"),
    ):
        with pytest.raises(DataError, match=message):
            CocoEvaluator(iou_type="segm").update([{**own, "masks": masks}], known)


def test_reset_forgets_and_a_refused_batch_is_not_taken() -> None:
    evaluator = CocoEvaluator()
    evaluator.update([NOTHING], [there(LARGE, labels=[0])])
    evaluator.reset()
    good = ([found(LARGE, labels=[0], scores=[0.5])], [there(LARGE, labels=[0])])
    evaluator.update(*good)
    with pytest.raises(DataError, match=r"preds\[1\] must have 'scores'"):
        evaluator.update([NOTHING, NO_OBJECT], [there(LARGE, labels=[0])] * 2)
    assert evaluator.compute()["map"].item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("preds", "target", "message"),
    [
        (NOTHING, [], r"preds.*image, got a dict"),
        ([NOTHING], [], "preds of 1 images, but target of 0"),
        ([[1]], [NO_OBJECT], r"preds\[0\] must be a dict"),
        ([NOTHING], [{"labels": torch.zeros(0)}], r"target\[0\].*tensor; got NoneType"),
        ([{**NOTHING, "labels": [1]}], [NO_OBJECT], r"preds\[0\].*'labels'.*tensor; got list"),
        ([NOTHING], [{"boxes": torch.zeros(2, 3), "labels": torch.zeros(2)}], r"boxes of the shape \(2, 3\)"),
        ([NOTHING], [there(LARGE, labels=[1, 2])], r"labels.*\(2,\).*1, one for each"),
        (
            [NOTHING],
            [there(LARGE, [9, 9, 30, 4], labels=[0, 1])],
            r"\[9.0.*4.0\].*box_format='xyxy'",
        ),
        ([NOTHING], [there([1, 1, float("nan"), 4], labels=[1])], r"box \[1.0.*4.0\], which is not finite"),
        ([NOTHING], [there(LARGE, labels=[1.0])], r"labels.*torch.float32.*integers"),  # type: ignore[list-item]
    ],
)
def test_what_is_wrong_is_named(preds: Any, target: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        CocoEvaluator().update(preds, target)


def test_wrong_arguments_and_numbers_are_named() -> None:
    for options, message in (
        ({"box_format": "yxyx"}, "box_format='yxyx' is none of xyxy, xywh, cxcywh"),
        ({"iou_type": "keypoints"}, "iou_type='keypoints' is none of bbox, segm"),
        ({"average": "weighted"}, "average='weighted' is none of macro, micro"),
        ({"max_detection_thresholds": [1, 10]}, r"\[1, 10\] must be three numbers"),
        ({"max_detection_thresholds": 100}, "max_detection_thresholds=100 must be a list of numbers"),
        ({"max_detection_thresholds": [1.5, 10, 100]}, r"\[1.5, 10, 100\] must be a list of numbers: 'float'"),
        ({"iou_thresholds": 0.5}, "iou_thresholds=0.5 must be a list of numbers"),
        ({"rec_thresholds": ["half"]}, r"rec_thresholds=\['half'\] must be a list of numbers"),
        ({"rec_thresholds": [0.5, 1.5]}, "be from 0 to 1"),
        ({"iou_type": ()}, "has no kind; name bbox or segm"),
    ):
        with pytest.raises(DataError, match=message):
            CocoEvaluator(**options)
    with pytest.raises(DataError, match=r"an IoU is 1\.5"):
        computed([NOTHING], [NO_OBJECT], iou_thresholds=[1.5])
    with pytest.raises(MetricError, match="score that is NaN"):
        computed([found(LARGE, labels=[0], scores=[float("nan")])], [there(LARGE, labels=[0])])
