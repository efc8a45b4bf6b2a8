"""A metric of a classifier that is a third-party function: scikit-learn's, torchmetrics' or one's own."""

import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.classification.label_metrics import check_labels
from metricopt_ext.classification.metrics import MetricSpec, binary_logit, check
from metricopt_ext.classification.targets import Target
from metricopt_ext.errors import DataError
from metricopt_ext.experiment.own_metric import FEW, number_within
from metricopt_ext.utils.named import name_of, unbound
from metricopt_ext.utils.words import words_in

# Words of what is of scores, in a function's name and those of what it calls, and in its arguments' names.
SCORED = re.compile(
    r"\b((log|p)?auc(pr|roc)?|auroc|auprc?|roc|average precision|brier|calibration|cross ?entropy|n?dcg|ece|eer|gini"
    r"|hinge|ks|lift|log ?loss|nll|predict proba|ranking|top( k|[0-9]+)"
    r"|at (fixed|fpr|precision|recall|sensitivity|specificity))\b"
)
SCORES = re.compile(r"\b(confidences?|prob(a|as|s|ability|abilities)?|posteriors?|scores?)[0-9]*\b")
LOGITS = re.compile(r"\b(decision|logits?|margins?)\b")
TRUE = re.compile(r"\b(actual|expected|gt|labels?|targets?|true|truth|y)\b")
PREDICTED = re.compile(r"\b(hat|outputs?|pred|preds|predicted|predictions?|yhat)\b")
WEIGHTS = "sample_weight"  # what scikit-learn calls the weights of rows


def from_callable(
    fn: Callable[..., Any],
    *,
    maximize: bool,
    bounds: tuple[float, float] = (0.0, 1.0),
    name: str | None = None,
    scores: Literal["", "labels", "probabilities", "logits"] = "",
    columns: Sequence[str] = (),
    kind: str = "classes",
) -> MetricSpec:
    """Make a metric from a third-party function.

    A torchmetrics function (or a ``functools.partial`` of one) or metric object is called as ``fn(preds, target)`` on
    tensors, and an object is reset around each call. Anything else is called like scikit-learn's metrics,
    ``fn(y_true, y_pred)`` on numpy arrays; in the other order if its arguments are named so. Columns come after these
    two; see `_with_columns`.

    Args:
        fn: The function. It must return one finite number within ``bounds``.
        maximize: Whether larger is better.
        bounds: Smallest and largest value of the metric.
        name: Name of the metric; by default that of ``fn``.
        scores: What ``fn`` gets as predictions: the predicted classes (``n``), or the probabilities or logits
            (``n x c``; for two classes, ``n`` for class 1). Empty for what its name, its arguments' or what it calls
            says (`meaning_of`), and else for classes.
        columns: Names of further arrays of the same rows that ``fn`` gets, ``n`` each.
        kind: What is predicted (`targets.KINDS`); of several labels predictions and labels are ``n x k``.

    Raises:
        ValueError: For unknown ``scores``, bounds out of order, or columns that ``fn`` has no arguments for.
        MetricError: From the metric, for a result that is not one number, not finite or out of bounds.
    """
    unsure, scores = not (scores or meaning_of(fn)), scores or meaning_of(fn) or "labels"
    if scores not in ("labels", "probabilities", "logits"):
        raise ValueError(f"scores must be 'labels', 'probabilities' or 'logits', got {scores!r}")
    low, high = (float(bound) for bound in bounds)
    if not low < high:
        raise ValueError(f"bounds must be (smallest, largest), got {bounds}")
    label = name or name_of(fn)
    torchmetrics = sys.modules.get("torchmetrics")  # a torchmetrics metric has imported it
    stateful = torchmetrics is not None and isinstance(fn, torchmetrics.Metric)
    takes_tensors = stateful or (getattr(unbound(fn), "__module__", None) or "").partition(".")[0] == "torchmetrics"

    call = _with_columns(fn, label, columns, takes_tensors)
    first, second = [*map(words_in, _arguments(fn)), "", ""][:2]
    turned = any(each.search(first) for each in (PREDICTED, SCORES, LOGITS)) and TRUE.search(second)

    def evaluate(predicted: Tensor, labels: Tensor, *own: npt.NDArray[Any]) -> Any:
        if not takes_tensors:
            both = (each.numpy(force=True).copy() for each in ((predicted, labels) if turned else (labels, predicted)))
            return call(*both, *map(_copied, own))  # copies, as it may work in place
        given = [_as_tensor(each, name).to(labels.device) for each, name in zip(own, columns, strict=True)]
        if not stateful:
            return call(predicted, labels, *given)
        metric: Any = fn
        metric.reset()
        metric.update(*(each.to(metric.device) for each in (predicted, labels, *given)))
        value = metric.compute()
        metric.reset()
        return value

    def function(scores: str, logits: Tensor, labels: Tensor, *own: npt.NDArray[Any]) -> float:
        if kind == "multilabel":
            logits, labels = check_labels(logits, labels)
        else:
            logits, labels, num_classes = check(logits, labels)
            logits = binary_logit(logits) if num_classes == 2 and scores != "labels" else logits
        target = Target("multilabel" if logits.dim() == 1 else kind, 2)  # a single logit is one label's
        if scores != "logits":
            logits = target.decide(logits) if scores == "labels" else target.probabilities(logits)
        return number_within(evaluate(logits, labels, *own), (low, high), label)

    return MetricSpec(
        label,
        maximize,
        None if math.isinf(high - low) else (low, high),
        partial(function, scores),
        f"a function of the {scores}",
        tuple(columns),
        of_scores=partial(function, "probabilities") if unsure else None,
    )


