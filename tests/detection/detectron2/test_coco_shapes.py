"""Masks of COCO's files are registered as Detectron2's own reader has them, or refused where needed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.data import MetadataCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.modeling import build_model
from detectron2.structures import BoxMode
from pycocotools import mask as masks

from metricopt_ext.detection.detectron2.datasets import check_sets, records_of, registered_truth
from metricopt_ext.detection.detectron2.registered import register_entries, register_parts
from metricopt_ext.detection.detectron2.search import training_loss
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import ConfigError

pytestmark = pytest.mark.detectron2


@pytest.fixture
def write(catalog: Any, squares: Callable[..., DetectionSet], tmp_path: Path) -> Callable[..., Path]:
    """Write four images with three objects each: polygons or a run-length encoding."""
    data = squares(4)

    def make(change: Callable[[dict[str, Any]], None] | None = None, encoded: bool = False) -> Path:
        content: dict[str, Any] = {
            "images": [
                {"id": 30 - n, "file_name": image.path.name, "width": image.width, "height": image.height}
                for n, image in enumerate(data.images)
            ],
            "categories": [{"id": 9, "name": "thing"}, {"id": 4, "name": "square"}],
            "annotations": [],
        }
        for n, image in enumerate(data.images):
            for at in range(3):
                x, y, w, h = 3.0 + at, 4.0, 10.0 + n, 20.0
                shape: Any = [[x, y, x + w, y, x + w, y + h], [x, y + 1, x + 2, y + 3, x, y + 3]]
                if encoded or at == 2:  # a crowd
                    pixels = np.zeros((image.height, image.width), dtype=np.uint8, order="F")
                    pixels[4:24, 3:13] = 1
                    runs = np.diff(np.flatnonzero(np.diff(pixels.ravel("F"), prepend=0, append=0)), prepend=0)
                    shape = {"size": [image.height, image.width], "counts": [*runs.tolist()]}
                    shape["counts"].append(pixels.size - sum(shape["counts"]))
                content["annotations"].append(
                    {
                        "id": 100 + 3 * n + at,
                        "image_id": 30 - n,
                        "category_id": (9, 4)[at % 2],
                        "bbox": [x, y, w, h],
                        "area": 77.0,
                        "iscrowd": int(at == 2),
                        "segmentation": shape,
                    }
                )
        if change:
            change(content)
        path = data.images[0].path.parent / "shapes.json"
        path.write_text(json.dumps(content))
        return path

    return make


def comparable(annotation: dict[str, Any]) -> dict[str, Any]:
    box = BoxMode.convert(list(annotation["bbox"]), annotation["bbox_mode"], BoxMode.XYXY_ABS)
    shape = annotation["segmentation"]
    decoded = masks.decode(shape).tolist() if isinstance(shape, dict) else shape
    keys = ("category_id", "iscrowd")
    return {"box": [float(each) for each in box], "shape": decoded, **{key: annotation[key] for key in keys}}


def test_they_are_as_detectron2_reads_them(write: Callable[..., Path]) -> None:
    path = write()
    theirs = load_coco_json(str(path), str(path.parent), "theirs")
    register_entries([f"ours={path.parent}:shapes.json", f"part={path.parent}:shapes.json[:50%]"], "elsewhere")
    ours = records_of("ours")
    assert [each["image_id"] for each in ours] == [each["image_id"] for each in theirs] == [27, 28, 29, 30]
    for first, second in zip(ours, theirs, strict=True):
        assert list(map(comparable, first["annotations"])) == list(map(comparable, second["annotations"]))
    by_id = {each["image_id"]: each for each in theirs}
    part = records_of("part")
    assert len(part) == 2
    for each in part:
        other = by_id[each["image_id"]]["annotations"]
        assert list(map(comparable, each["annotations"])) == list(map(comparable, other))
    metadata, known = MetadataCatalog.get("ours"), MetadataCatalog.get("theirs")
    assert metadata.thing_classes == known.thing_classes == ["square", "thing"]
    assert metadata.thing_dataset_id_to_contiguous_id == known.thing_dataset_id_to_contiguous_id
    assert metadata.json_file == str(path)
    assert MetadataCatalog.get("part").get("json_file") is None  # it has images that the part lacks


@pytest.mark.parametrize("encoded", [False, True])
def test_mask_r_cnn_learns_from_them(
    encoded: bool, write: Callable[..., Path], tiny_config: Callable[..., Any]
) -> None:
    cfg = tiny_config("fpn", "BN", "MODEL.MASK_ON", True, "METRICOPT.METRIC.NAME", "segm/AP")
    cfg.INPUT.MASK_FORMAT = "bitmask" if encoded else "polygon"
    cfg.INPUT.RANDOM_FLIP = "horizontal"
    cfg.METRICOPT.DATASETS.TRAIN = str(write(encoded=encoded))
    register_parts(cfg)
    assert cfg.DATASETS.TRAIN == ("own_train",)
    check_sets(cfg, cfg.DATASETS.TRAIN, cfg.DATASETS.TRAIN)
    batch = next(iter(MetricOptTrainer.build_train_loader(cfg)))
    assert all(each["instances"].has("gt_masks") for each in batch)
    assert all(len(each["instances"]) == 2 for each in batch)  # without the crowd
    assert torch.isfinite(training_loss(build_model(cfg), batch))
    if encoded:
        cfg.INPUT.MASK_FORMAT = "polygon"
        with pytest.raises(ConfigError, match=r"MASK_FORMAT.*8 of 8.* set it to bitmask"):
            check_sets(cfg, cfg.DATASETS.TRAIN, [])


def test_detectron2_s_evaluator_judges_by_the_file(write: Callable[..., Path], tiny_config: Callable[..., Any]) -> None:
    path = write()
    register_entries([f"ours={path.parent}:shapes.json", f"part={path.parent}:shapes.json[:50%]"], "elsewhere")
    cfg = tiny_config("fpn", "BN", "METRICOPT.METRIC.NAME", "segm/AP")
    evaluator = MetricOptTrainer.build_evaluator(cfg, "ours")
    assert {each["area"] for each in evaluator._coco_api.anns.values()} == {77.0}  # and not those of the boxes
    of_part = MetricOptTrainer.build_evaluator(cfg, "part")._coco_api  # which Detectron2 writes from the records
    whole = {(each["image_id"], tuple(each["bbox"])): each for each in evaluator._coco_api.anns.values()}
    assert len(of_part.anns) == 6
    for each in of_part.anns.values():
        known = whole[each["image_id"], tuple(each["bbox"])]
        assert (of_part.annToMask(each) == evaluator._coco_api.annToMask(known)).all()


def first(content: dict[str, Any]) -> dict[str, Any]:
    annotation: dict[str, Any] = content["annotations"][0]
    return annotation


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda all: first(all).update(segmentation=[[1, 2, 3, 4]]),
            r"MASK_ON.*annotation 0 has the polygon",
        ),
        (
            lambda all: first(all).pop("segmentation"),
            "MASK_ON is True, but 1 of 8 objects of",
        ),
    ],
)
def test_what_can_t_be_read_is_refused_where_it_is_needed(
    change: Callable[[dict[str, Any]], None], message: str, write: Callable[..., Path], tiny_config: Callable[..., Any]
) -> None:
    path = write(change)
    register_entries([f"ours={path.parent}:shapes.json"], "elsewhere")
    cfg = tiny_config()
    check_sets(cfg, ["ours"], ["ours"])  # boxes need no shapes
    assert len(registered_truth("ours").images) == 4
    cfg.MODEL.MASK_ON = True
    with pytest.raises(ConfigError, match=message):
        check_sets(cfg, ["ours"], [])
