"""Metrics of several labels each, by name; those of classes are in `metrics`.

They share the signature of those, ``function(logits, labels) -> float``; `targets` says what logits and labels are.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from metricopt_ext.classification.metrics import MetricSpec, _average_precision
from metricopt_ext.errors import ConfigError, DataError

NAMES = "micro_f1, macro_f1, samples_f1 (or micro_f2, macro_f0.5, ...), map, subset_accuracy, hamming_loss"
_F_BETA = re.compile(r"(micro|macro|samples)_f([0-9]+(?:\.[0-9]+)?)")


def label_metric(name: str, key: str = "metric.name") -> MetricSpec:
    """Return a metric of several labels by its name.

    Args:
        name: One of `NAMES`.
        key: The key that has the name, for the message.

    Raises:
        ConfigError: There is no such metric.
    """
    found = _F_BETA.fullmatch(name)
    if found is not None and float(found[2]) > 0:
        mean, beta = found[1], float(found[2])
        said = {"micro": "over all labels of all examples", "macro": "the mean over labels"}
        return _spec(
            name,
            lambda logits, labels: _f_beta(logits > 0, labels == 1, mean, beta),
            f"F-measure with beta {beta:g}, {said.get(mean, 'the mean over examples')}",
        )
    if name == "map":
        return _spec(name, _mean_average_precision, "average precision, the mean over labels that have examples")
    if name == "subset_accuracy":
        return _spec(
            name,
            lambda logits, labels: float(((logits > 0) == (labels == 1)).all(1).double().mean()),
            "share of examples all of whose labels are right",
        )
    if name == "hamming_loss":
        return _spec(
            name,
            lambda logits, labels: float(((logits > 0) != (labels == 1)).double().mean()),
            "share of labels that are wrong",
            maximize=False,
        )
    raise ConfigError(
        f"{key}={name!r} is none of data.kind=multilabel: {NAMES}; name your own function as MODULE:FUNCTION"
    )


def _spec(
    name: str, function: Callable[[Tensor, Tensor], float], description: str, *, maximize: bool = True
) -> MetricSpec:
    """A metric whose function gets double logits, and labels on their device, that fit together."""

    def checked(logits: Tensor, labels: Tensor) -> float:
        logits, labels = check_labels(logits, labels)
        return function(logits.double(), labels)

    return MetricSpec(name, maximize, (0.0, 1.0), checked, description)


def check_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both without gradients and on one device; what does not fit together is refused.

    Raises:
        DataError: For an empty set, another shape or type, NaN, or labels out of range.
    """
    logits, labels = logits.detach(), labels.to(logits.device)
    if len(labels) == 0:
        raise DataError("a metric needs at least one example, got an empty set")
    if logits.dim() != 2 or len(logits) != len(labels) or not logits.is_floating_point():
        raise DataError(f"outputs must be floats, {len(labels)} x k, got {logits.dtype} of {tuple(logits.shape)}")
    if bool(logits.isnan().any()):
        raise DataError(f"logits must not be NaN, got NaN in {int(logits.isnan().any(1).sum())} of {len(labels)} rows")
    if labels.shape != logits.shape or not bool(((labels == 0) | (labels == 1)).all()):
        raise DataError(f"labels must be 0 and 1 of shape {tuple(logits.shape)}, got {tuple(labels.shape)}")
    return logits, labels


def _f_beta(predicted: Tensor, true: Tensor, mean: str, beta: float) -> float:
    """The F-measure of booleans ``n x k``; of nothing predicted and nothing there it is 0, as in scikit-learn."""
    hits, guessed, actual = (each.double() for each in (predicted & true, predicted, true))
    dims = {"micro": (0, 1), "macro": (0,), "samples": (1,)}[mean]
    above = (1 + beta**2) * hits.sum(dims)
    below = beta**2 * actual.sum(dims) + guessed.sum(dims)
    return float(torch.where(below > 0, above / below.clamp(min=1e-300), 0).mean())


def _mean_average_precision(logits: Tensor, labels: Tensor) -> float:
    present = (labels == 1).any(0)
    if not bool(present.any()):
        raise DataError("map needs an example of a label, got labels that are all 0")
    return float(_average_precision(logits.T[present], (labels == 1).T[present]).mean())
