"""Rank-based losses for pytorch-metric-learning: Smooth-AP and the recall loss of blackbox differentiation.

They take what its own losses take: any class sizes, a miner's tuples (as weights of the queries), references other than
the queries, reducers and embedding regularizers. A query without a positive is left out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.siblings.ranking import positives_up_to, ranking_losses
from metricopt_ext.utils.checks import check_above, check_at_least, check_instance

try:
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.losses import BaseMetricLossFunction
    from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
except ImportError as error:
    raise ImportError("these losses need pytorch-metric-learning: pip install 'pytorch-metric-learning<3'") from error


class RankingLoss(BaseMetricLossFunction):  # type: ignore[misc]
    """A loss of each query's ranking of the references.

    Args:
        options: ``distance`` (by default the cosine similarity), ``reducer``, ``embedding_regularizer``, ..., as for
            pytorch-metric-learning's own losses.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def get_default_distance(self) -> Any:
        """Return the cosine similarity."""
        return CosineSimilarity()

    def query_losses(self, scores: Tensor, same: Tensor, own: Tensor) -> Tensor:
        """Return the loss of each query, ``n``.

        Args:
            scores: Similarities of queries and references, ``n x m``.
            same: Whether their labels are equal, ``n x m``; each row has a match besides the query itself.
            own: Whether the reference is the query itself, ``n x m``.
        """
        raise NotImplementedError

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Tensor, ref_labels: Tensor
    ) -> dict[str, Any]:
        """Return the queries' losses in the form that pytorch-metric-learning's reducers take.

        Args:
            embeddings: Queries, ``n x d``.
            labels: Their labels, ``n``.
            indices_tuple: What a miner found: a query's weight is how often it occurs there. None for equal weights.
            ref_emb: References, ``m x d``; the same tensor as ``embeddings`` if the queries rank each other.
            ref_labels: Their labels, ``m``.

        Raises:
            ValueError: There are no labels.
        """
        common_functions.labels_required(labels)
        common_functions.labels_required(ref_labels)
        distances = self.distance(embeddings, ref_emb)
        scores = distances if self.distance.is_inverted else -distances
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # half precision would make ties
        same = labels[:, None] == ref_labels[None]
        among_themselves = ref_emb is embeddings
        own = torch.eye(len(labels), dtype=torch.bool, device=same.device) if among_themselves else same & False
        kept = (same & ~own).any(dim=1).nonzero().squeeze(1)
        if len(kept) == 0:
            return self.zero_losses()  # type: ignore[no-any-return]
        weights = loss_and_miner_utils.convert_to_weights(
            indices_tuple, labels, dtype=scores.dtype, using_ref=not among_themselves
        )
        losses = self.query_losses(scores[kept], same[kept], own[kept]) * weights[kept]
        return {"loss": {"losses": losses, "indices": kept, "reduction_type": "element"}}


class SmoothAPLoss(RankingLoss):
    """Smooth-AP (Brown et al. 2020, "Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval").

    1 - AP with ranks whose comparisons are sigmoids. With P the query's positives and s_j the similarity of item j,

        AP = mean over i in P of (1 + sum_{j in P, j != i} h_ij) / (1 + sum_{j != i} h_ij),
        h_ij = sigmoid((s_j - s_i) / temperature).

    If the queries rank each other, each is among its own positives, as in the authors' code.

    pytorch-metric-learning's loss of this name takes only classes of equal size and, in versions up to 2.9, is wrong
    unless there are as many classes as samples of each; where it is right, this one returns the same.

    Args:
        temperature: Width of the sigmoid in units of the similarity, above 0.
        options: As for `RankingLoss`.

    Raises:
        ValueError: The temperature is not above 0.

    Examples:
        >>> loss = SmoothAPLoss()
        >>> embeddings = torch.tensor([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [1.0, 0.1], [1.0, 0.2]])
        >>> round(float(loss(embeddings, torch.tensor([0, 0, 1, 1, 1]))), 4)
        0.0
    """

    def __init__(self, temperature: float = 0.01, **options: Any) -> None:
        check_above(0, temperature=temperature)
        super().__init__(**options)
        self.temperature = temperature
        self.add_to_recordable_attributes(name="temperature", is_stat=False)

    def query_losses(self, scores: Tensor, same: Tensor, own: Tensor) -> Tensor:
        """Return 1 - smoothed AP of each query, ``n``, in [0, 1); see `RankingLoss.query_losses`."""
        query, item = same.nonzero(as_tuple=True)
        ahead = torch.sigmoid((scores[query] - scores[query, item][:, None]) / self.temperature)
        ahead = ahead.scatter(1, item[:, None], 0.0)
        precision = (1 + (ahead * same[query]).sum(dim=1)) / (1 + ahead.sum(dim=1))
        summed = torch.zeros_like(scores[:, 0]).index_add(0, query, precision)
        return 1 - summed / same.sum(dim=1)


