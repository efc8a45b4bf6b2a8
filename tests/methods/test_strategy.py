"""What a strategy is: that each one keeps to it, and what is none."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.algorithm1 import Algorithm1
from metricopt_ext.methods.algorithm_s1 import AlgorithmS1
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.run_folder import RunFolder
from metricopt_ext.methods.strategy import Context, check_strategy
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.ngopt import NGOpt
from metricopt_ext.search.noisy_ei import NoisyEI
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.cached_metric import CachedMetric
from metricopt_ext.tasks.trajectory import TrajectoryStore

LEARNERS = [Recipe(), Algorithm1(), AlgorithmS1()]
SEARCHES = [GuidedTrustRegion(), CMAES(), GuidedES(), RandomSearch(), NGOpt(), NoisyEI()]


@pytest.mark.parametrize("strategy", [*LEARNERS, *SEARCHES], ids=lambda strategy: type(strategy).__name__)
def test_every_strategy_has_a_size_and_an_identity(strategy: Any) -> None:
    check_strategy(strategy)
    assert all(count > 0 for count in strategy.size(100_000, 8).values())
    assert_refused(lambda: strategy.size(1, 8), BudgetError, "1", "queries")
    assert json.loads(json.dumps(strategy.identity()))


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)
def test_each_start_of_a_search_is_a_query_more(search: Any) -> None:
    assert search.least_queries(8, 3) == search.least_queries(8) + 2


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (CMAES, ("strategy", "CMAES")),
        ("cmaes", ("strategy", "cmaes")),
        (print, ()),
    ],
)
def test_what_is_no_strategy_is_refused(wrong: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: check_strategy(wrong), ValueError, *names)


def test_what_is_on_file_is_booked_and_told(quadratic: Callable[..., Any]) -> None:
    class Noting(Callback):
        kept = 0

        def on_file(self, queries: int) -> None:
            self.kept = queries

    task, callback = quadratic(), Noting()
    context = Context(task, 40, RunFolder(None, {}), callback, {})
    context.retell(TrajectoryStore(), CachedMetric(task.metric, None))
    assert (callback.kept, task.metric.ledger.spent) == (0, 0)
