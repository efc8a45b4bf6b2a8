"""A box around a start, and what optimizers of other packages have in common."""

from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.search.box import Box, check_package, drawn, sobol
from metricopt_ext.search.strategy import Answer, Answers
from metricopt_ext.tasks.evaluation import Evaluation

START = torch.tensor([1.0, -2.0], dtype=torch.float32)


def told(box: Box, unit: torch.Tensor, answers: Any) -> Any:
    asking = box.proposed(unit)
    points = next(asking)
    with pytest.raises(StopIteration) as stopped:
        asking.send(Answers(answers(points)))
    return points, stopped.value.value


def test_the_unit_box_is_the_start_plus_or_minus_half_a_width() -> None:
    box = Box(START, 0.5)
    unit = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.3, 0.7]], dtype=torch.float64)
    points, (same, costs) = told(
        box, unit, lambda asked: [Answer(p, Evaluation(float(i))) for i, p in enumerate(asked)]
    )
    assert points.dtype == START.dtype
    torch.testing.assert_close(points, torch.tensor([[1.0, -2.0], [0.5, -1.5], [0.8, -1.8]]))
    assert torch.equal(box.middle, unit[:1])
    assert torch.equal(same, unit)  # not what rounding to single precision makes of it
    assert costs.tolist() == [0, 1, 2]


def test_what_was_answered_elsewhere_or_not_at_all_is_taken_as_it_is() -> None:
    unit = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.3, 0.7]], dtype=torch.float64)
    other = torch.tensor([1.25, -2.25])
    _, (found, costs) = told(
        Box(START, 0.5),
        unit,
        lambda asked: [Answer(other, Evaluation(5.0)), Answer(asked[1], None), Answer(asked[2], Evaluation(7.0))],
    )
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.25], [0.3, 0.7]], dtype=torch.float64))
    assert costs.tolist() == [5, 7]


def test_points_and_seeds_follow_their_seed() -> None:
    assert torch.equal(sobol(3, 8, 5), sobol(3, 8, 5))
    assert not torch.equal(sobol(3, 8, 5), sobol(3, 8, 6))
    assert bool(((sobol(3, 64, 5) >= 0) & (sobol(3, 64, 5) <= 1)).all())
    first, second = (torch.Generator().manual_seed(3) for _ in range(2))
    assert [drawn(first) for _ in range(3)] == [drawn(second) for _ in range(3)]


def test_a_missing_package_says_what_to_install() -> None:
    check_package("torch", "This search")
    assert_refused(
        lambda: check_package("no_such", "This search"), ImportError, "This", "search", "pip install 'no_such'"
    )
