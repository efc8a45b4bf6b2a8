"""A metric's value with its values on two halves of the data."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.tasks.halved import Halved, with_halves
from metricopt_ext.tasks.metric import Metric


def test_several_divisions_of_the_data_tell_a_value_for_each_half() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    pairs = [(torch.tensor([0, 1]), torch.tensor([2, 3])), (torch.tensor([0, 2]), torch.tensor([1, 3]))]

    def mean(half: torch.Tensor | None) -> float:
        return float((x if half is None else x[half]).mean())

    found = with_halves(mean, pairs)
    assert (float(found), found.halves) == (2.5, ((1.5, 3.5), (2.0, 3.0)))
    assert with_halves(mean, pairs[0]).halves == (1.5, 3.5)
    assert_refused(
        lambda: with_halves(mean, [pairs[0], (torch.tensor([0, 1]), torch.tensor([1, 2]))]),
        ValueError,
        "halves",
        "1",
        "2",
    )


def told(value: Halved) -> tuple[float, Any]:
    return float(value), value.halves


@pytest.mark.parametrize("error", [ValueError("one  class"), DataError("one class"), MetricError("one class")])
def test_what_is_refused_on_a_half_has_no_halves(error: Exception) -> None:
    def value_on(rows: Tensor | None) -> float:
        if rows is not None and 1 in rows:
            raise error
        return 0.25 if rows is None else 0.5

    halves = [torch.tensor([0, 2]), torch.tensor([3])]
    assert told(with_halves(value_on, halves)) == (0.25, (0.5, 0.5))
    why = f"on a half of its data it raised {type(error).__name__}: one class"
    assert told(with_halves(value_on, [*halves[:1], torch.tensor([1])])) == (0.25, why)
    assert told(with_halves(value_on, "there are no classes")) == (0.25, "there are no classes")
    assert told(with_halves(value_on, ())) == (0.25, None)
    assert told(with_halves(value_on, "")) == (0.25, None)


def test_halves_that_share_examples_are_refused() -> None:
    halves = [torch.arange(6), torch.arange(4, 8)]
    assert_refused(lambda: with_halves(lambda rows: 0.5, halves), ValueError, "halves", "6")
    metric = Metric(lambda: with_halves(lambda rows: 0.5, [torch.arange(8)] * 2), maximize=True, name="own")
    assert_refused(lambda: metric.evaluate(nn.Identity(), "x"), MetricError, "own", "8")


@pytest.mark.parametrize("error", [TimeoutError("too long"), OSError("no disk"), KeyError("x"), TypeError("y")])
def test_what_has_nothing_to_do_with_halves_is_raised(error: Exception) -> None:
    def value_on(rows: Tensor | None) -> float:
        if rows is not None:
            raise error
        return 0.25

    metric = Metric(lambda: with_halves(value_on, [torch.tensor([0]), torch.tensor([1])]), maximize=True)
    assert_refused(lambda: metric.evaluate(nn.Identity(), "x"), MetricError, type(error).__name__)
