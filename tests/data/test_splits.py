"""Train, validation and test parts of one set."""

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.shift import ImageShift
from metricopt_ext.data.splits import Splits, check_fractions
from metricopt_ext.errors import DataError


def test_splits_check_that_parts_fit() -> None:
    two, other = Split(torch.zeros(2, 1), torch.tensor([0, 1])), Split(torch.zeros(2, 3), torch.tensor([0, 1]))
    assert_refused(
        lambda: Splits(two, two, Split(torch.zeros(2, 1), torch.tensor([0, 2])), ("a", "b")), DataError, "0..1", "2"
    )
    assert_refused(lambda: Splits(two, other, two, ("a", "b")), DataError, "(1,)", "(3,)")
    assert_refused(lambda: Splits(two, two, two.take(torch.tensor([False, False])), ("a", "b")), DataError)
    assert_refused(lambda: Splits(two, two, two, ("a",)), DataError, "1")


def numbered(*counts: int, dtype: torch.dtype = torch.float32) -> Splits:
    """Parts of so many images, 1 x 1 x 2, of two classes; each image holds its part and its place."""
    parts = []
    for part, count in enumerate(counts):
        x = torch.stack([torch.full((count,), part), torch.arange(count)], 1).to(dtype).view(count, 1, 1, 2)
        parts.append(Split(x, torch.arange(count) % 2))
    return Splits(*parts, ("a", "b"))


def test_each_part_tells_its_classes() -> None:
    assert numbered(1, 3, 4).classes_of("train") == ["a"]
    assert numbered(1, 3, 4).classes_of("test") == ["a", "b"]


def test_each_part_is_changed_under_its_name() -> None:
    splits = numbered(2, 3, 4)
    seen: list[tuple[str, int]] = []

    def change(part: Split, name: str) -> Split:
        seen.append((name, len(part)))
        return Split(part.x + len(name), part.y)

    changed = splits.map(change)
    assert seen == [("train", 2), ("validation", 3), ("test", 4)]
    assert (changed.num_classes, changed.class_names) == (2, ("a", "b"))
    assert torch.equal(changed.validation.x, splits.validation.x + len("validation"))
    assert torch.equal(splits.validation.x, numbered(2, 3, 4).validation.x)  # left as it was
    assert_refused(
        lambda: splits.map(lambda part, name: part.take(torch.zeros(len(part), dtype=torch.bool))), DataError
    )


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
