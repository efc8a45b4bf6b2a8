"""Constants added to the logits: thresholds, offsets class by class, and adjustment by the priors."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_input_bias, attach_outputs
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.classification.losses import classification_loss
from metricopt_ext.classification.metrics import METRICS, MetricSpec, expected_cost
from metricopt_ext.classification.models import TabularMLP
from metricopt_ext.classification.offsets import (
    WithOffsets,
    raise_worst,
    target_line,
    tune_adjustment,
    tune_offsets,
    tune_threshold,
)
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import MetricError
from metricopt_ext.experiment.passes import Passes, noticing, passes_of
from metricopt_ext.methods.starts import cost_offsets, prior_offsets
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def task_of(model: nn.Module, part: Split, metric: MetricSpec) -> FinetuneTask:
    return FinetuneTask(
        attach_input_bias(model, dim=3),
        loss=classification_loss,
        batches=lambda seed, task, step: (part.x, part.y),
        metric=model_metric(metric, part),
    )


@pytest.mark.parametrize(
    "spec",
    [METRICS["mcr"], METRICS["f1"], METRICS["jaccard"], expected_cost([[0, 1], [5, 0]])],
    ids=lambda spec: spec.name,
)
def test_finds_the_best_of_all_candidate_thresholds(spec: MetricSpec) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    part = Split(x, ((x @ torch.tensor([1.0, -1.0, 0.5, 0.0]) + torch.randn(300)) > 1).long())
    model = TabularMLP(4).eval()
    with torch.no_grad():
        logits = model(x)
    task = task_of(model, part, spec)
    tuned = tune_threshold(task, x, evals=50)
    assert isinstance(tuned, nn.Module)
    assert task.metric.ledger.spent_on == {"threshold": 50}

    quantiles = [float(logits.quantile(i / 50)) for i in range(1, 50)]
    values = [spec.function(logits - t, part.y) for t in [0.0, *quantiles]]
    best = max(values) if spec.maximize else min(values)
    with torch.no_grad():
        assert spec.function(tuned(x), part.y) == pytest.approx(best, abs=1e-9)


# --- Several logits -----------------------------------------------------------------------------------------------

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def linear_task(target: list[float]) -> tuple[FinetuneTask, list[list[float]]]:
    """A linear classifier whose metric is the squared distance of its added offsets from a target.

    Returns:
        The task, and the offsets of each query, filled as they are asked.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, len(target)).double()
    plain = model(X).detach()
    asked: list[list[float]] = []

    def distance(judged: nn.Module) -> float:
        added = (judged(X) - plain).mean(0)
        asked.append([round(value, 9) for value in added.tolist()])
        return float((added - torch.tensor(target).double()).square().sum())

    task = FinetuneTask(
        attach_outputs(model),
        loss=classification_loss,
        batches=lambda seed, task, step: None,
        metric=Metric(distance, maximize=False, bounds=None),
    )
    task.adapter.set_phi(torch.ones(len(target)))  # the original model is what counts
    return task, asked


def added_by(end: nn.Module | None, task: FinetuneTask) -> list[float]:
    assert isinstance(end, WithOffsets)
    with torch.no_grad():
        return (end(X) - end.model(X)).mean(0).tolist()  # type: ignore[no-any-return]


def test_offsets_are_found_class_by_class() -> None:
    """Five values: steps of 2 in the first round, of 1 in the second and 0.5 in the third, each less its middle one."""
    task, asked = linear_task([2.9, -0.4, 0.2])
    tuned = tune_offsets(task, X, rounds=3, points=5)
    assert task.metric.ledger.spent_on == {"offsets": 1 + 3 * 3 * 4}
    assert asked[:5] == [[0, 0, 0], [-4, 0, 0], [-2, 0, 0], [2, 0, 0], [4, 0, 0]]
    assert asked[5:9] == [[2, step, 0] for step in (-4, -2, 2, 4)]
    assert asked[13:17] == [[2 + step, 0, 0] for step in (-2, -1, 1, 2)]
    assert added_by(tuned, task) == pytest.approx([3.0, -0.5, 0.0])


