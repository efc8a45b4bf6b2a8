"""What a user could do instead of MetricOpt, against naive loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from metricopt_ext.adapters.start import Start
from metricopt_ext.evidence.contenders import at_each_budget, searching
from metricopt_ext.evidence.method import METHODS, MethodResult, Reached
from metricopt_ext.evidence.method_config import FinetuneConfig, RefinedConfig
from metricopt_ext.evidence.rivals import at_budget, usual_methods
from metricopt_ext.evidence.run_config import RunConfig
from metricopt_ext.methods.tuning import FRESH
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.utils import progress
from metricopt_ext.utils.progress import Watcher


def test_finetuning_on_labels_uses_their_batches(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    examples = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = TensorBatches(examples, examples, batch_size=1)
    phi = torch.zeros(4, dtype=torch.float64)
    for step in range(6):
        x, _ = batches(5, FRESH, step)
        phi = phi - 0.2 * task.curvature * (phi - task.centre - x[0])
    config = RunConfig(finetune=FinetuneConfig(steps=6, lr=0.2))
    usual = usual_methods(config, 5, inputs=[], batches=lambda seed, index, step: batches(seed, index, step)[0][0])
    on_labels, on_loss = (usual[name](task, {}) for name in ("loss_finetune_validation", "loss_finetune"))
    assert on_labels is not None
    assert on_loss is not None
    torch.testing.assert_close(on_labels.reached[-1].end, phi)
    assert not torch.allclose(on_loss.reached[-1].end, phi)
    assert task.queries == 0


def test_searches_run_where_they_are_given_queries(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    config = RunConfig(finetune=FinetuneConfig(steps=6, lr=0.2))
    assert not {"guided_es", "cma_es", "refined"} & set(usual_methods(config, 5, inputs=[], batches=task.batches))
    config = RunConfig(finetune=FinetuneConfig(steps=6, lr=0.2), search_queries=30, refined=RefinedConfig(20))
    usual = usual_methods(config, 5, inputs=[], batches=task.batches)
    for name, search in (("guided_es", GuidedES(lr=0.2)), ("cma_es", CMAES())):
        before = task.queries
        result = usual[name](task, {"metricopt": MethodResult((Reached(task.origin(), 9, 9, 0.0),))})
        assert result is not None
        (reached,) = result.reached
        assert reached.queries == reached.queries_per_start == task.queries - before == 30
        assert torch.equal(reached.end, search(task, task.origin(), 30, seed=5).phi)
    assert "refined" in usual


def test_searches_that_take_long_say_how_far_they_are(
    quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Stages(Watcher):
        def stage(self, description: str) -> None:
            told.append(description)

    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    task = quadratic()
    config = RunConfig(finetune=FinetuneConfig(steps=6, lr=0.2), search_queries=30)
    usual = usual_methods(config, 5, inputs=[], batches=task.batches, watcher=Stages())
    usual["cma_es"](task, {"metricopt": MethodResult((Reached(task.origin(), 9, 9, 0.0),))})
    assert told == [f"{METHODS['cma_es'].title}, {n} of 30 queries" for n in range(1, 31)]


@pytest.mark.parametrize("queries", [40, "same"])
def test_searches_begin_where_metricopt_s_own_did_and_pay_for_the_choice(
    quadratic: Callable[..., Any], queries: int | str
) -> None:
    task = quadratic()
    starts = {"near": Start(task.goal / 2), "far": Start(-task.goal)}
    config = RunConfig(finetune=FinetuneConfig(steps=6, lr=0.2), queries=40, search_queries=queries)
    usual = usual_methods(config, 5, starts=starts, inputs=[], batches=task.batches)
    ours = usual["metricopt"](task.judged_by(task.metric.with_new_ledger()), {})
    assert ours is not None
    assert ours.result is not None
    assert ours.result.begun_at == "near"
    before = task.queries
    theirs = usual["cma_es"](task, {"metricopt": ours})
    assert theirs is not None
    assert (theirs.reached[-1].queries, task.queries - before) == (40, 37)  # three starts were judged before
    assert torch.equal(theirs.reached[-1].end, CMAES()(task, task.goal / 2, 37, seed=5).phi)


def test_a_contender_is_a_method_at_one_budget_where_it_applies(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    result = at_budget(searching(CMAES()), 30, 5)(task, {})
    assert result is not None
    (reached,) = result.reached
    assert reached.queries == reached.queries_per_start == task.queries == 30
    assert torch.equal(reached.end, CMAES()(task, task.origin(), 30, seed=5).phi)
    assert at_budget(at_each_budget(lambda *_: None), 30, 5)(task, {}) is None
