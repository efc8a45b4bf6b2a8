"""What inference of torchvision's detectors can be tuned for, before a weight is touched."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from math import inf, prod
from typing import Any

from torch import nn

from metricopt_ext.detection.acting import SIZES, VIEWS, Host, applied
from metricopt_ext.detection.ap50 import LOW_SCORE
from metricopt_ext.detection.config import SETTINGS
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.settings import Setting, Settings, Value, Values
from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.extras import install
from metricopt_ext.utils.kept_outputs import KeptOutputs
from metricopt_ext.utils.words import nearest, shortened

try:
    from torchvision.models.detection.ssd import SSD, SSDFeatureExtractorVGG
except ImportError as error:
    raise ImportError(f"torchvision's detectors need torchvision: {install('torchvision')}") from error

LARGER = tuple(each for each in SIZES if each >= 1)
MULTI_SCALE = 3.0  # times the inference, about: 0.5 + 1 + 2 ** 0.5

# For an average precision. What a lower threshold adds ranks below all else of its class and can't lower it; what more
# detections of an image add ranks below the rest of that image alone, but below almost everything in practice.
MANY = 300  # detections of an image, above LOW_SCORE
SIGMA = 0.2

# By expected worth: what is tried first. The others do nothing in most cases, or overfit: they must be asked for.
USUAL = SETTINGS[:6]
ALONE = ("size", "score_thresh", "detections")  # the others gain together only


# A context manager in which a detector acts by values.
Apply = Callable[..., AbstractContextManager[Any]]

PRESETS: dict[str, Values] = {
    "soft_nms": {"soft_nms": SIGMA},
    "flip": {"flip": True},
    "multi_scale": {"multi_scale": True},
    "flip+soft_nms": {"flip": True, "soft_nms": SIGMA},
    "flip+multi_scale+soft_nms": {"flip": True, "multi_scale": True, "soft_nms": SIGMA},
}


def detection_settings(
    model: nn.Module,
    *,
    names: Sequence[str] | None = None,
    inference: float | None = None,
    average_precision: bool = False,
    kept: KeptOutputs | None = None,
    boxes_only: bool = False,
    class_thresholds: Mapping[str, int] | None = None,
) -> Settings:
    """Return the settings of inference of one of torchvision's detectors.

    While they are applied, the model is called as usual, with a list of images in evaluation mode. In training mode it
    is as always. With all defaults the detections are those of the model, to the last bit.

    - ``size``: factor on the size to which test images are scaled, from .71 to 1.68; inference takes its square.
    - ``score_thresh``: lowest score of a detection.
    - ``score_thresh[CLASS]``: the same of one class, with ``class_thresholds`` and in the place of ``score_thresh``.
    - ``detections``: most detections of an image.
    - ``soft_nms``: sigma of gaussian soft-NMS by class (`soft_nms.soft_nms`); 0 for NMS.
    - ``flip``: whether what is found in the mirrored image competes too; twice the inference. Wrong for text, digits.
    - ``multi_scale``: whether what is found at ``size`` and at 2 ** .25 times less and more competes; three times.
    - ``nms``: IoU above which NMS removes the worse of two boxes.

    Args:
        model: A Faster or Mask R-CNN, RetinaNet, FCOS or SSD of torchvision.
        names: Which settings there are; by default those that are worth it, all but ``nms``.
        inference: Largest factor on inference time: values and presets beyond it are left out. None for any.
        average_precision: Whether the metric is an average precision. A score threshold of .0005 is free then: what it
            adds ranks below all else of its class. So are 300 detections of an image, of which those that fewer would
            have cut off are its worst. For other metrics both are settings like others.
        kept: Keeps what the model computes before thresholds and NMS, so that only a new size or flip takes a pass
            through it. Detections then carry no gradients.
        boxes_only: Whether masks are not needed. With ``kept`` there are none.
        class_thresholds: Classes that may have a score threshold of their own, by name the model's labels of them, from
            1: for a metric at an operating point, such as F1 or a precision at some recall. None for no class.

    Raises:
        ConfigError: The model is none of these or has no such setting, or ``kept`` would leave out masks;
            or there are ``class_thresholds`` for an average precision, or beside ``score_thresh``.
        ValueError: ``inference`` is below 1.

    Examples:
        >>> settings = detection_settings(model, average_precision=True)  # doctest: +SKIP
        >>> with settings.applied({"size": 1.41, **settings.free}):  # doctest: +SKIP
        ...     detections = model(images)
    """
    check_at_least(1, inference=inference)
    host = Host.of(model)
    if kept is not None and host.more_than_boxes and not boxes_only:
        raise ConfigError(
            f"kept outputs of a {type(model).__name__} are its boxes; set boxes_only=True if the metric judges boxes"
            " alone, or leave kept out"
        )
    own = thresholds_of_classes(
        class_thresholds, type(model).__name__, host.owner.score_thresh, names, average_precision
    )

    def acting_by(defaults: dict[str, Value]) -> Apply:
        def apply(values: dict[str, Value], model: nn.Module = model) -> AbstractContextManager[None]:
            acting = host if model is host.model else Host.of(model)  # a start with other tensors has a copy
            return applied(acting, defaults, kept, boxes_only, own, values)

        return apply

    return settings_of(
        type(model).__name__,
        [*_all_settings(host), *_of_classes(host, own)],
        acting_by,
        partial(set_on, class_thresholds=class_thresholds),
        names=names,
        inference=inference,
        average_precision=average_precision,
        of_classes=tuple(own),
    )


def thresholds_of_classes(
    classes: Mapping[str, int] | None, who: str, scores: float, names: Sequence[str] | None, average_precision: bool
) -> dict[str, int]:
    """Return the labels of classes by the names of their score thresholds.

    Args:
        classes: The labels, by the names of the classes.
        who: What the detector is called in messages.
        scores: Its own threshold.
        names: As in `detection_settings`.
        average_precision: As there.

    Raises:
        ConfigError: There are some for an average precision, or beside ``score_thresh``; or ``scores`` has no log-odds.
    """
    own = {f"score_thresh[{name}]": label for name, label in (classes or {}).items()}
    if own and average_precision:
        raise ConfigError(
            "class_thresholds are for a metric at an operating point; an average precision ranks all that is found, and"
            " a threshold can only lower it: leave them out"
        )
    asked = [name for name in (own if names is None else names) if name in own or name == "score_thresh"]
    if "score_thresh" in asked and len(set(asked)) > 1:
        raise ConfigError(f"names are {asked}; those of classes take the place of score_thresh: leave it out")
    if asked and not 0 < scores < 1:
        raise ConfigError(
            f"{who}'s score_thresh is {scores}, which has no log-odds; set it between"
            " 0 and 1 first, or leave score_thresh out"
        )
    return own


def settings_of(
    who: str,
    known: Sequence[Setting],
    apply: Callable[[dict[str, Value]], Apply],
    setting_on: Callable[[Any, Values], str],
    *,
    names: Sequence[str] | None,
    inference: float | None,
    average_precision: bool,
    of_classes: Sequence[str] = (),
) -> Settings:
    """Return the settings of a detector that are asked for.

    Args:
        who: What the detector is called in messages.
        known: All that it has.
        apply: Gets the defaults of those that are chosen, and returns what `Settings` applies.
        setting_on: What `Settings` sets on a model for good.
        names: As in `detection_settings`.
        inference: As there.
        average_precision: As there.
        of_classes: Names of the score thresholds of classes.

    Raises:
        ConfigError: There is no such setting, or none has a second value.
    """
    named = {each.name: each for each in known}
    usual = [each for name in USUAL for each in (of_classes if of_classes and name == "score_thresh" else (name,))]
    asked = [name for name in usual if name in named] if names is None else list(dict.fromkeys(names))
    if unknown := [name for name in asked if name not in named]:
        raise ConfigError(f"{who} has no setting {unknown[0]!r}{nearest(unknown[0], list(named))}")
    most = inf if inference is None else inference + 1e-9
    there = {name: each for name in asked if (each := _within(named[name], most)) is not None}
    if not there:
        raise ConfigError(f"no setting of {shortened(asked)} has a second value at inference={inference}; allow more")
    free: dict[str, Value] = {}
    if average_precision and "score_thresh" in there:
        free["score_thresh"] = min(LOW_SCORE, float(there["score_thresh"].default))
    if average_precision and "detections" in there:
        free["detections"] = max(MANY, int(there["detections"].default))

    def allowed(values: Values) -> bool:
        return set(values) <= set(there) and prod(there[name].factor(value) for name, value in values.items()) <= most

    return Settings(
        list(there.values()),
        apply({name: each.default for name, each in there.items()}),
        alone=[name for name in there if names is not None or (name in (*ALONE, *of_classes) and name not in free)],
        free=free,
        presets={name: values for name, values in PRESETS.items() if allowed(values)},
        set_on=setting_on,
    )


def set_on(model: nn.Module, values: Values, class_thresholds: Mapping[str, int] | None = None) -> str:
    """Set on a detector of torchvision what its own attributes can say, for good; call it once.

    These are the score threshold, the number of detections, the size of test images, and
    NMS's IoU. No checkpoint holds them: set them after the weights are loaded.

    Args:
        model: As in `detection_settings`, as it is by default.
        values: Values of its settings.
        class_thresholds: As in `detection_settings`.

    Returns:
        What must be done besides, in a sentence with code; empty where nothing must be.

    Raises:
        ConfigError: The model is none of torchvision's.
        ValueError: It has no such setting, or that can't have this value.
    """
    host = Host.of(model)
    own = [f"score_thresh[{name}]" for name in class_thresholds or {}]
    changed = Settings([*_all_settings(host), *_of_classes(host, own)], lambda values: ExitStack()).changed(values)
    for owner, name, value in host.attributes(changed):
        setattr(owner, name, value)
    rest = {name: value for name, value in changed.items() if name in (*VIEWS, *own)}
    if not rest:
        return ""
    more = f", class_thresholds={dict(class_thresholds or {})}" if set(own) & set(rest) else ""
    return (
        f"a {type(model).__name__} has no attribute for {', '.join(rest)}: detect inside `with"
        f" detection_settings(model, names={list(rest)}{more}).applied({rest}): model(images)`, of"
        " metricopt_ext.detection.settings"
    )


def with_attributes(scores: float, most: int, nms: float, sizes: tuple[float, ...] = SIZES) -> list[Setting]:
    """Return the settings that detectors have attributes for, with a detector's own values as defaults.

    Args:
        scores: The score threshold; one of 0 has no log-odds and is the lowest already, so it is no setting then.
        most: Detections of an image.
        nms: IoU of NMS.
        sizes: Factors on the size of test images; none for images that are not resized.
    """
    settings = [
        Setting("detections", 1, max(1000, most), scale="log", default=int(most)),
        Setting("nms", min(0.3, nms), max(0.9, nms), default=float(nms)),
    ]
    if sizes:
        settings.append(Setting("size", values=sizes, default=1.0, inference=lambda value: float(value) ** 2))
    if 0 < scores < 1:
        settings.append(score_threshold("score_thresh", scores))
    return settings


def _of_classes(host: Host, names: Iterable[str]) -> list[Setting]:
    """Return the score thresholds of classes; none if the model's own has no log-odds."""
    scores = host.owner.score_thresh
    return [score_threshold(name, scores) for name in names if 0 < scores < 1]


