"""Where a search may begin: what costs no query to reach, each to be judged by the metric before it is built upon."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.modulation import CONTEXT_NAME
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError
from metricopt_ext.tasks.metric import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import read_tensors, write_tensors

FILE_FORMAT = "metricopt_ext/buffers/1"


def all_starts(task: FinetuneTask, starts: Mapping[str, Start]) -> dict[str, Start]:
    """Return phi = 0, named ``"start"``, and the starts given: copies, as the model's own phi may be among them.

    Raises:
        ValueError: A name is taken by a result's other ends.
        AdapterError: A phi has another dimension or is not finite; the model lacks a buffer, or has one of another
            shape; or the metric does not take the model, so that it can't judge one with other buffers.
    """
    for name in ("start", "search"):
        if name in starts:
            raise ValueError(f"a start is named {name!r}, which is an end of every search; give it another name")
    return {"start": Start(task.origin()), **{name: _checked(task, name, start) for name, start in starts.items()}}


def _checked(task: FinetuneTask, name: str, start: Start) -> Start:
    if start.phi.shape != (task.dim,):
        raise AdapterError(
            f"start {name!r} has a phi of shape {tuple(start.phi.shape)}, this adapter's is ({task.dim},)"
        )
    if not start.phi.isfinite().all():
        raise AdapterError(f"start {name!r} has a phi that is not finite: {start.phi.tolist()}")
    check_buffers(task.adapter.model, start.buffers)
    if start.buffers and not task.metric.takes_model:
        raise AdapterError(
            f"start {name!r} has buffers, so it is judged on a copy of the model, but metric {task.metric.name!r} does"
            " not take the model; let it take the one to judge as its argument"
        )
    buffers = {key: value.detach().clone() for key, value in start.buffers.items()}
    return Start(start.phi.detach().to(task.origin(), copy=True), buffers)


def with_start(task: FinetuneTask, start: Start) -> FinetuneTask:
    """Return the task of a start: the same one, or one on a copy of the model that has the start's buffers.

    Raises:
        AdapterError: The model lacks a buffer, or has one of another shape.
    """
    if not start.buffers:
        return task
    copied = task.copied()
    set_buffers(copied.adapter.model, start.buffers)
    return copied


def same_buffers(a: Start, b: Start) -> bool:
    """Whether two starts are of the same model."""
    return a.buffers.keys() == b.buffers.keys() and all(
        torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers
    )


def holds_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> bool:
    """Whether a model's own buffers of these names are the same, in its precision."""
    own = dict(model.named_buffers())
    return all(name in own and torch.equal(own[name], value.to(own[name])) for name, value in buffers.items())


def set_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Copy buffers into a model.

    Raises:
        AdapterError: The model lacks one, or has one of another shape; nothing is changed.
    """
    check_buffers(model, buffers)
    own = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in buffers.items():
            own[name].copy_(value)


def save_buffers(path: str | Path, buffers: Mapping[str, Tensor]) -> None:
    """Write buffers, by their names in the model's state dict, to a safetensors file."""
    write_tensors(path, dict(buffers), FILE_FORMAT, {})


def load_buffers(model: nn.Module, path: str | Path) -> None:
    """Set the buffers that `optimize_metric` kept beside a phi, ``buffers.safetensors``; see `set_buffers`.

    Args:
        model: With or without an adapter.
        path: The file.

    Raises:
        FileFormatError: The file is missing, corrupt or holds something else.
        AdapterError: The model lacks one of the buffers, or has one of another shape; nothing is changed.
    """
    set_buffers(model, read_buffers(path))


def read_buffers(path: str | Path) -> dict[str, Tensor]:
    """Read what `save_buffers` wrote.

    Raises:
        FileFormatError: The file is missing, corrupt or holds something else.
    """
    return read_tensors(path, FILE_FORMAT)[0]


def check_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Reject buffers that a model has not.

    Raises:
        AdapterError: The model lacks one, or has one of another shape.
    """
    own = dict(model.named_buffers())
    for name, value in sorted(buffers.items()):
        if name not in own:
            raise AdapterError(f"the model has no buffer {name!r}")
        if value.shape != own[name].shape:
            raise AdapterError(f"buffer {name!r} has shape {tuple(value.shape)}, the model's {tuple(own[name].shape)}")


def batchnorm_start(task: FinetuneTask, inputs: Iterable[Any]) -> Start | None:
    """Return phi = 0 with BatchNorm statistics of other inputs, or None if the model has no BatchNorm.

    Args:
        task: Its model's statistics are replaced in the start, not in the model.
        inputs: Batches of inputs, without labels; see `reestimate_batchnorm`.
    """
    model = reestimate_batchnorm(task.adapter.model, inputs)
    if model is None:
        return None
    own = dict(task.adapter.model.named_buffers())
    changed = {
        name: value for name, value in model.named_buffers() if name in own and not torch.equal(value, own[name])
    }
    return Start(task.origin(), changed)


def reestimate_batchnorm(model: nn.Module, inputs: Iterable[Any]) -> nn.Module | None:
    """Return a copy of a model with BatchNorm statistics of other inputs, or None if it has no BatchNorm.

    A norm that no input reaches, such as an auxiliary head's, keeps its statistics.

    Args:
        model: With or without an adapter; the copy has none, and is in evaluation mode.
        inputs: Batches of inputs, without labels; each counts the same, so make them about equal in size.
    """
    copied = copy.deepcopy(model)
    if hasattr(copied, CONTEXT_NAME):
        Adapter(copied).remove()
    norms = [module for module in copied.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return None
    copied.eval()  # dropout in particular must not disturb the statistics
    before = [(norm.momentum, copy.deepcopy(norm.state_dict())) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    with torch.no_grad():
        for batch in inputs:
            copied(batch)
    for norm, (momentum, state) in zip(norms, before, strict=True):
        norm.momentum = momentum
        if norm.num_batches_tracked == 0:
            norm.load_state_dict(state)
    return copied.eval()


def best_start(task: FinetuneTask, starts: Mapping[str, Start]) -> tuple[str, dict[str, Evaluation]]:
    """Evaluate the metric once at each start and return the best one's name, the first of equals, and all evaluations.

    Raises:
        ValueError: There is no start.
    """
    if not starts:
        raise ValueError("there is no start to choose from")
    found = {name: with_start(task, start).evaluate(start.phi, "starts") for name, start in starts.items()}
    return min(found, key=lambda name: found[name].cost), found
