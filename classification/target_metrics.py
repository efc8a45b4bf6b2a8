"""Metrics of several labels, ranks and quantities, by name; those of classes are in `metrics`.

They share the signature of those, ``function(logits, labels) -> float``; `targets` says what logits and labels are.
"""

import math
import re
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.classification.metrics import METRICS, MetricSpec, _average_precision, macro
from metricopt_ext.classification.segmentation import boundary_f
from metricopt_ext.classification.targets import IGNORED, Target
from metricopt_ext.errors import ConfigError, DataError

# Those of classes that need decisions alone, which ranks have too.
OF_RANKS = ("accuracy", "mcr", "mcc", "balanced_accuracy", "worst_recall", "macro_f1", "mean_iou")
NAMES = {
    "multilabel": "micro_f1, macro_f1, samples_f1 (or micro_f2, macro_f0.5, ...), map, subset_accuracy, hamming_loss",
    "ordinal": f"quadratic_kappa, linear_kappa, rank_error, {', '.join(OF_RANKS)}",
    "segmentation": "mean_iou, boundary_f, pixel_accuracy",
    "regression": "mae, rmse, r2, pinball_0.9 (or pinball_0.5, ...), spearman, kendall, pearson",
}
_F_BETA = re.compile(r"(micro|macro|samples)_f([0-9]+(?:\.[0-9]+)?)")
_PINBALL = re.compile(r"pinball_(0?\.[0-9]+)")


def target_metric(name: str, kind: str) -> MetricSpec:
    """Return a metric of several labels, of ranks or of quantities by its name.

    Args:
        name: One of `NAMES`.
        kind: ``"multilabel"``, ``"ordinal"``, ``"regression"`` or ``"segmentation"``.

    Raises:
        ConfigError: There is no such metric of this kind.
    """
    makers = {"multilabel": _of_labels, "ordinal": _of_ranks, "regression": _of_quantities, "segmentation": _of_pixels}
    found = makers[kind](name)
    if found is None:
        raise ConfigError(
            f"metric.name={name!r} is none of data.kind={kind}: {NAMES[kind]}; name your own function as"
            " MODULE:FUNCTION"
        )
    return found


def check_rows(target: Target, logits: Tensor, labels: Tensor) -> None:
    """Reject outputs and labels that do not fit together, before a metric is computed of them.

    Args:
        target: What is predicted.
        logits: ``n x c``, or ``n`` for a single output.
        labels: As `targets` has them.

    Raises:
        DataError: For an empty set, another shape or type, NaN, or labels out of range.
    """
    wanted = {
        "multilabel": (len(labels), target.count),
        "ordinal": (len(labels), target.outputs),
        "regression": (len(labels),),
        "segmentation": (len(labels), target.count, *labels.shape[1:]),
    }[target.kind]
    shape = logits.squeeze(-1).shape if target.kind == "regression" and logits.dim() == 2 else logits.shape
    if len(labels) == 0:
        raise DataError("a metric needs at least one example, got an empty set")
    if tuple(shape) != wanted or not logits.is_floating_point():
        raise DataError(f"outputs must be floats of shape {wanted}, got {logits.dtype} of {tuple(logits.shape)}")
    if bool(logits.isnan().any()):
        rows = int(logits.reshape(len(labels), -1).isnan().any(1).sum())
        raise DataError(f"logits must not be NaN, got NaN in {rows} of {len(labels)} rows")
    if target.kind == "multilabel" and (
        labels.shape != logits.shape or not bool(((labels == 0) | (labels == 1)).all())
    ):
        raise DataError(f"labels must be 0 and 1 of shape {wanted}, got {tuple(labels.shape)}")
    if target.kind in ("ordinal", "regression") and labels.dim() != 1:
        raise DataError(f"labels must be of shape {(len(labels),)}, one for each example, got {tuple(labels.shape)}")
    if target.kind == "regression" and not bool(labels.isfinite().all()):
        wrong = int((~labels.isfinite()).sum())
        raise DataError(f"targets must be finite, got NaN or infinity in {wrong} of {len(labels)}")
    if target.kind == "ordinal" and not (int(labels.min()) >= 0 and int(labels.max()) < target.count):
        raise DataError(f"ranks must be in 0..{target.count - 1}, got {int(labels.min())} to {int(labels.max())}")


