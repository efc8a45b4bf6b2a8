"""MetricOpt (learned) in one call: what it spends and keeps, and that a run goes on where it stopped."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metricopt_ext.errors import BudgetError, FileFormatError, MetricError
from metricopt_ext.methods.siblings.algorithm_s1 import AlgorithmS1
from metricopt_ext.methods.siblings.learned import metricopt_learned
from metricopt_ext.search.update_rule import load_update_rule
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.value.loading import load_value_function

QUICK = AlgorithmS1(steps=5, evals=3, tasks=2, pairs=3, start_std=0.5, hidden=4, step=0.1)


@pytest.mark.parametrize("sees_metric", [True, False])
def test_every_query_is_counted(quadratic: Callable[..., Any], sees_metric: bool, tmp_path: Path) -> None:
    settings, task = replace(QUICK, sees_metric=sees_metric), quadratic(3)
    per_start = 3 + 2 * sees_metric
    assert settings.start_queries == per_start
    result = metricopt_learned(
        task, queries=2 * 6 + per_start + 5, settings=settings, output_dir=tmp_path, watcher=Watcher()
    )
    spent = {"collect": 12, **({"meta_test": 2} if sees_metric else {}), "guard": 3}
    assert result.queries == task.metric.ledger.spent_on == spent
    assert task.queries == sum(spent.values())
    assert result.queries_per_start == per_start
    assert torch.equal(task.adapter.phi, result.ends[result.chosen])
    assert torch.equal(result.path[-1], result.ends["learned"])
    assert result.before == task.true_cost(task.origin())
    assert result.after == min(task.true_cost(phi) for phi in result.ends.values()) == result.best
    assert torch.equal(load_update_rule(tmp_path / "update_rule.safetensors").weights, result.learned.rule.weights)
    f = load_value_function(tmp_path / "value_function.safetensors")
    assert torch.equal(f(result.path), result.learned.f(result.path))
    assert "value function (neural)" in str(result)


def test_too_few_queries_are_refused_before_any(quadratic: Callable[..., Any]) -> None:
    task = quadratic(3)
    with pytest.raises(BudgetError, match=r"16 queries are too few .* give at least 17, or fewer"):
        metricopt_learned(task, queries=16, settings=QUICK, watcher=Watcher())
    task = quadratic(3, budget=20)
    with pytest.raises(BudgetError, match="30 queries requested, 20 left"):
        metricopt_learned(task, queries=30, settings=QUICK, watcher=Watcher())
    assert task.queries == 0


@pytest.mark.parametrize("fail_after", [1, 7, 20, 24, 26])
def test_a_run_that_was_interrupted_ends_the_same(
    quadratic: Callable[..., Any], fail_after: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"queries": 29, "settings": QUICK, "seed": 3, "watcher": Watcher()}
    whole = metricopt_learned(quadratic(3), **options)
    task = quadratic(3)
    task.problem.fail_after = fail_after
    with pytest.raises(MetricError, match="server is down"):
        metricopt_learned(task, output_dir=tmp_path, **options)
    task.problem.fail_after = None
    with pytest.raises(FileFormatError, match="holds an earlier run"):
        metricopt_learned(task, output_dir=tmp_path, **options)
    with pytest.raises(FileFormatError, match="learned was"):
        metricopt_learned(task, output_dir=tmp_path, resume=True, **{**options, "settings": replace(QUICK, rate=0.5)})
    resumed = metricopt_learned(task, output_dir=tmp_path, resume=True, **options)
    assert torch.equal(resumed.learned.rule.weights, whole.learned.rule.weights)
    assert torch.equal(resumed.path, whole.path)
    assert resumed.queries == whole.queries
    assert resumed.learned.objectives == whole.learned.objectives
    assert resumed.learned.f.quality == whole.learned.f.quality
    assert task.queries <= 1 + 29 + 2 * 3  # the tasks in flight at most are observed again


def test_it_follows_its_seed_and_leaves_global_streams_alone(quadratic: Callable[..., Any]) -> None:
    ends = []
    for seed, stream in ((1, 0), (1, 5), (2, 0)):
        task = quadratic(3)
        torch.manual_seed(stream)
        before = torch.get_rng_state()
        ends.append(metricopt_learned(task, queries=17, settings=QUICK, seed=seed, watcher=Watcher()).path)
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
