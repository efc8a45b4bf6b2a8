"""Metrics of a classifier, computed from its logits.

`METRICS` holds the built-in ones by name; `expected_cost` builds one from a cost matrix. They all share one signature,
``function(logits, labels) -> float``, where the logits are ``n x c`` (c classes), or ``n`` for a binary classifier with
one logit (class 1 if it is above 0), and the labels are ``n`` integers in 0..c-1. Two columns count as binary, with
class 1 the positive one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.classification.outcomes import Outcomes, Ratio
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.utils.words import brief

# Why not scikit-learn: its values are the same, the tests hold, with ties, absent classes and a single one. (Its top-5
# accuracy decides ties otherwise. Its areas under curves are 0 or NaN without positives or negatives, an error here.)
# But a query on 5,000 examples of 10 classes by a small network, on one core, takes 9 ms in place of 3 for the
# F-measure, and 73 ms in place of 12 for the area under the ROC curve. Logits on a GPU would be copied, too.

MetricFunction = Callable[..., float]

RowFunction = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> a value of each row, ``n`` float64

Matrix = Tensor | npt.NDArray[Any] | Sequence[Any]


@dataclass(frozen=True)
class MetricSpec:
    """A metric and what an optimiser must know about it.

    Attributes:
        name: Name shown to users.
        maximize: Whether larger is better.
        bounds: Smallest and largest value the metric can take; None if there are none.
        function: ``function(logits, labels) -> float``, with logits ``n x c`` or ``n``, and labels ``n``. It raises
            `DataError` on an empty set, unequal lengths, NaN logits and labels outside 0..c-1. One with ``columns`` is
            called as ``function(logits, labels, *columns)``.
        description: One line for help texts.
        columns: Names of the further arrays of the same rows that the function takes, in order; see `Split.columns`.
        arguments: What makes it this metric besides its name, such as its costs; JSON.
        of_scores: The same function of probabilities in place of the predicted classes, where nothing tells which of
            them it is meant to get; None where something does.
        ratio: The same as a ratio of sums over rows; None if it is none.
        outcomes: What it is the worst of; None of a metric that is not made of outcomes.
    """

    name: str
    maximize: bool
    bounds: tuple[float, float] | None
    function: MetricFunction
    description: str
    columns: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    of_scores: MetricFunction | None = None
    ratio: Ratio | None = None
    outcomes: Outcomes | None = None


def check(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
    """Validate one call; returns the detached logits, int64 labels on the same device, and the number of classes."""
    logits = logits.detach()
    if not logits.is_floating_point() or logits.ndim not in (1, 2) or (logits.ndim == 2 and logits.shape[1] < 2):
        raise DataError(
            f"logits must be floats of shape n (binary) or n x c with c >= 2, "
            f"got {logits.dtype} of shape {tuple(logits.shape)}"
        )
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise DataError(f"labels must be n integers, got {labels.dtype} of shape {tuple(labels.shape)}")
    if len(logits) != len(labels):
        raise DataError(f"logits and labels must have one row per example, got {len(logits)} and {len(labels)} rows")
    if len(labels) == 0:
        raise DataError("a metric needs at least one example, got an empty set")
    labels = labels.to(logits.device, torch.int64)
    num_classes = logits.shape[1] if logits.ndim == 2 else 2
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= num_classes:
        raise DataError(f"labels must be in 0..{num_classes - 1}, got {low if low < 0 else high}")
    invalid = torch.isnan(logits)
    if invalid.any():
        rows = invalid if logits.ndim == 1 else invalid.any(1)
        raise DataError(f"logits must not be NaN, got NaN in {int(rows.sum())} of {len(logits)} rows")
    return logits, labels, num_classes


def decide(logits: Tensor) -> Tensor:
    """Return the class that is predicted of each example, ``n``."""
    return logits.argmax(1) if logits.ndim == 2 else (logits > 0).long()


def binary_logit(logits: Tensor) -> Tensor:
    """The log-odds of class 1, as n float64, from n or n x 2 logits."""
    logits = logits.double()
    return logits if logits.ndim == 1 else logits[:, 1] - logits[:, 0]


def _counts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """True positives, predictions and examples of each class: three tensors of c float64."""
    logits, labels, num_classes = check(logits, labels)
    predicted = decide(logits)
    hits = labels[predicted == labels]
    tp, guessed, actual = (torch.bincount(v, minlength=num_classes).double() for v in (hits, predicted, labels))
    return tp, guessed, actual


# Numerator and denominator, ``c`` each, by the true positives, the predictions and the examples of each class.
RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "recall": lambda tp, guessed, actual: (tp, actual),
    "precision": lambda tp, guessed, actual: (tp, guessed),
    "f1": lambda tp, guessed, actual: (2 * tp, guessed + actual),
    "jaccard": lambda tp, guessed, actual: (tp, guessed + actual - tp),
}


def ratio_of(name: str, number: int, logits: Tensor, labels: Tensor) -> float:
    """Return one of `RATIOS` of one class; 0 where it has no denominator."""
    numerator, denominator = RATIOS[name](*(counts[number] for counts in _counts(logits, labels)))
    return float(numerator / denominator.clamp(min=1))


def _of_two(name: str, logits: Tensor, labels: Tensor) -> float:
    _check_two(name, logits)
    return ratio_of(name, 1, logits, labels)


def _check_two(name: str, logits: Tensor) -> None:
    if logits.ndim == 2 and logits.shape[1] != 2:
        raise DataError(
            f"{name} of a positive class is for two classes, got {logits.shape[1]}; f1 and balanced_accuracy are for"
            " more, and in groups accuracy, mcr and expected_cost"
        )


def _positive_ratio(name: str) -> Ratio:
    """Return one of `RATIOS` of class 1 as a ratio of sums over rows."""

    def terms(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        _check_two(name, logits)
        logits, labels, _ = check(logits, labels)
        guessed, actual = (decide(logits) == 1).double(), (labels == 1).double()
        return RATIOS[name](guessed * actual, guessed, actual)

    return Ratio(terms, "alone" if name == "recall" else "needed")


def _positive_or_macro(name: str, logits: Tensor, labels: Tensor) -> float:
    """The ratio of class 1 if there are two classes, else its mean over the classes where it is defined."""
    two = logits.ndim == 1 or logits.shape[-1] == 2
    return ratio_of(name, 1, logits, labels) if two else _macro_of(name, logits, labels)


def _macro_of(name: str, logits: Tensor, labels: Tensor) -> float:
    return macro(*RATIOS[name](*_counts(logits, labels)))


def macro(numerator: Tensor, denominator: Tensor) -> float:
    """Return the mean of ratios, ``c`` by ``c``, over the classes where they are defined: the denominator is not 0."""
    defined = denominator > 0
    return float((numerator[defined] / denominator[defined]).mean())


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels, _ = check(logits, labels)
    return (decide(logits) == labels).double()


def _wrong(logits: Tensor, labels: Tensor) -> Tensor:
    return 1 - _right(logits, labels)


def _mean(of_rows: RowFunction, logits: Tensor, labels: Tensor) -> float:
    return float(of_rows(logits, labels).mean())


def _mean_ratio(of_rows: RowFunction) -> Ratio:
    """Return the mean of rows' values as a ratio of sums."""

    def terms(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        values = of_rows(logits, labels)
        return values, torch.ones_like(values)

    return Ratio(terms)


def _top5_accuracy(logits: Tensor, labels: Tensor) -> float:
    logits, labels, num_classes = check(logits, labels)
    if num_classes <= 5:
        raise DataError(f"top5_accuracy needs more than 5 classes, got {num_classes}, of which 5 are always right")
    true = logits.gather(1, labels.unsqueeze(1))
    earlier = torch.arange(num_classes, device=labels.device) < labels.unsqueeze(1)
    rank = ((logits > true) | ((logits == true) & earlier)).sum(1)  # of equal logits the first, as for accuracy
    return float((rank < 5).double().mean())


def _scores(logits: Tensor, name: str) -> Tensor:
    """Log-odds of class 1, ``1 x n``, from n or n x 2 logits, or log-probabilities of each class, ``c x n``."""
    several = logits.ndim == 2 and logits.shape[1] > 2
    scores = logits.double().log_softmax(1).T if several else binary_logit(logits).unsqueeze(0)
    if rows := int(scores.isnan().any(0).sum()):  # of infinities, whose difference is none
        raise DataError(f"{name} orders examples by their logits, got infinite ones in {rows} of {len(logits)} rows")
    return scores


def _average_precision(scores: Tensor, positive: Tensor) -> Tensor:
    """Average precision of each row: k values from k x n scores and k x n booleans, each row with a True.

    The sum over distinct thresholds of (increase in recall) x (precision), so tied scores count as one threshold.
    """
    scores, order = scores.sort(descending=True)
    tp = positive.gather(1, order).cumsum(1)
    threshold = torch.ones_like(positive)
    threshold[:, :-1] = scores[:, :-1] != scores[:, 1:]
    reached = torch.where(threshold, tp, 0).cummax(1).values
    gained = reached.diff(dim=1, prepend=torch.zeros_like(reached[:, :1]))
    rank = torch.arange(1, tp.shape[1] + 1, device=tp.device)
    return (gained * tp.double() / rank).sum(1) / tp[:, -1]


def _aucpr(logits: Tensor, labels: Tensor) -> float:
    logits, labels, num_classes = check(logits, labels)
    if num_classes == 2:
        if not labels.any():
            raise DataError("aucpr needs an example of the positive class, got labels that are all 0")
        return float(_average_precision(_scores(logits, "aucpr"), labels.bool().unsqueeze(0)))
    present = torch.bincount(labels).nonzero().flatten()
    scores = _scores(logits, "aucpr")[present]
    return float(_average_precision(scores, labels == present.unsqueeze(1)).mean())


def _roc(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """False and true positive rates, each k x (n + 1) from 0 to 1, as the threshold falls below one score more.

    Tied scores count as one threshold: the rates stay where they were until the last of them.

    Args:
        scores: ``k x n``.
        positive: ``k x n`` booleans, each row with a True and a False.
    """
    scores, order = scores.sort(descending=True)
    hits = positive.gather(1, order)
    threshold = torch.ones_like(hits)
    threshold[:, :-1] = scores[:, :-1] != scores[:, 1:]
    counts = torch.stack([(~hits).cumsum(1), hits.cumsum(1)])
    reached = torch.where(threshold, counts, 0).cummax(2).values.double()
    rates = torch.nn.functional.pad(reached / counts[..., -1:], (1, 0))
    return rates[0], rates[1]


def _over_rocs(logits: Tensor, labels: Tensor, name: str, value: Callable[[Tensor, Tensor], Tensor]) -> float:
    """A value of the ROC curve, ``k``, of class 1 if there are two classes, else its mean over those present."""
    logits, labels, num_classes = check(logits, labels)
    present = torch.bincount(labels, minlength=num_classes).nonzero().flatten()
    if len(present) < 2:
        raise DataError(f"{name} needs examples of two classes, got labels that are all {int(labels[0])}")
    if num_classes == 2:
        return float(value(*_roc(_scores(logits, name), labels.bool().unsqueeze(0))))
    scores = _scores(logits, name)[present]
    return float(value(*_roc(scores, labels == present.unsqueeze(1))).mean())


def _auc(logits: Tensor, labels: Tensor) -> float:
    area = _over_rocs(logits, labels, "auc", lambda fpr, tpr: torch.trapezoid(tpr, fpr))
    return min(area, 1.0)


def _equal_error_rate(fpr: Tensor, tpr: Tensor) -> Tensor:
    """The rate, ``k``, at which false positives and false negatives are equal, on the lines between thresholds."""
    excess = 1 - tpr - fpr  # falls from 1 to -1
    after = (excess <= 0).int().argmax(1, keepdim=True)
    before = after - 1
    high, low = excess.gather(1, before), excess.gather(1, after)
    start, end = fpr.gather(1, before), fpr.gather(1, after)
    return (start + high / (high - low) * (end - start)).squeeze(1)


def _eer(logits: Tensor, labels: Tensor) -> float:
    return _over_rocs(logits, labels, "eer", _equal_error_rate)


def _mcc(logits: Tensor, labels: Tensor) -> float:
    tp, guessed, actual = _counts(logits, labels)
    n = actual.sum()
    spread = (n**2 - guessed.square().sum()) * (n**2 - actual.square().sum())
    if spread == 0:  # one class alone is guessed, or true
        return 0.0
    return float(((tp.sum() * n - guessed @ actual) / spread.sqrt()).clamp(-1, 1))


_OVER_CLASSES = "over the classes that are present or predicted, two included"
_PER_CLASS = "with 3 or more classes macro, the mean over the classes present"

_LOWER = ("mcr", "eer")
_KNOWN: dict[str, tuple[MetricFunction, str]] = {
    "mcr": (partial(_mean, _wrong), "misclassification rate"),
    "accuracy": (partial(_mean, _right), "share of examples classified correctly"),
    "top5_accuracy": (
        _top5_accuracy,
        "share of examples whose class is among the 5 of the largest logits; for 6 or more classes",
    ),
    "recall": (partial(_of_two, "recall"), "share of the positive class's examples that are found; for two classes"),
    "precision": (
        partial(_of_two, "precision"),
        "share of what is predicted as the positive class that is of it, 0 if nothing is; for two classes",
    ),
    "f1": (partial(_positive_or_macro, "f1"), f"F-measure of the positive class; {_PER_CLASS}"),
    "macro_f1": (partial(_macro_of, "f1"), f"mean F-measure {_OVER_CLASSES}"),
    "jaccard": (
        partial(_positive_or_macro, "jaccard"),
        f"TP / (TP + FP + FN) of the positive class; {_PER_CLASS}",
    ),
    "mean_iou": (partial(_macro_of, "jaccard"), f"mean TP / (TP + FP + FN) {_OVER_CLASSES}"),
    "aucpr": (
        _aucpr,
        f"area under the precision-recall curve (average precision); {_PER_CLASS}, each against the rest",
    ),
    "auc": (_auc, f"area under the ROC curve; {_PER_CLASS}, each against the rest"),
    "eer": (
        _eer,
        "equal error rate, where as large a share of negatives is accepted as of positives rejected;"
        f" {_PER_CLASS}, each against the rest",
    ),
    "mcc": (_mcc, "Matthews correlation of true and predicted classes"),
    "balanced_accuracy": (partial(_macro_of, "recall"), "mean (macro) recall over the classes that have examples"),
}
_OF_ROWS = {
    "mcr": _mean_ratio(_wrong),
    "accuracy": _mean_ratio(_right),
    **{name: _positive_ratio(name) for name in RATIOS},
}
# Those that have a value in any group of rows.
GROUPED = (*_OF_ROWS, "expected_cost")
METRICS = {
    name: MetricSpec(
        name, name not in _LOWER, (-1.0 if name == "mcc" else 0.0, 1.0), function, said, ratio=_OF_ROWS.get(name)
    )
    for name, (function, said) in _KNOWN.items()
}


def worst_of(
    spec: MetricSpec, groups: Callable[..., Tensor], names: Sequence[str], name: str, said: str, *columns: str
) -> MetricSpec:
    """Return the metric that is the worst of another's values in groups of rows.

    Args:
        spec: The other, which has a ratio.
        groups: See `Outcomes`.
        names: The groups' names; empty where they go by their numbers.
        name: The metric's name.
        said: What it is.
        columns: Names of what ``groups`` takes after the labels.
    """
    assert spec.ratio is not None
    outcomes, combination = Outcomes(spec.ratio, groups, tuple(names)), Combination("worst", -1 if spec.maximize else 1)

    def function(logits: Tensor, labels: Tensor, *given: Any) -> float:
        if not (values := outcomes.values(logits, labels, *given)):
            raise DataError(f"{name} needs a group with an example of the positive class, got none")
        return float(combination.value(torch.tensor([*values.values()], dtype=torch.float64)))

    return MetricSpec(name, spec.maximize, spec.bounds, function, said, columns, outcomes=outcomes)


def worst_recall(classes: Sequence[str] = ()) -> MetricSpec:
    """Return the lowest recall, of classes that have these names; empty for their numbers."""
    # A class's recall is the accuracy on its rows.
    said = "lowest recall among the classes that have examples"
    return worst_of(METRICS["accuracy"], lambda labels: labels, classes, "worst_recall", said)


METRICS["worst_recall"] = worst_recall()


SHOWN = 20  # classes that a line names
# Those of which one of two classes is the positive one, so that they have another value if it is the other.
OF_POSITIVE = frozenset({*RATIOS, "aucpr"})
# Names of two classes, in lower case, that say which of them is the positive one.
TELLING = {
    *(("0", "1"), ("0.0", "1.0"), ("-1", "1"), ("false", "true"), ("f", "t"), ("no", "yes"), ("n", "y")),
    *(("negative", "positive"), ("neg", "pos")),
}


def check_classes(metrics: Sequence[str], classes: Sequence[str], positive: str) -> str:
    """Return a line on the order of the classes for metrics whose values depend on it, where their names don't say it.

    Args:
        metrics: What is judged, by a config's names.
        classes: The classes' names, in their order.
        positive: The one that is set as the positive one of two; empty if none is.

    Raises:
        ConfigError: A metric is of the positive class of two, and nothing tells which that is.
    """
    told = bool(positive) or len(classes) != 2 or tuple(map(str.lower, classes)) in TELLING
    if not told and (concerned := [name for name in metrics if name in OF_POSITIVE]):
        raise ConfigError(
            f"metric {concerned[0]} is of the positive class, and nothing tells whether that is {classes[0]!r} or"
            f" {classes[1]!r}; set data.positive to its name"
        )
    ordered = [name for name in metrics if name == "expected_cost" or ":" in name]
    if not ordered or list(classes) == [*map(str, range(len(classes)))]:
        return ""
    shown = ", ".join(f"{number} {name!r}" for number, name in enumerate(classes[:SHOWN]))
    more = ", ..." if len(classes) > SHOWN else "" if told else "; data.positive names another as class 1"
    return f"{ordered[0]} has the classes in the order {shown}{more}"


def expected_cost(costs: Matrix) -> MetricSpec:
    """The mean cost of the decisions, to be minimised.

    Args:
        costs: ``c x c``, the cost of each ``[true class, predicted class]``; finite and not all equal.

    Returns:
        The metric, with bounds (smallest cost, largest cost).

    Raises:
        ValueError: For costs of the wrong shape or range.
        DataError: From the metric, for logits with another number of classes.
    """
    try:
        cost = torch.as_tensor(costs, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"costs must be an array of numbers, got {brief(costs)}") from error
    if cost.ndim != 2 or cost.shape[0] != cost.shape[1] or len(cost) < 2:
        raise ValueError(
            f"costs must be c x c with c >= 2, a row for each true class and a column for each predicted one, got shape"
            f" {tuple(cost.shape)}"
        )
    if not cost.isfinite().all():
        raise ValueError(f"costs must be finite, got {cost.tolist()}")
    bounds = float(cost.min()), float(cost.max())
    if bounds[0] == bounds[1]:
        raise ValueError(f"costs must differ from each other, got {bounds[0]} everywhere")

    def paid(logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels, num_classes = check(logits, labels)
        if num_classes != len(cost):
            raise DataError(f"costs are for {len(cost)} classes, got logits of {num_classes}")
        return cost.to(labels.device)[labels, decide(logits)]

    def function(logits: Tensor, labels: Tensor) -> float:
        return min(max(_mean(paid, logits, labels), bounds[0]), bounds[1])

    said, arguments = "mean of costs[true class][predicted class]", {"costs": cost.tolist()}
    return MetricSpec("expected_cost", False, bounds, function, said, arguments=arguments, ratio=_mean_ratio(paid))


def check_split(labels: Tensor, num_classes: int, where: str = "validation") -> None:
    """Make sure that a metric is meaningful on these labels.

    Args:
        labels: ``n`` integers in 0..num_classes-1.
        num_classes: Number of classes, 2 or more.
        where: Name of the split, for the message.

    Raises:
        DataError: If the split is empty, holds a label out of range or a single class.
    """
    if len(labels) == 0:
        raise DataError(f"the {where} split is empty; it must hold examples of at least two classes")
    present = sorted(set(labels.tolist()))
    if present[0] < 0 or present[-1] >= num_classes:
        wrong = present[0] if present[0] < 0 else present[-1]
        raise DataError(f"the {where} split must have labels in 0..{num_classes - 1}, got {wrong}")
    if len(present) == 1:
        raise DataError(f"the {where} split must hold at least two classes, got only class {present[0]}")
