"""A metric on a part of the data, as the black box of a model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from metricopt_ext.classification.metrics import MetricSpec, check_split
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import DataError
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.tasks.halved import with_halves
from metricopt_ext.tasks.metric import Metric


def check_part(part: Split, target: Target, name: str) -> None:
    """Make sure that a metric is meaningful on a part's labels (see `check_split`).

    Raises:
        DataError: It has one class, or no label.
    """
    if target.kind == "multilabel":
        if not bool((part.y == 1).any()):
            raise DataError(f"no example of the {name} split has a label")
    else:
        check_split(part.y, target.count, name)


def value_of(spec: MetricSpec, logits: Tensor, part: Split, rows: Tensor | None = None) -> float:
    """Return a metric's value on a part of the data, or on some rows of it.

    Args:
        spec: The metric; it is given what ``spec.columns`` names of the part's columns, of the same rows.
        logits: Those of the whole part, ``n`` or ``n x c``.
        part: Inputs, labels and columns.
        rows: Indices, which may repeat; None for all rows.
    """
    columns = [part.columns[name] for name in spec.columns]
    if rows is None:
        return spec.function(logits, part.y, *columns)
    places = rows.numpy(force=True)
    return spec.function(logits[rows], part.y[rows], *(column[places] for column in columns))


def model_metric(
    spec: MetricSpec,
    part: Split,
    halves: Sequence[Tensor] | str = (),
    *,
    also: Mapping[str, MetricSpec] | None = None,
    subject_to: Mapping[str, str] | None = None,
) -> Metric:
    """Make the black box: a classifier's metric on one part of the data.

    Args:
        spec: The metric.
        part: Inputs and labels.
        halves: Indices of two halves of them, for a metric that also reports its value on each, or why there are
            none; empty for one that does not.
        also: What counts besides, by name (`Metric`).
        subject_to: Constraints on it, which are told at every query, by the same logits.
    """
    also, subject_to = also or {}, subject_to or {}
    bounded = {name: each for name, each in also.items() if name in subject_to}

    def function(model: nn.Module) -> Any:
        logits = predict(model, part.x)
        value = with_halves(lambda half: value_of(spec, logits, part, half), halves)
        others = {name: value_of(each, logits, part) for name, each in bounded.items()}
        return {spec.name: value, **others} if others else value

    def alone(other: MetricSpec) -> Callable[[nn.Module], float]:
        return lambda model: value_of(other, predict(model, part.x), part)

    return Metric(
        function,
        maximize=spec.maximize,
        bounds=spec.bounds,
        name=spec.name,
        also={name: alone(each) for name, each in also.items() if name not in bounded},
        subject_to=subject_to,
    )


def batch_metric(spec: MetricSpec) -> BatchMetric:
    """Make the black box of a batch's scores and labels."""
    return BatchMetric(
        spec.function, maximize=spec.maximize, bounds=spec.bounds, name=spec.name, arguments=spec.arguments
    )
