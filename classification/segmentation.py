"""Mean IoU of a network for semantic segmentation as the black-box metric."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.classification.metrics import macro
from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.tasks.metric import Metric, with_halves

IGNORED = 255  # the label of pixels that don't count, in VOC's files and others


def mean_iou_metric(
    images: Sequence[Tensor],
    labels: Sequence[Tensor],
    classes: int,
    *,
    halves: Sequence[Tensor] = (),
    ignored: int = IGNORED,
) -> Metric:
    """Return the black box: the mean over classes of TP / (TP + FP + FN), counted over the pixels of all images.

    A class that is neither present nor predicted is left out of the mean, as in scikit-learn's ``jaccard_score``.

    Args:
        images: What the network takes, each ``c x h x w``; it gets them one by one, so sizes may differ.
        labels: The class of each pixel, each ``h x w`` integers in 0..classes-1, or ``ignored``.
        classes: Number of classes, the background included.
        halves: Positions of two halves of the images, for a metric that also reports its value on each; empty for one
            that does not.
        ignored: Label of pixels that don't count.

    Returns:
        The metric of a network whose output, or the output's ``"out"`` as in torchvision, is ``1 x classes x h x w``.

    Raises:
        DataError: There are no images, images and labels don't fit together, or a label is out of range.
        MetricError: From the metric, for a network whose output has another shape or is NaN.
    """
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

    def confusion(model: nn.Module, image: Tensor, label: Tensor) -> Tensor:
        """Count the pixels of an image by true and predicted class, ``classes x classes``."""
        output: Any = model(image[None])
        scores: Tensor = output["out"] if isinstance(output, dict) else output
        if scores.shape != (1, classes, *label.shape):
            raise MetricError(
                f"the network's output has shape {tuple(scores.shape)}; mean IoU needs {(1, classes, *label.shape)}"
            )
        if scores.isnan().any():
            raise MetricError("the network's output has NaN")
        label = label.to(scores.device).long()
        counts = label != ignored
        pairs = label[counts] * classes + scores[0].argmax(0)[counts]
        return torch.bincount(pairs, minlength=classes**2).view(classes, classes)

    def function(model: nn.Module) -> Any:
        each = torch.stack([confusion(model, *pair) for pair in zip(images, labels, strict=True)]).double()

        def value_on(half: Tensor | None) -> float:
            table = (each if half is None else each[half.to(each.device)]).sum(0)
            hits = table.diagonal()
            return macro(hits, table.sum(0) + table.sum(1) - hits)

        return with_halves(value_on, halves)

    return Metric(function, maximize=True, bounds=(0.0, 1.0), name="mIoU")
