"""What a loss that is learned on logits takes: the logits of some classes, and a label in 0..c-1 for each example."""

import torch
from torch import Tensor

from metricopt_ext.errors import DataError


def class_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the labels of logits as int64, ``n``, however they are stored.

    Args:
        scores: Logits, ``n`` for one of two classes, or ``n x c`` with c of at least 2.
        labels: ``n`` whole numbers in 0..c-1, or booleans.

    Raises:
        DataError: The shapes are others, the scores are no floats, or a label is no class's number.
    """
    shape = tuple(scores.shape)
    if not scores.is_floating_point() or len(shape) not in (1, 2) or shape[1:] == (1,) or shape[:1] != labels.shape:
        remedy = "" if shape[1:] != (1,) else "; squeeze(1) makes them n, the logit of class 1 of two"
        remedy = remedy if labels.dim() != 2 else "; argmax(1) makes labels of one-hot rows"
        raise DataError(
            f"scores are {scores.dtype} of shape {shape} and labels have shape {tuple(labels.shape)}; give n or n x c"
            f" logits, c at least 2, and n labels{remedy}"
        )
    whole, classes = labels.long(), shape[1] if len(shape) == 2 else 2
    if len(whole):
        low, high = whole.aminmax()
        if low < 0 or high >= classes or (labels.is_floating_point() and not torch.equal(whole.to(labels), labels)):
            wrong = labels[(whole < 0) | (whole >= classes) | (whole.to(labels) != labels)]
            raise DataError(
                f"a label is {wrong[0].item()}; the labels of {classes} classes are the whole numbers 0..{classes - 1}:"
                " number the classes from 0"
            )
    return whole
