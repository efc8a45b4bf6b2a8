"""Random batches that lack a class which the metric needs are drawn again, and the others stay as they were."""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.errors import BudgetError, MetricError
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.siblings.random_batches import TRIES, first_defined
from metricopt_ext.siblings.sl.set_loss import SetLoss, UniversalTraining
from metricopt_ext.tasks.ledger import Ledger


def of_both_classes(scores: Tensor, labels: Tensor) -> float:
    if len(labels.unique()) < 2:
        raise ValueError("one class only")
    return float((scores > 0).double().mean())


def metric(function: Callable[[Tensor, Tensor], float] = of_both_classes, budget: int | None = None) -> BatchMetric:
    return BatchMetric(function, maximize=False, name="both", ledger=Ledger(budget))


def batches(*labels: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    for each in labels:
        yield torch.zeros(len(each)), torch.tensor(each)


def first(known: BatchMetric, drawn: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    def ask(scores: Tensor, labels: Tensor) -> float:
        return known.cost(scores, labels, "test")

    return first_defined(drawn, ask, classes=2, ledger=known.ledger)[1]


def test_the_first_that_has_a_cost_is_taken_and_counts_alone() -> None:
    known = metric()
    assert first(known, batches([0, 0], [1, 1], [0, 1], [1, 0])).tolist() == [0, 1]
    assert known.ledger.spent_on == {"test": 1}
    lenient = metric(lambda scores, labels: 0.5)  # which needs no class
    assert first(lenient, batches([0, 0], [0, 1])).tolist() == [0, 0]


def test_tries_end_with_the_remedy_and_other_failures_at_once() -> None:
    known = metric()
    assert_refused(
        lambda: first(known, ((torch.zeros(3), torch.ones(3).long()) for _ in count())),
        MetricError,
        "one class only",
        TRIES,
        "3",
        "larger batches",
    )
    assert known.ledger.spent == 0

    def down(scores: Tensor, labels: Tensor) -> float:
        raise OSError("the server is down")

    broken = metric(down)
    assert_refused(lambda: first(broken, batches([0, 1], [0, 1])), MetricError, "the server is down")
    assert broken.ledger.spent == 1
    with pytest.raises(BudgetError):
        first(metric(budget=0), batches([0, 0], [0, 1]))


@pytest.mark.parametrize("thresholds", [0, 3])
def test_the_universal_training_draws_again_what_lacks_a_class_alone(thresholds: int) -> None:
    seen: dict[str, list[Tensor]] = {"strict": [], "lenient": []}

    def judging(name: str, needed: int) -> BatchMetric:
        def judge(scores: Tensor, labels: Tensor) -> float:
            if len(labels.unique()) < needed:
                raise ValueError("one class only")
            seen[name].append(labels)
            return 0.5

        return metric(judge)

    training = UniversalTraining(30, thresholds=thresholds, lr=0.01)
    for name, needed in (("strict", 2), ("lenient", 1)):
        known = judging(name, needed)
        training.learn(SetLoss(1), known, 4, seed=2)
        assert known.ledger.spent_on == {"universal": 30 * max(1, thresholds)}
    for strict, lenient in zip(seen["strict"], seen["lenient"], strict=True):
        assert torch.equal(strict, lenient) == (len(lenient.unique()) == 2)
