"""Inputs without labels, as the deployment has them, and the entropy of what a classifier predicts for them."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.errors import AdapterError, DataError, MetricOptError
from metricopt_ext.utils.words import brief

Found = TypeVar("Found")

REMEDY = "give batches of what the model takes, without labels, e.g. x.split(100)"

# Rows of numbers from 0 to 1 whose sums differ from 1 by no more are probabilities, also of half precision. Others are
# if a sigmoid or softmax made them. Where autograd does not tell, a single column is taken for them only with so many
# rows, as a few weak logits may lie there by chance.
PROBABILITIES, ROWS = 0.02, 20
MOVES = re.compile("Alias|Cat|Clamp|Clone|Expand|Permute|Reshape|Select|Slice|Squeeze|T0|ToCopy|Transpose|Uns|View")


def each_batch(inputs: Iterable[Any], use: Callable[[Any], Found]) -> Iterator[Found]:
    """Yield what a function makes of each batch of inputs, one at least.

    Args:
        inputs: The batches.
        use: Gives a batch to a model.

    Raises:
        DataError: There is no batch, one has no examples, or a model can't take it.
    """
    number = -1
    for number, batch in enumerate(inputs if isinstance(inputs, Iterable) and not isinstance(inputs, str) else ()):
        if isinstance(batch, Tensor) and batch.dim() and not len(batch):
            raise DataError(f"batch {number} of the inputs has no examples; leave it out")
        try:
            found = use(batch)
        except MetricOptError:
            raise
        except Exception as error:
            what = f"of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else brief(batch)
            said = f"the model can't take batch {number} of the inputs, {what}: {brief(error)}"
            raise DataError(f"{said}; {REMEDY}") from error
        yield found
    if number < 0:
        raise DataError(f"inputs are {brief(inputs)}, which hold no batch, or none any more; {REMEDY}")


def logits_of(output: Any, count: int | None = None) -> Tensor:
    """Return a model's logits, a row for each example or pixel, ``m x C``; ``m x 1`` of two classes with one logit.

    Args:
        output: What the model returned: ``n``, ``n x C`` or ``n x C x ...``; or a dict that has these as ``"logits"``
            or ``"out"``, or an object with them as ``.logits``.
        count: C if it is known.

    Raises:
        AdapterError: It is something else.
    """
    of_dict = isinstance(output, dict)
    found = output.get("logits", output.get("out")) if of_dict else getattr(output, "logits", output)
    if not isinstance(found, Tensor) or not found.is_floating_point() or not found.dim():
        raise AdapterError(
            f"the entropy of a prediction is that of logits, n x C, but the model returned {type(output).__name__};"
            " give a model that returns logits, or a loss"
        )
    logits = found[:, None] if found.dim() == 1 else found.movedim(1, -1).reshape(-1, found.shape[1])
    if count is not None and logits.shape[1] != count:
        raise AdapterError(f"the model returned {logits.shape[1]} logits, where phi has offsets for {count}")
    return logits


def refuse_probabilities(logits: Tensor) -> None:
    """Refuse what must be probabilities, not logits, ``m x C``: rows that sum to 1, or what a sigmoid or softmax made.

    Raises:
        AdapterError: They are; the message has the remedy.
    """
    if not len(logits) or not bool(((logits >= 0) & (logits <= 1)).all()):
        return
    made = logits.grad_fn
    while made is not None and MOVES.match(made.name()):
        made = made.next_functions[0][0]
    several = logits.shape[1] > 1
    known = made.name().startswith(("Sigmoid", "Softmax")) if made is not None else not several and len(logits) >= ROWS
    if known or (several and bool(((logits.double().sum(1) - 1).abs() < PROBABILITIES).all())):
        raise AdapterError(
            f"the model returned numbers from {logits.min().item():.3g} to {logits.max().item():.3g}, which are"
            " probabilities; give a model that returns logits: leave its last softmax or sigmoid out"
        )


def entropy(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean entropy of a model's predictions on a batch of inputs, in nats; a scalar.

    Raises:
        AdapterError: It does not return logits.
    """
    logits = logits_of(model(batch))
    if logits.shape[1] == 1:  # two classes: of logits 0 and z
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    log_p = F.log_softmax(logits, 1)
    return -(log_p.exp() * log_p).sum(1).mean()
