"""A search in one line of a training script of one's own: tune its model for its validation, and merge phi."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import FILM
from metricopt_ext.adapters.wrappers import unwrapped
from metricopt_ext.data.evidence import check_evidence
from metricopt_ext.errors import AdapterError, ConfigError, DataError, MetricError
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.result import Result
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import DatasetBatches
from metricopt_ext.tasks.combine import Combine
from metricopt_ext.tasks.direction import direction
from metricopt_ext.tasks.inputs import logits_of, refuse_probabilities
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask, Loss
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import in_mode
from metricopt_ext.utils.named import name_of
from metricopt_ext.utils.seeding import seeded_streams
from metricopt_ext.utils.words import and_more, brief

OF_LOGITS = (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)


def tune_model(
    model: nn.Module,
    loader: Any,
    loss: Loss | nn.Module,
    metric: Callable[..., Any],
    *,
    queries: int,
    maximize: bool | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    name: str | None = None,
    combine: Combine | None = None,
    training: bool = False,
    attach: Callable[[nn.Module], Adapter] = FILM,
    population: int | None = None,
    **options: Any,
) -> Result:
    """Tune a trained model for a metric, by what a training script has at hand, and merge phi into its weights.

    The script goes on with an ordinary model: what it saves next is the tuned one. A DataParallel, DDP or
    torch.compile wrapper stays as it is around it. Where the script runs in several processes, each calls this: the
    first one's phi is judged by all of them together, so a metric may gather what each finds on its shard of the data.

    Args:
        model: The model as the script has it, or its wrapper.
        loader: The training data: a DataLoader of a dataset with an index. Its collate function and batch size are
            taken, its order is not.
        loss: ``loss(model, batch) -> scalar`` of the model without its wrapper, on a batch on the model's device; or a
            criterion, a module such as ``nn.CrossEntropyLoss()`` that takes the model's outputs for a batch's first
            part, and its second. What it draws at random is the same each time.
        metric: The script's own validation: a function of nothing, or of the model without its wrapper, that returns
            what `Metric` takes: a number, or ``(value, (half, half))`` for the guard, or with ``combine`` several by
            name. Of several processes the first one's counts.
        queries: Evaluations of the metric that may be spent.
        maximize: Whether higher is better; None where the metric's name says so, as accuracy and loss do.
        bounds: Lowest and highest possible value; None for a metric without known bounds.
        name: The metric's name in messages; by default the function's.
        combine: How what ``metric`` returns by name makes the metric, as of `Metric`, e.g. ``"worst"``.
        training: Whether the loss is computed in training mode, as detectors return their losses only there; BatchNorm
            and dropout layers still compute as in evaluation.
        attach: Attaches the adapter to the model; by default FiLM on every normalisation layer, with 32 numbers.
        population: How many phi are computed in one forward pass; by default chosen on the first batch, as in
            `FinetuneTask`. A loss that keeps tensors for later needs 1.
        options: Further arguments of `optimize_metric`, e.g. ``seed`` and ``output_dir``.

    Returns:
        What the search did.

    Raises:
        DataError: The training data can't be drawn in batches; or they are those of the one DataLoader that ``metric``
            names.
        ConfigError: Nothing tells whether higher is better; or there are several processes and an ``output_dir``, which
            they can't share.
        TypeError: ``loss`` is a function of outputs and targets, such as ``F.cross_entropy``, or a criterion whose
            batches have no first and second part, as dicts have not.
        Others: As from ``attach``, `FinetuneTask` and `optimize_metric`; the model has no adapter then.

    Examples:
        >>> run = tune_model(  # doctest: +SKIP
        ...     model,
        ...     train_loader,
        ...     criterion,
        ...     lambda: validate(val_loader, model),
        ...     maximize=True,
        ...     queries=100,
        ... )
    """
    if several():
        options = in_step(options)
    inner = unwrapped(model)
    drawn, device = loader_batches(loader), next(inner.parameters()).device
    name = name or name_of(metric)
    higher = direction(name, maximize)
    _check_judged(loader, metric)
    replayed = ReplayedLoss(loss, training)
    if isinstance(loss, OF_LOGITS):
        with in_mode(inner, training=False), seeded_streams(0, device):
            outputs = inner(replayed.pair(on_device(drawn(0, 0, 0), device))[0])
        try:
            refuse_probabilities(logits_of(outputs))
        except AdapterError as error:
            warnings.warn(f"loss is {type(loss).__name__}, which takes logits, but {error}", stacklevel=2)
    before = KeptModules(inner)
    try:
        adapter = attach(inner)
        judged = Metric(judged_together(adapter, metric), maximize=higher, bounds=bounds, name=name, combine=combine)
        task = FinetuneTask(
            adapter,
            loss=replayed,
            batches=lambda *place: on_device(drawn(*place), device),
            metric=judged,
            population=population,
        )
        run: Result = optimize_metric(task, queries=queries, **options)
        adapter.set_phi(of_first(adapter.phi.detach()))
        adapter.merge()
    except BaseException:
        before.put_back()  # without an adapter
        raise
    return run


def _check_judged(loader: Any, metric: Callable[..., Any]) -> None:
    """Refuse a metric whose own names, or arguments, are of one DataLoader, and that is of what is trained on."""
    if isinstance(metric, partial):
        seen = [*metric.args, *metric.keywords.values()]
    else:
        names = inspect.getclosurevars(metric) if inspect.isfunction(metric) else None
        seen = [] if names is None else [*names.nonlocals.values(), *names.globals.values()]
    loaders = {id(each): each for each in seen if isinstance(each, DataLoader)}
    if len(loaders) == 1:
        check_evidence(getattr(loader, "dataset", None), loaders.popitem()[1].dataset, "the metric's DataLoader")


class ReplayedLoss:
    """A loss in one mode of the model, whose random draws are the same each time.

    Args:
        loss: ``loss(model, batch) -> scalar``, or a criterion of outputs and targets; see `tune_model`.
        training: Whether the model is in training mode meanwhile.

    Raises:
        TypeError: ``loss`` is no function, or one of outputs and targets, or a class.
    """

    def __init__(self, loss: Loss | nn.Module, training: bool) -> None:
        function = loss.func if isinstance(loss, partial) else loss
        name = getattr(function, "__name__", brief(loss))
        if isinstance(function, type):
            raise TypeError(f"loss is the class {name}; give one made of it, loss={name}()")
        if not callable(loss):
            raise TypeError(f"loss is {brief(loss)}; it must be a function loss(model, batch), or a criterion")
        host = str(getattr(function, "__module__", None)).partition(".")[0]
        if not isinstance(loss, nn.Module) and host in ("torch", "torchvision"):
            raise TypeError(f"loss is {name}, of outputs and targets; {_of_outputs(name)}")
        self.loss, self.training = loss, training

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a model on a batch, a scalar.

        Raises:
            TypeError: It is of outputs and targets, but takes the model or a batch without these two parts.
        """
        device = next(model.parameters()).device
        with in_mode(model, training=self.training), seeded_streams(0, device):
            if isinstance(self.loss, nn.Module):
                x, y = self.pair(batch)
                loss: Tensor = self.loss(model(x), y)
                return loss
            try:
                return self.loss(model, batch)
            except (AttributeError, TypeError) as error:
                if type(model).__name__ not in str(error):
                    raise
                raise TypeError(
                    f"loss(model, batch) raised {brief(error)}; if loss is of outputs and targets,"
                    f" {_of_outputs('criterion')}"
                ) from error

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """Return what a criterion is of: a batch's first part, the model's input, and its second.

        Raises:
            TypeError: The batch has no such parts.
        """
        parts: tuple[Any, ...] = ()
        if not isinstance(batch, Mapping | Tensor):  # a tensor's first two rows are examples
            with suppress(IndexError, KeyError, TypeError):
                parts = batch[0], batch[1]
        if not parts:
            keys = [repr(key) for key in batch] if isinstance(batch, Mapping) else []
            kind = f"a {type(batch).__name__}{' of ' if keys else ''}{', '.join(keys)}"
            raise TypeError(
                f"loss is {type(self.loss).__name__}, of a batch's first part and its second, but a batch is {kind};"
                " give a function of the model and a batch, such as loss=lambda model, batch:"
                f" criterion(model(batch[{keys[0] if keys else '...'}]), batch[{keys[-1] if keys else '...'}])"
            )
        return parts[0], parts[1]


