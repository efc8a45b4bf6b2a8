"""Parts of one's own: which folders they are, their classes by name, their files by content."""

import warnings
from pathlib import Path

import pytest
import torch

from helpers.refusals import assert_refused, assert_warned, having
from metricopt_ext.data.own_parts import (
    digests_of_rows,
    folders_of_parts,
    given_parts,
    renumbered,
    same_classes,
    warn_of_copies,
)
from metricopt_ext.errors import ConfigError, DataError


@pytest.mark.parametrize("given", [{"train": "a"}, {"validation": "b"}, {"validation": "b", "test": "c"}])
def test_train_and_what_to_judge_on_are_needed(given: dict[str, str]) -> None:
    assert_refused(lambda: given_parts(given), ConfigError, "data.train", "data.test")


def test_parts_are_in_place_of_a_root() -> None:
    assert given_parts({"train": "", "validation": "", "test": ""}, "there") == {}
    assert given_parts({"test": "c", "train": "a", "validation": ""}) == {"train": "a", "test": "c"}
    assert_refused(
        lambda: given_parts({"train": "a", "test": "c"}, "there"), ConfigError, "data.root=there", "data.test"
    )


@pytest.mark.parametrize("around", ["", "dataset/"])
@pytest.mark.parametrize(
    "names", [("train", "val", "test"), ("Training", "valid", "Testing"), ("TRAIN", "dev", "test")]
)
def test_folders_of_parts_are_found_by_their_names(tmp_path: Path, around: str, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / f"{around}{name}" / "cat").mkdir(parents=True)
    found, left = folders_of_parts(tmp_path)
    assert {part: path.name for part, path in found.items()} == dict(
        zip(("train", "validation", "test"), names, strict=True)
    )
    assert left == []


def test_a_part_without_class_folders_is_left_and_named(tmp_path: Path) -> None:
    for name in ("train/cat", "val/cat", "test"):
        (tmp_path / name).mkdir(parents=True)
    found, left = folders_of_parts(tmp_path)
    assert list(found) == ["train", "validation"]
    assert left == [tmp_path / "test"]


@pytest.mark.parametrize("names", [("train", "bus", "car"), ("train",), ("val", "test"), ("cat", "dog")])
def test_classes_are_no_parts(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name / "a").mkdir(parents=True)
    assert folders_of_parts(tmp_path) == ({}, [])


def test_two_folders_of_one_part_are_refused(tmp_path: Path) -> None:
    for name in ("train", "val", "valid"):
        (tmp_path / name / "a").mkdir(parents=True)
    assert_refused(lambda: folders_of_parts(tmp_path), DataError, "data.val")


@pytest.mark.parametrize("alone", ["train", "validation", "test"])
def test_a_class_of_one_part_alone_is_named(alone: str) -> None:
    parts = {name: ["cat", "dog", *(["emu"] if name == alone else [])] for name in ("train", "validation", "test")}
    assert_refused(lambda: same_classes(parts), DataError, "emu")


def test_a_class_that_train_lacks_is_named() -> None:
    assert_refused(
        lambda: same_classes({"train": ["cat"], "validation": ["cat", "emu"], "test": ["cat", "emu"]}),
        DataError,
        "emu",
        "data.train",
    )


def test_a_class_that_one_part_to_judge_on_lacks_is_warned_of() -> None:
    classes = assert_warned(
        lambda: same_classes({"train": ["emu", "cat"], "validation": ["cat", "emu"], "test": ["cat"]}),
        "classes",
        "emu",
        "data.test",
    )
    assert classes == ("emu", "cat")


def test_labels_are_renumbered_by_name() -> None:
    assert renumbered(torch.tensor([0, 1, 1]), ("cat", "emu"), ("bee", "cat", "dog", "emu")).tolist() == [1, 3, 3]


def test_copies_are_counted_and_five_are_named() -> None:
    parts = {"train": {f"a{i}": str(i) for i in range(9)}, "test": {f"b{i}": str(i) for i in range(2, 12)}}
    with pytest.warns(UserWarning, match=having("7")) as told:
        warn_of_copies(parts)
    (said,) = {str(each.message) for each in told}
    assert "b2 of test is a2 of train" in said
    assert said.count(" is a") == 5
    assert "and 2 more" in said


def test_copies_within_a_part_are_no_copies() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_copies({"train": {"a": "1", "b": "1"}, "test": {"c": "2"}})


def test_rows_are_told_apart_by_features_and_label() -> None:
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [-0.0, torch.nan], [0.0, torch.nan]])
    digests = digests_of_rows(x, torch.tensor([0, 1, 0, 0, 0]), "abcde")
    assert digests["a"] == digests["c"] != digests["b"]
    assert digests["d"] == digests["e"]