def score_threshold(name: str, scores: float) -> Setting:
    """Return the setting of a score threshold, in log-odds; so much by default."""
    low, high = min(LOW_SCORE, scores), max(0.95, scores)
    return Setting(name, low, high, scale="logit", default=float(scores))


def with_views(*, several_sizes: bool) -> list[Setting]:
    """Return the settings that detectors have no attributes for; several sizes at once if images can be so small."""
    settings = [
        Setting("soft_nms", 0.0, 1.0, default=0.0),
        Setting("flip", values=(False, True), default=False, inference=2.0),
    ]
    if several_sizes:
        settings.append(Setting("multi_scale", values=(False, True), default=False, inference=MULTI_SCALE))
    return settings


def _all_settings(host: Host) -> list[Setting]:
    """Return what a detector can be tuned for, with its own values as defaults."""
    owner = host.owner
    sizes = SIZES
    if isinstance(host.model, SSD) and isinstance(host.model.backbone, SSDFeatureExtractorVGG):
        sizes = LARGER  # on smaller images its last layer would have nothing to see
    return [
        *with_attributes(owner.score_thresh, owner.detections_per_img, owner.nms_thresh, sizes),
        *with_views(several_sizes=len(sizes) == len(SIZES)),
    ]


def _within(setting: Setting, most: float) -> Setting | None:
    """Return a setting without the values that take more than a factor; None if its default alone is left."""
    if setting.values is None:
        return setting
    values = tuple(each for each in setting.values if setting.factor(each) <= most)
    if len(values) < 2:
        return None
    return Setting(setting.name, values=values, default=setting.default, inference=setting.inference)
