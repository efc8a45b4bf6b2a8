"""A detector of torchvision acts by settings of inference: where it has what they change, and its forward pass."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.detection.frozen import acts_in_box_head_alone
from metricopt_ext.detection.soft_nms import merged, mirrored
from metricopt_ext.detection.torchvision_toolkit import has_proposals
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.settings import Value, Values
from metricopt_ext.utils.extras import install
from metricopt_ext.utils.kept_outputs import KeptOutputs, circumstances, digest_of, digest_of_model

try:
    from torchvision.models.detection import FCOS, RetinaNet
    from torchvision.models.detection.ssd import SSD
    from torchvision.models.detection.transform import GeneralizedRCNNTransform
    from torchvision.ops import MultiScaleRoIAlign
except ImportError as error:
    raise ImportError(f"torchvision's detectors need torchvision: {install('torchvision')}") from error

ONE_STAGE = (RetinaNet, FCOS, SSD)

# Factors on the size of the test images: 2 to the power of -0.5, -0.25, ... 0.75, to two decimals.
SIZES: tuple[float, ...] = (0.71, 0.84, 1.0, 1.19, 1.41, 1.68)

# With what several scales have beside the smallest and the largest size.
SCALES = (0.59, *SIZES, 2.0)

ATTRIBUTES = {"score_thresh": "score_thresh", "detections": "detections_per_img", "nms": "nms_thresh"}
VIEWS = ("flip", "multi_scale", "soft_nms")  # what no attribute of a module says


class View(NamedTuple):
    """How an image is shown to the detector.

    Attributes:
        scale: Factor on the size to which it is scaled by default.
        flip: Whether it is mirrored from left to right.
    """

    scale: float
    flip: bool


@dataclass
class Host:
    """Where one of torchvision's detectors has what its settings change.

    Attributes:
        model: The detector.
        owner: The module that thresholds and suppresses boxes.
        at: That module's name in the model, empty for itself.
        min_size: What its transform has by default.
        max_size: The same.
        fixed_size: The same, width and height; None but for an SSD.
    """

    model: Any
    owner: Any
    at: str
    min_size: tuple[int, ...]
    max_size: int
    fixed_size: tuple[int, int] | None

    @classmethod
    def of(cls, model: Any) -> "Host":
        """Make one of a detector.

        Raises:
            ConfigError: It is none of torchvision's, or detects by code of its own.
        """
        one_stage = any(
            isinstance(model, kind)
            and type(model).forward is kind.forward
            and type(model).postprocess_detections is kind.postprocess_detections
            for kind in ONE_STAGE
        )
        owner = model if one_stage else model.roi_heads if has_proposals(model) else None
        if owner is None or type(model.transform) is not GeneralizedRCNNTransform:
            raise ConfigError(
                f"{type(model).__name__} is not, or detects otherwise than, torchvision's Faster or Mask"
                " R-CNN, RetinaNet, FCOS or SSD, whose settings of inference are known; give your own,"
                " metricopt_ext.Settings"
            )
        transform = model.transform
        fixed = None if transform.fixed_size is None else tuple(transform.fixed_size)
        return cls(
            model, owner, "" if one_stage else "roi_heads.", tuple(transform.min_size), transform.max_size, fixed
        )

    @property
    def more_than_boxes(self) -> bool:
        """Whether it finds more, such as masks."""
        return bool(self.at) and (self.owner.has_mask() or self.owner.has_keypoint())

    def attributes(self, changed: Values) -> Iterator[tuple[Any, str, Any]]:
        """Go through modules, names of attributes and their values, of what attributes can say."""
        for name, attribute in ATTRIBUTES.items():
            if name in changed:
                yield self.owner, attribute, changed[name]
        if "size" in changed:
            for attribute, size in self.scaled(float(changed["size"])).items():
                yield self.model.transform, attribute, size

    def scaled(self, factor: float) -> dict[str, Any]:
        """The transform's sizes, times a factor."""
        if factor == 1:
            return {"min_size": self.min_size, "max_size": self.max_size, "fixed_size": self.fixed_size}
        fixed = None if self.fixed_size is None else tuple(round(side * factor) for side in self.fixed_size)
        smaller = tuple(max(1, round(size * factor)) for size in self.min_size)
        return {"min_size": smaller, "max_size": max(1, round(self.max_size * factor)), "fixed_size": fixed}

    @contextmanager
    def seeing(self, scale: float) -> Iterator[None]:
        """Scale images so."""
        with replaced(self.model.transform, **self.scaled(scale)):
            yield

    @property
    def ignored(self) -> list[str]:
        """Names of attributes on which nothing before thresholds and NMS depends, or that `View` says."""
        after = [f"{self.at}{name}" for name in (*ATTRIBUTES.values(), "topk_candidates", "postprocess_detections")]
        sizes = [f"transform.{name}" for name in ("min_size", "max_size", "fixed_size")]
        pools = [f"{name}.{attribute}" for name, _ in self.pools for attribute in ("scales", "map_levels")]
        return [*after, *sizes, *pools, "_has_warned"]

    @property
    def pools(self) -> list[tuple[str, MultiScaleRoIAlign]]:
        """Modules that take their scales from the first images that they see, and keep them."""
        return [(name, each) for name, each in self.model.named_modules() if isinstance(each, MultiScaleRoIAlign)]

    def before_nms(self, images: Sequence[Tensor], view: View, forward: Callable[..., Any]) -> tuple[Any, ...]:
        """Return what `postprocess_detections` gets for images, whose last part are their scaled sizes."""
        taken: list[tuple[Any, ...]] = []

        def take(*outputs: Any) -> Any:
            taken.append(outputs)
            box = images[0].new_zeros(0, 4)
            nothing = {
                "boxes": box,
                "scores": box[:, 0],
                "labels": torch.zeros(0, dtype=torch.int64, device=box.device),
            }
            return self.as_returned([dict(nothing) for _ in images])

        shown = [image.flip(-1) for image in images] if view.flip else list(images)
        with self.seeing(view.scale), replaced(self.owner, postprocess_detections=take):
            forward(shown)
        return taken[0]

    def pooled(self, images: Sequence[Tensor], view: View, forward: Callable[..., Any]) -> tuple[Any, ...]:
        """Return what the box head gets for images: features pooled of all proposals, these, and the scaled sizes."""
        taken: list[Tensor] = []
        hook = self.owner.box_roi_pool.register_forward_hook(lambda module, inputs, output: taken.append(output))
        try:
            *_, proposals, sizes = self.before_nms(images, view, forward)
        finally:
            hook.remove()
        return taken[0], proposals, sizes

    def by_box_head(self, pooled: Tensor, proposals: Any, sizes: Any) -> tuple[Any, ...]:
        """Return what `before_nms` does, from what `pooled` does."""
        return *self.owner.box_predictor(self.owner.box_head(pooled)), proposals, sizes

    def digest_before_head(self) -> str:
        """Return what identifies all that `pooled` depends on but images and view."""
        sizes, scales = ("min_size", "max_size", "fixed_size"), ("scales", "map_levels")
        before: list[tuple[Any, tuple[str, ...]]] = [
            (self.model.transform, sizes),
            (self.model.backbone, ()),
            (self.model.rpn, ()),
            (self.owner.box_roi_pool, scales),
        ]
        return " ".join(digest_of_model(part, ignored) for part, ignored in before)

    def as_returned(self, found: list[dict[str, Tensor]]) -> Any:
        """Return detections as the owner's `postprocess_detections` does."""
        return tuple([each[name] for each in found] for name in ("boxes", "scores", "labels")) if self.at else found

    def after_nms(self, outputs: tuple[Any, ...], sizes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Return the detections, in pixels of images of these heights and widths, by the model's own code."""
        found = type(self.owner).postprocess_detections(self.owner, *outputs)
        if self.at:
            found = [dict(zip(("boxes", "scores", "labels"), each, strict=True)) for each in zip(*found, strict=True)]
        in_pixels: list[dict[str, Tensor]] = self.model.transform.postprocess(found, outputs[-1], sizes)
        return in_pixels

    def candidates(self, outputs: tuple[Any, ...], sizes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Return all boxes that NMS would choose from."""
        with replaced(self.owner, nms_thresh=2.0, detections_per_img=sys.maxsize):  # no IoU is above 1
            return self.after_nms(outputs, sizes)


@contextmanager
def applied(
    host: Host,
    defaults: Values,
    kept: KeptOutputs | None,
    boxes_only: bool,
    of_classes: Mapping[str, int],
    values: dict[str, Value],
) -> Iterator[None]:
    """Have a detector act by values; the last that are applied count."""
    changed = {name: value for name, value in values.items() if value != defaults.get(name)}
    thresholds = {label: float(changed[name]) for name, label in of_classes.items() if name in changed}
    others = host.owner.score_thresh
    with ExitStack() as stack:
        if thresholds:
            stack.enter_context(replaced(host.owner, score_thresh=min(others, *thresholds.values())))
        for _, pool in host.pools:
            stack.enter_context(replaced(pool, scales=pool.scales, map_levels=pool.map_levels))
        for owner, name, value in host.attributes(changed):
            stack.enter_context(replaced(owner, **{name: value}))
        if kept is not None or thresholds or any(name in changed for name in VIEWS):
            forward = host.model.forward
            if isinstance(acting := getattr(forward, "__self__", None), _Acting):
                forward = acting.forward_before
            acting = _Acting(host, values, kept, boxes_only, forward, thresholds, others)
            stack.enter_context(replaced(host.model, forward=acting.forward))
        yield


class _Acting:
    """A detector's forward pass by settings, in place of its own; a copy of the model has a copy of it.

    Args:
        host: The detector.
        values: What its settings are; attributes are set already.
        kept: Where outputs are kept; None where they aren't.
        boxes_only: Whether masks are left out.
        forward: The model's own forward pass.
        thresholds: Lowest scores by label, of classes that have one of their own.
        others: That of the other classes.
    """

    def __init__(
        self,
        host: Host,
        values: Values,
        kept: KeptOutputs | None,
        boxes_only: bool,
        forward: Callable[..., Any],
        thresholds: Mapping[int, float],
        others: float,
    ) -> None:
        self.thresholds, self.others = dict(thresholds), others
        self.host, self.kept, self.forward_before = host, kept, forward
        size = float(values.get("size", 1.0))
        scales = [size]
        if values.get("multi_scale", False):
            at = SCALES.index(size)
            scales += [SCALES[at - 1], SCALES[at + 1]]
        flips = (False, True) if values.get("flip", False) else (False,)
        self.views = [View(scale, flip) for scale in scales for flip in flips]
        self.sigma = float(values.get("soft_nms", 0.0))
        self.more_than_boxes = host.more_than_boxes and not boxes_only
        self.ignored = host.ignored

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        """Return what the model finds in each image: ``boxes``, ``scores``, ``labels`` and what else it finds."""
        if self.host.model.training:
            return self.forward_before(images, targets)
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        if self.kept is None:
            made = [partial(self.host.before_nms, images, view, self.forward_before) for view in self.views]
        else:
            judged = f"{digest_of_model(self.host.model, self.ignored)} {circumstances(images[0].device)}"
            seen = digest_of(images)
            made = [partial(self._kept_before_nms, images, judged, seen, view) for view in self.views]
        if not self.more_than_boxes:
            return self._found([make() for make in made], sizes)
        # Masks are of the boxes that are left in the end, so the first view, which has them, comes last.
        others = [make() for make in made[1:]]
        found: list[dict[str, Tensor]] = []

        def finish(*outputs: Any) -> Any:
            found.extend(self._found([outputs, *others], sizes))
            scaled = [
                {**each, "boxes": each["boxes"] * _ratio(size, seen, each["boxes"])}
                for each, size, seen in zip(found, sizes, outputs[-1], strict=True)
            ]
            return self.host.as_returned(scaled)

        with replaced(self.host.owner, postprocess_detections=finish):
            whole = self.forward_before(images)
        return [{**each, **boxes} for each, boxes in zip(whole, found, strict=True)]

    def _kept_before_nms(self, images: Sequence[Tensor], judged: str, seen: str, view: View) -> tuple[Any, ...]:
        assert self.kept is not None
        sizes = sorted(self.host.scaled(view.scale).items())

        @torch.no_grad()
        def make() -> tuple[Any, ...]:
            return self.host.before_nms(images, view, self.forward_before)

        @torch.no_grad()
        def pool() -> tuple[Any, ...]:
            return self.host.pooled(images, view, self.forward_before)

        @torch.no_grad()
        def make_from_pooled() -> tuple[Any, ...]:
            assert self.kept is not None
            key = f"pooled {self.host.digest_before_head()} {circumstances(images[0].device)} {sizes} {view.flip}"
            return self.host.by_box_head(*self.kept.of(key, pool, part=seen, if_room=True))

        # phi that acts in the box head alone changes nothing before that, so its queries share the pooled features
        in_head = acts_in_box_head_alone(self.host.model)
        outputs: tuple[Any, ...] = self.kept.of(
            f"{judged} {sizes} {view.flip}", make_from_pooled if in_head else make, part=seen, by_pass=not in_head
        )
        return outputs

    def _found(self, outputs: list[tuple[Any, ...]], sizes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Return the detections of images, in their pixels, from what the views gave before thresholds and NMS."""
        if not self.thresholds:
            return self._above_one(outputs, sizes)
        # What is below its class's threshold suppresses nothing above it, but must not take its place among the most.
        most = self.host.owner.detections_per_img
        with replaced(self.host.owner, detections_per_img=sys.maxsize):
            found = self._above_one(outputs, sizes)
        chosen = [self._above_own(each).nonzero().flatten()[:most] for each in found]
        return [{name: each[name][rows] for name in each} for each, rows in zip(found, chosen, strict=True)]

    def _above_own(self, found: dict[str, Tensor]) -> Tensor:
        """Return which detections are above the threshold of their class, ``n``."""
        least = torch.full_like(found["scores"], self.others)
        for label, threshold in self.thresholds.items():
            least[found["labels"] == label] = threshold
        return found["scores"] > least

    def _above_one(self, outputs: list[tuple[Any, ...]], sizes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Return the same, above one threshold of all classes."""
        if len(outputs) == 1 and not self.sigma:
            return self.host.after_nms(outputs[0], sizes)
        of_views = [self.host.candidates(each, sizes) for each in outputs]
        for view, found in zip(self.views, of_views, strict=True):
            for each, (_, width) in zip(found, sizes, strict=True):
                if view.flip:
                    each["boxes"] = mirrored(each["boxes"], width)
        owner = self.host.owner
        return merged(
            list(zip(*of_views, strict=True)),
            nms=owner.nms_thresh,
            sigma=self.sigma,
            threshold=owner.score_thresh,
            most=owner.detections_per_img,
        )


def _ratio(size: tuple[int, int], seen: tuple[int, int], like: Tensor) -> Tensor:
    """What turns boxes of an image of some height and width into those of the scaled one, ``4``."""
    return like.new_tensor([seen[1] / size[1], seen[0] / size[0]] * 2)


@contextmanager
def replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """Give a module other attributes, and then its own again, or none where it had none of its own."""
    held = vars(module)
    before = {name: held[name] for name in attributes if name in held}
    try:
        for name, value in attributes.items():
            held[name] = value
        yield
    finally:
        for name in attributes:
            if name in before:
                held[name] = before[name]  # in its old place, of which a digest may tell
            else:
                held.pop(name, None)
