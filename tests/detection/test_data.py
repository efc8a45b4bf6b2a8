"""The parts of a detection run's data, and the black box that judges on them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_named, assert_refused, assert_warned, having

pytest.importorskip("torchvision")

from metricopt_ext.data.halves import random_halves
from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.coco import write_coco
from metricopt_ext.detection.config import DetectionConfig, VOCConfig
from metricopt_ext.detection.data import load_splits
from metricopt_ext.detection.metric import OwnDetectionMetric, ap50_metric, detector_metric, truth_of
from metricopt_ext.detection.records import Annotated, Detections
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import write_voc
from metricopt_ext.errors import ConfigError, DataError, MetricError
from metricopt_ext.tasks.evaluation import Evaluation

CLASSES = ("cat", "dog")
VOC = ("voc_11_point", "voc")


def examples(count: int, name: str = "a", seed: int = 0) -> list[Example]:
    """Make blank images with two objects each, one of either class."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        corners = torch.randint(0, 20, (2, 2), generator=rng).float()
        boxes = torch.cat([corners, corners + torch.randint(8, 12, (2, 2), generator=rng)], 1)
        no = torch.zeros(2, dtype=torch.bool)
        truth = Annotated(f"{name}{i}", Path("none"), 32, 32, boxes, torch.tensor([0, 1]), no, no.clone())
        image = torch.full((3, 32, 32), i, dtype=torch.uint8)
        image[1] = ord(name)  # no two sets have an image in common
        made.append(Example(image, truth))
    return made


def voc_tree(folder: Path, classes: Sequence[str] = CLASSES) -> Path:
    write_voc(folder, examples(10, "a"), classes, "trainval")
    return write_voc(folder, examples(4, "b", seed=1), classes, "test")


def config_of(root: Path, **settings: Any) -> DetectionConfig:
    data = {"root": str(root), "splits": ["trainval", "", "test"], "validation_share": 0.3, **settings}
    return DetectionConfig(data=VOCConfig(name="voc", **data))


def ids(part: Sequence[Example]) -> list[Any]:
    return [example.truth.image_id for example in part]


def test_validation_is_held_out_of_train(tmp_path: Path) -> None:
    tree = voc_tree(tmp_path / "voc")
    splits = load_splits(config_of(tree), 0, tmp_path)
    assert splits.classes == CLASSES
    assert (len(splits.train), len(splits.validation)) == (7, 3)
    assert sorted(ids(splits.train) + ids(splits.validation)) == [f"a{i}" for i in range(10)]
    assert ids(splits.test) == [f"b{i}" for i in range(4)]
    held_out = [ids(load_splits(config_of(tree), seed, tmp_path).validation) for seed in (0, 1, 2)]
    assert held_out[0] == ids(splits.validation)
    assert len(set(map(tuple, held_out))) > 1


def test_images_are_drawn_by_the_seed_and_further_trees_join_train(tmp_path: Path) -> None:
    tree, more = voc_tree(tmp_path / "voc"), write_voc(tmp_path / "more", examples(5, "c"), CLASSES, "trainval")
    all_of = load_splits(config_of(tree, more_train=[str(more)], splits=["trainval", "test", "test"]), 0, tmp_path)
    assert ids(all_of.train) == [f"a{i}" for i in range(10)] + [f"c{i}" for i in range(5)]
    few = config_of(tree, images=[4, 2, 9])
    first, again, other = (load_splits(few, seed, tmp_path) for seed in (0, 0, 1))
    assert [len(part) for part in (first.train, first.validation, first.test)] == [4, 2, 4]
    assert set(ids(first.train)) <= set(ids(load_splits(config_of(tree), 0, tmp_path).train))
    assert ids(first.train) == ids(again.train) != ids(other.train)


def test_parts_of_other_classes_are_refused(tmp_path: Path) -> None:
    tree, more = voc_tree(tmp_path / "voc"), voc_tree(tmp_path / "more", ("cat", "horse"))
    assert_refused(
        lambda: load_splits(config_of(tree, more_train=[str(more)]), 0, tmp_path), DataError, "more", "data.classes"
    )
    one = load_splits(config_of(tree, splits=["trainval", "test", "test"]), 0, tmp_path)
    files = [
        write_coco(tmp_path / f"{i}.json", truth_of(one.test, classes))
        for i, classes in enumerate([CLASSES, CLASSES, ("cat", "horse")])
    ]
    coco = config_of(tree / "JPEGImages", splits=[str(file) for file in files])
    coco.data.name = "coco"
    assert_refused(lambda: load_splits(coco, 0, tmp_path), DataError, "horse", "data.test")


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    write_voc(tmp_path / "voc", examples(1), CLASSES, "trainval")
    write_voc(tmp_path / "voc", examples(1, "b"), CLASSES, "test")
    assert_refused(lambda: load_splits(config_of(tmp_path / "voc"), 0, tmp_path), DataError, "1")


