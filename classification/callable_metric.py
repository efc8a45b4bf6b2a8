"""A metric of a classifier that is a third-party function: scikit-learn's, torchmetrics' or one's own."""

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.classification.metrics import MetricSpec, binary_logit, check, decide
from metricopt_ext.errors import DataError
from metricopt_ext.tasks.own_metric import number_within

SCORES = re.compile(r"(^|_)(scores?|prob(a|as|s|abilit(y|ies))?)$", re.IGNORECASE)  # names of arguments
SCORED = re.compile(r"roc|auc|aupr|brier|log_?loss|average_precision|cross_?entropy|calibration|nll", re.IGNORECASE)
WEIGHTS = "sample_weight"  # what scikit-learn calls the weights of rows


def from_callable(
    fn: Callable[..., Any],
    *,
    maximize: bool,
    bounds: tuple[float, float] = (0.0, 1.0),
    name: str | None = None,
    scores: Literal["", "labels", "probabilities", "logits"] = "",
    columns: Sequence[str] = (),
    prepared: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> MetricSpec:
    """Make a metric from a third-party function.

    A torchmetrics function (or a ``functools.partial`` of one) or metric object is called as ``fn(preds, target)`` on
    tensors, and an object is reset around each call. Anything else is called like scikit-learn's metrics,
    ``fn(y_true, y_pred)`` on numpy arrays. Columns come after these two; see `_with_columns`.

    Args:
        fn: The function. It must return one finite number within ``bounds``.
        maximize: Whether larger is better.
        bounds: Smallest and largest value of the metric.
        name: Name of the metric; by default that of ``fn``.
        scores: What ``fn`` gets as predictions: the predicted classes (``n``), or the probabilities or logits
            (``n x c``; for two classes, ``n`` for class 1). Empty for classes, but probabilities where its name or an
            argument's says that it is of scores, as those of ``roc_auc_score(y_true, y_score)`` and ``log_loss`` do.
        columns: Names of further arrays of the same rows that ``fn`` gets, ``n`` each.
        prepared: Returns what ``fn`` gets as predictions and labels for logits and labels, in place of those of
            classes.

    Raises:
        ValueError: For unknown ``scores``, bounds out of order, or columns that ``fn`` has no arguments for.
        MetricError: From the metric, for a result that is not one number, not finite or out of bounds.
    """
    scores = scores or scores_of(fn)
    if scores not in ("labels", "probabilities", "logits"):
        raise ValueError(f"scores must be 'labels', 'probabilities' or 'logits', got {scores!r}")
    low, high = (float(bound) for bound in bounds)
    if not low < high:
        raise ValueError(f"bounds must be (smallest, largest), got {bounds}")
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    label = str(name or getattr(inner, "__name__", type(inner).__name__))
    torchmetrics = sys.modules.get("torchmetrics")  # a torchmetrics metric has imported it
    stateful = torchmetrics is not None and isinstance(fn, torchmetrics.Metric)
    takes_tensors = stateful or (getattr(inner, "__module__", None) or "").partition(".")[0] == "torchmetrics"

    def predictions(logits: Tensor, num_classes: int) -> Tensor:
        if scores == "labels":
            return decide(logits)
        if num_classes == 2:
            logit = binary_logit(logits)
            return logit.sigmoid() if scores == "probabilities" else logit
        return logits.double().softmax(1) if scores == "probabilities" else logits

    call = _with_columns(fn, label, columns, takes_tensors)

    def evaluate(predicted: Tensor, labels: Tensor, *own: npt.NDArray[Any]) -> Any:
        if not takes_tensors:
            # copies, as it may work in place
            return call(labels.numpy(force=True).copy(), predicted.numpy(force=True).copy(), *map(_copied, own))
        given = [_as_tensor(each, name).to(labels.device) for each, name in zip(own, columns, strict=True)]
        if not stateful:
            return call(predicted, labels, *given)
        metric: Any = fn
        metric.reset()
        metric.update(*(each.to(metric.device) for each in (predicted, labels, *given)))
        value = metric.compute()
        metric.reset()
        return value

    def function(logits: Tensor, labels: Tensor, *own: npt.NDArray[Any]) -> float:
        if prepared is None:
            logits, labels, num_classes = check(logits, labels)
            predicted = predictions(logits, num_classes)
        else:
            predicted, labels = prepared(logits, labels)
        return number_within(evaluate(predicted, labels, *own), (low, high), label)

    known = None if math.isinf(high - low) else (low, high)
    return MetricSpec(label, maximize, known, function, f"{label} of the {scores}", tuple(columns))


def scores_of(fn: Callable[..., Any]) -> Literal["labels", "probabilities"]:
    """Return what a function is of, by its name or its arguments': decided labels, or scores."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    try:
        arguments = list(inspect.signature(fn).parameters)[:2]
    except (TypeError, ValueError):  # a builtin may have no signature
        arguments = []
    name = getattr(fn, "__name__", type(fn).__name__)
    of_scores = SCORED.search(name) or any(map(SCORES.search, arguments))
    return "probabilities" if of_scores else "labels"


def _copied(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return column.copy()


def _as_tensor(column: npt.NDArray[Any], name: str) -> Tensor:
    if column.dtype == object:
        raise DataError(f"column {name!r} holds texts, and torchmetrics takes numbers; number them in the data")
    return torch.from_numpy(column.copy())


def _with_columns(
    fn: Callable[..., Any], label: str, columns: Sequence[str], takes_tensors: bool
) -> Callable[..., Any]:
    """Return what gives columns to a function: in their order, after labels and predictions.

    One that has no place for them may have arguments of their names, to be given by name, as scikit-learn's have
    ``sample_weight``; a single column is given as this, whatever its name.

    Raises:
        ValueError: It has no arguments for them.
    """
    if not columns or takes_tensors:
        return fn
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin may have none
        return fn
    by_name = {name: name for name in columns}
    if len(columns) == 1 and WEIGHTS in signature.parameters:
        by_name = {columns[0]: WEIGHTS}
    try:
        signature.bind(None, None, *columns)
        return fn
    except TypeError as error:
        try:
            signature.bind(None, None, **dict.fromkeys(by_name.values()))
        except TypeError:
            given = ", ".join(columns)
            raise ValueError(
                f"{label} is to be called as {label}(labels, predictions, {given}), but {error}; give it an argument"
                " for each of metric.columns"
            ) from error
    return lambda labels, predicted, *own: fn(labels, predicted, **dict(zip(by_name.values(), own, strict=True)))
