"""Random search: Gaussian points around the start, the same for every budget."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.seeding import generator


def test_it_keeps_to_the_protocol(keeps_to_protocol: Callable[..., None]) -> None:
    keeps_to_protocol(RandomSearch(), 30)


def test_points_are_those_of_the_definition_and_a_longer_run_goes_on(quadratic: Callable[..., Any]) -> None:
    task, rng = quadratic(dim=8), generator(2, "random_search")
    start = task.starts(0.3, 0, [0])[0]
    expected = [start] + [start + 0.2 * torch.randn(8, generator=rng, dtype=torch.float64) for _ in range(39)]
    for queries in (20, 40):
        points: list[torch.Tensor] = []
        noting = task.judged_by(Metric(lambda model, points=points: _note(model, points), maximize=False, bounds=None))
        RandomSearch(0.2)(noting, start, queries, seed=2)
        assert torch.equal(torch.stack(points), torch.stack(expected[:queries]))


def _note(model: Any, points: list[torch.Tensor]) -> float:
    points.append(model.metricopt.phi.detach().clone())
    return 0.0


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_an_impossible_spread_is_refused(std: float) -> None:
    assert_refused(lambda: RandomSearch(std), ValueError, "std", std)
