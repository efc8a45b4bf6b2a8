"""What sibling methods are given, made from a finetuning task or by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.errors import AdapterError, MetricError
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.metric import Metric


def of(task: Any, **settings: Any) -> TrainingTask:
    metric = BatchMetric(lambda scores, labels: 0.5, maximize=False)
    return TrainingTask.of(task, predict=lambda model, batch: (batch, batch), batch_metric=metric, **settings)


def test_of_phi_it_is_a_copy_at_phi_0_that_trains_phi_alone(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    task.adapter.set_phi(torch.ones(4, dtype=torch.float64))
    made = of(task)
    assert made.trains == "phi"
    assert made.parameters() == [Adapter(made.model).phi]
    assert torch.equal(made.parameters()[0], torch.zeros(4, dtype=torch.float64))
    assert torch.equal(task.adapter.phi, torch.ones(4, dtype=torch.float64))
    assert made.metric is task.metric
    assert made.batches is not None
    assert made.loss == task.loss


def test_of_a_model_it_is_a_copy_without_adapter_that_trains_all(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    made = of(task, trains="model")
    assert dict(made.model.named_parameters()).keys() == {"weight", "bias"}
    assert [parameter.shape for parameter in made.parameters()] == [(3, 2), (3,)]
    assert all(parameter.requires_grad for parameter in made.parameters())
    assert all(a is not b for a, b in zip(made.parameters(), task.adapter.model.parameters(), strict=False))
    assert Adapter(task.adapter.model).dim == 4  # its own is still there


def test_other_batches_replace_the_tasks(quadratic: Callable[..., Any]) -> None:
    mine = lambda seed, task, step: (seed, task, step)  # noqa: E731
    assert of(quadratic(), batches=mine).batches(1, 2, 3) == (1, 2, 3)


def test_an_untrained_model_comes_from_its_seed(training_task: Callable[..., TrainingTask]) -> None:
    task = training_task("phi")
    first, again, other = (task.untrained(seed).model.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert task.untrained(3).trains == "model"
    assert_refused(lambda: replace(task, build=None).untrained(0), ValueError, "build", "None")


def test_what_can_not_be_trained_or_judged_is_refused(training_task: Callable[..., TrainingTask]) -> None:
    task = training_task("model")
    assert_refused(lambda: replace(task, trains="theta"), ValueError, "trains", "theta", "phi", "model")
    assert_refused(lambda: replace(task, trains="phi"), AdapterError, "Net")
    assert_refused(lambda: replace(task, model=task.copied().model.requires_grad_(False)), AdapterError, "Net")
    assert_refused(
        lambda: replace(task, metric=Metric(lambda: 0.5, maximize=True, name="known")), MetricError, "metric", "known"
    )


def test_weights_under_an_adapter_are_refused() -> None:
    model = nn.Linear(2, 1)
    attach_input_bias(model, dim=2)
    assert_refused(
        lambda: TrainingTask(
            model,
            trains="model",
            batches=lambda seed, task, step: None,
            predict=lambda model, batch: batch,
            batch_metric=BatchMetric(lambda scores, labels: 0.5, maximize=False),
            metric=Metric(lambda model: 0.5, maximize=True),
            loss=lambda model, batch: torch.zeros(()),
        ),
        AdapterError,
        "Linear",
    )
