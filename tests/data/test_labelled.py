"""Examples and their labels: what is refused, and what is taken of them."""

import math

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.data.labelled import Labelled, Split
from metricopt_ext.errors import DataError


@pytest.mark.parametrize(
    ("x", "y", "names"),
    [
        (torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), ("float64",)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), ("(2,)",)),
        (torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64), ("2", "int64")),
        (torch.zeros(2, 1), torch.zeros(2), ("float32",)),
        (torch.tensor([[1.0], [float("nan")]]), torch.zeros(2, dtype=torch.int64), ("1", "2")),
    ],
)
def test_split_checks_its_tensors(x: Tensor, y: Tensor, names: tuple[str, ...]) -> None:
    assert_refused(lambda: Split(x, y), DataError, *names)


def test_examples_are_taken_by_place_or_where_true() -> None:
    split = Split(torch.arange(4.0)[:, None], torch.tensor([0, 1, 0, 2]))
    by_place = split.take(torch.tensor([3, 0, 3]))
    assert by_place.x.flatten().tolist() == [3, 0, 3]
    assert by_place.y.tolist() == [2, 0, 2]
    where_true = split.take(split.y == 0)
    assert where_true.x.flatten().tolist() == [0, 2]
    assert (len(by_place), len(where_true), len(split)) == (3, 2, 4)
    assert len(split.take(split.y > 5)) == 0


def test_what_is_taken_of_a_whole_set_has_no_names() -> None:
    whole = Labelled(torch.zeros(2, 1), torch.tensor([0, 1]), ("a", "b"))
    assert type(whole.take(torch.tensor([1]))) is Split
    assert_refused(
        lambda: Labelled(torch.zeros(2, 1), torch.tensor([0]), ("a",)), DataError, "2", "torch.int64", "(1,)"
    )


def test_bad_rows_are_counted_not_values() -> None:
    x = torch.zeros(5, 2, 3)
    x[1] = math.inf
    x[3, 0, 2] = math.nan
    assert_refused(lambda: Split(x, torch.zeros(5, dtype=torch.int64)), DataError, "NaN", "2", "5")
