"""The metric of a batch at its best threshold, as in the code of Learning Surrogate Losses (Grabocka et al., 2019)."""

import torch
from torch import Tensor

from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.utils.checks import check_integer


def check_thresholds(thresholds: int) -> None:
    """Reject a single threshold: it is the lowest logit, at which all examples count as positive.

    Raises:
        ValueError: It is neither 0 nor an integer of at least 2.
    """
    check_integer(0, thresholds=thresholds)
    if thresholds == 1:
        raise ValueError(
            "thresholds is 1, the lowest logit, at which the cost is the same for any model; give 0 or 100"
        )


def lowest_cost(metric: BatchMetric, scores: Tensor, labels: Tensor, thresholds: int, purpose: str) -> float:
    """Return the lowest cost of a batch over thresholds on its single logit; one query for each.

    The thresholds are its percentiles 0, 100 / k, 200 / k, ... for k thresholds, and a logit at or above one counts as
    positive. Metrics of the order alone have the same cost at all of them.

    Args:
        metric: The metric, which counts a logit above 0 as positive.
        scores: ``n`` logits; of ``n x c`` the largest decides, and there is no threshold.
        labels: ``n``.
        thresholds: How many, at least 2, or 0 for none, which is one query at the logits as they are.
        purpose: What the ledger books the queries under.

    Raises:
        ValueError: The number of thresholds is out of range.
        BudgetError: The budget is spent.
        MetricError: The metric failed.
    """
    check_thresholds(thresholds)
    if not thresholds or scores.dim() != 1:
        return metric.cost(scores, labels, purpose)
    scores = scores.detach()
    ordered, places = scores.sort().values, torch.arange(thresholds, device=scores.device) * (len(scores) - 1)
    before, share = places // thresholds, places % thresholds / thresholds  # whole numbers: no place is rounded
    at = ordered[before].lerp(ordered[(before + 1).clamp(max=len(scores) - 1)], share.to(scores))
    below = at.nextafter(at - 1)  # so that a logit at the threshold is above 0
    return min(metric.cost(scores - each, labels, purpose) for each in below)
