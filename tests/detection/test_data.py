"""The parts of a detection run's data, and the black box that judges on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_named, assert_refused, having

pytest.importorskip("torchvision")

from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.config import DetectionConfig, VOCConfig
from metricopt_ext.detection.data import load_splits
from metricopt_ext.detection.metric import truth_of
from metricopt_ext.detection.records import Annotated, Detections
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import write_voc
from metricopt_ext.errors import DataError

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
