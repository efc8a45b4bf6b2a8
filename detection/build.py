"""Turns a detection config into the things it describes: toolkit, detector, adapter, metric."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.data.named_model import settings_of
from metricopt_ext.data.pretrained import pretrained
from metricopt_ext.detection.coco_outputs import for_classes
from metricopt_ext.detection.config import DetectionConfig, DetectorAdapterConfig, MetricConfig
from metricopt_ext.detection.data import DetectionSplits
from metricopt_ext.detection.frozen import FrozenFeatures, acts_in_box_head_alone
from metricopt_ext.detection.kept_maps import keep_maps
from metricopt_ext.detection.matching import DEFINITIONS
from metricopt_ext.detection.metric import (
    PRECISIONS,
    ClassAveragePrecision,
    DetectionMetric,
    MeanAveragePrecision,
    MeanF1,
    OwnDetectionMetric,
    kind_of,
)
from metricopt_ext.detection.own_detector import OwnToolkit
from metricopt_ext.detection.task import ExampleBatches
from metricopt_ext.detection.toolkit import Toolkit
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.detection.train import train_detector
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.besides import NO_BOUNDS, class_number, of_class, own_function
from metricopt_ext.experiment.own_metric import own_metric
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.extras import require

F1 = MeanF1.name
TOOLKITS = ("detectron2", "torchvision", "transformers")
KEPT = "adapter.keep_gib"
# The settings that not all toolkits use.
SETTINGS = {
    "detectron2": ("model.config_file", "model.opts", KEPT),
    "torchvision": ("model.name", "model.min_size", "model.max_size", "model.proposals", "model.coco_weights", KEPT),
    "transformers": ("model.name",),
}
# Those of torchvision's and our own detectors, which one of the user's own takes in its own way.
OF_STOCK = ("model.min_size", "model.max_size", "model.proposals", "model.coco_weights")


def build_toolkit(config: DetectionConfig) -> Toolkit:
    """Return the toolkit that the settings name.

    Raises:
        ConfigError: There is no such toolkit, it is not installed, it rejects its settings, or one is another's.
    """
    model = config.model
    if config.toolkit not in TOOLKITS:
        raise ConfigError(f"toolkit={config.toolkit!r} is none of {', '.join(TOOLKITS)}")
    if config.kind != "bbox" and config.toolkit != "torchvision":
        more = " or search by tools/train_detector.py, with METRICOPT.METRIC.NAME" * (config.toolkit == "detectron2")
        raise ConfigError(
            f"{config.kind} are judged with toolkit=torchvision here, not with toolkit={config.toolkit}; judge its"
            f" boxes, by metric.name=AP50,{more or ' or take another toolkit'}"
        )
    _refuse_settings_of_others(config)
    # Otherwise the detector is trained further, or all of its weights are read from model.weights.
    strict_weights = not model.steps and not model.weights
    if ":" in model.name:
        return _own(config)
    if config.toolkit == "torchvision":
        return TorchvisionToolkit(
            name=model.name,
            min_size=model.min_size,
            max_size=model.max_size,
            proposals=model.proposals,
            weights=model.coco_weights,
            entry=model.entry,
            strict_weights=strict_weights,
            classification_loss=config.classification_loss,  # type: ignore[arg-type]
            kind=config.kind,
        )
    if config.toolkit == "transformers":
        if config.classification_loss != DetectionConfig.classification_loss:
            raise ConfigError(f"classification_loss={config.classification_loss!r} is not for toolkit=transformers")
        return _transformers(model.name)
    try:
        from metricopt_ext.detection.detectron2.config import read_config
        from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
    except ImportError as error:
        raise ConfigError(
            f"toolkit=detectron2 needs Detectron2, which is installed from source ({error});"
            " --toolkit torchvision works without it, with its own config file"
        ) from error
    if not model.config_file:
        raise ConfigError("toolkit=detectron2 needs model.config_file=FILE, the YAML file that describes the detector")
    device = ["MODEL.DEVICE", str(choose_device(config.device))]
    cfg = read_config(model.config_file, [*model.opts, *device])
    return Detectron2Toolkit(cfg, config.classification_loss, strict_weights=strict_weights)


def _own(config: DetectionConfig) -> Toolkit:
    """The toolkit of a detector that a function of the user's own builds.

    Raises:
        ConfigError: Another toolkit is set, or what only the tool's own detectors take.
    """
    model, default = config.model, DetectionConfig()
    if config.toolkit != "torchvision":
        raise ConfigError(
            f"model.name={model.name} builds a detector with torchvision's interface, for toolkit=torchvision, not"
            f" toolkit={config.toolkit}"
        )
    for key in OF_STOCK:
        if (value := attrgetter(key)(config)) != attrgetter(key)(default):
            instead = "model.weights" if key == "model.coco_weights" else f"model.kwargs.{key.rpartition('.')[2]}"
            raise ConfigError(
                f"{key}={value!r} is for the tool's own detectors; model.name={model.name} can be given {instead}"
            )
    return OwnToolkit(
        name=model.name,
        classification_loss=config.classification_loss,  # type: ignore[arg-type]
        kind=config.kind,
        **settings_of(model),
    )


def _transformers(folder: str) -> Toolkit:
    try:
        require("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError("toolkit=transformers needs transformers: pip install transformers") from error
    from metricopt_ext.detection.transformers_toolkit import TransformersToolkit

    return TransformersToolkit(folder)


def with_outputs_of(
    toolkit: Toolkit, config: DetectionConfig, classes: Sequence[str], category_ids: Sequence[int | str], weights: str
) -> Toolkit:
    """Return a toolkit whose detectors have the outputs of the weights that they are given as a whole.

    They are more than the classes where torchvision trained them on COCO (`coco_outputs`).

    Args:
        toolkit: The toolkit.
        config: The settings.
        classes: The data's classes.
        category_ids: How the data number them; empty if they are not in COCO's format.
        weights: The detector's file; empty for ``model.coco_weights``, which count where they are not trained further.

    Raises:
        DataError: The outputs are of other classes than the data's.
    """
    if config.toolkit == "transformers":
        return toolkit.for_classes(classes)  # type: ignore[attr-defined, no-any-return]
    if isinstance(toolkit, OwnToolkit):
        return replace(toolkit, classes=len(classes))
    weights = weights or ("" if config.model.steps else config.model.coco_weights)
    if not weights or not isinstance(toolkit, TorchvisionToolkit):
        return toolkit
    return for_classes(toolkit, classes, category_ids, Path(weights), config.model.entry)


def _refuse_settings_of_others(config: DetectionConfig) -> None:
    """Reject non-default settings that the toolkit does not use."""
    default = DetectionConfig()
    for key in dict.fromkeys(chain.from_iterable(SETTINGS.values())):
        value = attrgetter(key)(config)
        if key not in SETTINGS[config.toolkit] and value != attrgetter(key)(default):
            users = " and ".join(toolkit for toolkit, keys in SETTINGS.items() if key in keys)
            raise ConfigError(f"{key}={value!r} is for toolkit={users} and has no effect with toolkit={config.toolkit}")


def build_metric(config: MetricConfig) -> DetectionMetric:
    """Return the metric that the settings name; a module that they name is imported, which runs it.

    Raises:
        ConfigError: There is no such metric or definition, or the settings are not a function's.
    """
    name, definition = config.name, config.definition
    if own := own_metric(name, config):
        return OwnDetectionMetric(*own, f"{name} of objects and detections")
    if name not in (*PRECISIONS, F1):
        known = ", ".join((F1, *PRECISIONS))
        raise ConfigError(f"metric.name={name!r} is none of {known}; name your own function as MODULE:FUNCTION")
    if definition not in DEFINITIONS:
        raise ConfigError(f"metric.definition={definition!r} is none of {', '.join(DEFINITIONS)}")
    return MeanF1(definition) if name == F1 else _precision(name, definition, f"metric.name={name}")


def _precision(name: str, definition: str, who: str) -> MeanAveragePrecision:
    if kind_of(name) != "bbox" and definition != "coco":
        raise ConfigError(f"{who} is by COCO's definition, not by metric.definition={definition}; set it to coco")
    return MeanAveragePrecision(name, definition)  # type: ignore[arg-type]


def besides(config: MetricConfig, classes: Sequence[str] | None = None) -> dict[str, DetectionMetric]:
    """Return what counts besides the metric by name; a module that is named is imported, which runs it.

    Args:
        config: The metric's settings: AP50, AP, AP75, segm/AP50 and so on, AP50[CLASS] and so on, in any case, are by
            its definition.
        classes: The names of the classes; None where they are not known yet.

    Raises:
        ConfigError: There is no such metric, or class.
    """
    return {name: _besides(name, key, config, classes) for name, key in config.besides.items()}


def _besides(name: str, key: str, config: MetricConfig, classes: Sequence[str] | None) -> DetectionMetric:
    if function := own_function(name, config, key):
        return OwnDetectionMetric(function, name, True, NO_BOUNDS, f"{name} of objects and detections")
    if name.casefold() == F1.casefold():
        return MeanF1(config.definition)  # type: ignore[arg-type]
    metric, label = of_class(name) or (name, "")
    known = {each.casefold(): each for each in PRECISIONS}
    if metric.casefold() not in known:
        choices = ", ".join([F1, *PRECISIONS])
        raise ConfigError(
            f"{key}: {name!r} is none of {choices}, nor one of the latter of a class, such as AP50[CLASS]; name your"
            " own function as MODULE:FUNCTION"
        )
    mean = _precision(known[metric.casefold()], config.definition, f"{key}: {name}")
    if not label or classes is None:
        return mean
    number = class_number(label, tuple(classes), key)
    return ClassAveragePrecision(mean.name, mean.definition, classes[number])


def detector(
    config: DetectionConfig,
    toolkit: Toolkit,
    splits: DetectionSplits,
    seed: int,
    folder: Path,
    callback: Callback | None = None,
) -> nn.Module:
    """Return the detector: loaded, resumed from ``folder``, or trained and kept there as ``model.safetensors``.

    Raises:
        DataError: The weights don't fit the model.
        FileFormatError: The checkpoint is corrupt.
    """
    settings = config.model
    batches = ExampleBatches(splits.train, settings.batch_size)

    def train(model: nn.Module, checkpoint: Path) -> None:
        if settings.steps:
            options: dict[str, Any] = {"steps": settings.steps, "lr": settings.lr, "seed": seed}
            train_detector(toolkit, model, batches, **options, checkpoint=checkpoint, callback=callback)

    return pretrained(
        lambda: toolkit.build(len(splits.classes), seed),
        train,
        check=lambda model: attach(toolkit, model, config.adapter, seed).merge(),
        weights=settings.weights,
        entry=settings.entry,
        folder=folder,
        seed=seed,
        device=choose_device(config.device),
    )


def attach(toolkit: Toolkit, model: nn.Module, config: DetectorAdapterConfig, seed: int) -> Adapter:
    """Attach the adapter that the settings describe.

    Raises:
        ConfigError: The detector has no such placement.
    """
    layers = config.layers or toolkit.film_layers(model, [config.placement])
    return attach_film(model, layers, dim=config.dim, seed=seed)


def remembering(toolkit: Toolkit, adapter: Adapter, config: DetectorAdapterConfig) -> Toolkit:
    """Return a toolkit that computes what phi can't change once, where it can do so and the settings allow it."""
    if not config.keep_gib:
        return toolkit
    if hasattr(toolkit, "cfg"):  # Detectron2's, which is imported only where it is installed
        from metricopt_ext.detection.detectron2.kept_features import keep_features

        keep_features(adapter.model, config.keep_gib)
    elif isinstance(toolkit, TorchvisionToolkit):
        if toolkit.kind == "bbox" and acts_in_box_head_alone(adapter.model):
            return FrozenFeatures(toolkit, adapter, config.keep_gib)
        keep_maps(adapter.model, config.keep_gib)
    return toolkit