@pytest.mark.parametrize(("budget", "best"), [(1, [0.0, 0.0]), (4, [2.0, 0.0]), (5, [4.0, 0.0]), (7, [4.0, -2.0])])
def test_a_budget_ends_the_search_with_the_best_so_far(budget: int, best: list[float]) -> None:
    task, asked = linear_task([3.4, -1.7])
    tuned = tune_offsets(task, X, points=5, budget=budget)
    assert task.metric.ledger.spent == len(asked) == budget
    assert added_by(tuned, task) == pytest.approx(best)


CLASSES = ("a", "b", "c")


def made_of(outcomes: Callable[[list[float]], Any], **options: Any) -> tuple[FinetuneTask, list[list[float]]]:
    """A linear classifier of three classes whose metric is told what its added offsets come to.

    Returns:
        The task, and the offsets of each query, filled as they are asked.
    """
    task, asked = linear_task([0.0] * 3)
    before = task.metric.function

    def told(judged: nn.Module) -> Any:
        before(judged)
        return outcomes(asked[-1])

    return replace(task, metric=Metric(told, maximize=True, bounds=None, name="recall", **options)), asked


def test_the_worst_class_is_raised_and_its_own_step_is_halved_where_the_metric_loses() -> None:
    """A class's value is its offset over the mean of all, from 0, 0.4 and 2 on."""

    def outcomes(added: list[float]) -> dict[str, float]:
        return {name: b + a - sum(added) / 3 for name, a, b in zip(CLASSES, added, (0.0, 0.4, 2.0), strict=True)}

    task, asked = made_of(outcomes, combine="worst")
    tuned = raise_worst(task, X, CLASSES, 6)
    assert asked == [[0, 0, 0], [0.5, 0, 0], [0.5, 0.5, 0], [0.5, 0.25, 0], [1, 0.25, 0], [0.75, 0.25, 0]]
    assert added_by(tuned, task) == pytest.approx([0.75, 0.25, 0])
    assert task.metric.ledger.spent_on == {"offsets": 6}
    assert added_by(raise_worst(task, X, CLASSES, 5), task) == pytest.approx([0.5, 0.25, 0])


def test_a_class_is_raised_further_while_nothing_is_lost() -> None:
    task, asked = made_of(lambda added: {"c": 0.7, "b": float(added[1] > 1.2), "a": 0.5}, combine="worst")
    tuned = raise_worst(task, X, CLASSES, 4)
    assert [each[1] for each in asked] == [0, 0.5, 1, 1.5]
    assert added_by(tuned, task) == pytest.approx([0, 1.5, 0])


def test_what_has_no_worst_class_is_refused() -> None:
    number, _ = made_of(lambda added: 0.5)
    assert_refused(lambda: raise_worst(number, X, CLASSES, 6), MetricError, "recall", "raise_worst")
    groups, _ = made_of(lambda added: {"old": 0.5, "young": 0.7}, combine="worst")
    assert_refused(lambda: raise_worst(groups, X, CLASSES, 6), MetricError, "old", "raise_worst")
    assert groups.metric.ledger.spent == 1


