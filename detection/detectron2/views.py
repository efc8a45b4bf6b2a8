"""How Detectron2's detectors find boxes by settings: in several views of an image, by soft-NMS, from kept outputs.

Several views, a flip or three sizes, are joined as by Detectron2's own ``GeneralizedRCNNWithTTA``: each view is
suppressed by itself, then all are together. So its ``TEST.AUG`` finds the same boxes. Soft-NMS, which it has not,
chooses from the boxes of all views before NMS, as in `metricopt_ext.detection.acting`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from detectron2.data import transforms
from detectron2.modeling import FastRCNNOutputLayers, GeneralizedRCNN, RetinaNet
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.modeling.roi_heads import CascadeROIHeads, Res5ROIHeads, StandardROIHeads
from detectron2.modeling.roi_heads.fast_rcnn import fast_rcnn_inference, fast_rcnn_inference_single_image
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn

from metricopt_ext.detection.acting import replaced
from metricopt_ext.detection.soft_nms import merged
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.settings import Values
from metricopt_ext.utils.kept_outputs import KeptOutputs, circumstances, digest_of, digest_of_model

# How many views of an image are computed together, and the least score of what they find, as in Detectron2.
TOGETHER, LEAST = 3, 1e-8

# What a model computes before thresholds and NMS: tensors by name, and the images' sizes.
Outputs = dict[str, Any]


def predictors_of(model: Any) -> list[Any]:
    """Return the modules that threshold and suppress boxes; those of a cascade in order.

    Raises:
        ConfigError: The detector is none of Detectron2's R-CNNs of boxes and RetinaNet, or detects by code of its own.
    """
    if _keeps(model, RetinaNet, "forward", "forward_inference", "inference_single_image"):
        return [model]
    heads = getattr(model, "roi_heads", None)
    predictor = getattr(heads, "box_predictor", None)
    predictors = list(predictor) if isinstance(predictor, nn.ModuleList) else [predictor]
    own = ["forward", "_forward_box"]
    known = {StandardROIHeads: own, CascadeROIHeads: own, Res5ROIHeads: ["forward"]}
    how = ("inference", "predict_boxes", "predict_probs")
    if not (
        _keeps(model, GeneralizedRCNN, "forward", "inference")
        and any(_keeps(heads, kind, *methods) for kind, methods in known.items())
        and all(_keeps(each, FastRCNNOutputLayers, *how) for each in predictors)
    ):
        raise ConfigError(
            f"{type(model).__name__} is not, or detects otherwise than, Detectron2's GeneralizedRCNN with a box head or"
            " RetinaNet, whose settings of inference are known; give your own, metricopt_ext.Settings"
        )
    return predictors


def _keeps(module: Any, kind: type, *methods: str) -> bool:
    """Whether a module is of a kind and has some of its methods as they are."""
    return isinstance(module, kind) and all(getattr(type(module), name) is getattr(kind, name) for name in methods)


class View(NamedTuple):
    """How an image is shown to the detector.

    Attributes:
        side: Pixels of the shorter side; 0 leaves the image as it is.
        flip: Whether it is mirrored from left to right.
    """

    side: int
    flip: bool


class Acting:
    """A detector's forward pass by settings, in place of its own; a copy of the model has a copy of it.

    What is returned has boxes, scores and classes alone.

    Args:
        model: The detector.
        values: ``soft_nms``; what attributes say is set already.
        views: What is looked at of an image; none for the images as they are given.
        longest: Most pixels of a view's longer side.
        size: What tells the size to which images are scaled before.
        kept: Where outputs are kept; None where they aren't.
        ignored: Names of attributes on which no output before thresholds and NMS depends.
        thresholds: Lowest scores by class, of those that have one of their own; the model's own is the least of all.
        others: That of the other classes.
    """

    def __init__(
        self,
        model: Any,
        values: Values,
        views: Sequence[View],
        longest: int,
        size: str,
        kept: KeptOutputs | None,
        ignored: Sequence[str],
        thresholds: Mapping[int, float],
        others: float,
    ) -> None:
        self.thresholds, self.others = dict(thresholds), others
        self.model, self.views, self.longest, self.size, self.kept = model, views, longest, size, kept
        self.sigma = float(values.get("soft_nms", 0.0))
        self.ignored = ignored
        forward = model.forward
        if isinstance(acting := getattr(forward, "__self__", None), Acting):
            forward = acting.forward_before
        self.forward_before: Callable[..., Any] = forward

    def forward(self, inputs: Sequence[dict[str, Any]]) -> Any:
        """Return what the model finds in each image, as it does itself."""
        if self.model.training:
            return self.forward_before(inputs)
        judged = ""
        if self.kept is not None:
            judged = f"{digest_of_model(self.model, self.ignored)} {circumstances(self.model.device)} {self.size}"
        if not self.thresholds:
            return [{"instances": each} for each in self._found(inputs, judged)]
        # What is below its class's threshold suppresses nothing above it, but must not take its place among the most.
        _, most = self._nms_and_most()
        with ExitStack() as stack:
            for each in predictors_of(self.model):
                stack.enter_context(replaced(each, **_any_number(each)))
            found = self._found(inputs, judged)
        return [{"instances": each[self._above_own(each)][:most]} for each in found]

    def _found(self, inputs: Sequence[dict[str, Any]], judged: str) -> list[Instances]:
        """Return what is found above one threshold of all classes, best first."""
        return [self._in_views(each, judged) for each in inputs] if self.views else self._as_given(inputs, judged)

    def _above_own(self, found: Instances) -> Tensor:
        """Return which detections are above the threshold of their class, ``n``."""
        least = torch.full_like(found.scores, self.others)
        for label, threshold in self.thresholds.items():
            least[found.pred_classes == label] = threshold
        above: Tensor = found.scores > least
        return above

    def _as_given(self, inputs: Sequence[dict[str, Any]], judged: str) -> list[Instances]:
        """Return what is found in images as they are given, together."""
        images = [each["image"] for each in inputs]
        found = self._chosen(self._kept(judged, images, partial(self._outputs, inputs)))
        sizes = [
            (each.get("height", one.image_size[0]), each.get("width", one.image_size[1]))
            for each, one in zip(inputs, found, strict=True)
        ]
        in_pixels = [detector_postprocess(one, *size) for one, size in zip(found, sizes, strict=True)]
        if not self.sigma:
            return in_pixels
        return self._by_soft_nms([[_candidates(each)] for each in in_pixels], sizes)

    def _in_views(self, given: dict[str, Any], judged: str) -> Instances:
        """Return what is found in the views of an image, together."""
        height, width = given["image"].shape[-2:]
        size = given.get("height", height), given.get("width", width)
        shown = [_transforms(size, (height, width), view, self.longest) for view in self.views]
        found: list[Instances] = []
        for first in range(0, len(self.views), TOGETHER):
            some = list(range(first, min(first + TOGETHER, len(self.views))))
            made: list[Outputs] = []  # of these views, by the first of them that is not kept

            def make(place: int, some: list[int] = some, made: list[Outputs] = made) -> Outputs:
                if not made:
                    seen = [{"image": _seen(given["image"], shown[i])} for i in some]
                    made.extend(_one_by_one(self._outputs(seen)))
                return made[place]

            names = [tuple(self.views[i]) for i in some]
            for place in range(len(some)):
                key = f"{judged} {self.longest} {names} {place}"  # images that are padded together are seen otherwise
                found += self._chosen(self._kept(key, [given["image"]], partial(make, place)))
        boxes = [
            torch.from_numpy(tfm.inverse().apply_box(each.pred_boxes.tensor.detach().cpu().numpy())).to(
                each.scores.device
            )
            for tfm, each in zip(shown, found, strict=True)
        ]
        if self.sigma:
            of_views = [
                {**_candidates(each), "boxes": _clipped(box, size)} for box, each in zip(boxes, found, strict=True)
            ]
            return self._by_soft_nms([of_views], [size])[0]
        scores, classes = (torch.cat([getattr(each, name) for each in found]) for name in ("scores", "pred_classes"))
        of_classes = scores.new_zeros(len(scores), int(classes.max()) + 2 if len(classes) else 1)
        of_classes[torch.arange(len(scores)), classes] = scores
        nms, most = self._nms_and_most()
        return fast_rcnn_inference_single_image(torch.cat(boxes), of_classes, size, LEAST, nms, most)[0]

    def _by_soft_nms(self, views: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        nms, most = self._nms_and_most()
        threshold = predictors_of(self.model)[-1].test_score_thresh
        found = merged(views, nms=nms, sigma=self.sigma, threshold=threshold, most=most)
        return [
            Instances(size, pred_boxes=Boxes(each["boxes"]), scores=each["scores"], pred_classes=each["labels"])
            for each, size in zip(found, sizes, strict=True)
        ]

    def _nms_and_most(self) -> tuple[float, int]:
        last = predictors_of(self.model)[-1]
        return last.test_nms_thresh, last.max_detections_per_image if last is self.model else last.test_topk_per_image

    def _kept(self, key: str, images: Sequence[Tensor], make: Callable[[], Outputs]) -> Outputs:
        if self.kept is None:
            return make()
        with torch.no_grad():
            outputs: Outputs = self.kept.of(key, make, part=digest_of(images))
        return outputs

    def _outputs(self, inputs: Sequence[dict[str, Any]]) -> Outputs:
        """Return what the model computes for images before thresholds and NMS."""
        if isinstance(self.model, RetinaNet):
            return self._outputs_of_retinanet(inputs)
        predictors = predictors_of(self.model)
        logits: list[Any] = [None] * len(predictors)
        boxes: list[Any] = [None]
        sizes: list[Any] = []

        def probs(at: int, predictions: Any, proposals: Sequence[Any]) -> Any:
            logits[at], sizes[:] = predictions[0], [tuple(each.image_size) for each in proposals]
            return FastRCNNOutputLayers.predict_probs(predictors[at], predictions, proposals)

        def decoded(predictions: Any, proposals: Sequence[Any]) -> Any:
            boxes[0] = FastRCNNOutputLayers.predict_boxes(predictors[-1], predictions, proposals)
            return boxes[0]

        with ExitStack() as stack:
            for at, each in enumerate(predictors):
                stack.enter_context(replaced(each, predict_probs=partial(probs, at)))
            stack.enter_context(replaced(predictors[-1], predict_boxes=decoded))
            self.forward_before(inputs)
        return {"logits": tuple(logits), "boxes": tuple(boxes[0]), "sizes": tuple(sizes)}

    def _outputs_of_retinanet(self, inputs: Sequence[dict[str, Any]]) -> Outputs:
        taken: list[Outputs] = []

        def take(images: Any, features: Any, predictions: Any) -> list[Any]:
            logits, deltas = predictions
            sizes = tuple((int(height), int(width)) for height, width in images.image_sizes)
            taken.append({"logits": tuple(logits), "deltas": tuple(deltas), "sizes": sizes})
            return []

        with replaced(self.model, forward_inference=take):
            self.forward_before(inputs)
        return taken[0]

    def _chosen(self, outputs: Outputs) -> list[Instances]:
        """Return the detections in pixels of the images that the model saw, or of soft-NMS all that it chooses from."""
        if not self.sigma:
            return self._detected(outputs)
        with ExitStack() as stack:
            for each in predictors_of(self.model):
                stack.enter_context(replaced(each, test_nms_thresh=2.0, **_any_number(each)))  # no IoU is above 1
                return self._detected(outputs)
        raise AssertionError

    def _detected(self, outputs: Outputs) -> list[Instances]:
        """Return the detections by the model's own code, as its attributes say."""
        found: list[Instances]
        logits = [each.clone() for each in outputs["logits"]]
        sizes = outputs["sizes"]
        if isinstance(self.model, RetinaNet):  # which works in place
            images: Any = SimpleNamespace(image_sizes=sizes)
            found = RetinaNet.forward_inference(self.model, images, logits, [logits, list(outputs["deltas"])])
            return found
        predictors, boxes = predictors_of(self.model), outputs["boxes"]
        rows: Any = [range(len(each)) for each in boxes]  # of proposals, of which the number alone is read
        probs = [
            FastRCNNOutputLayers.predict_probs(one, (each, each), rows)
            for one, each in zip(predictors, logits, strict=True)
        ]
        scores = [sum(each) * (1.0 / len(predictors)) for each in zip(*probs, strict=True)]  # as a cascade has it
        last = predictors[-1]
        limits = last.test_score_thresh, last.test_nms_thresh, last.test_topk_per_image
        found = fast_rcnn_inference(list(boxes), scores, list(sizes), *limits)[0]
        return found


