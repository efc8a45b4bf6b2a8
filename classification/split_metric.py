"""A metric on a part of the data, as the black box of a model."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from metricopt_ext.classification.metrics import MetricSpec, check_split
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError
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
    return spec.function(*_given(spec, logits, part, rows))


def _given(spec: MetricSpec, logits: Tensor, part: Split, rows: Tensor | None) -> tuple[Any, ...]:
    """Return what a metric's function takes: logits, labels and columns, of some rows or all."""
    columns = [part.columns[name] for name in spec.columns]
    if rows is None:
        return logits, part.y, *columns
    places = rows.numpy(force=True)
    return logits[rows], part.y[rows], *(column[places] for column in columns)


def told_by(spec: MetricSpec, logits: Tensor, part: Split, halves: Sequence[Tensor] | str = ()) -> dict[str, Any]:
    """Return a metric's value by its name, or what it is made of by theirs, each with its values on two halves.

    Args:
        spec: The metric.
        logits: Those of the whole part, ``n`` or ``n x c``.
        part: Inputs, labels and columns.
        halves: See `model_metric`.
    """
    if spec.outcomes is None:
        return {spec.name: with_halves(lambda half: value_of(spec, logits, part, half), halves)}
    whole = spec.outcomes.values(*_given(spec, logits, part, None))
    if isinstance(halves, str) or not len(halves):
        return {name: (value, halves or None) for name, value in whole.items()}
    each = [spec.outcomes.values(*_given(spec, logits, part, half)) for half in halves]
    return {name: (value, tuple(half.get(name, math.nan) for half in each)) for name, value in whole.items()}


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

    Raises:
        ConfigError: A constraint has the name of what the metric is made of.
    """
    also, subject_to = also or {}, subject_to or {}
    bounded = {name: each for name, each in also.items() if name in subject_to}
    if spec.outcomes is not None and (both := bounded.keys() & set(spec.outcomes.names)):
        raise ConfigError(f"metric.subject_to has {min(both)!r}, which is what one of {spec.name}'s outcomes is called")

    def function(model: nn.Module) -> Any:
        logits = predict(model, part.x)
        others = {name: value_of(each, logits, part) for name, each in bounded.items()}
        return told_by(spec, logits, part, halves) | others

    def alone(other: MetricSpec) -> Callable[[nn.Module], float]:
        return lambda model: value_of(other, predict(model, part.x), part)

    return Metric(
        function,
        maximize=spec.maximize,
        bounds=spec.bounds,
        name=spec.name,
        also={name: alone(each) for name, each in also.items() if name not in bounded},
        subject_to=subject_to,
        combine=None if spec.outcomes is None else "worst",
    )


def batch_metric(spec: MetricSpec) -> BatchMetric:
    """Make the black box of a batch's scores and labels."""
    return BatchMetric(
        spec.function, maximize=spec.maximize, bounds=spec.bounds, name=spec.name, arguments=spec.arguments
    )
