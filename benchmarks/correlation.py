"""How well losses rank outputs as a metric does: Spearman's and Kendall's correlation, as a table."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.experiment.style import markdown_table
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.utils.words import counted

HEADER = ("loss", "Spearman", "Kendall")

# (scores ``n`` or ``n x c``, labels ``n``) -> the loss, a scalar
ScoreLoss = Callable[[Tensor, Tensor], Tensor | float]


class RankCorrelation(NamedTuple):
    """Rank correlations of a loss with a metric's cost, in [-1, 1]; 1 if the lower loss always is the better metric.

    Both are NaN if either is the same everywhere.

    Attributes:
        spearman: Spearman's rho; equal values share the mean of their ranks.
        kendall: Kendall's tau-b.
    """

    spearman: float
    kendall: float


@dataclass(frozen=True)
class CorrelationReport:
    """Losses and a metric on the same outputs.

    Attributes:
        metric: The metric's name.
        maximize: Whether higher is better.
        values: The metric of each output, in its own units.
        losses: Each loss of each output, by its name.
        left_out: How many further outputs the metric is not defined on.
    """

    metric: str
    maximize: bool
    values: list[float]
    losses: dict[str, list[float]]
    left_out: int = 0

    @property
    def correlations(self) -> dict[str, RankCorrelation]:
        """Each loss's correlations with the metric as a cost, as in ReLoss's Table 1 (Huang et al., 2022)."""
        from scipy.stats import kendalltau, spearmanr

        costs, found = [-value if self.maximize else value for value in self.values], {}
        for name, losses in self.losses.items():
            if len(set(costs)) < 2 or len(set(losses)) < 2:
                found[name] = RankCorrelation(math.nan, math.nan)
            else:
                each = spearmanr(losses, costs).statistic, kendalltau(losses, costs).statistic
                found[name] = RankCorrelation(*map(float, each))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return all of it for a JSON file; an undefined correlation is None."""
        return {
            "metric": {"name": self.metric, "maximize": self.maximize},
            "correlations": {
                name: {key: None if math.isnan(value) else value for key, value in each._asdict().items()}
                for name, each in self.correlations.items()
            },
            "values": self.values,
            "losses": self.losses,
        }

    def markdown(self) -> str:
        """Return a table of the correlations."""
        rows = [[name, *(f"{value:.4f}" for value in each)] for name, each in self.correlations.items()]
        return "\n".join(markdown_table(HEADER, rows))


@torch.no_grad()
def correlation_report(
    losses: Mapping[str, ScoreLoss],
    metric: BatchMetric,
    outputs: Iterable[tuple[Tensor, Tensor]],
    *,
    where_defined: bool = False,
) -> CorrelationReport:
    """Correlate the ranks that losses and a metric give to outputs, e.g. a model's at checkpoints of its training.

    Args:
        losses: By name, each ``loss(scores, labels) -> scalar``; lower is better.
        metric: The metric; one query for each output, booked as ``"correlation"``.
        outputs: Batches of scores, ``n`` or ``n x c``, and labels, ``n``; two at least.
        where_defined: Whether to leave out the outputs on which the metric fails, as on those of a class that it needs.

    Raises:
        DataError: There are no losses, or fewer than two outputs.
        BudgetError: The metric's budget ran out.
        MetricError: The metric failed, but for ``where_defined``.

    Examples:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> metric = BatchMetric(lambda scores, labels: (scores.argmax(1) == labels).float().mean(), maximize=True)
        >>> labels = torch.tensor([0, 1, 1])
        >>> outputs = [(margin * torch.tensor([[1.0, 0], [0, 1], [0, 1]]), labels) for margin in (-1, 1)]
        >>> print(correlation_report({"cross-entropy": cross_entropy}, metric, outputs).markdown())
        | loss | Spearman | Kendall |
        | --- | --- | --- |
        | cross-entropy | 1.0000 | 1.0000 |
    """
    if not losses:
        raise DataError("losses is empty; a correlation needs one at least")
    values: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in losses}
    left_out = 0
    for scores, labels in outputs:
        try:
            values.append(metric.value(scores, labels, "correlation"))
        except MetricError:
            if not where_defined:
                raise
            left_out += 1
            continue
        for name, loss in losses.items():
            found[name].append(float(loss(scores, labels)))
    if len(values) < 2:
        raise DataError(f"{counted(len(values), 'output')} can't be ranked; a correlation needs two at least")
    return CorrelationReport(metric.name, metric.maximize, values, found, left_out)
