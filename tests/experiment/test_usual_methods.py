"""What a user could do instead of MetricOpt, against naive loops."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.inference import put_into
from helpers.refusals import assert_refused
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import BudgetError
from metricopt_ext.experiment.baselines import at_each_budget, searched, searching
from metricopt_ext.experiment.brought_sections import bring_sections
from metricopt_ext.experiment.compare import judge
from metricopt_ext.experiment.method import Reached
from metricopt_ext.experiment.method_config import FinetuneConfig, LearnedConfig, PaperSettings
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.usual_methods import planned, usual_methods, variant
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.methods.paper.recipe import FRESH
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.learned import load_update_rule
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Setting, Settings

SMALL = LearnedConfig(evals=3, tasks=2)
FINETUNE, PAPER = FinetuneConfig(steps=5, lr=0.2), PaperSettings(evals=3)
CONFIG = RunConfig(finetune=FINETUNE, learned=SMALL, queries=30, methods=["metricopt_learned"])


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
    (on_labels,), (on_loss,) = (usual[name]({}).run(task) for name in ("loss_finetune_validation", "loss_finetune"))
    torch.testing.assert_close(on_labels.end, phi)
    assert not torch.allclose(on_loss.end, phi)  # type: ignore[arg-type]
    assert task.queries == 0


def test_searches_run_where_they_are_given_queries(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    config = RunConfig(finetune=FinetuneConfig(steps=6, lr=0.2))
    assert not {"guided_es", "cma_es"} & set(usual_methods(config, 5, inputs=[], batches=task.batches))
    config = RunConfig(finetune=FinetuneConfig(steps=6, lr=0.2), search_queries=30)
    config.methods = ["guided_es", "cma_es"]
    usual = usual_methods(config, 5, inputs=[], batches=task.batches)
    for name, search in (("guided_es", GuidedES(lr=0.2)), ("cma_es", CMAES())):
        before = task.queries
        (reached,) = usual[name]({"metricopt": (Reached(task.origin(), 9, 9, 0.0),)}).run(task)
        assert reached.queries == reached.queries_per_start == task.queries - before == 30
        assert torch.equal(reached.end, searched(task, search, task.origin(), 30, seed=5).phi)


@pytest.mark.parametrize("queries", [40, None])
def test_searches_begin_where_metricopt_s_own_did_and_pay_for_the_choice(
    quadratic: Callable[..., Any], queries: int | None
) -> None:
    task = quadratic()
    starts = {"near": Start(task.goal / 2), "far": Start(-task.goal)}
    config = RunConfig(finetune=FinetuneConfig(steps=6, lr=0.2), queries=40, methods=["cma_es"], search_queries=queries)
    usual = usual_methods(config, 5, starts=starts, inputs=[], batches=task.batches)
    (ours,) = usual["metricopt"]({}).run(task.judged_by(task.metric.with_settings()))
    assert ours.result is not None
    assert ours.result.started_at == "near"
    before = task.queries
    (theirs,) = usual["cma_es"]({"metricopt": (ours,)}).run(task)
    assert (theirs.queries, task.queries - before) == (40, 37)  # three starts were judged before
    assert torch.equal(theirs.end, searched(task, CMAES(), task.goal / 2, 37, seed=5).phi)  # type: ignore[arg-type]


def test_searches_pay_for_the_settings_that_they_begin_with(quadratic: Callable[..., Any]) -> None:
    task, now = quadratic(), {"size": 1}

    metric = Metric(lambda model: task.distance(model) - now["size"], maximize=False, bounds=None, name="distance")
    task = replace(
        task, metric=metric, settings=Settings([Setting("size", values=(1, 2, 3), default=1)], put_into(now))
    )
    config = RunConfig(finetune=FinetuneConfig(steps=6, lr=0.2), queries=40, methods=["cma_es"])
    usual = usual_methods(config, 5, inputs=[], batches=task.batches)
    (ours,) = usual["metricopt"]({}).run(task.judged_by(task.metric.with_settings()))
    assert ours.result is not None
    assert (ours.result.started_at, ours.result.queries["settings"]) == ("settings", 2)
    before = task.queries
    (theirs,) = usual["cma_es"]({"metricopt": (ours,)}).run(task)
    assert (theirs.queries, task.queries - before) == (40, 37)  # a start and two choices of settings were judged before
    assert "settings" not in usual
    config.methods = ["settings"]
    bring_sections(config, config.methods)
    alone = usual_methods(config, 5, inputs=[], batches=task.batches)["settings"]
    (tuned,) = alone({"metricopt": (ours,)}).run(task)
    assert isinstance(tuned.end, Start)
    assert (tuned.queries, task.queries - before) == (3, 37)
    assert (tuned.end.settings, torch.equal(tuned.end.phi, task.origin())) == ({"size": 3}, True)
    assert judge(task, tuned.end) == pytest.approx(judge(task, task.origin()) - 2)


def test_a_baseline_is_a_method_at_one_budget_where_it_applies(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    (reached,) = planned(searching(CMAES()), 30, 5)({}).run(task)
    assert reached.queries == reached.queries_per_start == task.queries == 30
    assert torch.equal(reached.end, searched(task, CMAES(), task.origin(), 30, seed=5).phi)
    assert planned(at_each_budget(lambda *_: None), 30, 5)({}).run(task) == ()


def test_the_learned_optimizer_runs_where_it_is_asked_for(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    CONFIG.check()
    task = quadratic(3)
    plain = usual_methods(RunConfig(), 5, inputs=[], batches=task.batches)
    assert "metricopt_learned" not in plain
    methods = usual_methods(CONFIG, 5, inputs=[], batches=task.batches, folder=tmp_path)
    (reached,) = methods["metricopt_learned"]({}).run(task)
    strategy = SMALL.build(FINETUNE)
    assert strategy.lr == 0.2
    expected = optimize_metric(quadratic(3), queries=30, strategy=strategy, seed=5, callback=Callback())
    assert isinstance(reached.end, torch.Tensor)
    assert torch.equal(reached.end, expected.ends[expected.chosen])
    assert reached.path is not None
    assert torch.equal(reached.path, expected.path)
    assert reached.queries == task.queries == sum(expected.queries.values()) <= 30
    assert reached.queries_per_start == expected.queries_per_start == 5
    kept = load_update_rule(tmp_path / "metricopt_learned" / "update_rule.safetensors")
    assert torch.equal(kept.weights, expected.rule.weights)
    resumed = variant("metricopt_learned", CONFIG, 5, folder=tmp_path, resume=True, callback=Callback())
    (again,) = resumed({}).run(quadratic(3))
    assert torch.equal(again.path, reached.path)  # type: ignore[arg-type]


def test_algorithm_1_runs_beside_another_strategy(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    config = RunConfig(finetune=FINETUNE, queries=30, paper=PAPER, methods=["metricopt_paper"], starts=[])
    config.check()
    assert config.method.name == "search"
    task = quadratic(3)
    methods = usual_methods(config, 5, starts={}, inputs=[], batches=task.batches, folder=tmp_path)
    (reached,) = methods["metricopt_paper"]({}).run(task)
    expected = optimize_metric(quadratic(3), queries=30, strategy=PAPER.build(FINETUNE), seed=5, callback=Callback())
    assert isinstance(reached.end, torch.Tensor)
    assert torch.equal(reached.end, expected.ends[expected.chosen])
    assert reached.queries == task.queries == sum(expected.queries.values()) <= 30
    assert (tmp_path / "metricopt_paper" / "value_function.safetensors").exists()


def test_too_little_is_refused_before_any_work() -> None:
    assert_refused(
        lambda: replace(CONFIG, queries=16).check(),
        BudgetError,
        "16",
        "queries",
    )
    assert_refused(
        lambda: RunConfig(finetune=FINETUNE, queries=6, paper=PAPER, methods=["metricopt_paper"], starts=[]).check(),
        BudgetError,
        "6",
        "queries",
    )
