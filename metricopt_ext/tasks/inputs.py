"""Inputs without labels, batch by batch, as the deployment has them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.utils.words import brief

Found = TypeVar("Found")

REMEDY = "give batches of what the model takes, without labels, e.g. x.split(100)"


def each_batch(inputs: Iterable[Any], use: Callable[[Any], Found]) -> Iterator[Found]:
    """Yield what a function makes of each batch of inputs, one at least.

    Args:
        inputs: The batches.
        use: Gives a batch to a model.

    Raises:
        DataError: There is no batch, one has no examples, or a model can't take it.
    """
    if not isinstance(inputs, Iterable) or isinstance(inputs, str):
        raise DataError(f"inputs are {brief(inputs)}; {REMEDY}")
    number = -1
    for number, batch in enumerate(inputs):
        if isinstance(batch, Tensor) and batch.dim() and not len(batch):
            raise DataError(f"batch {number} of the inputs has no examples; leave it out")
        try:
            found = use(batch)
        except MetricOptError:
            raise
        except Exception as error:
            shown = f"a tensor of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else brief(batch)
            raise DataError(
                f"the model can't take batch {number} of the inputs, {shown}: {brief(error)}; {REMEDY}"
            ) from error
        yield found
    if number < 0:
        raise DataError(f"there are no inputs, or an iterator of them has ended; {REMEDY}")
