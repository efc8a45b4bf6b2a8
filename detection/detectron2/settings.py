"""What inference of Detectron2's detectors can be tuned for, and the lines of its config that say so."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import transforms
from detectron2.modeling import RetinaNet
from torch import nn

from metricopt_ext.detection.acting import SCALES, SIZES, VIEWS, replaced
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
from metricopt_ext.detection.detectron2.views import Acting, View, predictors_of
from metricopt_ext.detection.settings import (
    Apply,
    score_threshold,
    settings_of,
    thresholds_of_classes,
    with_attributes,
    with_views,
)
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.settings import Setting, Settings, Value, Values
from metricopt_ext.utils.kept_outputs import KeptOutputs

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
    kept: KeptOutputs | None = None,
    class_thresholds: Mapping[str, int] | None = None,
) -> Settings:
    """Return the settings of inference of an R-CNN, with one box head or a cascade, or RetinaNet.

    They are those of `metricopt_ext.detection.settings.detection_settings`. While they are applied, ``toolkit.detect``
    acts so, and but for ``size`` so does the model itself. A flip and several sizes are joined as by Detectron2's own
    test-time augmentation, so that `config_lines` has it find the same boxes; of RetinaNet, for which Detectron2 has
    none, they are joined in that way too. By ``soft_nms``, ``flip`` or ``multi_scale``, and with ``kept``,
    the model gives boxes without masks.

    Args:
        toolkit: The detector's toolkit, which resizes images.
        model: A detector that it built.
        names: Which settings there are; by default all but ``nms``.
        inference: Largest factor on inference time; None for any.
        average_precision: Whether the metric is an average precision, for which a low threshold is free.
        kept: Keeps what the model computes before thresholds and NMS, so that only a new size or flip takes a pass
            through it. A flip and sizes that are computed together, by threes, are kept as such.
        class_thresholds: Classes that may have a score threshold of their own, by name the model's numbers of them,
            from 0, as in `metricopt_ext.detection.settings.detection_settings`. None for no class.

    Raises:
        ConfigError: The detector is none of these, or has no such setting; or as there of ``class_thresholds``.
    """
    scores = getattr(predictors_of(model)[0], _names(model)["score_thresh"][0])
    own = thresholds_of_classes(class_thresholds, type(model).__name__, scores, names, average_precision)

    def acting_by(defaults: dict[str, Value]) -> Apply:
        def apply(values: dict[str, Value], model: nn.Module = model) -> AbstractContextManager[None]:
            return _applied(toolkit, model, defaults, kept, own, values)

        return apply

    return settings_of(
        type(model).__name__,
        [*_all_settings(toolkit, model), *(score_threshold(name, scores) for name in own)],
        acting_by,
        partial(set_on, toolkit, class_thresholds=class_thresholds),
        names=names,
        inference=inference,
        average_precision=average_precision,
        of_classes=tuple(own),
    )


def _all_settings(toolkit: Detectron2Toolkit, model: Any) -> list[Setting]:
    """Return what a detector can be tuned for, with its own values as defaults."""
    own = {name: getattr(predictors_of(model)[0], attribute) for name, (attribute, _) in _names(model).items()}
    sizes = SIZES if toolkit.cfg.INPUT.MIN_SIZE_TEST else ()  # 0 leaves images as they are
    settings = with_attributes(own["score_thresh"], own["detections"], own["nms"], sizes)
    return settings + with_views(several_sizes=bool(sizes))


def config_lines(cfg: CfgNode, values: Values) -> list[str]:
    """Return keys and values for the command line of Detectron2's ``train_net.py --eval-only``, in turns.

    With a flip or several sizes the result to look at is that with ``_TTA``, such as ``bbox_TTA``.

    Args:
        cfg: The detector's config, as it is by default.
        values: Values of `detectron2_settings`.

    Raises:
        ConfigError: The config is of another detector, or has no key for a value; the message has code for that.

    Examples:
        >>> config_lines(cfg, {"size": 1.41, "detections": 300})  # doctest: +SKIP
        ['TEST.DETECTIONS_PER_IMAGE', '300', 'INPUT.MIN_SIZE_TEST', '1128', 'INPUT.MAX_SIZE_TEST', '1880']
    """
    kinds = {"GeneralizedRCNN": OF_RCNN, "RetinaNet": OF_RETINANET}
    if (kind := cfg.MODEL.META_ARCHITECTURE) not in kinds:
        raise ConfigError(f"MODEL.META_ARCHITECTURE is {kind}; settings are known of {' and '.join(kinds)}")
    keys = {name: key for name, (_, key) in kinds[kind].items()}
    in_views = [name for name in ("flip", "multi_scale") if values.get(name, False)]
    without = ["soft_nms"] if values.get("soft_nms", 0) else []
    without += in_views if kind == "RetinaNet" else []
    if unknown := [name for name in values if name not in (*keys, "size", *VIEWS)]:
        known = (*keys, "size", "flip", "multi_scale")
        raise ConfigError(f"Detectron2's config has no key for {unknown[0]!r}; it has for {', '.join(known)}")
    if without:
        rest = {name: values[name] for name in without}
        raise ConfigError(_told(f"Detectron2's config of {kind} has no key", rest))
    lines: dict[str, Any] = {key: values[name] for name, key in keys.items() if name in values}
    size = float(values.get("size", 1.0))
    if "size" in values:
        lines |= dict(zip(("INPUT.MIN_SIZE_TEST", "INPUT.MAX_SIZE_TEST"), _scaled(cfg, size), strict=True))
    if in_views:
        views, longest = _views(cfg, values)
        lines |= {"TEST.AUG.ENABLED": True, "TEST.AUG.MIN_SIZES": tuple(dict.fromkeys(view.side for view in views))}
        lines |= {"TEST.AUG.MAX_SIZE": longest, "TEST.AUG.FLIP": any(view.flip for view in views)}
    return [part for key, value in lines.items() for part in (key, repr(value))]


def _told(who: str, rest: Values, more: str = "") -> str:
    """Say what a detector, or its config, can't be set to, with code for it."""
    return (
        f"{who} for {', '.join(rest)}: detect inside `with detectron2_settings(toolkit, model,"
        f" names={list(rest)}{more}).applied({rest}): toolkit.detect(model, batch)`, of"
        " metricopt_ext.detection.detectron2.settings"
    )