def test_boxes_outside_their_images_are_counted_once_and_a_train_set_needs_others(tmp_path: Path) -> None:
    inner, outer = examples(4), examples(4)
    for example in outer:
        example.truth.boxes[0] += 40
    for name, some in (("some", [*inner[:2], *outer[2:]]), ("all", outer)):
        write_voc(tmp_path / name, some, CLASSES, "trainval")
        write_voc(tmp_path / name, examples(2, "b"), CLASSES, "test")
    with pytest.warns(UserWarning, match="outside") as caught:
        splits = load_splits(config_of(tmp_path / "some", splits=["trainval", "test", "test"]), 0, tmp_path)
    said, copied = (str(each.message) for each in caught)
    assert "2 images in two parts, by content" in copied  # test is validation too
    assert "2 outside the image, left out of training (a2.xml, a3.xml)" in said
    assert [len(each.truth.boxes) for each in splits.train] == [2] * 4
    for example in outer:
        example.truth.boxes[1] += 40
    write_voc(tmp_path / "all", outer, CLASSES, "trainval")
    with (
        pytest.warns(UserWarning, match=having("8")),
        pytest.raises(DataError) as caught,
    ):
        load_splits(config_of(tmp_path / "all", splits=["trainval", "test", "test"]), 0, tmp_path)
    assert_named(caught, "4")
    # They count where they are evaluated: what is nowhere is not found.
    with pytest.warns(UserWarning, match="counts them as they are"):
        judged = load_splits(config_of(tmp_path / "some", splits=["test", "trainval", "test"]), 0, tmp_path).validation
    found = [Detections(each.truth.boxes[1:], torch.ones(1), each.truth.labels[1:]) for each in judged]
    assert average_precision(found, truth_of(judged, CLASSES), "voc").per_class == {"cat": 0.0, "dog": 1.0}


class Finding:
    """A toolkit whose detector finds every object, some with an error too large, at random scores."""

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        found = []
        for example in batch:
            rng = torch.Generator().manual_seed(int(example.image[0, 0, 0]))
            error = torch.randint(-4, 5, (2, 4), generator=rng)
            scores = torch.rand(2, generator=rng)
            found.append(Detections(example.truth.boxes + error, scores, example.truth.labels))
        return found


@pytest.mark.parametrize("definition", [*VOC, "coco"])
def test_the_metric_is_ap50_of_all_images_and_of_each_half(definition: Any) -> None:
    images, toolkit, model = examples(19), Finding(), nn.Identity()
    halves = [half.tolist() for half in random_halves(19, 0)]
    answer = ap50_metric(toolkit, images, CLASSES, definition).evaluate(model, "test")

    def cost(places: Sequence[int]) -> float:
        chosen = [images[i] for i in places]
        return 1 - average_precision(toolkit.detect(model, chosen), truth_of(chosen, CLASSES), definition).mean

    assert 0.05 < answer.cost < 0.95
    assert answer.cost == pytest.approx(cost(range(19)))
    assert answer.halves == (pytest.approx(cost(halves[0])), pytest.approx(cost(halves[1])))
    assert ap50_metric(toolkit, images, CLASSES, definition, ()).evaluate(model, "test") == Evaluation(answer.cost)


@pytest.mark.parametrize(("definition", "told"), [("voc", False), ("coco", True)])
def test_a_half_whose_objects_are_all_difficult_is_told_only_where_they_count(definition: Any, told: bool) -> None:
    images = examples(4)
    for example in images[2:]:
        example.truth.difficult[:] = True
    metric = ap50_metric(Finding(), images, CLASSES, definition, list(torch.arange(4).view(2, 2)))
    if told:
        assert metric.evaluate(nn.Identity(), "test").halves is not None
    else:
        with pytest.warns(UserWarning, match=r"one.*images has no object that counts"):
            assert metric.evaluate(nn.Identity(), "test").halves is None


