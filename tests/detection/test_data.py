"""The parts of a detection run's data, and the black box that judges on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision")

from helpers.boxes import blank_examples
from helpers.refusals import assert_warned
from metricopt_ext.detection.config import DetectionConfig, VOCConfig
from metricopt_ext.detection.data import load_splits
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import write_voc

CLASSES = ("cat", "dog")


def voc_tree(folder: Path, classes: Sequence[str] = CLASSES) -> Path:
    write_voc(folder, blank_examples(10, "a"), classes, "trainval")
    return write_voc(folder, blank_examples(4, "b", seed=1), classes, "test")


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
    tree, more = voc_tree(tmp_path / "voc"), write_voc(tmp_path / "more", blank_examples(5, "c"), CLASSES, "trainval")
    all_of = load_splits(config_of(tree, more_train=[str(more)], splits=["trainval", "test", "test"]), 0, tmp_path)
    assert ids(all_of.train) == [f"a{i}" for i in range(10)] + [f"c{i}" for i in range(5)]
    few = config_of(tree, images=[4, 2, 9])
    first, again, other = (load_splits(few, seed, tmp_path) for seed in (0, 0, 1))
    assert [len(part) for part in (first.train, first.validation, first.test)] == [4, 2, 4]
    assert set(ids(first.train)) <= set(ids(load_splits(config_of(tree), 0, tmp_path).train))
    assert ids(first.train) == ids(again.train) != ids(other.train)


def test_images_of_another_part_are_counted_whatever_they_are_called(tmp_path: Path) -> None:
    tree = voc_tree(tmp_path / "voc")
    images = {file.stem: file for file in (tree / "JPEGImages").iterdir()}
    for i in range(3):
        images[f"b{i}"].write_bytes(images[f"a{i}"].read_bytes())
    assert_warned(lambda: load_splits(config_of(tree), 0, tmp_path), "3 of 4 images of test", images["b0"].name)


def test_classes_of_nearly_one_name_are_named(tmp_path: Path) -> None:
    tree = voc_tree(tmp_path / "voc", ("Cat", "cat"))
    assert_warned(lambda: load_splits(config_of(tree), 0, tmp_path), "'Cat'", "'cat'")
