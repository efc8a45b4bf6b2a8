"""Annotated sets go into Detectron2's catalog and come back, and AP50 is computed from what its models put out."""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.data import DatasetCatalog, MetadataCatalog, build_detection_test_loader
from detectron2.data.datasets import register_pascal_voc
from detectron2.evaluation import inference_on_dataset
from detectron2.structures import Boxes, BoxMode, Instances, RotatedBoxes

from coco_files import write_coco
from helpers.refusals import assert_refused
from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.detectron2.datasets import (
    Mapper,
    as_truth,
    check_sets,
    drawn_images,
    records_of,
    register,
    registered_truth,
)
from metricopt_ext.detection.detectron2.evaluator import AP50Evaluator
from metricopt_ext.detection.detectron2.registered import register_entries, register_parts
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import ConfigError, DataError, MetricError

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("catalog")]


class Oracle(torch.nn.Module):
    """A model that knows the truth about some images, in pixels of the file, and puts it out as Detectron2 does."""

    def __init__(self, truth: DetectionSet, known: int) -> None:
        super().__init__()
        self.truth = {image.image_id: image for image in truth.images[:known]}

    def forward(self, inputs: list[dict[str, Any]]) -> list[dict[str, Instances]]:
        assert not self.training
        outputs = []
        for each in inputs:
            found = Instances((each["height"], each["width"]))
            known = self.truth.get(each["image_id"])
            boxes = torch.zeros(0, 4) if known is None else known.boxes
            found.pred_boxes = Boxes(boxes)
            found.scores = torch.ones(len(boxes))
            found.pred_classes = torch.zeros(0, dtype=torch.int64) if known is None else known.labels
            outputs.append({"instances": found})
        return outputs


def assert_same(first: Annotated, second: Annotated) -> None:
    for name in ("image_id", "path", "width", "height"):
        assert getattr(first, name) == getattr(second, name)
    for name in ("boxes", "labels", "difficult", "crowd"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def with_flags(data: DetectionSet) -> DetectionSet:
    """Mark the last object of each image as difficult, and the first of those with two as a crowd; empty the first."""
    images = []
    for image in data.images:
        n = len(image.labels)
        difficult, crowd = torch.arange(n) == n - 1, torch.arange(n) < n - 1
        images.append(replace(image, difficult=difficult, crowd=crowd))
    none = torch.zeros(0, dtype=torch.bool)
    images[0] = replace(
        images[0], boxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64), difficult=none, crowd=none
    )
    return DetectionSet(data.classes, images)


def test_sets_come_back_from_the_catalog(squares: Callable[..., DetectionSet]) -> None:
    data = with_flags(squares(4))
    register("squares", data)
    back = registered_truth("squares")
    assert back.classes == data.classes
    for first, second in zip(data.images, back.images, strict=True):
        assert_same(first, second)
    with pytest.raises(DataError, match="already has a dataset 'squares'"):
        register("squares", data)
    with pytest.raises(DataError, match="no dataset 'circles'"):
        registered_truth("circles")


def test_voc_s_difficult_objects_are_found_in_its_files(squares: Callable[..., DetectionSet], tmp_path: Path) -> None:
    """Detectron2's own reader of VOC's sets, its catalog's voc_2007_test among them, does not keep the flags."""
    data = squares(6)
    write_voc(tmp_path / "VOC", data, difficult=True)
    for image in data.images:
        Path(tmp_path / "VOC" / "JPEGImages" / image.path.name).rename(
            tmp_path / "VOC" / "JPEGImages" / f"{image.path.stem}.jpg"
        )
    register_pascal_voc("like_voc", str(tmp_path / "VOC"), "trainval", 2007, data.classes)
    records = records_of("like_voc")
    truth = as_truth("like_voc", records[2:4])
    assert truth.classes == data.classes
    for record, mine, image in zip(records[2:4], truth.images, data.images[2:4], strict=True):
        assert mine.image_id == record["image_id"]
        assert torch.equal(mine.boxes, image.boxes)
        assert mine.difficult.tolist() == [True] + [False] * (len(image.boxes) - 1)


def test_sets_must_fit_the_detector_and_each_other(tiny_config: Any, squares: Callable[..., DetectionSet]) -> None:
    data = squares(2)
    register("one", data)
    register("other", replace(data, classes=("green", "red")))
    register("single", replace(squares(1), classes=("red",)))
    cfg = tiny_config()
    check_sets(cfg, ["one"], ["one"])
    with pytest.raises(ConfigError, match=r"other.*one has red, green"):
        check_sets(cfg, ["one"], ["other"])
    with pytest.raises(ConfigError, match=r"MODEL\.ROI_HEADS\.NUM_CLASSES.*red"):
        check_sets(cfg, [], ["single"])
    with pytest.raises(DataError, match="no dataset 'two'"):
        check_sets(cfg, ["one"], ["two"])
    retina = tiny_config("fpn", "BN", "MODEL.META_ARCHITECTURE", "RetinaNet", "MODEL.RETINANET.NUM_CLASSES", 1)
    check_sets(retina, [], ["single"])


