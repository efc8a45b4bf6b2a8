"""A line of starts of a model with BatchNorm that the deployment's inputs tell, without labels: mixed statistics."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.methods.starts import batchnorm_start, mixed
from metricopt_ext.tasks.task import FinetuneTask

# Weights of the deployment's statistics that are asked first: half of each, more of the deployment's, and its alone.
FIRST = (0.75, 0.5, 1.0)


def batchnorm_line(task: FinetuneTask, inputs: Iterable[Any]) -> StartLine | None:
    """Return the line from the training's BatchNorm statistics, at 0, to other inputs', at 1 (`batchnorm_start`).

    Mean and variance are each mixed linearly, as where the training's are prior observations of the deployment's
    (Schneider et al., 2020, eq. 1); a variance is at least the smaller of both.

    Args:
        task: Its model's statistics are replaced in the starts, not in the model.
        inputs: Batches of inputs, without labels, about equal in size.

    Returns:
        The line; None if the model has no BatchNorm, or none whose statistics differ.

    Raises:
        DataError: There is no batch, or the model can't take one.
    """
    end = batchnorm_start(task, inputs)
    return None if end is None else statistics_line(task, end)


def statistics_line(task: FinetuneTask, end: Start) -> StartLine | None:
    """Return the line of `batchnorm_line` to a start that is known (`batchnorm_start`); None if it has no statistics.

    Args:
        task: Its model's statistics are those at 0.
        end: Has those at 1.
    """
    own = {name: value.detach().clone() for name, value in task.adapter.base_state_dict().items()}
    theirs = {name: value for name, value in end.tensors.items() if value.is_floating_point()}
    if not theirs:
        return None
    origin = task.origin()

    def at(t: float) -> Start:
        return Start(origin.clone(), {name: _statistics(own[name], value, t) for name, value in theirs.items()})

    return StartLine(at, 0.0, 1.0, FIRST)


def _statistics(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Return means or variances mixed, between the two, whatever they were rounded to."""
    return mixed(a, b, t).clamp(torch.minimum(a, b), torch.maximum(a, b))
