"""What a detector is judged by, as the black-box metric: AP50, AP, AP75, F1, or a function of one's own.

``segm/AP50``, as Detectron2 calls it, and so on, are those of masks.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from metricopt_ext.data.halves import random_halves
from metricopt_ext.data.rare import Rare, rare_groups
from metricopt_ext.detection.ap50 import (
    METRICS,
    Matches,
    beyond_limit,
    match,
    match_for,
    mean_over_ious,
    told_beyond_limit,
)
from metricopt_ext.detection.matching import Definition
from metricopt_ext.detection.records import Detections, DetectionSet, as_array
from metricopt_ext.detection.tables import KINDS, Kind
from metricopt_ext.detection.toolkit import Example, Toolkit
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.own_metric import number_within, try_on_few, why
from metricopt_ext.tasks.halved import with_halves
from metricopt_ext.tasks.metric import Metric

BATCH = 8
PRECISIONS = (*METRICS, *(f"{kind}/{name}" for kind in KINDS if kind != "bbox" for name in METRICS))

ValueOn = Callable[[Sequence[int] | None], float]  # the value on images at some positions, or on all


class DetectionMetric(ABC):
    """A metric of what a detector finds in images.

    Attributes:
        name: Name in tables.
        maximize: Whether higher is better.
        bounds: Lowest and highest value.
        description: What it is, in a line; empty if its name says it.
    """

    name: str
    maximize: bool = True
    bounds: tuple[float, float] = (0.0, 1.0)
    description: str = ""

    @abstractmethod
    def judge(self, found: Sequence[Detections], truth: DetectionSet) -> ValueOn:
        """Return the metric of what was found in each image of a set, as a function of its images."""

    @abstractmethod
    def with_objects(self, truth: DetectionSet) -> npt.NDArray[np.bool_]:
        """Return which images have an object that counts, ``n``."""

    def try_on(self, truth: DetectionSet) -> None:  # noqa: B027
        """Find out whether it can judge these images, before work is done for it; a known metric can.

        Raises:
            ConfigError: It fails; the message says why.
        """

    def cut(self, found: Sequence[Detections]) -> str:
        """Return in words which detections it does not count for their number; empty if there are none."""
        return ""


@dataclass(frozen=True)
class MeanAveragePrecision(DetectionMetric):
    """AP50, AP or AP75, of boxes or masks.

    Attributes:
        name: ``"AP50"``, ``"AP75"``, or ``"AP"``, the mean over the IoUs from 0.5 to 0.95; one of `PRECISIONS`.
        definition: See `ap50`; of masks it is COCO's.
    """

    name: str
    definition: Definition

    @property
    def description(self) -> str:  # type: ignore[override]
        """By whose definition it is, as the same detections have another value by another."""
        return f"average precision by the definition {self.definition!r} (metric.definition)"

    @property
    def kind(self) -> Kind:
        """What is compared."""
        return kind_of(self.name)

    def judge(self, found: Sequence[Detections], truth: DetectionSet) -> ValueOn:
        """Return the average precision as a function of images; one of them must have an object that counts."""
        matches = self._matches(found, truth)
        return lambda images: mean_over_ious(matches, images)

    def cut(self, found: Sequence[Detections]) -> str:
        """Return in words how many detections are beyond COCO's limit; empty by another definition."""
        return told_beyond_limit(beyond_limit(found)) if self.definition == "coco" else ""

    def with_objects(self, truth: DetectionSet) -> npt.NDArray[np.bool_]:
        """Return which images have an object that counts by the definition."""
        has_one: npt.NDArray[np.bool_] = self._matches(_nothing_in(truth), truth)[0].objects.sum(axis=1) > 0
        return has_one

    def _matches(self, found: Sequence[Detections], truth: DetectionSet) -> list[Matches]:
        return match_for(self.name.rpartition("/")[2], found, truth, self.definition, self.kind)


@dataclass(frozen=True)
class ClassAveragePrecision(MeanAveragePrecision):
    """AP50, AP or AP75 of one class.

    Attributes:
        label: The class's name, as the set has it.
    """

    label: str

    def judge(self, found: Sequence[Detections], truth: DetectionSet) -> ValueOn:
        """Return the average precision of the class as a function of images; one must have such an object."""
        matches = self._matches(found, truth)

        def value_on(images: Sequence[int] | None) -> float:
            of_classes = [each.average_precision(images).per_class for each in matches]
            if self.label not in of_classes[0]:
                raise DataError(
                    f"no image has an object of class {self.label!r} that counts; its {self.name} needs one"
                )
            return float(np.mean([each[self.label] for each in of_classes]))

        return value_on

    def try_on(self, truth: DetectionSet) -> None:
        """Refuse images without an object of the class."""
        try:
            self.judge(_nothing_in(truth), truth)(None)
        except DataError as error:
            raise ConfigError(f"metric.also or metric.subject_to: {error}") from error


