"""The parametric losses of Adaptive Loss Alignment (Huang et al., 2019), and what its controller sees of each.

Three families: class correlations for classifiers (Eq. 6), a mixture of distances and a focal weighting for embeddings
(Eq. 9 and 10). The loss parameters Phi are a vector of u numbers, each with statistics of its own.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.errors import DataError
from metricopt_ext.siblings.class_labels import class_labels
from metricopt_ext.utils.checks import check_above, check_at_least, check_integer

Link = Literal["sigmoid", "none"]
LINKS: tuple[Link, ...] = ("sigmoid", "none")

NEAREST = 0.1  # distances of negatives are taken to be at least this, below which 1 / d outweighs all else
TYPICAL = math.sqrt(2)  # distance of two embeddings at right angles, as those of unrelated examples are on average


class AdaptiveLoss(ABC):
    """A loss with parameters Phi, ``u``, which a controller moves one by one.

    Attributes:
        family: Its name; a policy is for one family.
        observed: Number k of validation statistics that the controller sees of each parameter.
        kinds: Number of parameters that the controller tells apart by a one-hot vector; 0 if all are alike to it.
        low: Smallest value of a parameter.
        high: Largest value of a parameter.
    """

    family: ClassVar[str]
    observed: ClassVar[int]
    kinds: ClassVar[int]
    low: float
    high: float

    @abstractmethod
    def initial(self) -> Tensor:
        """Return Phi_0, ``u`` in double precision, at which the loss is the usual one."""

    @abstractmethod
    def loss(self, parameters: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            parameters: Phi, ``u``.
            scores: What the model returned for n examples, with its gradient.
            labels: ``n`` integers.
        """

    @abstractmethod
    def statistics(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the statistics of each parameter on validation data, ``u x k``, on a scale that all tasks share."""

    def moved(self, parameters: Tensor, change: Tensor) -> Tensor:
        """Return the parameters, ``u``, after a change, ``u``, kept within their limits."""
        return (parameters + change).clamp(self.low, self.high)


class ClassCorrelation(AdaptiveLoss):
    """Eq. 6: minus sigmoid(y^T Phi log f(y|x)), the mean over examples, with a symmetric matrix Phi.

    The parameters are the entries above the diagonal, row by row; each stands for its mirror image too, and the
    diagonal stays 1. The paper calls Phi = I the cross-entropy, which Eq. 6 as printed is not: it is then
    -sigmoid(-cross-entropy) of each example. Without the sigmoid it is the cross-entropy, but unbounded below as soon
    as an entry is negative.

    Args:
        classes: Number of classes; a single logit makes two.
        link: ``"sigmoid"`` for Eq. 6 as printed, ``"none"`` for the same without the sigmoid: -y^T Phi log f(y|x).
        lowest: Smallest entry, -1 in the paper. Under a negative one the model need not find the right class: it can
            drive Eq. 6 to its minimum by the log-probability of the other class alone. 0 rules that out.

    Raises:
        ValueError: A value is out of range.
    """

    family = "classes"
    observed = 2
    kinds = 0
    high = 1.0

    def __init__(self, classes: int, link: Link = "sigmoid", lowest: float = -1.0) -> None:
        check_integer(2, classes=classes)
        check_lowest(lowest)
        self.low = lowest
        if link not in LINKS:
            raise ValueError(f"link is {link!r}; it must be one of {', '.join(LINKS)}")
        self.classes, self.link = classes, link
        self.rows, self.columns = torch.triu_indices(classes, classes, 1)

    def initial(self) -> Tensor:
        """Return no correlation between any two classes, zeros."""
        return torch.zeros(len(self.rows), dtype=torch.float64)

    def matrix(self, parameters: Tensor) -> Tensor:
        """Return Phi as a matrix, ``c x c``, which the parameters may be already."""
        if parameters.dim() == 2:
            return parameters
        matrix = torch.eye(self.classes, dtype=parameters.dtype)
        matrix[self.rows, self.columns] = matrix[self.columns, self.rows] = parameters
        return matrix

    def loss(self, parameters: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of ``n`` or ``n x c`` logits; see `AdaptiveLoss.loss`.

        Raises:
            DataError: The scores are no such logits, or a label is no class's number.
        """
        labels = class_labels(scores, labels)  # a negative one would count from the matrix's end
        agreement = (self.matrix(parameters).to(scores)[labels] * log_probabilities(scores)).sum(1)
        return -(agreement.sigmoid() if self.link == "sigmoid" else agreement).mean()

    def statistics(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return [C_ij, C_ji] of each pair of classes (Eq. 7), in units of what a uniform prediction has, log c."""
        confusions = self.confusions(scores, labels) / math.log(self.classes)
        pairs = confusions[self.rows, self.columns], confusions[self.columns, self.rows]
        return torch.stack(pairs, 1)

    def confusions(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return C, ``c x c`` (Eq. 7): the mean of -log f^j over the examples of class i.

        A class without examples has the confusions of a uniform prediction, log c.
        """
        member = F.one_hot(class_labels(scores, labels), self.classes).to(scores)
        counts = member.sum(0)[:, None]
        confusions = -(member.t() @ log_probabilities(scores)) / counts.clamp(min=1)
        return torch.where(counts > 0, confusions, math.log(self.classes))

    def confusion_matrix(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return C of Eq. 7 over its largest entry, ``c x c`` in double precision: a Phi within the limits, [0, 1]."""
        confusions = self.confusions(scores, labels).detach().to("cpu", torch.float64)
        return confusions / confusions.max()


def check_lowest(lowest: float) -> None:
    """Reject a limit of class correlations that is not in [-1, 0], which Phi_0 has to respect.

    Raises:
        ValueError: It is rejected.
    """
    check_at_least(-1, lowest=lowest)
    if lowest > 0:
        raise ValueError(f"lowest is {lowest}; it must be at most 0, where the correlations begin")


def log_probabilities(scores: Tensor) -> Tensor:
    """Return the classes' log-probabilities, ``n x c``, of ``n x c`` logits, or of one logit for class 1 of two."""
    if scores.dim() == 1:
        return F.logsigmoid(torch.stack([-scores, scores], 1))
    return F.log_softmax(scores, 1)


# Eq. 9 leaves their forms to the supplement; the first of each is the initial one that the text names.
INCREASING: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda d: d**2,
    lambda d: d,
    lambda d: d**3,
    torch.log1p,
    torch.expm1,
)
DECREASING: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda d: 0.5 / d,
    lambda d: -d,
    lambda d: -(d**2),
    lambda d: -torch.log(d),
    lambda d: torch.exp(-d),
)


class PairwiseLoss(AdaptiveLoss):
    """A loss of the distances between a batch's embeddings, which are put on the unit sphere before.

    Attributes:
        of_positives: The functions of d+ whose means are the statistics of the first parameters, one each.
        of_negatives: Those of d- for the other parameters.
    """

    of_positives: ClassVar[tuple[Callable[[Tensor], Tensor], ...]]
    of_negatives: ClassVar[tuple[Callable[[Tensor], Tensor], ...]]

    @abstractmethod
    def of_distances(self, parameters: Tensor, d: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return the loss of distances, ``n x n``, and of which pairs have the same label and which another."""

    def loss(self, parameters: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of embeddings, ``n x d``; see `AdaptiveLoss.loss`."""
        d, positive, negative = distances(scores, labels)
        return self.of_distances(parameters.to(d), d, positive, negative)

    def statistics(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over pairs of each parameter's function, in units of its size at `TYPICAL`, ``u x 1``."""
        d, positive, negative = distances(scores, labels)
        typical, kept = d.new_tensor(TYPICAL), d.clamp(min=NEAREST)
        means = [mean_over(function(d), positive) / function(typical).abs() for function in self.of_positives]
        means += [mean_over(function(kept), negative) / function(typical).abs() for function in self.of_negatives]
        return torch.stack(means)[:, None]


class DistanceMixture(PairwiseLoss):
    """Eq. 9: weights Phi of five increasing functions of d+ and five decreasing ones of d-.

    The mean over the pairs of a batch; with as many examples of each class, that is the mean over all its triplets.
    There is no margin and no hinge, as in Eq. 9.
    """

    family = "mixture"
    observed = 1
    kinds = 10
    low, high = 0.0, 1.0
    of_positives, of_negatives = INCREASING, DECREASING

    def initial(self) -> Tensor:
        """Return the weights that select d^2 and 0.5 / d."""
        return torch.tensor([1.0, 0, 0, 0, 0] * 2, dtype=torch.float64)

    def of_distances(self, parameters: Tensor, d: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return the mixture; see `PairwiseLoss.of_distances`."""
        kept = d.clamp(min=NEAREST)
        pulls = torch.stack([mean_over(F_i(d), positive) for F_i in INCREASING])
        pushes = torch.stack([mean_over(F_i(kept), negative) for F_i in DECREASING])
        return parameters @ torch.cat([pulls, pushes])


class FocalWeighting(PairwiseLoss):
    """Eq. 10: Phi says how much the far positives and the near negatives of an anchor outweigh the others.

    The mean over anchors. The paper gives no Phi_0, which is 1 here, nor limits; below 0.1 it does not go here, as it
    divides.

    Args:
        offset: alpha, the distance beyond which a positive, and below which a negative, weighs most.
    """

    family = "focal"
    observed = 1
    kinds = 2
    low, high = 0.1, math.inf
    of_positives, of_negatives = (INCREASING[1],), (INCREASING[1],)  # the distances themselves

    def __init__(self, offset: float = 1.0) -> None:
        check_above(0, offset=offset)
        self.offset = offset

    def initial(self) -> Tensor:
        """Return ones."""
        return torch.ones(2, dtype=torch.float64)

    def of_distances(self, parameters: Tensor, d: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return the focal weighting; see `PairwiseLoss.of_distances`."""
        pull, push = parameters
        far = log_one_plus_sum((pull * (d - self.offset)).masked_fill(~positive, -math.inf)) / pull
        near = log_one_plus_sum((-push * (d - self.offset)).masked_fill(~negative, -math.inf)) / push
        loss: Tensor = (far + near).mean()
        return loss


def distances(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return distances on the unit sphere, ``n x n``, and which pairs are positive and which negative.

    Raises:
        DataError: The embeddings are not ``n x d``.
    """
    if embeddings.dim() != 2 or not embeddings.is_floating_point():
        raise DataError(
            f"embeddings must be floats of shape n x d, got {embeddings.dtype} of {tuple(embeddings.shape)}"
        )
    on_sphere = F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)))  # no cdist of halves
    d = torch.cdist(on_sphere, on_sphere, compute_mode="donot_use_mm_for_euclid_dist")  # exact, and flat at 0
    same = labels[:, None] == labels[None]
    return d, same & ~torch.eye(len(labels), dtype=torch.bool, device=same.device), ~same


def mean_over(values: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean of ``n x n`` values over the pairs that are told, 0 if there are none."""
    return values[pairs].sum() / pairs.sum().clamp(min=1)


def log_one_plus_sum(exponents: Tensor) -> Tensor:
    """Return log(1 + sum exp) of each row of ``n x m`` exponents."""
    return torch.cat([torch.zeros_like(exponents[:, :1]), exponents], 1).logsumexp(1)


FAMILIES = (ClassCorrelation.family, DistanceMixture.family, FocalWeighting.family)