def target_of(kind: str, logits: Tensor) -> Target:
    """Return what outputs, ``n x c`` or ``n``, predict."""
    width = logits.shape[1] if logits.dim() >= 2 else 1
    return Target(kind, {"multilabel": width, "ordinal": width + 1, "segmentation": width}.get(kind, 1))


def prepared_by(kind: str, scores: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return what makes predictions for a function of one's own: decisions, probabilities or logits (`scores`)."""

    def prepared(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = logits.detach(), labels.to(logits.device)
        target = target_of(kind, logits)
        check_rows(target, logits, labels)
        if scores == "labels":
            decided = target.decide(logits)
            return decided.double() if kind == "regression" else decided, labels
        return target.probabilities(logits) if scores == "probabilities" else logits, labels

    return prepared


def _checked(kind: str, function: Callable[[Tensor, Tensor], float]) -> Callable[[Tensor, Tensor], float]:
    """Have a function get double logits, and labels on their device, that fit together."""

    def checked(logits: Tensor, labels: Tensor) -> float:
        logits, labels = logits.detach(), labels.to(logits.device)
        check_rows(target_of(kind, logits), logits, labels)
        return function(logits.double(), labels)

    return checked


def _of_labels(name: str) -> MetricSpec | None:
    def spec(function: Callable[[Tensor, Tensor], float], said: str, maximize: bool = True) -> MetricSpec:
        return MetricSpec(name, maximize, (0.0, 1.0), _checked("multilabel", function), said)

    if found := _F_BETA.fullmatch(name):
        mean, beta = found[1], float(found[2])
        if beta == 0:
            return None
        said = {"micro": "over all labels of all examples", "macro": "the mean over labels"}
        return spec(
            lambda logits, labels: _f_beta(logits > 0, labels == 1, mean, beta),
            f"F-measure with beta {beta:g}, {said.get(mean, 'the mean over examples')}",
        )
    if name == "map":
        return spec(_mean_average_precision, "average precision, the mean over labels that have examples")
    if name == "subset_accuracy":
        return spec(
            lambda logits, labels: float(((logits > 0) == (labels == 1)).all(1).double().mean()),
            "share of examples all of whose labels are right",
        )
    if name == "hamming_loss":
        return spec(
            lambda logits, labels: float(((logits > 0) != (labels == 1)).double().mean()),
            "share of labels that are wrong",
            False,
        )
    return None


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


def _of_ranks(name: str) -> MetricSpec | None:
    if name in OF_RANKS:
        known = METRICS[name]

        def of_decisions(logits: Tensor, labels: Tensor) -> float:
            target = target_of("ordinal", logits)
            return known.function(F.one_hot(target.decide(logits), target.count).double(), labels)

        return MetricSpec(name, known.maximize, known.bounds, _checked("ordinal", of_decisions), known.description)
    if name in ("quadratic_kappa", "linear_kappa"):
        power = 2 if name.startswith("quadratic") else 1
        return MetricSpec(
            name,
            True,
            (-1.0, 1.0),
            _checked("ordinal", lambda logits, labels: _kappa(logits, labels, power)),
            f"agreement of true and predicted ranks beyond chance, errors by their {name.split('_')[0]} distance",
        )
    if name == "rank_error":
        return MetricSpec(
            name,
            False,
            None,
            _checked(
                "ordinal",
                lambda logits, labels: float(
                    (target_of("ordinal", logits).decide(logits) - labels).abs().double().mean()
                ),
            ),
            "mean distance of the predicted rank from the true one",
        )
    return None


def _kappa(logits: Tensor, labels: Tensor, power: int) -> float:
    """Cohen's weighted kappa; 0 if one rank alone is there and predicted, where it is not defined."""
    target = target_of("ordinal", logits)
    predicted, count = target.decide(logits), target.count
    table = torch.bincount(labels * count + predicted, minlength=count**2).view(count, count).double()
    ranks = torch.arange(count, device=logits.device)
    weights = (ranks[:, None] - ranks).abs().double() ** power
    by_chance = torch.outer(table.sum(1), table.sum(0)) / len(labels)
    expected = float((weights * by_chance).sum())
    return max(-1.0, 1 - float((weights * table).sum()) / expected) if expected else 0.0


def _of_pixels(name: str) -> MetricSpec | None:
    def counted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted and true class of each pixel that counts."""
        counts = labels != IGNORED
        if not bool(counts.any()):
            raise DataError(f"{name} needs a pixel that counts, got labels that are all {IGNORED}")
        return logits.argmax(1)[counts], labels[counts]

    def overlap(logits: Tensor, labels: Tensor) -> float:
        classes = logits.shape[1]
        predicted, true = counted(logits, labels)
        table = torch.bincount(true * classes + predicted, minlength=classes**2).view(classes, classes).double()
        hits = table.diagonal()
        return macro(hits, table.sum(0) + table.sum(1) - hits)

    def right(logits: Tensor, labels: Tensor) -> float:
        predicted, true = counted(logits, labels)
        return float((predicted == true).double().mean())

    found: dict[str, tuple[Callable[[Tensor, Tensor], float], str]] = {
        "mean_iou": (overlap, "mean over classes of TP / (TP + FP + FN) over all pixels that count"),
        "pixel_accuracy": (right, "share of pixels classified correctly, of those that count"),
        "boundary_f": (
            lambda logits, labels: boundary_f(logits.argmax(1), labels, logits.shape[1]),
            "F-measure of boundaries, within 0.75% of the diagonal (BF score)",
        ),
    }
    if name not in found:
        return None
    return MetricSpec(name, True, (0.0, 1.0), _checked("segmentation", found[name][0]), found[name][1])


def _of_quantities(name: str) -> MetricSpec | None:
    def spec(
        function: Callable[[Tensor, Tensor], float],
        said: str,
        maximize: bool = False,
        bounds: tuple[float, float] | None = None,
    ) -> MetricSpec:
        def single(logits: Tensor, labels: Tensor) -> float:
            return function(logits.reshape(len(labels)), labels.double())

        return MetricSpec(name, maximize, bounds, _checked("regression", single), said)

    if found := _PINBALL.fullmatch(name):
        quantile = float(found[1])
        if not 0 < quantile < 1:
            return None
        return spec(
            lambda predicted, true: float(
                torch.maximum(quantile * (true - predicted), (quantile - 1) * (true - predicted)).mean()
            ),
            f"pinball loss: what predictions of the {quantile:g}-quantile lose",
        )
    if name == "mae":
        return spec(lambda predicted, true: float((predicted - true).abs().mean()), "mean absolute error")
    if name == "rmse":
        return spec(lambda predicted, true: float((predicted - true).square().mean().sqrt()), "root mean squared error")
    if name == "r2":
        return spec(_explained, "share of the variance that is explained", True)
    if name in ("spearman", "kendall", "pearson"):
        return spec(
            lambda predicted, true: _correlation(predicted, true, name),
            f"{name.title()}'s correlation of predictions and targets",
            True,
            (-1.0, 1.0),
        )
    return None


def _explained(predicted: Tensor, true: Tensor) -> float:
    variance = float((true - true.mean()).square().sum())
    if variance == 0:
        raise DataError(f"r2 needs targets that differ, got {float(true[0]):g} everywhere")
    return 1 - float((true - predicted).square().sum()) / variance


def _correlation(predicted: Tensor, true: Tensor, name: str) -> float:
    """A correlation; 0 if all predictions are the same, which rank nothing."""
    from scipy import stats

    first, second = predicted.numpy(force=True), true.numpy(force=True)
    if second.min() == second.max():
        raise DataError(f"{name} needs targets that differ, got {second[0]:g} everywhere")
    if first.min() == first.max():
        return 0.0
    function = {"spearman": stats.spearmanr, "kendall": stats.kendalltau, "pearson": stats.pearsonr}[name]
    with np.errstate(invalid="ignore"):
        found = float(function(first, second).statistic)
    if math.isnan(found):  # of infinite predictions
        raise DataError(f"{name} is not defined for predictions from {first.min():g} to {first.max():g}")
    return min(1.0, max(-1.0, found))  # rounding may overshoot