@dataclass(frozen=True)
class MeanF1(DetectionMetric):
    """F1 at IoU 0.5 of all that a detector finds, the mean over the classes that have an object.

    Unlike an average precision it depends on the detector's score threshold, below which nothing is found.

    Attributes:
        definition: See `ap50`: which detection hits an object.
    """

    definition: Definition
    name: str = "F1"

    def judge(self, found: Sequence[Detections], truth: DetectionSet) -> ValueOn:
        """Return F1 as a function of images; one of them must have an object that counts."""
        return match(found, truth, self.definition).f1

    def with_objects(self, truth: DetectionSet) -> npt.NDArray[np.bool_]:
        """Return which images have an object that counts by the definition."""
        return MeanAveragePrecision("AP50", self.definition).with_objects(truth)


@dataclass(frozen=True)
class OwnDetectionMetric(DetectionMetric):
    """A function of the user's own.

    Attributes:
        function: ``function(truth, found)``, two lists of a dict for each image. Of arrays, both have ``boxes``,
            ``m x 4`` (left, top, right, bottom, in pixels), and ``labels``, ``m`` indices of classes; the first also
            ``difficult`` and ``crowd``, ``m`` booleans, the second ``scores``, ``m``. Returns the value.
        name: Name in tables.
        maximize: Whether higher is better.
        bounds: Lowest and highest value.
        description: What it is, in a line.
    """

    function: Callable[[list[dict[str, Any]], list[dict[str, Any]]], Any]
    name: str
    maximize: bool = True
    bounds: tuple[float, float] = (0.0, 1.0)
    description: str = ""

    def judge(self, found: Sequence[Detections], truth: DetectionSet) -> ValueOn:
        """Return the function's value as a function of images."""

        def value_on(images: Sequence[int] | None) -> float:
            rows = range(len(truth)) if images is None else images
            known = [_arrays(truth.images[i], "boxes", "labels", "difficult", "crowd") for i in rows]
            seen = [_arrays(found[i], "boxes", "scores", "labels") for i in rows]
            return number_within(self.function(known, seen), self.bounds, self.name)

        return value_on

    def with_objects(self, truth: DetectionSet) -> npt.NDArray[np.bool_]:
        """Return which images have an object."""
        return np.array([len(image.labels) > 0 for image in truth.images])

    def try_on(self, truth: DetectionSet) -> None:
        """Call the function as if a detector had found every object."""
        found = [Detections(image.boxes, torch.ones(len(image.labels)), image.labels) for image in truth.images]
        try:
            try_on_few(self.judge(found, truth), len(truth))
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"metric {self.name!r} fails where each object of {len(truth)} images is found:"
                f" {why(error)}; see metric.kwargs (its arguments) and metric.bounds (its range)"
            ) from error


def kind_of(name: str) -> Kind:
    """Return what a metric compares, by its name: boxes, unless it begins with ``segm/``."""
    return next((kind for kind in KINDS if name.casefold().startswith(f"{kind}/")), "bbox")


def truth_of(examples: Sequence[Example], classes: Sequence[str]) -> DetectionSet:
    """Return the ground truth of examples in memory, in pixels of their images."""
    return DetectionSet(tuple(classes), [example.truth for example in examples])


def rare_images(truth: DetectionSet) -> Rare | None:
    """Return the types of images of which a set has few: those with an object of each class that counts."""
    counting = [set(image.labels[~(image.difficult | image.crowd)].tolist()) for image in truth.images]
    counts = {name: sum(label in each for each in counting) for label, name in enumerate(truth.classes)}
    return rare_groups("image type", counts)


def in_batches(examples: Sequence[Example]) -> list[list[Example]]:
    """Divide examples into batches for statistics, each of one size, so that no padding counts."""
    of_size: dict[tuple[int, int], list[Example]] = {}
    for each in examples:
        of_size.setdefault(each.size, []).append(each)
    return [of_one[at : at + BATCH] for of_one in of_size.values() for at in range(0, len(of_one), BATCH)]


