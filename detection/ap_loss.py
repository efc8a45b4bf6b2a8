"""The average precision of a detector's classification as its loss."""

from typing import Literal

from torch import Tensor

from metricopt_ext.siblings.ranking import positives_up_to, ranking_losses
from metricopt_ext.utils.checks import check_above, check_at_least

ClassificationLoss = Literal["cross_entropy", "ap"]


def ap_loss(scores: Tensor, labels: Tensor, *, lambda_val: float = 100.0, margin: float = 0.1) -> Tensor:
    """Return 1 - AP, averaged over the classes that have a positive; a scalar in [0, 1), 0 if none has.

    The AP loss of Rolinek et al. ("Optimizing Rank-based Metrics with Blackbox Differentiation", CVPR 2020). For each
    class, all items are ranked by their score:

        AP = mean over positives i of rk+(i) / rk(i),

    with its rank rk among all items and rk+ among the positives. The ranks are exact; their gradient comes from an
    interpolation (`ranking_losses`) in which rk+ is constant.

    Args:
        scores: Scores of the items for each class, ``n x C``.
        labels: Classes of the items, ``n`` integers below C; negative for the background.
        lambda_val: How far the interpolation moves the scores, above 0. With P positives in a class, one of precision p
            at rank r moves by ``lambda_val p / (P r)``; if that is below the gaps between scores, nothing is learned.
        margin: By how much a positive's score must exceed a negative's, at least 0; half is subtracted from the
            positives and half is added to the negatives.

    Raises:
        ValueError: ``lambda_val`` or ``margin`` is out of range.
    """
    check_above(0, lambda_val=lambda_val)
    check_at_least(0, margin=margin)
    classes = labels[labels >= 0].unique()
    if len(classes) == 0:
        return scores.sum() * 0  # a loss that has a gradient
    positive = classes[:, None] == labels
    shifted = scores.T[classes] - margin * (positive.to(scores.dtype) - 0.5)

    def losses(ranks: Tensor) -> Tensor:
        precision = positives_up_to(ranks, positive) / ranks
        average: Tensor = (precision * positive).sum(dim=1) / positive.sum(dim=1)
        return 1 - average

    return ranking_losses(shifted, losses, lambda_val).mean()
