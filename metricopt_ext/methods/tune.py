"""Attach, search, merge: a trained model tuned in one call, by what a training script or a host's trainer has."""

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import FILM
from metricopt_ext.adapters.wrappers import unwrapped
from metricopt_ext.data.evidence import check_function
from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.methods.folder import RunFolder
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.strategy import Plan
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import Batches, loader_batches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask, Loss
from metricopt_ext.utils.modes import in_mode
from metricopt_ext.utils.seeding import seeded_streams

Attach = Callable[[nn.Module], Adapter]
PLANNED = ("strategy", "starts", "guard_confidence", "seed")  # options that can be checked before training


def tune_model(
    model: nn.Module,
    *,
    loss: Loss | nn.Module,
    batches: DataLoader[Any] | Batches,
    metric: Metric,
    queries: int,
    attach: Attach = FILM,
    merge: bool = True,
    training: bool | None = False,
    population: int | None = None,
    together: bool = True,
    **options: Any,
) -> Result:
    """Tune a trained model for a metric, by what a training script has at hand, and merge phi into its weights.

    The script goes on with an ordinary model: what it saves next is the tuned one. A DataParallel, DDP or
    torch.compile wrapper stays as it is around it. Where the script runs in several processes, each calls this: the
    first one's phi is judged by all of them together, so a metric may gather what each finds on its shard of the data.

    Args:
        model: The model as the script has it, or its wrapper.
        loss: ``loss(model, batch) -> scalar`` of the model without its wrapper, on a batch on the model's device; or a
            criterion, a module such as ``nn.CrossEntropyLoss()`` that takes the model's outputs for a batch's first
            part, and its second; it gets what the model returns, so a model that ends in a softmax needs another one.
            What it draws at random is the same each time.
        batches: The training data: a DataLoader of a dataset with an index, of which the collate function and the batch
            size are taken, not the order; or ``batches(seed, task, step)``, as of `FinetuneTask`.
        metric: The script's own validation, of data that the model was not trained on: ``Metric(validate,
            maximize=True)``. Of several processes the first one's answer counts.
        queries: Evaluations of the metric that may be spent.
        attach: Attaches the adapter to the model; by default FiLM on every normalisation layer, with 32 numbers.
        merge: Whether phi is merged. If not, ``Adapter(model)`` is the handle to the adapter, which stays.
        training: Whether the loss is computed in training mode, as detectors return their losses only there; BatchNorm
            and dropout layers still compute as in evaluation. None: in the modes in which the modules are.
        population: How many phi are computed in one forward pass; by default chosen on the first batch, as in
            `FinetuneTask`. A loss that keeps tensors for later needs 1.
        together: Whether all processes of torch's group call this; False in one that tunes a model by itself.
        options: Further arguments of `optimize_metric`, e.g. ``seed``, ``output_dir`` and
            ``starts=lambda task: {"batchnorm": mo.batchnorm_start(task, inputs)}``.

    Returns:
        What the search did.

    Raises:
        DataError: The training data can't be drawn in batches; or they are those of the one DataLoader that the metric
            names.
        ConfigError: Several processes have an ``output_dir``, which they can't share.
        TypeError: ``loss`` is a criterion, and a batch has no first and second part, as a dict has not.
        Others: As from ``attach``, `FinetuneTask` and `optimize_metric`; the model has no adapter then.

    Examples:
        >>> run = tune_model(  # doctest: +SKIP
        ...     model,
        ...     loss=nn.CrossEntropyLoss(),
        ...     batches=train_loader,
        ...     metric=Metric(lambda: validate(val_loader, model), maximize=True),
        ...     queries=100,
        ... )
    """
    drawn = batches if callable(batches) else loader_batches(batches)
    together = together and _several()
    if together:
        options = _in_step(options)
    adapter = attach(unwrapped(model))
    try:
        task = FinetuneTask(
            adapter,
            loss=partial(_replayed, loss, training),
            batches=lambda *place: tree_map(partial(_moved, adapter.phi.device), drawn(*place)),
            metric=metric,
            population=population,
        )
        if not callable(batches):
            check_function(batches.dataset, metric.function)
        if together:
            task = task.judged_by(_judged_together(metric, adapter))
        run: Result = optimize_metric(task, queries=queries, **options)
        if together:
            adapter.set_phi(_of_first(adapter.phi.detach().cpu()))
        if merge:
            adapter.merge()
    except BaseException:
        adapter.remove()
        raise
    return run