def detect_all(toolkit: Toolkit, model: nn.Module, examples: Sequence[Example]) -> list[Detections]:
    """Return what a detector finds in each image, one at a time, as toolkits evaluate it.

    In a batch an image is padded for others, and even without, what is found is rounded otherwise.
    """
    found = list[Detections]()
    for at in range(0, len(examples), BATCH):
        for each in examples[at : at + BATCH]:
            each.begin()
        found += [toolkit.detect(model, [each])[0] for each in examples[at : at + BATCH]]
    return found


def detector_metric(
    metric: DetectionMetric,
    toolkit: Toolkit,
    examples: Sequence[Example],
    classes: Sequence[str],
    halves: Sequence[Tensor] | str | None = None,
    *,
    also: Mapping[str, DetectionMetric] | None = None,
    subject_to: Mapping[str, str] | None = None,
) -> Metric:
    """Return the black box: a metric of what a detector finds in images.

    Args:
        metric: The metric.
        toolkit: The toolkit of the detectors to evaluate.
        examples: The images.
        classes: Names of the classes.
        halves: Positions of two halves of the images, on each of which the metric also reports its value, or why there
            are none; by default random ones, if each has an object that counts. Empty for a metric without.
        also: What counts besides, by name (`Metric`).
        subject_to: Constraints on it, which are told at every query, of the same detections.

    One warning says how many detections were not counted for their number, when it first happens.
    """
    truth = truth_of(examples, classes)
    told = halves_of_images(halves, metric.with_objects(truth))
    cuts: list[str] = []
    also, subject_to = also or {}, subject_to or {}
    bounded = {name: each for name, each in also.items() if name in subject_to}

    def function(model: nn.Module) -> Any:
        found = detect_all(toolkit, model, examples)
        value_on = metric.judge(found, truth)
        if not cuts and (cut := metric.cut(found)):
            cuts.append(cut)
            warnings.warn(cut, stacklevel=1)
        value = with_halves(lambda half: value_on(None if half is None else half.tolist()), told)
        others = {name: each.judge(found, truth)(None) for name, each in bounded.items()}
        return {metric.name: value, **others} if others else value

    def alone(other: DetectionMetric) -> Callable[[nn.Module], float]:
        return lambda model: other.judge(detect_all(toolkit, model, examples), truth)(None)

    return Metric(
        function,
        maximize=metric.maximize,
        bounds=metric.bounds,
        name=metric.name,
        also={name: alone(each) for name, each in also.items() if name not in bounded},
        subject_to=subject_to,
    )


def halves_of_images(
    halves: Sequence[Tensor] | str | None, has_object: npt.NDArray[np.bool_]
) -> Sequence[Tensor] | str:
    """Return halves of images, or that there are none, as one of them has no object that counts.

    Args:
        halves: Positions of the images of each, or why there are none; None for random ones.
        has_object: Which images have an object that counts, ``n``.

    Raises:
        DataError: A position is none of an image.
    """
    halves = random_halves(len(has_object), 0) if halves is None else halves
    for half in () if isinstance(halves, str) else halves:
        if len(half) and not 0 <= int(half.min()) <= int(half.max()) < len(has_object):
            ends = f"{int(half.min())} to {int(half.max())}"
            raise DataError(f"halves must be positions of {len(has_object)} images, from 0, got {ends}")
    if isinstance(halves, str) or all(has_object[half.numpy()].any() for half in halves):
        return halves
    return "one of two halves of its images has no object that counts"


def ap50_metric(
    toolkit: Toolkit,
    examples: Sequence[Example],
    classes: Sequence[str],
    definition: Definition,
    halves: Sequence[Tensor] | str | None = None,
    *,
    name: str = "AP50",
) -> Metric:
    """Return the black box of AP50, AP or AP75; see `detector_metric` and `MeanAveragePrecision`."""
    return detector_metric(MeanAveragePrecision(name, definition), toolkit, examples, classes, halves)


def _nothing_in(truth: DetectionSet) -> list[Detections]:
    """What a detector finds that finds nothing."""
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64), shapes=[])
    return [nothing] * len(truth)


def _arrays(record: Any, *fields: str) -> dict[str, Any]:
    """Copies, as a function may work in place."""
    return {name: as_array(getattr(record, name)).copy() for name in fields}
