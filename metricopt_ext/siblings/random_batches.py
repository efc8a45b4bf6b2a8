"""The cost of a batch that a method drew at random, which may lack a class that the metric needs."""

from collections.abc import Callable, Iterable
from itertools import islice

from torch import Tensor

from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.ledger import Ledger

TRIES = 100


def first_defined(
    batches: Iterable[tuple[Tensor, Tensor]],
    cost: Callable[[Tensor, Tensor], float],
    *,
    classes: int,
    ledger: Ledger,
) -> tuple[Tensor, Tensor, float]:
    """Return the first of random batches that has a cost: scores, labels and the cost.

    One on which the metric fails, and in which a class is missing, is passed over, and its query counts no more.

    Args:
        batches: Scores, ``n`` or ``n x c``, and labels, ``n``; `TRIES` are tried at most.
        cost: Asks for the cost of one.
        classes: c.
        ledger: What the queries are booked in.

    Raises:
        BudgetError: The budget is spent.
        MetricError: The metric failed where no class is missing, or on all that were tried.
    """
    size, tried = 0, 0
    for scores, labels in islice(batches, TRIES):
        before = dict(ledger.spent_on)
        try:
            return scores, labels, cost(scores, labels)
        except MetricError as error:
            if len(labels.unique()) == classes:
                raise
            ledger.spent_on = before
            size, tried, failed = len(labels), tried + 1, error
    raise MetricError(
        f"{failed}; so on {tried} random batches of {size}, each without one of {classes} classes: give larger batches"
    ) from failed
