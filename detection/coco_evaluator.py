"""COCO's numbers of detections that are given batch by batch, with the arguments and keys of torchmetrics."""

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.detection.ap50 import METRICS, RECALLS, beyond_limit, told_beyond_limit
from metricopt_ext.detection.coco_summary import Summary, summarize
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.tables import FoundTable, TruthTable
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
IouType = Literal["bbox", "segm"]
GIVEN: dict[str, str] = {"bbox": "boxes", "segm": "masks"}
SIZES = {"small": "s", "medium": "m", "large": "l"}


class CocoEvaluator:
    """COCO's numbers, as pycocotools computes them, of what `update` is given: as torchmetrics' MeanAveragePrecision.

    Args:
        box_format: How boxes are written: corners, ``"xywh"`` or ``"cxcywh"``, in pixels.
        iou_type: What is compared: boxes, masks, or a sequence of both, whose keys then begin with it.
        iou_thresholds: The IoUs, in (0, 1], that AP and AR are means over; by default COCO's ten.
        rec_thresholds: The recalls, in [0, 1], that AP is a mean over; by default COCO's 101.
        max_detection_thresholds: How many detections of a class in an image count, three numbers, the largest for AP.
        class_metrics: Whether each class has its AP and AR, too.
        average: ``"macro"`` for the mean over classes, ``"micro"`` for all classes taken for one.

    Raises:
        DataError: An argument is none of these.
    """

    def __init__(
        self,
        box_format: BoxFormat = "xyxy",
        iou_type: IouType | Sequence[IouType] = "bbox",
        iou_thresholds: Sequence[float] | None = None,
        rec_thresholds: Sequence[float] | None = None,
        max_detection_thresholds: Sequence[int] | None = None,
        class_metrics: bool = False,
        average: Literal["macro", "micro"] = "macro",
    ) -> None:
        self.kinds: tuple[IouType, ...] = (iou_type,) if isinstance(iou_type, str) else tuple(iou_type)
        self.most = _read(max_detection_thresholds, (1, 10, 100), operator.index, "max_detection_thresholds")
        if not self.kinds:
            raise DataError(f"iou_type={iou_type!r} has no kind; name {' or '.join(GIVEN)}")
        for name, value, known in (
            ("box_format", box_format, get_args(BoxFormat)),
            ("average", average, ("macro", "micro")),
            *(("iou_type", kind, tuple(GIVEN)) for kind in self.kinds),
        ):
            if value not in known:
                raise DataError(f"{name}={value!r} is none of {', '.join(known)}")
        if len(self.most) != 3 or self.most[0] < 1:
            raise DataError(f"max_detection_thresholds={self.most} must be three numbers, each at least 1")
        self.box_format, self.class_metrics, self.average = box_format, class_metrics, average
        self.ious = tuple(_read(iou_thresholds, METRICS["AP"], float, "iou_thresholds"))
        self.recalls = np.array(_read(rec_thresholds, RECALLS["coco"], float, "rec_thresholds"))
        if not len(self.ious) or not len(self.recalls) or not ((self.recalls >= 0) & (self.recalls <= 1)).all():
            raise DataError("iou_thresholds and rec_thresholds must have a number, and those be from 0 to 1")
        self.reset()

    def reset(self) -> None:
        """Forget all images."""
        self._found: dict[IouType, list[Detections]] = {kind: [] for kind in self.kinds}
        self._truth: dict[IouType, list[Annotated]] = {kind: [] for kind in self.kinds}

    def update(self, preds: Sequence[Mapping[str, Tensor]], target: Sequence[Mapping[str, Tensor]]) -> None:
        """Take what was found in some images, and what is there.

        Args:
            preds: Of each image ``scores``, ``n``, ``labels``, ``n`` integers, and ``boxes``, ``n x 4``, or ``masks``,
                ``n x h x w``.
            target: Of each ``labels`` and ``boxes`` or ``masks``; perhaps ``iscrowd``, ``n``, and ``area``, ``n`` in
                square pixels, of which 0 is not known.

        Raises:
            DataError: They are not so, or of different numbers of images; boxes of ``target`` are not finite, or end
                before they begin; or masks are neither 0 nor 1, or of another size than in ``target``.
        """
        for what, images in (("preds", preds), ("target", target)):
            if not isinstance(images, Sequence):
                raise DataError(f"{what} must be a list with a dict for each image, got a {type(images).__name__}")
        if len(preds) != len(target):
            raise DataError(f"there are preds of {len(preds)} images, but target of {len(target)}")
        at = len(self._truth[self.kinds[0]])
        read = [
            (kind, self._detections(own, kind, f"preds[{i}]"), self._annotated(there, kind, f"target[{i}]", at + i))
            for i, (own, there) in enumerate(zip(preds, target, strict=True))
            for kind in self.kinds
        ]
        for place, (_, found, annotated) in enumerate(read):
            _check_sizes([*(found.shapes or ()), *(annotated.shapes or ())], f"target[{place // len(self.kinds)}]")
        for kind, found, annotated in read:  # all of them or none
            self._found[kind].append(found)
            self._truth[kind].append(annotated)

    def compute(self) -> dict[str, Tensor]:
        """Return the numbers of all images, in float64, by torchmetrics' names; -1 for one of no object.

        A warning counts detections beyond the largest of ``max_detection_thresholds``.
        """
        numbers: dict[str, Tensor] = {}
        for kind in self.kinds:
            prefix = f"{kind}_" if len(self.kinds) > 1 else ""
            found, truth, labels = self._tables(kind)
            each = self._summary(found, truth, kind) if self.class_metrics else None
            if self.average == "micro":
                one = replace(found, labels=np.zeros_like(found.labels))
                whole = replace(truth, classes=("any",), labels=np.zeros_like(truth.labels))
                summary = self._summary(one, whole, kind)
            else:
                summary = each or self._summary(found, truth, kind)
            if cut := told_beyond_limit(beyond_limit(found, self.most[-1]), self.most[-1]):
                warnings.warn(f"{cut}; max_detection_thresholds counts more", stacklevel=2)
            told = self._named(summary.numbers)
            if each is not None:
                known = [self._named(each.per_class.get(name, {})) for name in truth.classes]
                told["map_per_class"] = [own["map"] for own in known]
                told[f"mar_{self.most[-1]}_per_class"] = [own[f"mar_{self.most[-1]}"] for own in known]
            else:
                told |= {"map_per_class": -1.0, f"mar_{self.most[-1]}_per_class": -1.0}
            numbers |= {prefix + key: torch.tensor(value, dtype=torch.float64) for key, value in told.items()}
            numbers["classes"] = torch.from_numpy(labels)
        return numbers

    def _summary(self, found: FoundTable, truth: TruthTable, kind: IouType) -> Summary:
        few, most = self.most[:-1], self.most[-1]
        return summarize(found, truth, kind, max_detections=most, few=few, over=self.ious, recalls=self.recalls)

    def _named(self, numbers: Mapping[str, float | None]) -> dict[str, Any]:
        """The numbers by torchmetrics' names."""
        ours = {"map": "AP", "map_50": "AP50", "map_75": "AP75"}
        ours |= {f"map_{name}": f"AP{size}" for name, size in SIZES.items()}
        ours |= {f"mar_{most}": f"AR{most}" for most in self.most}
        ours |= {f"mar_{name}": f"AR{size}" for name, size in SIZES.items()}
        known = {theirs: numbers.get(own) for theirs, own in ours.items()}
        return {name: -1.0 if value is None else value for name, value in known.items()}

    def _tables(self, kind: IouType) -> tuple[FoundTable, TruthTable, Any]:
        """All detections and images, and the label that each class has in what was given."""
        found, truth = FoundTable.of(self._found[kind]), TruthTable.of(DetectionSet((), self._truth[kind]))
        labels = np.unique(np.concatenate([found.labels, truth.labels]))
        classes = tuple(str(label) for label in labels.tolist()) or ("none",)
        return (
            replace(found, labels=np.searchsorted(labels, found.labels)),
            replace(truth, classes=classes, labels=np.searchsorted(labels, truth.labels)),
            labels,
        )

    def _detections(self, own: Mapping[str, Tensor], kind: IouType, where: str) -> Detections:
        boxes, areas, shapes = self._compared(own, kind, where)
        scores = _part(own, "scores", where, len(boxes)).double()
        return Detections(boxes, scores, _labels(own, where, len(boxes)), areas, shapes)

    def _annotated(self, own: Mapping[str, Tensor], kind: IouType, where: str, place: int) -> Annotated:
        boxes, areas, shapes = self._compared(own, kind, where)
        known = (boxes.isfinite() & (boxes[:, 2:] >= boxes[:, :2]).repeat(1, 2)).all(dim=1)
        if not known.all():
            wrong = own["boxes"][int((~known).nonzero()[0])].tolist()
            raise DataError(
                f"{where} has the box {brief(wrong)}, which is not finite or ends before it begins;"
                f" box_format={self.box_format!r} says how boxes are written"
            )
        none = torch.zeros(len(boxes), dtype=torch.bool)
        crowd = _part(own, "iscrowd", where, len(boxes)).bool() if "iscrowd" in own else none
        if "area" in own:
            told = _part(own, "area", where, len(boxes)).double()
            areas = torch.where((told > 0) & told.isfinite(), told, areas)
        labels = _labels(own, where, len(boxes))
        return Annotated(place, Path(), 0, 0, boxes, labels, none, crowd, areas=areas, shapes=shapes)

    def _compared(self, own: Any, kind: IouType, where: str) -> tuple[Tensor, Tensor, list[Any] | None]:
        """The boxes by their edges, the areas, and the masks if these are compared."""
        if not isinstance(own, Mapping):
            raise DataError(f"{where} must be a dict, got a {type(own).__name__}")
        if kind == "segm":
            return _masks(_tensor(own, "masks", where), where)
        given = _tensor(own, "boxes", where)
        boxes = (given if given.numel() else given.reshape(0, 4)).detach().double().cpu()
        if boxes.ndim != 2 or boxes.shape[1] != 4:
            raise DataError(f"{where} has boxes of the shape {tuple(given.shape)}; it must be n x 4")
        first, second = boxes[:, :2], boxes[:, 2:]
        if self.box_format == "cxcywh":
            first = first - second / 2
        if self.box_format != "xyxy":
            second = first + second
        return torch.cat([first, second], dim=1), (second - first).prod(dim=1), None


