"""The metric of a batch's scores and labels: a second black box, asked on batches of any data, with its own ledger."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.utils.files import to_json


class BatchMetric(CostScale):
    """A black-box metric of scores and labels, seen as a cost to minimise.

    A `Metric` judges a model on the data that is known to it alone. This one judges any scores, so whoever has it can
    learn how the metric depends on them.

    Args:
        function: ``function(scores, labels) -> float``, with scores ``n`` or ``n x c`` and labels ``n``; it sees no
            gradient.
        maximize: Whether higher is better.
        bounds: Lowest and highest possible value, between which the cost is scaled to [0, 1]; None for a metric without
            known bounds, whose cost is the value itself, negated if higher is better.
        name: Its name in messages and files.
        ledger: Counts the queries, one for each batch.
        arguments: What else makes it this metric, such as its costs, by name; JSON. What is learned for one metric is
            refused under another.

    Examples:
        >>> import torch
        >>> metric = BatchMetric(lambda scores, labels: ((scores > 0) == labels).float().mean(), maximize=True)
        >>> metric.cost(torch.tensor([1.0, -1.0]), torch.tensor([1, 1]), "example"), metric.ledger.spent
        (0.5, 1)
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], float],
        *,
        maximize: bool,
        bounds: tuple[float, float] | None = (0.0, 1.0),
        name: str | None = None,
        ledger: Ledger | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"function is {function!r}; it must be a function of scores and labels")
        name = name or getattr(function, "__name__", "metric").strip("<>")
        super().__init__(maximize=maximize, bounds=bounds, name=name, ledger=ledger)
        self.function, self.arguments = function, dict(arguments or {})

    @property
    def identity(self) -> dict[str, Any]:
        """What its values mean, as JSON: two metrics that differ in it are not the same, whatever their names."""
        described = {name: getattr(self, name) for name in ("name", "maximize", "bounds", "arguments")}
        return json.loads(to_json(described))  # type: ignore[no-any-return]

    def with_new_ledger(self) -> "BatchMetric":
        """Return the same metric with an empty ledger and no budget."""
        return BatchMetric(
            self.function, maximize=self.maximize, bounds=self.bounds, name=self.name, arguments=self.arguments
        )

    def cost(self, scores: Tensor, labels: Tensor, purpose: str) -> float:
        """Evaluate the metric on a batch and return the cost, in [0, 1] within bounds; one query (see `value`)."""
        return self.normalised(self.sign * self.value(scores, labels, purpose))

    def value(self, scores: Tensor, labels: Tensor, purpose: str) -> float:
        """Evaluate the metric on a batch; one query.

        Args:
            scores: ``n`` or ``n x c``.
            labels: ``n``.
            purpose: What the ledger books the query under.

        Raises:
            BudgetError: The budget is spent; the metric was not evaluated.
            MetricError: The metric raised, did not return a finite number, or left its bounds. The query still counts.
        """
        self.ledger.spend(purpose)
        try:
            value = float(self.function(scores.detach(), labels))
        except (Exception, SystemExit) as error:
            raise MetricError(f"metric {self.name!r} raised {type(error).__name__} on a batch: {error}") from error
        return self.checked(value, " on a batch")