def test_phi_is_not_tuned_on_what_is_trained_on(tiny_config: Any, squares: Callable[..., DetectionSet]) -> None:
    """Whatever the sets are called; images of both are counted."""
    data = squares(4)
    both = DetectionSet(data.classes, [*data.images[:1], *squares(2, seed=1).images])
    sets = {"one": data, "again": data, "part": data.subset([2, 0]), "both": both, "apart": squares(3, seed=2)}
    copied = [replace(each, path=each.path.with_name(f"copy-{i}.png")) for i, each in enumerate(data.images)]
    for image, copy in zip(data.images, copied, strict=True):
        copy.path.write_bytes(image.path.read_bytes())
    sets |= {
        "copied": DetectionSet(data.classes, copied),
        "half": DetectionSet(data.classes, [copied[0], both.images[1]]),
    }
    for name, each in sets.items():
        register(name, each)
    for name in ("one", "again", "part", "copied"):
        cfg = tiny_config("fpn", "BN", "METRICOPT.METRIC.SET", name)
        names = ("METRICOPT.METRIC.SET", name, "DATASETS.TRAIN")
        assert_refused(partial(check_sets, cfg, ["one"], [name]), ConfigError, *names)
        check_sets(cfg, [], [name])  # as it is evaluated
    cfg = tiny_config("fpn", "BN", "METRICOPT.METRIC.SET", "one", "DATASETS.TRAIN", ("apart", "one"))
    assert_refused(lambda: MetricOptTrainer.build_metric(cfg), ConfigError, *names[:1], "one", "DATASETS.TRAIN")
    for name, count in (("both", 3), ("half", 2)):
        with pytest.warns(UserWarning, match=f"1 of {count} images of {name}"):
            check_sets(tiny_config("fpn", "BN", "METRICOPT.METRIC.SET", name), ["one"], [name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_sets(tiny_config("fpn", "BN", "METRICOPT.METRIC.SET", "apart"), ["one"], ["apart", "one"])


@pytest.mark.parametrize("name", ["../up", "/tmp/x", "a/b", ""])
def test_a_set_s_name_is_no_path(name: str) -> None:
    """Detectron2's evaluator names a file after it."""
    assert_refused(lambda: register_entries([f"{name}=squares:train"], "data"), ConfigError, "REGISTER", name)


def outlying(data: DetectionSet) -> DetectionSet:
    """Give the first image a box that is outside, one partly so, and two without area."""
    boxes = torch.tensor([[99.0, 9, 120, 30], [-9, 10, 30, 30], [9, 9, 9, 20], [9, 9, 20, 9]])
    labels, no = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool)
    first = replace(data.images[0], boxes=boxes, labels=labels, difficult=no, crowd=no)
    return DetectionSet(data.classes, [first, *data.images[1:]])


def test_boxes_outside_their_images_are_not_trained_on(tiny_config: Any, squares: Callable[..., DetectionSet]) -> None:
    data = outlying(squares(2))
    register("outlying", data)
    with pytest.warns(UserWarning, match="boxes in dataset outlying") as caught:
        check_sets(tiny_config(), ["outlying"], ["outlying"])
    # torch warns of other things, once a process.
    (said,) = [text for text in (str(each.message) for each in caught) if "outlying" in text]
    for text in ("2 without area, left out", "1 outside the image, left out", "1 partly outside the image, clipped"):
        assert text in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_sets(tiny_config(), ["outlying"], [])  # once
    cfg = tiny_config("fpn", "BN", "INPUT.RANDOM_FLIP", "none", "INPUT.MIN_SIZE_TRAIN", (64,))
    mapped = Mapper(cfg, is_train=True)(dict(records_of("outlying")[0]))["instances"]
    assert mapped.gt_boxes.tensor.tolist() == [[0, 10, 30, 30]]
    truth = registered_truth("outlying").images[0]
    torch.testing.assert_close(truth.boxes, data.images[0].boxes, equal_nan=True)  # an evaluation counts them
    toolkit = Detectron2Toolkit(cfg)
    targets = toolkit._targets(Example(data.images[0].load(), data.images[0]))
    assert targets.gt_boxes.tensor.tolist() == [[0, 10, 30, 30]]
    assert targets.gt_classes.tolist() == [0]


def test_an_image_that_can_t_be_used_is_named(tiny_config: Any, squares: Callable[..., DetectionSet]) -> None:
    register("squares", squares(3))
    small, cut, gone = records_of("squares")
    mapper = Mapper(tiny_config(), is_train=True)
    assert mapper(dict(small))["image"].shape == (3, 64, 64)
    content = Path(cut["file_name"]).read_bytes()
    Path(cut["file_name"]).write_bytes(content[: len(content) // 2])
    Path(gone["file_name"]).unlink()
    for record in (cut, gone, {**small, "width": 63}):
        with pytest.raises(DataError, match=re.escape(f"{record['file_name']} can't be used: ")):
            mapper(record)


def write_voc(folder: Path, data: DetectionSet, difficult: bool = False) -> None:
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    for image in data.images:
        boxes = "".join(
            f"<object><name>{data.classes[label]}</name><difficult>{int(difficult and n == 0)}</difficult>"
            f"<bndbox><xmin>{x0 + 1:.0f}</xmin><ymin>{y0 + 1:.0f}</ymin><xmax>{x1:.0f}</xmax><ymax>{y1:.0f}</ymax>"
            "</bndbox></object>"
            for n, ((x0, y0, x1, y1), label) in enumerate(zip(image.boxes.tolist(), image.labels.tolist(), strict=True))
        )
        size = f"<size><width>{image.width}</width><height>{image.height}</height><depth>3</depth></size>"
        name = image.path.name
        (folder / "Annotations" / f"{image.path.stem}.xml").write_text(
            f"<annotation><filename>{name}</filename>{size}{boxes}</annotation>"
        )
        (folder / "JPEGImages" / name).write_bytes(image.path.read_bytes())
    names = "\n".join(image.path.stem for image in data.images)
    (folder / "ImageSets" / "Main" / "trainval.txt").write_text(names + "\n")


def coco_file(data: DetectionSet, file: Path, names: Sequence[str]) -> Path:
    """Write a set in COCO's format, its categories in another order, which the file's numbers follow."""
    write_coco(file, data)
    content = json.loads(file.read_text())
    numbers = {each["id"]: names.index(each["name"]) + 5 for each in content["categories"]}
    content["categories"] = [{"id": at + 5, "name": name} for at, name in enumerate(names)]
    for each in content["annotations"]:
        each["category_id"] = numbers[each["category_id"]]
    file.write_text(json.dumps(content))
    return file


def test_parts_of_ones_own_take_the_place_of_the_sets(
    tiny_config: Any, squares: Callable[..., DetectionSet], tmp_path: Path
) -> None:
    cfg, sets = tiny_config(), [squares(count, seed=count) for count in (3, 4, 2)]
    node = cfg.METRICOPT.DATASETS
    node.TRAIN = str(coco_file(sets[0], tmp_path / "train.json", ["green", "red"]))
    node.VAL = str(coco_file(sets[1], tmp_path / "val.json", ["red", "green"]))
    write_voc(tmp_path / "VOC", sets[2])
    node.TEST = str(tmp_path / "VOC")
    with data_names():
        found = register_parts(cfg)
        assert [each.partition(":")[0] for each in found] == ["train", "validation", "test"]
        assert found[0].endswith("images in " + str(tmp_path) + "; 3 images")
        assert (cfg.DATASETS.TRAIN, cfg.METRICOPT.METRIC.SET, cfg.DATASETS.TEST) == (
            ("own_train",), "own_val", ("own_test",)
        )  # fmt: skip
        for name, data in zip(("own_train", "own_val", "own_test"), sets, strict=True):
            truth = registered_truth(name)
            assert truth.classes == ("green", "red")  # train's, in each
            for image, other in zip(truth.images, data.images, strict=True):
                assert torch.equal(image.boxes.round().float(), other.boxes)
                assert torch.equal(image.labels, 1 - other.labels)  # those of squares are red, green
    node.TRAIN = node.TEST = ""
    cfg.DATASETS.TRAIN = ("mine",)
    with data_names():
        register_parts(cfg)
        assert (cfg.DATASETS.TRAIN, cfg.METRICOPT.METRIC.SET) == (("mine",), "own_val")
    node.TEST = str(tmp_path / "nowhere")
    with pytest.raises(DataError, match="nowhere"):
        register_parts(cfg)
    node.TRAIN, node.TEST = node.VAL, ""
    with data_names(), pytest.warns(UserWarning, match="4 of 4 images of validation"):
        register_parts(cfg)


@contextmanager
def data_names() -> Iterator[None]:
    before = set(DatasetCatalog.list())
    yield
    for name in set(DatasetCatalog.list()) - before:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


@pytest.mark.parametrize("definition", ["voc", "voc_11_point", "coco"])
def test_evaluator_agrees_with_ap50_on_what_the_model_put_out(
    definition: Any, tiny_config: Any, squares: Callable[..., DetectionSet]
) -> None:
    data = squares(5, width=80)
    register("squares", data)
    loader = build_detection_test_loader(tiny_config(), "squares")
    results = inference_on_dataset(
        Oracle(data, known=3), loader, AP50Evaluator(registered_truth("squares"), definition)
    )
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    found = [Detections(i.boxes, torch.ones(len(i.labels)), i.labels) for i in data.images[:3]]
    expected = average_precision([*found, nothing, nothing], data, definition)
    assert 0 < expected.mean < 1
    assert results["bbox"]["AP50"] == 100 * expected.mean
    np.testing.assert_array_equal(
        [results["bbox"][f"AP50-{name}"] for name in data.classes],
        [100 * expected.per_class[name] for name in data.classes],
    )


def test_validation_metric(tiny_config: Any, squares: Callable[..., DetectionSet]) -> None:
    data = squares(8)
    register("squares", data)

    def metric_on(images: int) -> Any:
        options = ("METRICOPT.METRIC.SET", "squares", "METRICOPT.METRIC.IMAGES", images, "METRICOPT.SEED", 2)
        return MetricOptTrainer.build_metric(tiny_config("fpn", "BN", *options))

    metric = metric_on(5)
    assert metric.evaluate(Oracle(data, known=8), "test").value == 100
    assert metric.evaluate(Oracle(data, known=0), "test").value == 0
    assert 0 < metric_on(0).evaluate(Oracle(data, known=4), "test").value < 100
    assert metric.name == "squares/bbox/AP50"
    with_file = MetadataCatalog.get("squares")
    with_file.set(json_file="all.json", evaluator_type="coco")
    for images, kept in ((0, True), (4, False)):  # the file is of all images
        drawn = MetadataCatalog.get(drawn_images("squares", images, 0))
        assert hasattr(drawn, "json_file") is kept
        assert drawn.evaluator_type == "coco"
    assert len(DatasetCatalog.get(drawn_images("squares", 4, 0))) == 4
    with pytest.raises(ConfigError, match=r"9.*requested, but 'squares' has 8"):
        metric_on(9)


def records(boxes: Any, **fields: Any) -> list[dict[str, Any]]:
    """A record for each box, which is what Detectron2's data needs to be evaluated, and nothing more."""
    things = [[{"bbox": box, "bbox_mode": BoxMode.XYXY_ABS, "category_id": 0, **fields}] for box in boxes]
    return [{"image_id": place, "annotations": each} for place, each in enumerate(things)]


def enter(name: str, given: list[dict[str, Any]]) -> None:
    DatasetCatalog.register(name, lambda: given)
    MetadataCatalog.get(name).set(thing_classes=["thing"])


def put_out(boxes: Any, kind: type[Boxes] = Boxes, dtype: torch.dtype = torch.float32) -> dict[str, Instances]:
    given = kind(torch.tensor(boxes))
    given.tensor = given.tensor.to(dtype)
    scores = torch.linspace(0.9, 0.8, len(boxes)).to(dtype)
    return {
        "instances": Instances((100, 100), pred_boxes=given, scores=scores, pred_classes=torch.zeros(len(boxes)).long())
    }


BOXES = ([0.0, 0.0, 50.0, 50.0], [50.0, 50.0, 99.0, 99.0])


@pytest.mark.parametrize(
    ("boxes", "fields", "message"),
    [
        (
            [[50.0, 50, 20, 10, 30]],
            {"bbox_mode": BoxMode.XYWHA_ABS},
            r"image 0.*'odd'.*box of mode .*XYWHA",
        ),
        (
            [[0.1, 0.1, 0.2, 0.2]],
            {},
            r"dataset 'odd'.*bbox_mode says",
        ),
    ],
)
def test_records_of_another_kind_are_refused(boxes: Any, fields: dict[str, Any], message: str) -> None:
    enter("odd", records(boxes, **fields))
    with pytest.raises(DataError, match=message):
        registered_truth("odd")


def test_outputs_of_another_kind_are_refused() -> None:
    given = records(BOXES[:1])
    enter("known", given)
    evaluator = AP50Evaluator(registered_truth("known"))
    evaluator.process(given, [put_out([[0.1, 0.1, 0.2, 0.2]])])
    with pytest.raises(MetricError, match="the detector: every bbox lies within"):
        evaluator.evaluate()
    with pytest.raises(MetricError, match=r"AP50.*boxes along the axes"):
        evaluator.process(given, [put_out([[25.0, 25, 50, 50, 0]], RotatedBoxes)])