def _read(given: Any, usual: Iterable[Any], number: Callable[[Any], Any], name: str) -> list[Any]:
    """Return the numbers that are given, ascending, or the usual ones."""
    try:
        return sorted(map(number, usual if given is None else given))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}={brief(given)} must be a list of numbers: {brief(error)}") from error


def _masks(given: Tensor, where: str) -> tuple[Tensor, Tensor, list[Any]]:
    from metricopt_ext.detection.shapes import masks_from, pixels_of

    if given.numel() and given.ndim != 3:
        raise DataError(f"{where} has masks of the shape {tuple(given.shape)}; it must be n x h x w")
    if given.is_floating_point() and not ((given == 0) | (given == 1)).all():
        raise DataError(f"{where} has masks of the type {given.dtype}, not of 0 and 1; give masks > 0.5, or as fits")
    shapes = masks_from(given.detach().cpu().bool().numpy())
    areas = torch.tensor([pixels_of(each) for each in shapes], dtype=torch.float64)
    return torch.zeros(len(shapes), 4, dtype=torch.float64), areas, shapes


def _check_sizes(masks: Sequence[Any], where: str) -> None:
    if len(sizes := sorted({tuple(each["size"]) for each in masks})) > 1:
        raise DataError(
            f"{where} and its preds have masks of {' and '.join(map(str, sizes))} pixels; resize them to the image's"
            " height and width"
        )


def _tensor(own: Mapping[str, Any], key: str, where: str) -> Tensor:
    if not isinstance(found := own.get(key), Tensor):
        raise DataError(f"{where} must have {key!r}, a tensor; got {type(found).__name__}")
    return found


def _part(own: Mapping[str, Any], key: str, where: str, count: int) -> Tensor:
    found = _tensor(own, key, where)
    if found.shape != (count,):
        raise DataError(f"{where} has {key} of the shape {tuple(found.shape)}; it must be {count}, one for each")
    return found.detach().to("cpu", copy=True)  # its buffer may be filled again


def _labels(own: Mapping[str, Any], where: str, count: int) -> Tensor:
    labels = _part(own, "labels", where, count)
    if labels.is_floating_point() and count:
        raise DataError(f"{where} has labels of the type {labels.dtype}; they must be integers")
    return labels.long()
