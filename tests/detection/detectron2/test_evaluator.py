"""Detectron2's own COCO evaluator on masks, as the metric that phi is tuned for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")
pytest.importorskip("pycocotools")

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import COCOEvaluator, inference_on_dataset
from detectron2.modeling import build_model
from detectron2.structures import BoxMode
from pycocotools import mask as rle

import metricopt_ext as mo
from metricopt_ext.data.halves import random_halves
from metricopt_ext.detection.detectron2.build import with_film
from metricopt_ext.detection.detectron2.datasets import as_records, registered_truth
from metricopt_ext.detection.detectron2.evaluator import AP50Evaluator, ap50_metric
from metricopt_ext.detection.detectron2.search import search
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from metricopt_ext.detection.detectron2.weights import load_weights
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import MetricError

pytestmark = pytest.mark.detectron2

QUERIES = 10
GOAL = torch.tensor([0.8, -0.6, 0.4, -0.2])
MASKS = [
    *(
        "MODEL.MASK_ON",
        True,
        "MODEL.ROI_MASK_HEAD.NAME",
        "MaskRCNNConvUpsampleHead",
        "MODEL.ROI_MASK_HEAD.NORM",
        "GN",
        "INPUT.MASK_FORMAT",
        "bitmask",
    ),
    *("MODEL.ROI_MASK_HEAD.NUM_CONV", 1, "MODEL.ROI_MASK_HEAD.CONV_DIM", 32, "TEST.DETECTIONS_PER_IMAGE", 4),
    *("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0, "METRICOPT.SEARCH.QUERIES", QUERIES),
    *("METRICOPT.METRIC.SET", "masks", "METRICOPT.METRIC.NAME", "segm/AP50"),
    *("METRICOPT.FILM.LAYERS", ("roi_heads.mask_head.mask_fcn1.norm",)),  # so boxes stay as they are
    *("DATASETS.TRAIN", ("masks_train",), "DATASETS.TEST", (), "SOLVER.IMS_PER_BATCH", 1),
]


class Masks(MetricOptTrainer):
    """A user's trainer, whose guard is without halves."""

    @classmethod
    def build_metric(cls, cfg: Any) -> mo.Metric:
        """The value alone: of a few images, the guard takes all that two halves gain for chance."""
        metric = super().build_metric(cfg)
        assert metric is not None
        return mo.Metric(lambda model: float(metric.function(model)), **metric.settings)


@pytest.fixture
def masks(catalog: Any, squares: Callable[..., DetectionSet], tiny_config: Any, tmp_path: Path) -> Any:
    """Make the config of a Mask R-CNN and register what it finds at a certain phi, which makes it the truth."""
    cfg = tiny_config("fpn", "BN", *MASKS, "MODEL.WEIGHTS", str(tmp_path / "detector.pth"))
    torch.manual_seed(0)
    model = build_model(cfg)
    for name, tensor in model.state_dict().items():
        if name.endswith("norm.weight"):
            tensor.fill_(0.2)  # random weights explode otherwise, and one class gets all
    torch.save({"model": model.state_dict()}, cfg.MODEL.WEIGHTS)
    adapted = with_film(model.eval(), cfg.METRICOPT.FILM.LAYERS, dim=4)
    mo.Adapter(adapted).set_phi(GOAL)
    records = as_records(squares(4))
    register("masks", records)
    register("masks_train", records)
    for record in records:
        image = MetricOptTrainer.build_test_loader(cfg, "masks").dataset[records.index(record)]
        with torch.no_grad():
            record["annotations"] = things(adapted([image])[0]["instances"])
    return cfg


def register(name: str, records: list[dict[str, Any]]) -> None:
    DatasetCatalog.register(name, lambda: records)
    MetadataCatalog.get(name).set(thing_classes=["red", "green"])


def things(found: Any) -> list[dict[str, Any]]:
    shapes = zip(found.pred_boxes.tensor.tolist(), found.pred_classes.tolist(), found.pred_masks, strict=True)
    return [
        {
            "bbox": box,
            "bbox_mode": BoxMode.XYXY_ABS,
            "category_id": label,
            "iscrowd": 0,
            "segmentation": rle.encode(np.asfortranarray(mask.numpy().astype(np.uint8))),
        }
        for box, label, mask in shapes
        if mask.any()
    ]


def trained(cfg: Any) -> Any:
    model = build_model(cfg)
    load_weights(model, cfg.MODEL.WEIGHTS)
    return model


def by_detectron2(model: Any, cfg: Any) -> float:
    loader = MetricOptTrainer.build_test_loader(cfg, "masks")
    evaluator = COCOEvaluator("masks", ("segm",), output_dir=cfg.OUTPUT_DIR)
    return float(inference_on_dataset(model.eval(), loader, evaluator)["segm"]["AP50"])