def meaning_of(fn: Callable[..., Any]) -> Literal["", "labels", "probabilities", "logits"]:
    """Return what a function's predictions are by its name, its arguments' and what it calls; empty if these don't say.

    Examples:
        >>> meaning_of(lambda y_true, y_score: 0.0), meaning_of(lambda y_true, y_pred: 0.0)
        ('probabilities', '')
    """
    fn = inspect.unwrap(unbound(fn))
    called = fn if hasattr(fn, "__code__") or inspect.ismethod(fn) else type(fn).__call__
    names = words_in(" ".join([name_of(fn), *getattr(getattr(called, "__code__", None), "co_names", ())]))
    arguments = [*map(words_in, _arguments(fn))]
    if any(map(LOGITS.search, arguments)) or "hinge" in names.split():
        return "logits"
    if any(map(SCORES.search, arguments)) or SCORED.search(names):
        return "probabilities"
    return "labels" if arguments[1:] in (["labels"], ["classes"]) else ""


def _arguments(fn: Callable[..., Any]) -> list[str]:
    """Return the names of a function's first two arguments."""
    try:
        return list(inspect.signature(fn).parameters)[:2]
    except (TypeError, ValueError):  # a builtin may have no signature
        return []


def warn_of_scores(spec: MetricSpec, logits: Tensor, labels: Tensor, *columns: npt.NDArray[Any]) -> None:
    """Warn of a function that gets classes, and has several values of probabilities by which the same are decided.

    Args:
        spec: The metric.
        logits: Made-up outputs.
        labels: The labels.
        columns: What the metric is given besides.
    """
    some, rng, found = slice(None, None, len(labels) // FEW | 1), torch.Generator().manual_seed(0), set[float]()
    for of_scores in filter(None, [spec.of_scores] * 2):
        factor = 1 + torch.rand(len(logits), 1, generator=rng).to(logits)
        with suppress(Exception), warnings.catch_warnings():  # of one that takes classes alone
            warnings.simplefilter("ignore")
            found.add(of_scores((logits * factor)[some], labels[some], *(each[some] for each in columns)))
    if len(found) > 1:
        warnings.warn(
            f"{spec.name} gets the predicted classes, but has another value of probabilities; set metric.scores to"
            " labels or probabilities, or name its second argument labels or y_prob",
            stacklevel=1,
        )


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