def set_on(
    toolkit: Detectron2Toolkit,
    model: nn.Module,
    values: Values,
    class_thresholds: Mapping[str, int] | None = None,
) -> str:
    """Set on a detector and its toolkit what Detectron2's config can say of one look at an image; call it once.

    They are then as that config builds them, the toolkit's own included. No checkpoint holds it: set it after the
    weights are loaded, or keep `config_lines`.

    Args:
        toolkit: The detector's toolkit.
        model: As in `detectron2_settings`, as it is by default.
        values: Values of its settings.
        class_thresholds: As in `detectron2_settings`.

    Returns:
        What must be done besides, in a sentence with code; empty where nothing must be.

    Raises:
        ConfigError: The detector is none of these.
        ValueError: It has no such setting, or that can't have this value.
    """
    scores = getattr(predictors_of(model)[0], _names(model)["score_thresh"][0])
    own = [f"score_thresh[{name}]" for name in class_thresholds or {}]
    known = Settings(
        [*_all_settings(toolkit, model), *(score_threshold(name, scores) for name in own)], lambda values: ExitStack()
    )
    changed = known.changed(values)
    held = {name: value for name, value in changed.items() if name not in (*VIEWS, *own)}
    rest = {name: value for name, value in changed.items() if name in (*VIEWS, *own)}
    cfg = toolkit.cfg.clone()
    cfg.defrost()
    cfg.merge_from_list(config_lines(cfg, held))
    for owner, attribute, value in list(_attributes(model, held)):
        setattr(owner, attribute, value)
    if "size" in held:
        toolkit._resize = transforms.ResizeShortestEdge([cfg.INPUT.MIN_SIZE_TEST] * 2, cfg.INPUT.MAX_SIZE_TEST)
    toolkit.cfg = cfg
    more = f", class_thresholds={dict(class_thresholds or {})}" if set(own) & set(rest) else ""
    return _told(f"a {type(model).__name__} has no attribute", rest, more) if rest else ""


def _names(model: Any) -> dict[str, tuple[str, str]]:
    return OF_RETINANET if isinstance(model, RetinaNet) else OF_RCNN


def _attributes(model: Any, changed: Values) -> Iterator[tuple[Any, str, Any]]:
    """Go through modules, names of attributes and their values, of what attributes can say."""
    for module in predictors_of(model):
        for name, (attribute, _) in _names(model).items():
            if name in changed:
                yield module, attribute, changed[name]


def _scaled(cfg: CfgNode, factor: float) -> tuple[int, int]:
    return round(cfg.INPUT.MIN_SIZE_TEST * factor), round(cfg.INPUT.MAX_SIZE_TEST * factor)


def _views(cfg: CfgNode, values: Values) -> tuple[list[View], int]:
    """Return how an image is looked at, in Detectron2's order, and the longest side of all; no views for once."""
    at = SCALES.index(float(values.get("size", 1.0)))
    scales = SCALES[at - 1 : at + 2] if values.get("multi_scale", False) else SCALES[at : at + 1]
    flips = (False, True) if values.get("flip", False) else (False,)
    views = list(dict.fromkeys(View(_scaled(cfg, scale)[0], flip) for scale in scales for flip in flips))
    return views if len(views) > 1 else [], _scaled(cfg, scales[-1])[1]


@contextmanager
def _applied(
    toolkit: Detectron2Toolkit,
    model: Any,
    defaults: Values,
    kept: KeptOutputs | None,
    of_classes: Mapping[str, int],
    values: dict[str, Value],
) -> Iterator[None]:
    modules, names = predictors_of(model), _names(model)
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    attribute = names["score_thresh"][0]
    others = getattr(modules[-1], attribute)
    thresholds = {label: float(changed[name]) for name, label in of_classes.items() if name in changed}
    smaller, larger = _scaled(toolkit.cfg, float(values.get("size", 1.0)))
    with ExitStack() as stack:
        for module in modules if thresholds else ():
            stack.enter_context(replaced(module, **{attribute: min(others, *thresholds.values())}))
        for owner, attribute, value in list(_attributes(model, changed)):
            stack.enter_context(replaced(owner, **{attribute: value}))
        if "size" in changed:
            resize = transforms.ResizeShortestEdge([smaller, smaller], larger)
            stack.enter_context(replaced(toolkit, _resize=resize))
        if kept is not None or thresholds or any(name in changed for name in VIEWS):
            views, longest = _views(toolkit.cfg, values)
            at = {id(module): name for name, module in model.named_modules()}
            ignored = [
                f"{at[id(module)]}.{attribute}".lstrip(".") for module in modules for attribute, _ in names.values()
            ]
            ignored += ["test_topk_candidates"] if isinstance(model, RetinaNet) else []
            acting = Acting(model, values, views, longest, f"{smaller} {larger}", kept, ignored, thresholds, others)
            stack.enter_context(replaced(model, forward=acting.forward))
        yield
