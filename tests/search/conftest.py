"""What every search keeps to (`direct.Search`), checked on a quadratic."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import BudgetError, MetricError
from metricopt_ext.search.strategy import SearchStrategy as Search


def _global_streams() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()]


@pytest.fixture
def keeps_to_protocol(quadratic: Callable[..., Any]) -> Callable[[Search, int], None]:
    """Check that a search spends exactly its budget, starts at the start, follows its seed and changes nothing else."""

    def check(search: Search, queries: int) -> None:
        least = search.least_queries(8)
        for budget in (least, queries):
            task, seen = quadratic(dim=8, budget=budget), []
            start = task.starts(0.3, 0, [0])[0]
            with task.metric.calling(lambda query, seen=seen: seen.append(query.evaluation.cost)):
                result = search(task, start, budget)
            assert task.metric.ledger.spent_on == {"search": budget}
            assert task.queries == len(seen) == budget
            assert seen[0] == task.true_cost(start)
            assert result.cost == min(seen) == task.true_cost(result.phi)
            assert result.curve[0] == (1, seen[0])

        def run(seed: int, global_seed: int) -> list[float]:
            torch.manual_seed(global_seed)
            np.random.seed(global_seed)
            task, seen = quadratic(dim=8), []
            before = _global_streams()
            model = {name: value.clone() for name, value in task.adapter.model.state_dict().items()}
            with task.metric.calling(lambda query, seen=seen: seen.append(query.evaluation.cost)):
                search(task, task.origin(), queries, seed=seed)
            unchanged = _global_streams() == before  # by name: pytest would print all numbers
            assert unchanged
            assert all(torch.equal(value, model[name]) for name, value in task.adapter.model.state_dict().items())
            return seen

        first = run(3, 0)
        assert first == run(3, 1)
        assert first[1:] != run(4, 0)[1:]

        task = quadratic(dim=8, budget=queries)
        assert_refused(lambda: search(task, task.origin(), least - 1), ValueError, "queries", least - 1, least)
        assert_refused(lambda: search(task, task.origin(), queries + 1), BudgetError, queries + 1, queries)
        assert task.queries == 0
        task.problem.fail_after = least
        assert_refused(lambda: search(task, task.origin(), queries), MetricError, "server is down", least + 1, queries)

    return check
