"""Starts of a model with BatchNorm that the deployment's inputs tell, without labels: mixed statistics, and TENT."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import DataError
from metricopt_ext.methods.start_lines import mixed
from metricopt_ext.methods.starts import batchnorm_start, reestimate_batchnorm
from metricopt_ext.tasks.entropy import entropy_of, logits_of, refuse_probabilities
from metricopt_ext.tasks.inputs import each_batch
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.weights import same_bits

# Weights of the deployment's statistics that are asked first: half of each, more of the deployment's, and its alone.
FIRST = (0.75, 0.5, 1.0)

# TENT's rate for Adam (Wang et al., 2021, section 4).
RATE = 1e-3


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
    theirs = {name: value for name, value in end.buffers.items() if value.is_floating_point()}
    if not theirs:
        return None
    origin = task.origin()

    def at(t: float) -> Start:
        return Start(origin.clone(), {name: _statistics(own[name], value, t) for name, value in theirs.items()})

    return StartLine(at, 0.0, 1.0, FIRST)


def _statistics(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Return means or variances mixed, between the two, whatever they were rounded to."""
    return mixed(a, b, t).clamp(torch.minimum(a, b), torch.maximum(a, b))


def tent_start(task: FinetuneTask, inputs: Iterable[Any]) -> Start | None:
    """Return BatchNorm's scales and shifts after a pass of entropy minimisation over inputs (TENT; Wang et al., 2021).

    A step of Adam at 1e-3 for each batch, whose own statistics are used meanwhile; then the statistics are estimated
    anew on all inputs, as those of a deployment that sees one example at a time.

    Args:
        task: Its model, which returns logits, stays as it is.
        inputs: Batches of inputs, without labels, of the size in which the metric sees them, two examples at least.

    Returns:
        The start; None if the model has no BatchNorm with scales and shifts.

    Raises:
        AdapterError: The model does not return logits.
        DataError: There is no batch, or the model can't take one, or an entropy is not finite.
    """
    batches = list(inputs) if isinstance(inputs, Iterator) else inputs
    model = copy.deepcopy(task.adapter.model)
    Adapter(model).remove()
    model.eval().requires_grad_(False)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.affine]
    if not norms:
        return None
    for norm in norms:
        norm.train().requires_grad_(True)
    trained = [each for norm in norms for each in norm.parameters()]
    # Steps are taken in single precision at least: half a one would round most of them away.
    precise = [each.detach().to(torch.promote_types(each.dtype, torch.float32), copy=True) for each in trained]
    optimizer = torch.optim.Adam(precise, lr=RATE)

    def loss_on(batch: Any) -> Tensor:
        with torch.enable_grad():
            logits = logits_of(model(batch))
            refuse_probabilities(logits.detach())
            return entropy_of(logits)

    for index, loss in enumerate(each_batch(batches, loss_on)):
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        if not all(each.isfinite().all() for each in (loss, *gradients) if each is not None):
            raise DataError(
                f"the entropy of batch {index} of the inputs is not finite, or its gradient, in {loss.dtype}; look at"
                " the batch, or give a model in float32"
            )
        for value, gradient in zip(precise, gradients, strict=True):
            value.grad = None if gradient is None else gradient.to(value)
        optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(trained, precise, strict=True):
                parameter.copy_(value)
    found = reestimate_batchnorm(model, batches) or model
    own = task.adapter.base_state_dict()

    def changed(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {n: value.detach() for n, value in named if n in own and not same_bits(value.detach(), own[n])}

    return Start(task.origin(), changed(found.named_buffers()), changed(found.named_parameters()))
