"""What counts besides the metric: the settings that the tools share, and the functions that they name."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.own_metric import OwnMetricConfig, own_metric
from metricopt_ext.tasks.constraints import parse_constraints
from metricopt_ext.utils.config import config_section
from metricopt_ext.utils.words import brief, nearest

NO_BOUNDS = (-math.inf, math.inf)
_OF_CLASS = re.compile(r"(?P<metric>[^\[\]:]+)\[(?P<label>.+)\]", re.DOTALL)


@dataclass(kw_only=True)
class BesidesConfig:
    """The settings of what counts besides the metric."""

    # What is shown besides, before and after, at no query: names as name takes them, a class's own such as
    # recall[person], or MODULE:FUNCTION (metric.folder is for these too, where name is one)
    also: list[str] = field(default_factory=list)
    # What the search and the guard respect, by the same names: {accuracy: ">= start - 0.005"}, with >= or <= and a
    # number, start, start + c or start - c
    subject_to: dict[str, str] = field(default_factory=dict)

    @property
    def besides(self) -> dict[str, str]:
        """The names, each with the key that has it."""
        return {**dict.fromkeys(self.also, "metric.also"), **dict.fromkeys(self.subject_to, "metric.subject_to")}

    def check_besides(self, metric: str) -> None:
        """Reject constraints that can't be read, and names that are the metric's own.

        Args:
            metric: The metric's name.

        Raises:
            ConfigError: The message names them.
        """
        with config_section("metric.subject_to"):
            parse_constraints(self.subject_to, metric)
        if metric in self.also:
            raise ConfigError(f"metric.also has {brief(metric)}, which is the metric itself; leave it out")


def own_function(name: str, config: Any, key: str) -> Callable[..., Any] | None:
    """Import what a name of ``metric.also`` or ``metric.subject_to`` stands for as ``MODULE:FUNCTION``.

    Args:
        name: The name.
        config: The section metric, whose folder counts if it has one.
        key: The key that has the name, for messages.

    Returns:
        None for a name without a colon.

    Raises:
        ConfigError: As from `own_metric`.
    """
    own = own_metric(name, OwnMetricConfig(folder=getattr(config, "folder", "")), key)
    return None if own is None else own.function


def of_class(name: str) -> tuple[str, str] | None:
    """Return the metric and the class of ``METRIC[CLASS]``; None for any other name."""
    found = _OF_CLASS.fullmatch(name)
    return None if found is None else (found["metric"], found["label"])


def class_number(label: str, classes: tuple[str, ...], key: str) -> int:
    """Return the number of a class by its name, in whose case one may differ if no two classes do in theirs alone.

    Raises:
        ConfigError: There is none.
    """
    alike = [number for number, each in enumerate(classes) if each.casefold() == label.casefold()]
    if label not in classes and len(alike) != 1:
        raise ConfigError(f"{key}: there is no class {brief(label)}{nearest(label, list(classes))}")
    return classes.index(label) if label in classes else alike[0]
