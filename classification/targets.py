"""What a network predicts for an example: one class, or several labels; its losses and decisions.

Both kinds share one signature. Logits are ``n x c``, or ``n`` for a single one:

- a class: ``c`` logits, of which the largest decides, or one for two classes, decided by its sign; labels ``n``;
- several labels (multi-label): a logit for each of ``k``, decided by its sign; labels ``n x k`` of 0 and 1.

The offset of a logit is therefore minus the threshold of a label.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("classes", "multilabel")


@dataclass(frozen=True)
class Target:
    """What a network predicts.

    Attributes:
        kind: One of `KINDS`.
        count: How many classes or labels there are, and so how many logits a network needs; one of two classes may do
            with a single one.
    """

    kind: str
    count: int

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, ``n``."""
        if self.kind == "multilabel":
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none").mean(1)
        if logits.dim() == 1:
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
        return F.cross_entropy(logits, labels, reduction="none")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar."""
        return self.losses(logits, labels).mean()

    def decide(self, logits: Tensor) -> Tensor:
        """Return the predicted labels, in the form of the true ones."""
        if self.kind == "multilabel" or logits.dim() == 1:
            return (logits > 0).long()
        return logits.argmax(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class or label in double precision: ``n x c`` or ``n x k``."""
        logits = logits.double()
        if self.kind == "multilabel":
            return logits.sigmoid()
        if logits.dim() == 1:
            return torch.stack([(-logits).sigmoid(), logits.sigmoid()], 1)
        return logits.softmax(1)

    def shares(self, labels: Tensor) -> Tensor:
        """Return the share of examples that have each of ``k`` labels, ``k`` float64; of classes there are none, ``0``.

        Args:
            labels: ``n x k`` of labels, ``n`` of classes.
        """
        return labels.double().mean(0) if self.kind == "multilabel" else labels.new_zeros(0, dtype=torch.float64)


def matching_offsets(logits: Tensor, shares: Tensor) -> Tensor:
    """Return offsets with which these shares of logits are above 0: thresholds that predict as many as there are.

    Args:
        logits: ``n x c``.
        shares: ``c``, in [0, 1].

    Returns:
        ``c`` float64, each minus a quantile of its logits, half way between two of them; of none or all, beyond the
        outermost by 1.
    """
    ordered = logits.double().sort(dim=0, descending=True).values
    beside = torch.cat([ordered[:1] + 2, ordered, ordered[-1:] - 2])
    above = (shares.to(ordered) * len(logits)).round().long()
    columns = torch.arange(len(shares), device=logits.device)
    return -(beside[above, columns] + beside[above + 1, columns]) / 2