def counted(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """The share of images in which as many detections have a score above 0.5 as there are objects."""
    right = [(seen["scores"] > 0.5).sum() == len(known["labels"]) for known, seen in zip(truth, found, strict=True)]
    return sum(right) / len(right)


def test_a_function_of_one_s_own_judges_all_images_and_each_half() -> None:
    images, toolkit, halves = examples(19), Finding(), [half.tolist() for half in random_halves(19, 0)]
    given: list[tuple[Any, Any]] = []

    def function(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
        given.append((truth, found))
        return counted(truth, found)

    own = OwnDetectionMetric(function, "counted", bounds=(0.0, 2.0))
    metric = detector_metric(own, toolkit, images, CLASSES)
    answer = metric.evaluate(nn.Identity(), "test")
    detections = toolkit.detect(nn.Identity(), images)
    right = [int((each.scores > 0.5).sum()) == 2 for each in detections]
    values = [sum(right[i] for i in rows) / len(rows) for rows in (range(19), *halves)]
    assert 0 < values[0] < 1
    assert [metric.to_value(cost) for cost in (answer.cost, *answer.halves)] == pytest.approx(values)
    (truth, found), half = given[0], given[1]
    assert [len(each) for each in (truth, found, *half)] == [19, 19, 10, 10]
    assert set(truth[0]) == {"boxes", "labels", "difficult", "crowd"}
    assert set(found[0]) == {"boxes", "labels", "scores"}
    for i, example in enumerate(images):
        assert truth[i]["boxes"].tolist() == example.truth.boxes.tolist()
        assert found[i]["boxes"].tolist() == detections[i].boxes.tolist()
        assert found[i]["scores"].tolist() == detections[i].scores.tolist()
        assert truth[i]["labels"].tolist() == found[i]["labels"].tolist() == [0, 1]


def test_a_function_of_one_s_own_may_work_in_place() -> None:
    def function(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
        value = float(sum(known["boxes"].sum() for known in truth) + sum(seen["scores"].sum() for seen in found))
        for each in (*truth, *found):
            for array in each.values():
                array[:] = 0
        return value

    images = examples(6)
    own = OwnDetectionMetric(function, "own", bounds=(0.0, 1e6))
    own.try_on(truth_of(images, CLASSES))
    metric = detector_metric(own, Finding(), images, CLASSES, list(torch.arange(6).view(2, 3)))
    first, second = (metric.evaluate(nn.Identity(), "test") for _ in range(2))
    assert first == second
    whole, *halves = (metric.to_value(cost) for cost in (first.cost, *first.halves))
    assert whole == pytest.approx(sum(halves))
    assert min(halves) > 1


def test_a_function_of_one_s_own_is_tried_and_its_values_are_checked() -> None:
    truth = truth_of(examples(3), CLASSES)
    OwnDetectionMetric(counted, "counted").try_on(truth)
    for function, names in (
        (lambda truth, found: 2.0, ("bounds", "(0, 1)", "2", "metric.kwargs")),
        (lambda truth, found: found[0]["masks"], ("masks",)),
        (lambda truth: 1.0, ("1", "2")),
    ):
        with pytest.raises(ConfigError) as caught:
            OwnDetectionMetric(function, "own").try_on(truth)
        assert_named(caught, "own", "3", *names)
    metric = detector_metric(OwnDetectionMetric(lambda *given: -1, "own"), Finding(), examples(3), CLASSES)
    assert_refused(lambda: metric.evaluate(nn.Identity(), "test"), MetricError, "own", "(0, 1)", "-1")


def test_halves_without_an_object_are_not_reported() -> None:
    images = examples(4)
    for example in images[2:]:
        object.__setattr__(example.truth, "labels", example.truth.labels[:0])
    own = OwnDetectionMetric(lambda *given: 0.5, "own")
    apart = detector_metric(own, Finding(), images, CLASSES, list(torch.tensor([[0, 2], [1, 3]])))
    assert apart.evaluate(nn.Identity(), "test").halves is not None
    bare = detector_metric(own, Finding(), images, CLASSES, list(torch.tensor([[0, 1], [2, 3]])))
    with pytest.warns(UserWarning, match=r"one.*images has no object that counts"):
        assert bare.evaluate(nn.Identity(), "test").halves is None


def test_detections_beyond_coco_s_limit_are_counted_once() -> None:
    class Crowding(Finding):
        def detect(self, model: nn.Module, batch: Any) -> list[Detections]:
            found = super().detect(model, batch)
            return [Detections(*(torch.cat([each] * 60) for each in (f.boxes, f.scores, f.labels * 0))) for f in found]

    images = examples(3)
    metric = ap50_metric(Crowding(), images, CLASSES, "coco")
    assert_warned(lambda: metric.evaluate(nn.Identity(), "test"), "60", "100")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric.evaluate(nn.Identity(), "test")
        ap50_metric(Crowding(), images, CLASSES, "voc").evaluate(nn.Identity(), "test")


def test_a_function_of_one_s_own_is_given_bfloat16_as_float32() -> None:
    class Half(Finding):
        def detect(self, model: nn.Module, batch: Any) -> list[Detections]:
            found = super().detect(model, batch)
            return [Detections(each.boxes.bfloat16(), each.scores.bfloat16(), each.labels) for each in found]

    def function(truth: Any, found: Any) -> float:
        assert {each["scores"].dtype.name for each in found} == {"float32"}
        return float(sum(each["scores"].sum() for each in found))

    images = examples(3)
    own = OwnDetectionMetric(function, "own", bounds=(0.0, 1e6))
    metric = detector_metric(own, Half(), images, CLASSES)
    expected = sum(float(each.scores.float().sum()) for each in Half().detect(nn.Identity(), images))
    assert metric.to_value(metric.evaluate(nn.Identity(), "test").cost) == pytest.approx(expected, abs=1e-4)


def test_images_stay_on_disk(tmp_path: Path) -> None:
    tree = voc_tree(tmp_path / "voc")
    memory, disk = (load_splits(config_of(tree, size=20, stream=stream), 0, tmp_path) for stream in (False, True))
    for name in ("train", "validation", "test"):
        parts = getattr(memory, name), getattr(disk, name)
        assert ids(parts[0]) == ids(parts[1])
        for one, other in zip(*parts, strict=True):
            assert "image" not in vars(other)
            assert torch.equal(one.image, other.image)
            assert torch.equal(one.truth.boxes, other.truth.boxes)
