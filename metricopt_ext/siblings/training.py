"""What every sibling method is given: a model to train, batches, and both kinds of the black-box metric."""

import copy
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.context import CONTEXT_NAME
from metricopt_ext.errors import AdapterError, DataError, MetricError
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.metric import Metric, takes_model
from metricopt_ext.tasks.task import FinetuneTask, Loss
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.words import counted

Trains = Literal["phi", "model"]
TRAINS: tuple[Trains, ...] = ("phi", "model")

# By name, what was measured on the way: pairs of an iteration and a value.
History = dict[str, list[tuple[int, float]]]

# (model, batch) -> scores ``n`` or ``n x c``, with their gradient, and labels ``n``.
Predict = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """A model that a sibling method trains for a black-box metric: its adapter's phi alone, or all of its weights.

    Attributes:
        model: The model; with an adapter if phi is trained, a plain one otherwise.
        trains: ``"phi"`` or ``"model"``.
        batches: ``batches(seed, task, step) -> batch`` of the training data, as in `FinetuneTask`.
        predict: ``predict(model, batch) -> (scores, labels)``.
        batch_metric: The metric of scores and labels, whoever they are of; every call is a query of its ledger.
        metric: The metric of a model on the data that it is judged by; every call is a query of its ledger.
        loss: ``loss(model, batch) -> scalar``, what the model is trained with otherwise.
        validation: Labelled batches of the data that ``metric`` sees, for methods that look at more than its value.
        build: ``build(seed)`` returns an untrained model, for methods that train several.
        before: The model that this one is a copy of, as it was before any step; None of what is no copy.
    """

    model: nn.Module
    _: KW_ONLY
    trains: Trains
    batches: Batches
    predict: Predict
    batch_metric: BatchMetric
    metric: Metric
    loss: Loss
    validation: Batches | None = None
    build: Callable[[int], nn.Module] | None = None
    before: nn.Module | None = None

    def __post_init__(self) -> None:
        """Check that what is to be trained is there, and can be judged on a copy.

        Raises:
            ValueError: ``trains`` is neither ``"phi"`` nor ``"model"``.
            AdapterError: phi is to be trained without an adapter, or the weights under one, which freezes them.
            MetricError: The metric knows its model already, and so can't judge the copy that is trained.
        """
        if self.trains not in TRAINS:
            raise ValueError(f"trains is {self.trains!r}; it must be 'phi' or 'model'")
        if self.trains == "phi":
            Adapter(self.model)
        elif hasattr(self.model, CONTEXT_NAME):
            raise AdapterError(
                f"{type(self.model).__name__} has an adapter, which freezes its weights; remove or merge it first"
            )
        elif not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise AdapterError(f"{type(self.model).__name__} has no weights to train: all of them are frozen")
        if not all(map(takes_model, (self.metric.function, *self.metric.also.values()))):
            raise MetricError(
                f"metric {self.metric.name!r} takes no model; a sibling method trains a copy: let it take the model"
            )

    @classmethod
    def of(
        cls,
        task: FinetuneTask,
        *,
        trains: Trains = "phi",
        predict: Predict,
        batch_metric: BatchMetric,
        batches: Batches | None = None,
        validation: Batches | None = None,
        build: Callable[[int], nn.Module] | None = None,
    ) -> "TrainingTask":
        """Return a finetuning task as one for sibling methods, on a copy of its model at phi = 0.

        Args:
            task: Model, loss, batches and metric.
            trains: ``"phi"``, or ``"model"`` for all weights, from those of the model on; the copy then has no adapter.
            predict: ``predict(model, batch) -> (scores, labels)``.
            batch_metric: The metric of scores and labels.
            batches: Of the training data; by default the task's.
            validation: See `TrainingTask`.
            build: See `TrainingTask`.
        """
        if task.loss is None or task.batches is None:
            raise ValueError("the task has no loss, which this method trains by; give FinetuneTask loss= and batches=")
        copied = task.copied().adapter
        copied.set_phi(task.origin())
        return cls(
            copied.model if trains == "phi" else copied.remove(),
            trains=trains,
            batches=batches or task.batches,
            predict=predict,
            batch_metric=batch_metric,
            metric=task.metric,
            loss=task.loss,
            validation=validation,
            build=build,
        )

    def copied(self) -> "TrainingTask":
        """Return the same task on a copy of the model."""
        return replace(self, model=copy.deepcopy(self.model), before=self.model if self.before is None else self.before)

    def untrained(self, seed: int) -> "TrainingTask":
        """Return the same task on an untrained model, all of whose weights are trained.

        Raises:
            ValueError: ``build`` is missing.
        """
        if self.build is None:
            raise ValueError("build is None; an untrained model needs build(seed) -> model")
        return replace(self, model=self.build(seed), trains="model")

    def predicted(self, batch: Any, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Return what `predict` returns of a batch, unless NaN is among it that training has not brought about.

        Args:
            batch: The batch.
            model: What predicts; None for the task's model.

        Raises:
            DataError: A score is NaN, though no weight is, and was so before any step.
        """
        model = self.model if model is None else model
        scores, labels = self.predict(model, batch)
        if scores.isnan().any() and all(each.isfinite().all() for each in model.parameters()):
            if self.before is not None:
                with evaluating(self.before), torch.no_grad():
                    if not self.predict(self.before, batch)[0].isnan().any():
                        return scores, labels
            rows = int(scores.isnan().reshape(len(scores), -1).any(1).sum())
            raise DataError(
                f"the model's scores are NaN for {rows} of {counted(len(scores), 'example')} of a batch before any"
                f" step, in {scores.dtype}; leave out inputs that are NaN or infinite"
            )
        return scores, labels

    def check_precision(self) -> None:
        """Refuse weights in whose precision Adam divides 0 by 0, as its epsilon is 0 there.

        Raises:
            AdapterError: What is trained is of float16.
        """
        if any(parameter.dtype == torch.float16 for parameter in self.parameters()):
            raise AdapterError(
                f"the weights of {type(self.model).__name__} are torch.float16, in which Adam's steps are NaN; train"
                " them in torch.float32 or torch.bfloat16 (model.float())"
            )

    def parameters(self) -> list[nn.Parameter]:
        """Return what is trained: phi, or all weights that are not frozen."""
        if self.trains == "phi":
            return Adapter(self.model).parameters()
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def device(self) -> torch.device:
        """The device of what is trained."""
        return self.parameters()[0].device
