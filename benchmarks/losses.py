"""Losses of a classifier that MetricOpt was compared with, by ``loss.name=losses:AUCPRLoss loss.folder=benchmarks``.

Two are of how it ranks examples: of pairs, and an upper bound of the area under precision and recall. They are of each
class against the rest, by the log-odds of that class, and the mean over the classes that a batch has examples of and
others; of two classes, of class 1. Time and memory grow with the square of the batch. The third is of Jaccard's index.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.utils.checks import check_above, check_integer

FORMS = ("squared_hinge", "logistic")


class PairwiseAUC:
    """The mean over pairs of a positive and a negative of a loss of their scores' difference d.

    It bounds 1 - AUC, which is the mean of d < 0 (Rakotomamonjy, 2004, "Optimizing Area Under ROC Curve with SVMs").

    Args:
        form: ``"squared_hinge"``, max(0, 1 - d)^2, or ``"logistic"``, log(1 + exp(-d)).

    Raises:
        ValueError: The form is another.
    """

    def __init__(self, form: str = "squared_hinge") -> None:
        if form not in FORMS:
            raise ValueError(f"form is {form!r}; it must be one of {', '.join(FORMS)}")
        self.form = form

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of ``n`` or ``n x c`` logits and labels ``n``, a scalar."""
        scores, positive = against_the_rest(logits, labels)
        d = scores[:, :, None] - scores[:, None, :]
        each = (1 - d).relu().square() if self.form == "squared_hinge" else F.softplus(-d)
        pairs = positive[:, :, None] * (1 - positive[:, None, :])
        return _over_classes((each * pairs).sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1), positive)


class AUCPRLoss:
    """The AUCPR loss of Eban et al. (2017), "Scalable Learning of Non-Decomposable Objectives", batch by batch.

    Between the share of positives and 1 lie k precisions alpha, at equal distances. For each, with hinge losses L+ of
    the positives and L- of the negatives at a threshold b, the paper's saddle point is min over b, max over lambda of

        L+ + lambda (L+ + alpha / (1 - alpha) L- - P),

    P being the number of positives. At a precision within reach that is no less than P times 1 - recall. The paper
    takes steps of b and lambda beside the model's. Here a loss is a function of a batch alone, so each batch has b and
    lambda of its own, exactly. Hinge losses may leave a precision out of reach, where lambda would grow without end; it
    is at most ``multiplier``. The loss is the mean over the precisions, in units of P.

    Args:
        anchors: k.
        multiplier: Largest lambda.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(self, anchors: int = 10, multiplier: float = 10.0) -> None:
        check_integer(1, anchors=anchors)
        check_above(0, multiplier=multiplier)
        self.anchors, self.multiplier = anchors, multiplier

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of ``n`` or ``n x c`` logits and labels ``n``, a scalar."""
        scores, positive = against_the_rest(logits, labels)
        each = [self._of_class(*both) for both in zip(scores, positive, strict=True)]
        return _over_classes(torch.stack(each), positive)

    def _of_class(self, scores: Tensor, positive: Tensor) -> Tensor:
        """Return the loss of one class, from scores and 0 or 1, ``n`` each.

        The maximum over lambda is L+ + multiplier max(0, g), with g the bracket. That is convex in b and linear between
        the places where an example's hinge begins, so its minimum is at one of them, or where g is 0 between two.
        """
        n, count = len(scores), positive.sum()
        b = torch.where(positive > 0, scores - 1, scores + 1).sort().values
        of_positives = (positive * (1 - scores + b[:, None]).relu()).sum(1)
        of_negatives = ((1 - positive) * (1 + scores - b[:, None]).relu()).sum(1)
        share = (count / n).clamp(max=1 - 0.5 / n)  # without negatives the loss is 0, not infinity times 0
        steps = torch.arange(1, self.anchors + 1, dtype=scores.dtype, device=scores.device) / (self.anchors + 1)
        alpha = share + (1 - share) * steps
        g = of_positives + (alpha / (1 - alpha))[:, None] * of_negatives - count
        at_places = of_positives + self.multiplier * g.relu()
        before, after = g[:, :-1], g[:, 1:]
        crosses = (before > 0) & (after <= 0)
        way = before / torch.where(crosses, before - after, 1)
        between = of_positives[:-1] + way * of_positives.diff()
        lowest = torch.cat([at_places, torch.where(crosses, between, torch.inf)], 1).min(1).values
        return lowest.mean() / count.clamp(min=1)


def against_the_rest(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-odds of each class, ``c x n``, and which examples are of it, 0 or 1; of two classes, ``1 x n``.

    Args:
        logits: ``n`` or ``n x c``; memory grows with ``n c^2``.
        labels: ``n``.
    """
    if logits.dim() == 1:
        return logits[None], labels[None].to(logits)
    c = logits.shape[1]
    if c == 2:
        return (logits[:, 1] - logits[:, 0])[None], labels[None].to(logits)
    itself = torch.eye(c, dtype=torch.bool, device=logits.device)
    others = logits[:, None].masked_fill(itself, -torch.inf).logsumexp(2)
    classes = torch.arange(c, device=labels.device)
    return (logits - others).T, (labels == classes[:, None]).to(logits)


def _over_classes(losses: Tensor, positive: Tensor) -> Tensor:
    """Return the mean loss, of ``c``, over the classes that a batch has examples of and others; 0 without any."""
    defined = ((positive.sum(1) > 0) & (positive.sum(1) < positive.shape[1])).to(losses)
    return (losses * defined).sum() / defined.sum().clamp(min=1)


def lovasz(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the Lovasz hinge of one logit, ``n``, or the Lovasz softmax of ``n x c`` logits; labels are ``n``.

    The hinge is of class 1, with errors max(0, 1 - logit) of positives and max(0, 1 + logit) of negatives. The
    softmax is the mean over the classes that have examples, with errors |1 - p| and p.
    """
    if logits.dim() == 1:
        positive = labels.to(logits)
        return _jaccard_extension((1 - logits * (2 * positive - 1)).relu(), positive)
    probabilities, classes = logits.softmax(1).T, torch.arange(logits.shape[1], device=labels.device)
    positive = (labels == classes[:, None]).to(logits)
    losses = torch.stack([_jaccard_extension((y - p).abs(), y) for p, y in zip(probabilities, positive, strict=True)])
    present = (positive.sum(1) > 0).to(losses)
    return (losses * present).sum() / present.sum()


def _jaccard_extension(errors: Tensor, positive: Tensor) -> Tensor:
    """Return the extension of 1 - TP / (TP + FP + FN) at errors, ``n``, of examples that are 0 or 1, ``n``."""
    errors, order = errors.sort(descending=True)
    positive = positive.gather(0, order)
    missed, wrong, count = positive.cumsum(0), (1 - positive).cumsum(0), positive.sum()
    # Without any example of the class, the first error makes the loss 1 and no other adds to it.
    jaccard = 1 - (count - missed) / (count + wrong).clamp(min=1)
    return errors @ jaccard.diff(prepend=jaccard.new_zeros(1))