# --- Scores that are kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuned", ["threshold", "offsets", "adjustment"])
def test_the_model_runs_once_on_data_in_memory(tuned: str) -> None:
    torch.manual_seed(0)
    x = X.float()
    model = TabularMLP(4) if tuned == "threshold" else nn.Linear(4, 3)
    part = Split(x, (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long() * (tuned != "threshold"))
    task = noticing(task_of(model.eval(), part, METRICS["accuracy"]))
    tune = {
        "threshold": lambda: tune_threshold(task, x, 20),
        "offsets": lambda: tune_offsets(task, x, budget=20),
        "adjustment": lambda: tune_adjustment(task, x, COUNTS, 20),
    }[tuned]
    assert isinstance(tune(), WithOffsets)
    assert task.metric.ledger.spent == 20
    assert passes_of(task) == Passes(metric=1)


# --- Priors -------------------------------------------------------------------------------------------------------


def test_adjustment_undoes_the_priors() -> None:
    """Of Bayes' posterior under the priors it makes the one under equal priors, with one logit and with two."""
    likelihood = torch.tensor([[0.2, 0.5], [0.7, 0.1]]).double()  # of two inputs under each class
    counts = torch.tensor([90, 10])
    joint = (likelihood * counts).log()
    expected = (likelihood / likelihood.sum(1, keepdim=True))[:, 1]
    both = (joint + prior_offsets(counts)).softmax(1)[:, 1]
    single = (joint[:, 1] - joint[:, 0] + prior_offsets(counts, one_logit=True)).sigmoid()
    torch.testing.assert_close(both, expected)
    torch.testing.assert_close(single, expected)


COUNTS = torch.tensor([80, 10, 5])


LABELS = torch.tensor([[1, 0], [0, 0], [1, 1], [1, 0]])  # shares of 3/4 and 1/4


@pytest.mark.parametrize(
    ("target", "labels", "expected"),
    [
        (Target("classes", 2), torch.tensor([0, 0, 0, 1]), [-math.log(3) / 2, math.log(3) / 2]),
        (Target("classes", 2), torch.tensor([0, 0, 1, 1]), [-0.5, 0.5]),  # a threshold moves by one at least
        (Target("classes", 2), torch.tensor([0, 0, 0, 1, 1]), [-0.5, 0.5]),
        (Target("classes", 2), torch.tensor([0, 0, 1, 1, 1]), [0.5, -0.5]),
        (Target("multilabel", 2), LABELS, [-math.log(3), math.log(3)]),
        (Target("classes", 2), torch.tensor([0, 0, 0, 0]), None),  # no prior
        (Target("multilabel", 2), LABELS[:1], None),
        (Target("multilabel", 2), torch.tensor([[1, 0], [0, 1]]), None),  # moves little
    ],
)
def test_the_direction_of_a_line_is_that_of_the_offsets(
    target: Target, labels: Tensor, expected: list[float] | None
) -> None:
    """The offsets are in units of the adapter's scale; no other coordinate moves."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    assert target_line(attach_input_bias(copy.deepcopy(model), dim=3), target, labels) is None
    adapter = attach_input_bias(model, dim=3, outputs=Outputs(scale=4.0))
    line = target_line(adapter, target, labels)
    if expected is None:
        assert line is None
        return
    assert line is not None
    for t in (-2.5, 0.5, 1.0):
        found = line.at(t)
        assert found.phi.tolist() == pytest.approx([0, 0, 0, *(t * each / 4 for each in expected)], rel=1e-12)
        assert not found.tensors


def test_the_strength_of_an_adjustment_is_tuned() -> None:
    task, asked = linear_task((1.23 * prior_offsets(COUNTS)).tolist())
    tuned = tune_adjustment(task, X, COUNTS)
    assert added_by(tuned, task) == pytest.approx((1.2 * prior_offsets(COUNTS)).tolist())
    assert task.metric.ledger.spent_on == {"logit adjustment": 21}
    for i in (0, 10, 20):  # strengths of 0, 1 and 2
        assert asked[i] == pytest.approx((i / 10 * prior_offsets(COUNTS)).tolist(), abs=1e-8)


@pytest.mark.parametrize(
    ("costs", "one_logit"),
    [
        ([[0.0, 1.0], [5.0, 0.0]], False),
        ([[0.0, 1.0], [5.0, 0.0]], True),
        ([[0.0, 7.0], [0.5, 0.0]], True),
        ([[-1.0, 3.0], [2.0, -4.0]], True),  # what is right is worth something
        ([[0.0, 1.0, 1.0], [9.0, 0.0, 9.0], [0.2, 0.2, 0.0]], False),
    ],
)
def test_offsets_of_costs_are_bayes_decisions(costs: list[list[float]], one_logit: bool) -> None:
    """Of two classes always; of more where each error of a class costs the same, as a class then counts by its cost."""
    cost, count = torch.tensor(costs, dtype=torch.float64), len(costs)
    logits = torch.randn(500, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    logits = logits[:, 1] - logits[:, 0] if one_logit else logits
    odds = torch.stack([torch.zeros_like(logits), logits], 1) if one_logit else logits
    offsets = cost_offsets(cost, one_logit=one_logit)
    assert offsets is not None
    assert len(offsets) == (1 if one_logit else count)
    expected = (odds.softmax(1) @ cost).argmin(1)
    moved = logits + offsets
    assert torch.equal((moved > 0).long() if one_logit else moved.argmax(1), expected)


def test_no_offsets_where_an_error_costs_nothing() -> None:
    for costs in ([[0.0, 0.0], [5.0, 0.0]], [[0.0, 1.0], [-5.0, 0.0]]):
        assert cost_offsets(torch.tensor(costs)) is None
