"""Long tails: how many of each class are left, and which."""

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.classification.shift import long_tail
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import DataError


def splits_of(*counts: int) -> Splits:
    """Each example's input is its place, classes one after another."""

    def part(counts: tuple[int, ...]) -> Split:
        y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return Split(torch.arange(len(y), dtype=torch.float32)[:, None], y)

    names = tuple(map(str, range(len(counts))))
    return Splits(part(counts), part((2,) * len(counts)), part((3,) * len(counts)), names)


@pytest.mark.parametrize(
    ("counts", "imbalance", "largest", "kept"),
    [
        ((100, 100, 100), 100, 0, [100, 10, 1]),
        ((100, 100, 100, 100), 8, 80, [80, 40, 20, 10]),
        ((60, 90), 15, 0, [60, 4]),
        ((100, 20, 100), 4, 0, [40, 20, 10]),  # the second class has the fewest for its share
        ((100, 100, 100), 1, 30, [30, 30, 30]),
        ((7, 5, 6), 1, 0, [5, 5, 5]),
        ((81, 82, 81, 82, 81, 82, 82, 81, 79, 81), 15, 60, [60, 44, 33, 24, 18, 13, 10, 7, 5, 4]),
    ],
)
def test_counts_fall_geometrically(counts: tuple[int, ...], imbalance: float, largest: int, kept: list[int]) -> None:
    whole = splits_of(*counts)
    tail = long_tail(whole, imbalance, largest, seed=3)
    assert torch.bincount(tail.train.y).tolist() == kept
    places = tail.train.x[:, 0].long()
    assert torch.equal(tail.train.y, whole.train.y[places])
    assert (places.diff() > 0).all()  # each once, in the order that they had
    assert tail.validation is whole.validation
    assert tail.test is whole.test


def test_the_choice_is_the_seed_s() -> None:
    whole = splits_of(50, 50)
    one, again, other = (long_tail(whole, 5, seed=seed).train.x for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("imbalance", "largest", "names"),
    [
        (
            3,
            11,
            ("1/3", "10"),
        ),
        (100, 0, ("10", "0")),
    ],
)
def test_too_few_examples(imbalance: float, largest: int, names: tuple[str, ...]) -> None:
    assert_refused(lambda: long_tail(splits_of(10, 10), imbalance, largest), DataError, *names)


@pytest.mark.parametrize("imbalance", [0.5, 0, float("nan"), float("inf")])
def test_an_imbalance_out_of_range(imbalance: float) -> None:
    assert_refused(lambda: long_tail(splits_of(10, 10), imbalance), ValueError, "imbalance", imbalance)


@pytest.mark.parametrize("largest", [-1, 2.5])
def test_a_largest_class_out_of_range(largest: float) -> None:
    assert_refused(lambda: long_tail(splits_of(10, 10), 2, largest), ValueError, "largest_class", largest)
