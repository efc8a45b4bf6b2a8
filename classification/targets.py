"""What a network predicts for an example: one class, several labels, a rank or a quantity; its losses and decisions.

All kinds share one signature. Logits are ``n x c``, or ``n`` for a single one:

- a class: ``c`` logits, of which the largest decides, or one for two classes, decided by its sign; labels ``n``;
- several labels (multi-label): a logit for each of ``k``, decided by its sign; labels ``n x k`` of 0 and 1;
- a rank (ordinal): a logit for each of the ``c - 1`` cut points, above 0 where the rank is beyond it (Frank and Hall,
  2001); the rank is how many are; labels ``n`` in 0..c-1;
- a quantity (regression): one number, which is the prediction; labels ``n`` floats;
- the class of each pixel (segmentation): logits ``n x c x h x w``, of which the largest decides; labels ``n x h x w``,
  255 for pixels that don't count.

The offset of a logit is therefore minus the threshold of a label, or of a cut point.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.errors import DataError

KINDS = ("classes", "multilabel", "ordinal", "regression", "segmentation")
IGNORED = 255  # the label of pixels that don't count


@dataclass(frozen=True)
class Target:
    """What a network predicts.

    Attributes:
        kind: One of `KINDS`.
        count: How many classes, labels or ranks there are; 1 for a quantity.
        scale: Of a quantity, the standard deviation in which its error counts, above 0.
    """

    kind: str
    count: int
    scale: float = 1.0

    @property
    def outputs(self) -> int:
        """How many logits a network needs; one of two classes may do with a single one."""
        return self.count - 1 if self.kind == "ordinal" else self.count

    @property
    def loss_name(self) -> str:
        """What the loss is called."""
        return {"multilabel": "binary cross-entropy", "ordinal": "cumulative cross-entropy"}.get(
            self.kind, "squared error" if self.kind == "regression" else "cross-entropy"
        )

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, ``n``."""
        if self.kind == "regression":
            return ((_single(logits) - labels) / self.scale).square().to(logits.dtype)
        if self.kind == "ordinal":
            flat = logits.reshape(len(labels), -1)
            return F.binary_cross_entropy_with_logits(flat, beyond(labels, self.count).to(flat), reduction="none").mean(
                1
            )
        if self.kind == "multilabel":
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none").mean(1)
        if logits.dim() == 1:
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
        if self.kind == "segmentation":
            each = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
            return each.flatten(1).sum(1) / (labels != IGNORED).flatten(1).sum(1).clamp(min=1)
        return F.cross_entropy(logits, labels, reduction="none")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar."""
        return self.losses(logits, labels).mean()

    def decide(self, logits: Tensor) -> Tensor:
        """Return the predicted labels, in the form of the true ones."""
        if self.kind == "regression":
            return _single(logits)
        if self.kind == "ordinal":
            return (logits.reshape(len(logits), -1) > 0).sum(1)
        if self.kind == "multilabel" or logits.dim() == 1:
            return (logits > 0).long()
        return logits.argmax(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class, label or rank in double precision: ``n x c`` or ``n x k``.

        Of ranks, a cut point is passed at most as probably as those before it.

        Raises:
            DataError: It is a quantity that is predicted, which has none.
        """
        logits = logits.double()
        if self.kind == "regression":
            raise DataError("a quantity has no probabilities; take the prediction itself (metric.scores=labels)")
        if self.kind == "multilabel":
            return logits.sigmoid()
        if self.kind == "ordinal":
            passed = logits.reshape(len(logits), -1).sigmoid().cummin(1).values
            all_of_them, none = torch.ones_like(passed[:, :1]), torch.zeros_like(passed[:, :1])
            return torch.cat([all_of_them, passed], 1) - torch.cat([passed, none], 1)
        if logits.dim() == 1:
            return torch.stack([(-logits).sigmoid(), logits.sigmoid()], 1)
        return logits.softmax(1)

    def shares(self, labels: Tensor) -> Tensor:
        """Return the share of examples whose logit should be above 0, for each logit that a threshold decides.

        Args:
            labels: ``n x k`` of labels, ``n`` of ranks.

        Returns:
            ``k``, or ``c - 1``, float64 in [0, 1]; of classes and quantities there are none, ``0``.
        """
        if self.kind == "multilabel":
            return labels.double().mean(0)
        if self.kind == "ordinal":
            return beyond(labels, self.count).double().mean(0)
        return labels.new_zeros(0, dtype=torch.float64)


def beyond(ranks: Tensor, count: int) -> Tensor:
    """Return which of the ``count - 1`` cut points a rank lies beyond, ``n x (count - 1)``, for ranks ``n``."""
    return ranks.unsqueeze(-1) > torch.arange(count - 1, device=ranks.device)


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


def _single(logits: Tensor) -> Tensor:
    """The single output of each example, ``n``, from ``n`` or ``n x 1``."""
    return logits.squeeze(-1) if logits.dim() > 1 else logits
