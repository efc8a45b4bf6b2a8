"""The metric that a config names, tried before work is done for it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.classification.besides import check_besides
from metricopt_ext.classification.callable_metric import from_callable, warn_of_scores
from metricopt_ext.classification.config import MetricConfig
from metricopt_ext.classification.label_metrics import label_metric
from metricopt_ext.classification.metrics import GROUPED, METRICS, MetricSpec, expected_cost, worst_of, worst_recall
from metricopt_ext.classification.split_metric import value_of
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.own_metric import own_metric, try_on_few, why

NO_VALUES = np.empty(0)


def build_metric(
    config: MetricConfig,
    kind: str = "classes",
    classes: Sequence[str] = (),
    values: npt.NDArray[Any] = NO_VALUES,
) -> MetricSpec:
    """Return the metric that the settings name; a module that they name is imported, which runs it.

    Args:
        config: The metric's settings.
        kind: What is predicted (`targets.KINDS`).
        classes: The names of the classes; empty where they are not known yet.
        values: The values of the column that ``metric.by`` names, in order; empty where they are not known yet.

    Raises:
        ConfigError: There is no such metric, or its settings are incomplete.
    """
    if not config.by:
        return _whole_metric(config, kind, classes)
    if config.name not in GROUPED or kind != "classes":
        raise ConfigError(
            f"metric.by={config.by!r} is for a metric that is a mean over rows or a ratio of counts,"
            f" {', '.join(GROUPED)}, of data.kind=classes; got metric.name={config.name} and data.kind={kind}"
        )
    spec = _whole_metric(config, kind, classes)
    names = [f"{config.by}={value}" for value in values]
    said = f"{spec.description}; in the group by {config.by} where that is worst"
    return worst_of(spec, partial(_places, values), names, config.title, said, config.by)


def _places(values: npt.NDArray[Any], labels: Tensor, column: npt.NDArray[Any]) -> Tensor:
    """Return the place of each row's value among some in order, ``n`` int64; -1 where it is none of them."""
    places = np.searchsorted(values, column).clip(max=len(values) - 1)
    return torch.from_numpy(np.where(values[places] == column, places, -1))


def _whole_metric(config: MetricConfig, kind: str, classes: Sequence[str]) -> MetricSpec:
    """Return the metric of all rows."""
    own = own_metric(config.name, config)
    if own is None and kind == "multilabel":
        return label_metric(config.name)
    if config.name == "worst_recall":
        return worst_recall(classes)
    if config.name in METRICS:
        return METRICS[config.name]
    try:
        if config.name == "expected_cost":
            return expected_cost(config.costs)
        if own is None:
            raise ConfigError(
                f"metric.name={config.name!r} is none of {', '.join([*METRICS, 'expected_cost'])}; name your own"
                " function as MODULE:FUNCTION, e.g. sklearn.metrics:matthews_corrcoef"
            )
        spec = from_callable(
            own.function,
            maximize=own.maximize,
            bounds=own.bounds,
            name=own.name,
            scores=getattr(config, "scores", ""),
            columns=getattr(config, "columns", ()),
            kind=kind,
        )
        given = {name: getattr(config, name, None) for name in ("kwargs", "scores")}
        return replace(spec, arguments={"function": config.name, **given})
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric.name={config.name!r}: {error}") from error


def try_metric(
    config: MetricConfig,
    part: Split,
    target: Target,
    others: Mapping[str, MetricSpec] | None = None,
    metric: MetricSpec | None = None,
) -> None:
    """Evaluate the metric on made-up predictions, every second of them right, before work is done for it.

    Args:
        config: The metric's settings.
        part: Has true labels, and the columns that the metric is given.
        target: What is predicted.
        others: What counts besides the metric, by name.
        metric: What was built from the settings; None to build it.

    Raises:
        ConfigError: The metric fails; the message says why.
    """
    metric, outputs = metric or build_metric(config, target.kind), _made_up(part.y, target)
    check_besides(others or {}, outputs, part.y)
    try:
        if ":" in config.name:
            try_on_few(lambda rows: value_of(metric, outputs, part, torch.tensor(rows)), len(part))
            warn_of_scores(metric, outputs, part.y, *(part.columns[name] for name in metric.columns))
        else:
            value_of(metric, outputs, part)
    except (Exception, SystemExit) as error:
        keys = (
            "; see metric.kwargs (its arguments), metric.scores and metric.columns (what it is given) and metric.bounds"
            " (its range)"
        )
        what = "classes" if target.kind == "classes" else "labels each"
        raise ConfigError(
            f"metric.name={config.name} fails on made-up predictions of {target.count} {what}: {why(error)}"
            f"{keys if ':' in config.name else ''}"
        ) from error


def _made_up(labels: Tensor, target: Target) -> Tensor:
    """Outputs of which every second is right."""
    wrong = torch.arange(len(labels), device=labels.device) % 2
    if target.kind == "multilabel":
        return 2 * (labels ^ wrong[:, None]).float() - 1
    return F.one_hot((labels + wrong) % target.count, target.count).float()