@pytest.mark.slow
def test_masks_are_judged_and_searched_for_as_by_detectron2(masks: Any) -> None:
    model = trained(masks)
    metric = Masks.build_metric(masks)
    before = by_detectron2(model, masks)
    assert 0 < before < 100
    assert metric.judge(model).value == pytest.approx(before)

    run = search(masks, trainer_class=Masks)
    assert run.metric == "masks/segm/AP50"
    assert run.before == pytest.approx(before)
    assert run.after > run.before  # phi = 0 is no optimum, and the metric tells no halves
    load_weights(model, str(Path(masks.OUTPUT_DIR) / "model_merged.pth"))
    assert by_detectron2(model, masks) == pytest.approx(run.after, abs=2)  # merged, of single precision


@pytest.mark.parametrize("tasks", [None, ("bbox", "segm")])
def test_a_detector_that_finds_nothing_has_an_ap50_of_0(masks: Any, tasks: Any) -> None:
    """Detectron2 then says NaN, and of boxes alone where it goes by what is found."""
    masks.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 1.0
    evaluator = COCOEvaluator("masks", tasks, output_dir=masks.OUTPUT_DIR)
    loader, model = MetricOptTrainer.build_test_loader(masks, "masks"), trained(masks)
    assert ap50_metric(loader, evaluator, result="segm/AP50").judge(model).value == 0
    with pytest.raises(MetricError, match=r"COCOEvaluator.*segm/AP51.*'bbox/AP50'"):
        ap50_metric(loader, evaluator, result="segm/AP51").judge(model)


def test_halves_are_what_detectron2_says_of_their_images(masks: Any) -> None:
    model = trained(masks)
    loader = MetricOptTrainer.build_test_loader(masks, "masks")
    evaluator = COCOEvaluator("masks", output_dir=masks.OUTPUT_DIR)
    metric = ap50_metric(loader, evaluator, result="segm/AP50")
    evaluation = metric.judge(model)
    ids = sorted(record["image_id"] for record in DatasetCatalog.get("masks"))
    expected = []
    for half in random_halves(len(ids), 0):
        records = [record for record in DatasetCatalog.get("masks") if record["image_id"] in {ids[i] for i in half}]
        register(f"half-{len(expected)}", records)
        alone = COCOEvaluator(f"half-{len(expected)}", output_dir=masks.OUTPUT_DIR)
        inference_on_dataset(model, MetricOptTrainer.build_test_loader(masks, f"half-{len(expected)}"), alone)
        expected.append(alone.evaluate()["segm"]["AP50"])
    assert [metric.sign * cost for cost in evaluation.halves or ()] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("tasks", [None, ("bbox",)])
def test_halves_of_boxes_are_not_taken_for_masks(masks: Any, tasks: Any) -> None:
    """Evaluating boxes gives them outlines, and the evaluator goes by what is there."""
    masks.MODEL.MASK_ON = False
    torch.manual_seed(0)
    model, loader = build_model(masks), MetricOptTrainer.build_test_loader(masks, "masks")
    evaluator = COCOEvaluator("masks", tasks, output_dir=masks.OUTPUT_DIR)
    metric = ap50_metric(loader, evaluator, result="bbox/AP50")
    first, again = metric.judge(model), metric.judge(model)
    assert (again.cost, again.halves) == (first.cost, first.halves)
    ids = sorted(record["image_id"] for record in DatasetCatalog.get("masks"))
    alone = COCOEvaluator("masks", ("bbox",), output_dir=masks.OUTPUT_DIR)
    inference_on_dataset(model.eval(), loader, alone)
    assert len([each for image in alone._predictions for each in image["instances"]]) > 10
    expected = [alone.evaluate([ids[i] for i in half])["bbox"]["AP50"] for half in random_halves(len(ids), 0)]
    assert [metric.sign * cost for cost in first.halves or ()] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("definition", ["voc", "coco"])
def test_halves_of_our_evaluator_are_those_of_their_images(masks: Any, definition: Any) -> None:
    model, truth = trained(masks), registered_truth("masks")
    metric = ap50_metric(
        MetricOptTrainer.build_test_loader(masks, "masks"), AP50Evaluator(truth, definition, ap=True), result="bbox/AP"
    )
    evaluation, expected = metric.judge(model), []
    for half in random_halves(len(truth), 0):
        part = DetectionSet(truth.classes, [truth.images[i] for i in half])
        loader = MetricOptTrainer.build_test_loader(masks, "masks")
        own = [[each] for (each,) in loader if each["image_id"] in {image.image_id for image in part.images}]
        expected.append(inference_on_dataset(model, own, AP50Evaluator(part, definition, ap=True))["bbox"]["AP"])
    assert [metric.sign * cost for cost in evaluation.halves or ()] == pytest.approx(expected)