def _of_outputs(name: str) -> str:
    """Return how a loss of outputs and targets is given."""
    return f"give loss=lambda model, batch: {name}(model(batch[0]), batch[1])"


def judged_together(adapter: Adapter, metric: Callable[..., Any]) -> Callable[..., Any]:
    """Return a metric that all processes evaluate at once, at the first one's phi, and whose answer is the first's.

    Each searches by itself, and rounding could lead them apart: what they judge together must be one model.
    """

    @wraps(metric)
    def together(*model: nn.Module) -> Any:
        judged = Adapter(model[0]) if model else adapter
        phi = of_first(judged.phi.detach())
        with nullcontext() if torch.equal(phi, judged.phi) else judged.using(phi):
            return _answer_of_first(partial(metric, *model))

    return together


def _answer_of_first(metric: Callable[[], Any]) -> Any:
    """Return what a metric answers in the first process, or raise its error, in each of several that all call it.

    Raises:
        MetricError: It failed in the first process alone.
    """
    if not several():
        return metric()
    answer, own = None, None
    try:
        answer = metric()
    except Exception as error:
        own = error
    sent = [(answer, None if own is None else f"{type(own).__name__}: {own}")]
    distributed.broadcast_object_list(sent, src=0)
    first, failed = sent[0]
    if own is not None:
        raise own
    if failed is not None:
        raise MetricError(f"in the first process it raised {failed}")
    return first