def check_tuning(model: nn.Module, *, metric: Metric, queries: int, attach: Attach = FILM, **options: Any) -> None:
    """Check, before a model is trained, what `tune_model` would refuse after it, as far as it can be known by then.

    Args:
        model: The model. An adapter is attached for the check, and removed.
        metric: The metric, or one with the same name, bounds and budget; it is not asked.
        queries: See `tune_model`, as for the rest.
        attach: Attaches the adapter.
        options: Arguments of `optimize_metric`; a function that returns ``starts`` is given a task without a loss.

    Raises:
        TypeError: An option is none of `optimize_metric`.
        Others: As from `tune_model`.
    """
    inspect.signature(optimize_metric).bind(None, queries=queries, **options)
    if _several():
        _in_step(options)
    planned = {name: options[name] for name in PLANNED if name in options}
    adapter = attach(unwrapped(model))
    try:
        Plan(FinetuneTask(adapter, metric=metric), queries=queries, **planned)
    finally:
        adapter.remove()
    with RunFolder(options.get("output_dir"), {}).writing(options.get("resume", False)):
        pass


def _moved(device: torch.device, part: Any) -> Any:
    """Return a part of a batch on a device, if it can be: a tensor, or what Hugging Face's tokenizers return."""
    return part.to(device) if hasattr(part, "to") else part


def _replayed(loss: Loss | nn.Module, training: bool | None, model: nn.Module, batch: Any) -> Tensor:
    """Return a loss, or a criterion's, in one mode of the model; what it draws at random is the same each time.

    Raises:
        TypeError: A criterion is given a batch without a first and a second part.
    """
    mode = nullcontext() if training is None else in_mode(model, training=training)
    with mode, seeded_streams(0, next(model.parameters()).device):
        if not isinstance(loss, nn.Module):
            return loss(model, batch)
        if not isinstance(batch, tuple | list) or len(batch) < 2:  # a tensor's first two rows are examples
            raise TypeError(
                f"{type(loss).__name__} needs a batch of inputs and targets, and got a {type(batch).__name__};"
                " give loss=lambda model, batch: criterion(model(batch['x']), batch['y'])"
            )
        value: Tensor = loss(model(batch[0]), batch[1])
        return value


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _in_step(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a search that several processes make in step, of which the first tells.

    Raises:
        ConfigError: They would write to one folder, and one that resumes would not wait for the others.
    """
    if options.get("output_dir") is not None:
        raise ConfigError(
            f"output_dir={str(options['output_dir'])!r} is for one process, and here several judge together; leave it"
            " out, or let each judge all data: together=False, under distributed.joined()"
        )
    return options if distributed.get_rank() == 0 else {"callback": Callback(), **options}


def _judged_together(metric: Metric, adapter: Adapter) -> Metric:
    """Return a metric that all processes evaluate at once, at the first one's phi, and whose answer is the first's.

    Each searches by itself, and rounding could lead them apart: what they judge together must be one model.
    """

    def shared(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*model: nn.Module, **settings: Any) -> Any:
            phi, answer, failed = _of_first(adapter.phi.detach().cpu()), None, ""
            try:
                with nullcontext() if torch.equal(phi, adapter.phi.cpu()) else adapter.using(phi):
                    answer = function(*model, **settings)
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
                raise
            finally:  # the others wait, whatever became of it here
                answer, failed = _of_first((answer, failed))
            if failed:
                raise MetricError(f"in the first process it raised {failed}")
            return answer

        return call

    own = copy.copy(metric)  # with the same ledger and callbacks
    own.function, own.also = shared(metric.function), {name: shared(each) for name, each in metric.also.items()}
    return own


def _of_first(value: Any) -> Any:
    """Return what the first of several processes has."""
    sent = [value]
    distributed.broadcast_object_list(sent, src=0)
    return sent[0]