def double_log(r: Tensor) -> Tensor:
    """Return ``log(1 + log(1 + r))``."""
    return torch.log1p(torch.log1p(r))


class RecallLoss(RankingLoss):
    """The recall loss of Rolinek et al. 2020 ("Optimizing Rank-based Metrics with Blackbox Differentiation").

    With r_i the number of negatives that rank before positive i,

        loss of a query = mean over its positives i of weight(r_i).

    The ranks are exact. Their gradient comes from an interpolation: with the ranks rk(s) of the scores s, 1 for the
    highest,

        d loss / d s = (rk(s + lambda_val * d loss / d rk) - rk(s)) / lambda_val,

    in which a positive's rank among the positives is treated as constant. This is done for each query separately, so
    neither the number of queries, nor a reducer, nor a gradient scaler changes how far the scores are moved. For square
    inputs and classes of equal size this matches the authors' code, which uses the number of queries in place of the
    number of references where they differ.

    If the queries rank each other, each is left out of its own ranking.

    Args:
        lambda_val: How far the interpolation moves the scores, above 0.
        margin: By how much a positive's score must exceed a negative's, at least 0; half is subtracted from the
            positives and half is added to the negatives.
        weight: Turns numbers r, ``n x m``, at least 0, into losses. The paper also uses ``torch.log1p``.
        options: As for `RankingLoss`.

    Raises:
        ValueError: ``lambda_val`` or ``margin`` is out of range, or ``weight`` can't be called.

    Examples:
        >>> loss = RecallLoss()
        >>> embeddings = torch.tensor([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [1.0, 0.1], [1.0, 0.2]])
        >>> float(loss(embeddings, torch.tensor([0, 0, 1, 1, 1])))
        0.0
    """

    def __init__(
        self,
        lambda_val: float = 4.0,
        margin: float = 0.02,
        weight: Callable[[Tensor], Tensor] = double_log,
        **options: Any,
    ) -> None:
        check_above(0, lambda_val=lambda_val)
        check_at_least(0, margin=margin)
        check_instance("torch.log1p", optional=False, weight=weight)
        super().__init__(**options)
        self.lambda_val, self.margin, self.weight = lambda_val, margin, weight
        self.add_to_recordable_attributes(list_of_names=["lambda_val", "margin"], is_stat=False)

    def query_losses(self, scores: Tensor, same: Tensor, own: Tensor) -> Tensor:
        """Return the loss of each query, ``n``; see `RankingLoss.query_losses`."""
        scores = scores - self.margin * (same.to(scores.dtype) - 0.5)
        scores = scores.masked_fill(own, -torch.inf)  # last, so it changes no other rank
        positive = same & ~own

        def losses(ranks: Tensor) -> Tensor:
            before = ranks - positives_up_to(ranks, positive)
            return (self.weight(before) * positive).sum(dim=1) / positive.sum(dim=1)

        return ranking_losses(scores, losses, self.lambda_val)