class Logged(NamedTuple):
    """The names under which a host reports what is tuned: one, or several outcomes, of which combine makes the metric.

    Attributes:
        names: The names.
        combine: As of `Metric`; None of one name.
    """

    names: tuple[str, ...]
    combine: Combine | None

    @classmethod
    def of(cls, given: str | Sequence[str], combine: Combine | None) -> "Logged":
        """Return what a user's name or names mean.

        Raises:
            ConfigError: Several are given without combine, or one with it, or none, or one twice.
        """
        names = (given,) if isinstance(given, str) else tuple(given)
        if isinstance(given, str) != (combine is None) or not names or len({*names}) < len(names):
            raise ConfigError(
                f"what is to be tuned is {brief(given)}, with combine={brief(combine)}; give one name, or a list of"
                " several, each once, and combine='worst'"
            )
        return cls(names, combine)

    def __str__(self) -> str:
        """Return the metric's name."""
        how = self.combine if isinstance(self.combine, str) else name_of(self.combine)
        return self.names[0] if self.combine is None else f"{how} of {and_more(self.names)}"

    def maximize(self, direction_of: Callable[[str], bool]) -> bool:
        """Return whether higher is better, of all names alike.

        Raises:
            ConfigError: Of one it is, and not of another.
        """
        if len(found := {direction_of(name) for name in self.names}) > 1:
            raise ConfigError(f"of {brief(list(self.names))} some are better if higher, some if lower; say maximize=")
        return found.pop()

    def told(self, value_of: Callable[[str], Any]) -> Any:
        """Return what a `Metric`'s function returns, by what each name is, with or without halves."""
        return value_of(self.names[0]) if self.combine is None else {name: value_of(name) for name in self.names}


def several() -> bool:
    """Whether the script runs in several processes of one group."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def in_step(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a search that several processes make in step, of which the first tells.

    Raises:
        ConfigError: They would write to one folder, and one that resumes would not wait for the others.
    """
    if options.get("output_dir") is not None:
        raise ConfigError(
            f"output_dir={str(options['output_dir'])!r} is for one process, and here {distributed.get_world_size()}"
            " judge together; leave it out, or let each judge all data under distributed.joined()"
        )
    return options if distributed.get_rank() == 0 else {"callback": Callback(), **options}


def of_first(values: Tensor) -> Tensor:
    """Return the first process's values of a tensor, a copy, on each of several processes; else the tensor itself."""
    if not several():
        return values
    copied = values.clone()
    distributed.broadcast(copied, src=0)
    return copied


def loader_batches(loader: Any, size: int | None = None) -> DatasetBatches:
    """Return a DataLoader's data as batches that can be drawn again.

    Args:
        loader: The DataLoader.
        size: Examples of a batch; None for the loader's.

    Raises:
        DataError: They can't: there is no index, or no batch size.
    """
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        raise DataError(
            f"the training data is a {type(loader).__name__} without an index, so its batches can't be drawn again;"
            " give a DataLoader of a dataset with __len__ and __getitem__"
        )
    size = size or loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise DataError(
            "the training data's DataLoader has no batch_size, nor its batch_sampler; give one of them a batch_size"
        )
    return DatasetBatches(dataset, size, collate=loader.collate_fn)


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if not isinstance(batch, Tensor) and callable(getattr(batch, "to", None)):  # as of Hugging Face's tokenizers
        return batch.to(device)
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, batch)
