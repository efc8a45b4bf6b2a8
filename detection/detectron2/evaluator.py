"""AP50 as an evaluator of Detectron2, and as the metric that phi is tuned for."""

import inspect
import io
import logging
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from typing import Any

from detectron2.evaluation import COCOEvaluator, DatasetEvaluator, inference_on_dataset
from detectron2.utils import comm
from torch import Tensor, nn

from metricopt_ext.data.halves import random_halves
from metricopt_ext.detection.ap50 import (
    METRICS,
    Matches,
    beyond_limit,
    match_for,
    mean_over_ious,
    told_beyond_limit,
)
from metricopt_ext.detection.box_kinds import check_detected
from metricopt_ext.detection.detectron2.datasets import check_image_ids
from metricopt_ext.detection.detectron2.toolkit import detections_of
from metricopt_ext.detection.matching import Definition
from metricopt_ext.detection.metric import MeanAveragePrecision, halves_of_images
from metricopt_ext.detection.records import Detections, DetectionSet
from metricopt_ext.detection.tables import KINDS
from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.halved import Halved
from metricopt_ext.tasks.metric import Metric


class AP50Evaluator(DatasetEvaluator):  # type: ignore[misc]
    """Average precision at IoU 0.5 over an annotated set.

    With several processes, each gets some of the images; they exchange their detections, and each computes and returns
    the same result.

    Args:
        truth: The set that the model is evaluated on, e.g. from `datasets.registered_truth`.
        definition: ``"voc_11_point"``, ``"voc"`` or ``"coco"``; see `ap50.average_precision`.
        ap: Whether ``AP``, the mean over the IoUs 0.5, 0.55, ..., 0.95, and ``AP75`` are computed too.

    Raises:
        DataError: Two images have one id, so that what is found in them could not be told apart.
    """

    def __init__(self, truth: DetectionSet, definition: Definition = "coco", *, ap: bool = False) -> None:
        self.truth = truth
        self.definition = definition
        self.ap = ap
        self._found: dict[str | int, Detections] = {}
        self._matches: Sequence[Matches] = ()  # at each IoU, of the last evaluation
        self._told = self._checked = False
        check_image_ids([image.image_id for image in truth.images], "the set")

    def reset(self) -> None:
        """Forget all detections."""
        self._found = {}

    def process(self, inputs: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]]) -> None:
        """Store the detections in some images."""
        for each, output in zip(inputs, outputs, strict=True):
            self._found[each["image_id"]] = detections_of(output["instances"])

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return ``{"bbox": {"AP50": ..., "AP50-CLASS": ...}}`` in percent, like Detectron2's own evaluators.

        Raises:
            MetricError: Some image of the set was not given to the model, or at the first call its boxes are of another
                kind (`box_kinds`).
        """
        found = {image: detections for part in comm.all_gather(self._found) for image, detections in part.items()}
        missing = [image.image_id for image in self.truth.images if image.image_id not in found]
        if missing:
            raise MetricError(
                f"{len(missing)} of {len(self.truth)} images were not given to the model, e.g. {missing[0]!r}; evaluate"
                " on the set that the evaluator was made for"
            )
        detections = [found[image.image_id] for image in self.truth.images]
        self._matches = match_for("AP" if self.ap else "AP50", detections, self.truth, self.definition)
        scores = self.evaluate_part(None)
        if not self._checked:
            self._checked = True
            check_detected(detections, self.truth)
        cut = told_beyond_limit(beyond_limit(detections)) if self.definition == "coco" else ""
        if cut and not self._told:
            self._told = True
            warnings.warn(cut, stacklevel=2)
        return scores

    def evaluate_part(self, images: Sequence[int] | None) -> dict[str, dict[str, float]]:
        """Return what `evaluate` would of some images of the set alone, after it.

        Args:
            images: Their positions in the set; None for all.

        Raises:
            MetricError: None of them has an object that counts.
        """
        result = self._matches[0].average_precision(images)  # at an IoU of 0.5
        scores = {f"AP50-{name}": 100 * value for name, value in result.per_class.items()}
        if self.ap:
            scores["AP"] = 100 * mean_over_ious(self._matches, images)
            scores["AP75"] = 100 * self._matches[METRICS["AP"].index(0.75)].average_precision(images).mean
        return OrderedDict(bbox={"AP50": 100 * result.mean, **scores})


def ap50_metric(
    loader: Iterable[Any], evaluator: DatasetEvaluator, name: str = "AP50", *, result: str = "bbox/AP50"
) -> Metric:
    """Return AP50, or another of an evaluator's results, as a metric in percent, from 0 to 100, as Detectron2 has it.

    With `AP50Evaluator` and Detectron2's ``COCOEvaluator`` it also tells its values on two random halves of the images;
    of another evaluator it says that there are none.

    It is 0 where a detector finds nothing in any image, of which Detectron2's ``COCOEvaluator`` says NaN, or no more
    than of boxes.

    Args:
        loader: Gives the images, e.g. Detectron2's test loader.
        evaluator: Holds their ground truth; its results have ``result`` in percent, as ``bbox/AP50`` those of
            `AP50Evaluator` and of Detectron2's own evaluators.
        name: The metric's name, by which Detectron2's writers write it.
        result: Which of the results, larger being better: ``bbox/AP``, or ``segm/AP50`` from Detectron2's
            ``COCOEvaluator``.
    """
    kind, _, measure = result.partition("/")
    halves, judged = _on_halves(evaluator)

    def ap50(model: nn.Module) -> Halved:
        count = _Count()
        whole = inference_on_dataset(model, loader, [evaluator, count])
        on_halves = [] if isinstance(halves, str) else [judged(half) for half in halves]
        gathered = comm.all_gather((whole, on_halves, count.found))
        found, on_halves, _ = gathered[0]  # others may know nothing
        given = [f"{each}/{key}" for each, values in found.items() for key in values]
        value: float = found.get(kind, {}).get(measure, math.nan)
        if math.isnan(value) and any(measure in values for values in found.values()):
            counts = [each for _, _, each in gathered if each is not None]
            if counts and not sum(counts):
                return Halved(0.0, halves if isinstance(halves, str) else (0.0, 0.0))
        if result not in given:
            raise MetricError(f"{type(evaluator).__name__} gave no {result}, but {given}")
        if math.isnan(value):
            raise MetricError(
                f"{type(evaluator).__name__} gave nan as {result}: no object of the set counts for it; evaluate on a"
                f" set that has some, or name another of {given}"
            )
        if isinstance(halves, str):
            return Halved(value, halves)
        first, second = (each.get(kind, {}).get(measure, math.nan) for each in on_halves)
        return Halved(value, (first, second))

    return Metric(ap50, maximize=True, bounds=(0.0, 100.0), name=name)


def _on_halves(evaluator: DatasetEvaluator) -> tuple[Sequence[Tensor] | str, Callable[[Tensor], dict[str, Any]]]:
    """Halves of an evaluator's images, or why there are none, and its results on the images at some positions."""
    if isinstance(evaluator, AP50Evaluator):
        with_objects = MeanAveragePrecision("AP50", evaluator.definition).with_objects(evaluator.truth)
        return halves_of_images(None, with_objects), lambda half: evaluator.evaluate_part(half.tolist())
    if not (isinstance(evaluator, COCOEvaluator) and "img_ids" in inspect.signature(evaluator.evaluate).parameters):
        return f"{type(evaluator).__name__} judges all images together", lambda half: {}
    ids = sorted(evaluator._coco_api.getImgIds())

    def judged(half: Tensor) -> dict[str, Any]:
        logger, tasks = evaluator._logger, evaluator._tasks
        level = logger.level
        logger.setLevel(logging.WARNING)  # one table of results for each query
        # Judging boxes has given them outlines, by which the evaluator would next take them for masks.
        evaluator._tasks = tasks or [kind for kind in KINDS if kind in getattr(evaluator, "_results", {})] or None
        try:
            with redirect_stdout(io.StringIO()):
                return evaluator.evaluate(img_ids=[ids[i] for i in half.tolist()]) or {}
        finally:
            evaluator._tasks = tasks
            logger.setLevel(level)

    return random_halves(len(ids), 0), judged


class _Count(DatasetEvaluator):  # type: ignore[misc]
    """How many objects a model finds in all images; None if it does not tell of objects."""

    def reset(self) -> None:
        self.found: int | None = None

    def process(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        for output in outputs:
            if isinstance(output, dict) and "instances" in output:
                self.found = (self.found or 0) + len(output["instances"])

    def evaluate(self) -> None: ...