def _any_number(module: Any) -> dict[str, int]:
    """Return what lets a module find any number of objects in an image."""
    names = ("max_detections_per_image", "test_topk_per_image")
    return {name: sys.maxsize for name in names if hasattr(module, name)}


def _one_by_one(outputs: Outputs) -> list[Outputs]:
    """Divide the outputs of images into those of each."""
    sizes = outputs["sizes"]
    if "deltas" in outputs:
        return [
            {**{key: tuple(each[i : i + 1] for each in outputs[key]) for key in ("logits", "deltas")}, "sizes": (size,)}
            for i, size in enumerate(sizes)
        ]
    counts = [len(each) for each in outputs["boxes"]]
    logits = zip(*(each.split(counts) for each in outputs["logits"]), strict=True)
    return [
        {"logits": tuple(of_image), "boxes": (boxes,), "sizes": (size,)}
        for of_image, boxes, size in zip(logits, outputs["boxes"], sizes, strict=True)
    ]


def _transforms(size: tuple[int, int], given: tuple[int, int], view: View, longest: int) -> transforms.TransformList:
    """Return what makes a view of an image, from the file's height and width on; as ``DatasetMapperTTA``.

    Args:
        size: Height and width of the file.
        given: Those of the image that the model is given.
        view: The view, which is made of that.
        longest: Most pixels of its longer side.
    """
    width = given[1]
    steps = [transforms.NoOpTransform() if given == size else transforms.ResizeTransform(*size, *given)]
    if view.side:
        to = transforms.ResizeShortestEdge.get_output_shape(*given, view.side, longest)
        steps.append(transforms.ResizeTransform(*given, *to))
        width = to[1]
    if view.flip:
        steps.append(transforms.HFlipTransform(width))
    return transforms.TransformList(steps)


def _seen(image: Tensor, shown: transforms.TransformList) -> Tensor:
    """Return an image as a view shows it; the first transform is made already."""
    pixels = np.copy(image.permute(1, 2, 0).cpu().numpy())
    for step in shown.transforms[1:]:
        pixels = step.apply_image(pixels)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _candidates(found: Instances) -> dict[str, Tensor]:
    return {"boxes": found.pred_boxes.tensor, "scores": found.scores, "labels": found.pred_classes}


def _clipped(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    within = Boxes(boxes)
    within.clip(size)
    clipped: Tensor = within.tensor
    return clipped
