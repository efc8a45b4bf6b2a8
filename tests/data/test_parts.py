"""Examples in parts: their tensors, parts of one's own, and parts of a size."""

import math
from pathlib import Path

import pytest
import torch

from helpers.refusals import assert_refused, having
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.own_parts import (
    digests_of_rows,
    folders_of_parts,
    warn_of_shared,
)
from metricopt_ext.data.parts import large_parts
from metricopt_ext.data.shift import ImageShift
from metricopt_ext.data.splits import Splits, check_fractions


@pytest.mark.parametrize(("n", "size"), [(10, 4), (8, 4), (3, 4), (1, 1), (9, 1)])
def test_large_parts_are_whole_and_of_about_one_size(n: int, size: int) -> None:
    parts = large_parts(torch.arange(n)[:, None], size)
    sizes = [len(part) for part in parts]
    assert torch.cat(parts).flatten().tolist() == list(range(n))
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-n // size)  # no more than needed


def test_examples_are_taken_by_place_or_where_true() -> None:
    split = Split(torch.arange(4.0)[:, None], torch.tensor([0, 1, 0, 2]))
    by_place = split.take(torch.tensor([3, 0, 3]))
    assert by_place.x.flatten().tolist() == [3, 0, 3]
    assert by_place.y.tolist() == [2, 0, 2]
    where_true = split.take(split.y == 0)
    assert where_true.x.flatten().tolist() == [0, 2]
    assert (len(by_place), len(where_true), len(split)) == (3, 2, 4)
    assert len(split.take(split.y > 5)) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_validation_and_test_are_shifted_by_draws_of_their_own(dtype: torch.dtype) -> None:
    x = torch.arange(30 * 16, dtype=torch.float32).view(30, 1, 4, 4) % 251
    x = x.to(torch.uint8) if dtype == torch.uint8 else x / 255
    part = Split(x, torch.arange(30) % 2)
    splits = Splits(part, part, part, ("a", "b"))
    shift = ImageShift(noise_std=0.05, rotation_degrees=30)
    shifted, again, other = (splits.shifted(shift, seed) for seed in (3, 3, 4))
    assert shifted.train is part
    assert shifted.validation.x.dtype == shifted.test.x.dtype == torch.float32
    assert torch.equal(shifted.validation.y, part.y)
    assert torch.equal(shifted.validation.x, again.validation.x)
    assert not torch.equal(shifted.validation.x, other.validation.x)
    assert not torch.equal(shifted.validation.x, shifted.test.x)
    plain = splits.shifted(ImageShift(), 3)
    torch.testing.assert_close(plain.test.x, x.float() / (255 if dtype == torch.uint8 else 1))


def test_fractions_may_sum_to_one_but_for_rounding() -> None:
    assert sum((0.7, 0.2, 0.1)) != 1
    check_fractions((0.7, 0.2, 0.1))
    assert_refused(lambda: check_fractions([0.7, 0.2, 0.11]), ValueError, "1", "(0.7, 0.2, 0.11)")
    assert_refused(lambda: check_fractions([math.nan, 0.5, 0.5]), ValueError, "nan")


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


@pytest.mark.parametrize("names", [("train", "bus", "car"), ("train",), ("val", "test"), ("cat", "dog")])
def test_classes_are_no_parts(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name / "a").mkdir(parents=True)
    assert folders_of_parts(tmp_path) == ({}, [])


def test_copies_are_counted_and_five_are_named() -> None:
    parts = {"train": {f"a{i}": str(i) for i in range(9)}, "test": {f"b{i}": str(i) for i in range(2, 12)}}
    with pytest.warns(UserWarning, match=having("7")) as told:
        warn_of_shared(parts, "file")
    (said,) = {str(each.message) for each in told}
    assert "b2 of test is a2 of train" in said
    assert said.count(" is a") == 5
    assert "and 2 more" in said


def test_rows_are_told_apart_by_their_numbers() -> None:
    digests = digests_of_rows(
        torch.tensor([[1.0, 2.0], [1.0, 2.5], [1.0, 2.0], [-0.0, torch.nan], [0.0, torch.nan]]), "abcde"
    )
    assert digests["a"] == digests["c"] != digests["b"]
    assert digests["d"] == digests["e"]
