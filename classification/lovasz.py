"""The Lovasz losses (Berman et al., 2018): the Jaccard loss of a set of errors, extended to errors of any size."""

import torch
from torch import Tensor


def lovasz(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the Lovasz hinge of one logit, ``n``, or the Lovasz softmax of ``n x c`` logits; labels are ``n``.

    The hinge is of class 1, with errors max(0, 1 - logit) of positives and max(0, 1 + logit) of negatives. The
    softmax is the mean over the classes that have examples, with errors |1 - p| and p.
    """
    if logits.dim() == 1:
        positive = labels.to(logits)
        return _of_class((1 - logits * (2 * positive - 1)).relu(), positive)
    probabilities, classes = logits.softmax(1).T, torch.arange(logits.shape[1], device=labels.device)
    positive = (labels == classes[:, None]).to(logits)
    losses = torch.stack([_of_class((y - p).abs(), y) for p, y in zip(probabilities, positive, strict=True)])
    present = (positive.sum(1) > 0).to(losses)
    return (losses * present).sum() / present.sum()


def _of_class(errors: Tensor, positive: Tensor) -> Tensor:
    """Return the extension of 1 - TP / (TP + FP + FN) at errors, ``n``, of examples that are 0 or 1, ``n``."""
    errors, order = errors.sort(descending=True)
    positive = positive.gather(0, order)
    missed, wrong, count = positive.cumsum(0), (1 - positive).cumsum(0), positive.sum()
    # Without any example of the class, the first error makes the loss 1 and no other adds to it.
    jaccard = 1 - (count - missed) / (count + wrong).clamp(min=1)
    return errors @ jaccard.diff(prepend=jaccard.new_zeros(1))
