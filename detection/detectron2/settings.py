"""What inference of Detectron2's detectors can be tuned for by its config: size, thresholds, detections of an image."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import transforms
from detectron2.modeling import FastRCNNOutputLayers, GeneralizedRCNN, RetinaNet
from torch import nn

from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
from metricopt_ext.detection.settings import SIZES, Apply, replaced, settings_of, with_attributes
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.settings import Settings, Value, Values

# By setting: the modules' attributes, and the config's keys.
OF_RCNN = {
    "score_thresh": ("test_score_thresh", "MODEL.ROI_HEADS.SCORE_THRESH_TEST"),
    "detections": ("test_topk_per_image", "TEST.DETECTIONS_PER_IMAGE"),
    "nms": ("test_nms_thresh", "MODEL.ROI_HEADS.NMS_THRESH_TEST"),
}
OF_RETINANET = {
    "score_thresh": ("test_score_thresh", "MODEL.RETINANET.SCORE_THRESH_TEST"),
    "detections": ("max_detections_per_image", "TEST.DETECTIONS_PER_IMAGE"),
    "nms": ("test_nms_thresh", "MODEL.RETINANET.NMS_THRESH_TEST"),
}


def detectron2_settings(
    toolkit: Detectron2Toolkit,
    model: nn.Module,
    *,
    names: Sequence[str] | None = None,
    inference: float | None = None,
    average_precision: bool = False,
) -> Settings:
    """Return the settings of inference of an R-CNN, with one box head or a cascade, or RetinaNet.

    They are ``size``, ``score_thresh``, ``detections`` and, if named, ``nms``, as in
    `metricopt_ext.detection.settings.detection_settings`; while they are applied, ``toolkit.detect`` acts so. Flips and
    several sizes are Detectron2's own test-time augmentation, ``TEST.AUG``, which it evaluates by itself.

    Args:
        toolkit: The detector's toolkit, which resizes images.
        model: A detector that it built.
        names: Which settings there are; by default all but ``nms``.
        inference: Largest factor on inference time; None for any.
        average_precision: Whether the metric is an average precision, for which a low threshold is free.

    Raises:
        ConfigError: The detector is none of these, or has no such setting.
    """
    modules, attributes = _where(model)
    values = {name: getattr(modules[0], attribute) for name, (attribute, _) in attributes.items()}
    sizes = SIZES if toolkit.cfg.INPUT.MIN_SIZE_TEST else ()  # 0 leaves images as they are

    def acting_by(defaults: dict[str, Value]) -> Apply:
        def apply(values: dict[str, Value], model: nn.Module = model) -> AbstractContextManager[None]:
            return _applied(toolkit, model, defaults, values)

        return apply

    return settings_of(
        type(model).__name__,
        with_attributes(values["score_thresh"], values["detections"], values["nms"], sizes),
        acting_by,
        names=names,
        inference=inference,
        average_precision=average_precision,
    )


def config_lines(cfg: CfgNode, values: Values) -> list[str]:
    """Return keys and values for the command line of Detectron2's ``train_net.py --eval-only``, in turns.

    Args:
        cfg: The detector's config, as it is by default.
        values: Values of `detectron2_settings`.

    Raises:
        ConfigError: The config is of another detector, or has no key for a value.

    Example:
        >>> config_lines(cfg, {"size": 1.41, "detections": 300})  # doctest: +SKIP
        ['TEST.DETECTIONS_PER_IMAGE', '300', 'INPUT.MIN_SIZE_TEST', '1128', 'INPUT.MAX_SIZE_TEST', '1880']
    """
    kinds = {"GeneralizedRCNN": OF_RCNN, "RetinaNet": OF_RETINANET}
    if (kind := cfg.MODEL.META_ARCHITECTURE) not in kinds:
        raise ConfigError(f"MODEL.META_ARCHITECTURE is {kind}; settings are known of {' and '.join(kinds)}")
    keys = {name: key for name, (_, key) in kinds[kind].items()}
    if unknown := [name for name in values if name not in (*keys, "size")]:
        raise ConfigError(f"Detectron2's config has no key for {unknown[0]!r}; it has for {', '.join((*keys, 'size'))}")
    lines = {key: values[name] for name, key in keys.items() if name in values}
    if "size" in values:
        smaller, larger = _scaled(cfg, float(values["size"]))
        lines |= {"INPUT.MIN_SIZE_TEST": smaller, "INPUT.MAX_SIZE_TEST": larger}
    return [part for key, value in lines.items() for part in (key, repr(value))]


def _where(model: Any) -> tuple[list[Any], dict[str, tuple[str, str]]]:
    """The modules that threshold and suppress boxes, and where they have what."""
    if type(model) is RetinaNet:
        return [model], OF_RETINANET
    heads = getattr(getattr(model, "roi_heads", None), "box_predictor", None)
    predictors = list(heads) if isinstance(heads, nn.ModuleList) else [heads]
    if not isinstance(model, GeneralizedRCNN) or not all(type(each) is FastRCNNOutputLayers for each in predictors):
        raise ConfigError(
            f"{type(model).__name__} is not, or detects otherwise than, Detectron2's GeneralizedRCNN with a box head or"
            " RetinaNet, whose settings of inference are known; give your own, metricopt_ext.Settings"
        )
    return predictors, OF_RCNN


def _scaled(cfg: CfgNode, factor: float) -> tuple[int, int]:
    return round(cfg.INPUT.MIN_SIZE_TEST * factor), round(cfg.INPUT.MAX_SIZE_TEST * factor)


@contextmanager
def _applied(
    toolkit: Detectron2Toolkit, model: nn.Module, defaults: Values, values: dict[str, Value]
) -> Iterator[None]:
    modules, attributes = _where(model)
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    with ExitStack() as stack:
        for module in modules:
            own = {attribute: changed[name] for name, (attribute, _) in attributes.items() if name in changed}
            stack.enter_context(replaced(module, **own))
        if "size" in changed:
            smaller, larger = _scaled(toolkit.cfg, float(changed["size"]))
            resize = transforms.ResizeShortestEdge([smaller, smaller], larger)
            stack.enter_context(replaced(toolkit, _resize=resize))
        yield
