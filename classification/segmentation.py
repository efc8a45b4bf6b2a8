"""Metrics of a network for semantic segmentation as the black box: mean IoU, and the F-measure of boundaries."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from metricopt_ext.classification.metrics import macro
from metricopt_ext.classification.targets import IGNORED
from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.tasks.halved import with_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.checks import check_above
from metricopt_ext.utils.words import brief

Images = Sequence[Tensor] | Sequence[npt.NDArray[Any]] | Tensor | npt.NDArray[Any]

DIAGONAL_SHARE = 0.0075  # of an image, within which boundaries are the same


def mean_iou_metric(
    images: Images,
    labels: Images,
    classes: int,
    *,
    halves: Sequence[Tensor] = (),
    ignored: int = IGNORED,
) -> Metric:
    """Return the black box: the mean over classes of TP / (TP + FP + FN), counted over the pixels of all images.

    A class that is neither present nor predicted is left out of the mean, as in scikit-learn's ``jaccard_score``.

    Args:
        images: What the network takes, each ``c x h x w``; it gets them one by one, so sizes may differ. Those of one
            size may be stacked, ``n x c x h x w``; arrays will do in place of tensors.
        labels: The class of each pixel, each ``h x w`` integers in 0..classes-1, or ``ignored``; likewise.
        classes: Number of classes, the background included.
        halves: Positions of two halves of the images, for a metric that also reports its value on each; empty for one
            that does not.
        ignored: Label of pixels that don't count.

    Returns:
        The metric of a network whose output, or the output's ``"out"`` as in torchvision, is ``1 x classes x h x w``.

    Raises:
        DataError: There are no images, images and labels don't fit together, a label is out of range, or no pixel
            counts.
        MetricError: From the metric, for a network whose output has another shape or is NaN.
    """
    images, labels = _checked(images, labels, classes, ignored)

    def confusion(model: nn.Module, image: Tensor, label: Tensor) -> Tensor:
        """Count the pixels of an image by true and predicted class, ``classes x classes``."""
        predicted = _predicted(model, image, label, classes, "mean IoU")
        label = label.to(predicted.device).long()
        counts = label != ignored
        pairs = label[counts] * classes + predicted[counts]
        return torch.bincount(pairs, minlength=classes**2).view(classes, classes)

    def function(model: nn.Module) -> Any:
        each = torch.stack([confusion(model, *pair) for pair in zip(images, labels, strict=True)]).double()

        def value_on(half: Tensor | None) -> float:
            table = (each if half is None else each[half.to(each.device)]).sum(0)
            hits = table.diagonal()
            return macro(hits, table.sum(0) + table.sum(1) - hits)

        return with_halves(value_on, halves)

    return Metric(function, maximize=True, bounds=(0.0, 1.0), name="mIoU")


def boundary_f_metric(
    images: Images,
    labels: Images,
    classes: int,
    *,
    tolerance: float | None = None,
    halves: Sequence[Tensor] = (),
    ignored: int = IGNORED,
) -> Metric:
    """Return the black box: how well predicted boundaries follow the true ones (BF score, Csurka et al. 2013).

    A boundary pixel of a class has a neighbour, of four, that is of another. Precision is the share of predicted
    boundary pixels within the tolerance of a true one, recall that of true ones within it of a predicted one, and F
    their harmonic mean: of each class in each image that has its boundary, predicted or true. The mean over images, and
    then over classes, is the value. Pixels to ignore are no boundary, and none is beside them for their sake.

    Args:
        images: As in `mean_iou_metric`.
        labels: As in `mean_iou_metric`.
        classes: Number of classes, the background included.
        tolerance: Largest distance in pixels, above 0; None for 0.75% of an image's diagonal.
        halves: As in `mean_iou_metric`.
        ignored: Label of pixels that don't count.

    Returns:
        The metric of a network, as in `mean_iou_metric`.

    Raises:
        ValueError: The tolerance is out of range.
        DataError: As in `mean_iou_metric`, or no label map has a boundary.
        MetricError: As in `mean_iou_metric`.
    """
    if tolerance is not None:
        check_above(0, tolerance=tolerance)
    images, labels = _checked(images, labels, classes, ignored)
    if not any(_boundaries(_as_array(label), classes, ignored).any() for label in labels):
        raise DataError("no label map has a boundary: each shows a single class")

    def scores(model: nn.Module, image: Tensor, label: Tensor) -> npt.NDArray[np.float64]:
        """F of each class in an image, ``classes``; NaN for one without a boundary."""
        true = _as_array(label)
        predicted = _as_array(_predicted(model, image, label, classes, "boundary F"))
        predicted = np.where(true == ignored, ignored, predicted)
        reach = DIAGONAL_SHARE * math.hypot(*true.shape) if tolerance is None else tolerance
        pairs = zip(_boundaries(predicted, classes, ignored), _boundaries(true, classes, ignored), strict=True)
        return np.array([_boundary_f(*pair, reach) for pair in pairs])

    def function(model: nn.Module) -> Any:
        each = np.stack([scores(model, *pair) for pair in zip(images, labels, strict=True)])

        return with_halves(
            lambda half: _mean_boundary_f(each if half is None else each[half.numpy(force=True)]), halves
        )

    return Metric(function, maximize=True, bounds=(0.0, 1.0), name="boundary F")


def boundary_f(predicted: Tensor, labels: Tensor, classes: int, *, ignored: int = IGNORED) -> float:
    """Return the boundary F of label maps, ``n x h x w``, as `boundary_f_metric` has it.

    Args:
        predicted: The predicted class of each pixel.
        labels: The true one, or ``ignored``.
        classes: Number of classes.
        ignored: Label of pixels that don't count.

    Raises:
        MetricError: Nothing has a boundary, predicted or true.
    """
    reach = DIAGONAL_SHARE * math.hypot(*labels.shape[1:])
    each = []
    for shown, true in zip(_as_array(predicted), _as_array(labels), strict=True):
        seen = np.where(true == ignored, ignored, shown)
        pairs = zip(_boundaries(seen, classes, ignored), _boundaries(true, classes, ignored), strict=True)
        each.append([_boundary_f(*pair, reach) for pair in pairs])
    return _mean_boundary_f(np.array(each))


def _mean_boundary_f(each: npt.NDArray[np.float64]) -> float:
    """The mean over images, then over classes, of ``n x classes`` values, NaN where there is no boundary."""
    some = each[:, ~np.isnan(each).all(0)]
    if not some.size:
        raise MetricError("boundary F is not defined on images without a boundary, predicted or true")
    return float(np.nanmean(some, 0).mean())


def _as_array(classes: Tensor) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = classes.long().numpy(force=True)
    return found


def _boundaries(shown: npt.NDArray[np.int64], classes: int, ignored: int) -> npt.NDArray[np.bool_]:
    """The boundary pixels of each class, ``classes x h x w``: those beside a pixel of another one."""
    beside = np.zeros(shown.shape, bool)
    for axis in (0, 1):
        first, second = (np.moveaxis(each, axis, 0) for each in (shown, beside))
        differ = (first[1:] != first[:-1]) & (first[1:] != ignored) & (first[:-1] != ignored)
        second[1:] |= differ
        second[:-1] |= differ
    found: npt.NDArray[np.bool_] = (shown == np.arange(classes)[:, None, None]) & beside
    return found


def _boundary_f(predicted: npt.NDArray[np.bool_], true: npt.NDArray[np.bool_], reach: float) -> float:
    """F of two sets of boundary pixels, ``h x w``; 0 if one is empty, NaN if both are."""
    if not predicted.any() or not true.any():
        return 0.0 if predicted.any() or true.any() else math.nan
    from scipy.ndimage import distance_transform_edt

    precision = float((distance_transform_edt(~true)[predicted] <= reach).mean())
    recall = float((distance_transform_edt(~predicted)[true] <= reach).mean())
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _checked(images: Images, labels: Images, classes: int, ignored: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return images and label maps as tensors, and reject those that don't fit together."""
    try:
        images, labels = ([torch.as_tensor(each) for each in given] for given in (images, labels))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"images and label maps must be tensors or arrays of numbers: {brief(error)}") from error
    if not images or len(images) != len(labels):
        raise DataError(f"there are {len(images)} images and {len(labels)} label maps; give one map for each image")
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        if label.is_floating_point() or label.shape != image.shape[-2:]:
            raise DataError(
                f"label map {index} is {label.dtype} of shape {tuple(label.shape)}; it must be integers of shape"
                f" {tuple(image.shape[-2:])}, one for each pixel"
            )
        wrong = label[((label < 0) | (label >= classes)) & (label != ignored)]
        if len(wrong):
            raise DataError(f"label map {index} holds {int(wrong[0])}; labels are 0..{classes - 1} or {ignored}")
    if all(bool((label == ignored).all()) for label in labels):
        raise DataError(f"no pixel of the label maps counts: all are {ignored}; give maps of the classes")
    return images, labels


def _predicted(model: nn.Module, image: Tensor, label: Tensor, classes: int, what: str) -> Tensor:
    """The class of each pixel of an image, ``h x w``, as a network predicts it."""
    output: Any = model(image[None])
    scores: Tensor = output["out"] if isinstance(output, dict) else output
    if scores.shape != (1, classes, *label.shape):
        raise MetricError(
            f"the network's output has shape {tuple(scores.shape)}; {what} needs {(1, classes, *label.shape)}"
        )
    if scores.isnan().any():
        raise MetricError("the network's output has NaN")
    return scores[0].argmax(0)
