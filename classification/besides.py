"""The metrics that ``metric.also`` and ``metric.subject_to`` name, those of one class among them."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from metricopt_ext.classification.callable_metric import from_callable, warn_of_scores
from metricopt_ext.classification.label_metrics import label_metric
from metricopt_ext.classification.metrics import METRICS, MetricSpec, ratio_of
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.besides import NO_BOUNDS, BesidesConfig, class_number, of_class, own_function
from metricopt_ext.experiment.own_metric import why

OF_ONE_CLASS = ("recall", "precision", "f1")


def besides(config: BesidesConfig, kind: str, classes: tuple[str, ...] | None = None) -> dict[str, MetricSpec]:
    """Return what counts besides the metric by name; a module that is named is imported, which runs it.

    Args:
        config: The metric's settings.
        kind: What is predicted (`targets.KINDS`).
        classes: The names of the classes; None where they are not known yet.

    Raises:
        ConfigError: There is no such metric, or class.
    """
    return {name: _named(name, key, config, kind, classes) for name, key in config.besides.items()}


def check_besides(found: Mapping[str, MetricSpec], outputs: Tensor, labels: Tensor) -> None:
    """Evaluate what counts besides the metric on made-up outputs, before work is done for it.

    Args:
        found: By name.
        outputs: The outputs of a model, as `targets` has them.
        labels: The labels.

    Raises:
        ConfigError: One fails; the message says why.
    """
    for name, spec in found.items():
        try:
            spec.function(outputs, labels)
            warn_of_scores(spec, outputs, labels)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"metric.also or metric.subject_to: {name} fails: {why(error)}") from error


def _named(name: str, key: str, config: BesidesConfig, kind: str, classes: tuple[str, ...] | None) -> MetricSpec:
    if function := own_function(name, config, key):
        return from_callable(function, maximize=True, bounds=NO_BOUNDS, name=name, kind=kind)
    if kind == "multilabel":
        return label_metric(name, key)
    metric, label = of_class(name) or ("", "")
    if metric in OF_ONE_CLASS:
        number = 0 if classes is None else class_number(label, classes, key)
        return MetricSpec(
            name, True, (0.0, 1.0), partial(_of_one_class, metric, number, label), f"{metric} of one class"
        )
    if name in METRICS:
        return METRICS[name]
    known = ", ".join([*METRICS, *(f"{each}[CLASS]" for each in OF_ONE_CLASS)])
    raise ConfigError(f"{key}: {name!r} is none of {known}; name your own function as MODULE:FUNCTION")


def _of_one_class(metric: str, number: int, label: str, logits: Tensor, labels: Tensor) -> float:
    """Recall, precision or F-measure of one class against the rest; precision is 0 where nothing is predicted so.

    Args:
        metric: One of `OF_ONE_CLASS`.
        number: The class.
        label: Its name, for messages.
        logits: ``n x c`` or ``n``.
        labels: ``n``.

    Raises:
        DataError: No example is of the class.
    """
    if not bool((labels == number).any()):
        raise DataError(f"no example has class {label!r}, which {metric} needs")
    return ratio_of(metric, number, logits, labels)
