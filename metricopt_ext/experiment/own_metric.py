"""A metric of the user's own that a config names as ``MODULE:FUNCTION``: its settings, its import, its value."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.runtime.identity import fingerprint_of_code
from metricopt_ext.tasks.direction import known_direction
from metricopt_ext.utils.named import named
from metricopt_ext.utils.numbers import number_of, within

FEW = 20  # examples on which a function is tried, about


@dataclass(kw_only=True)
class OwnMetricConfig:
    """The settings of a metric that is named as ``MODULE:FUNCTION``, which alone has them."""

    folder: str = ""  # where the module is, if it is not installed
    # the function's further arguments, e.g. {average: macro}; metric.kwargs.average=macro on the command line
    kwargs: dict[str, Any] = field(default_factory=dict)
    maximize: bool | None = None  # whether higher is better; null is as its name says, and yes with a warning else
    bounds: list[float] = field(default_factory=lambda: [0.0, 1.0])  # lowest and highest value

    def check(self) -> None:
        """Reject bounds that are none.

        Raises:
            ConfigError: The message names them.
        """
        if len(self.bounds) != 2 or not 0 < self.bounds[1] - self.bounds[0] < math.inf:
            raise ConfigError(
                f"metric.bounds={self.bounds}: it must be two finite numbers, the lowest and the highest value"
            )


class OwnMetric(NamedTuple):
    """The function, what it is called in tables, and what is known of its values."""

    function: Callable[..., Any]
    name: str
    maximize: bool
    bounds: tuple[float, float]  # infinite where none are known


def own_metric(name: str, config: Any, key: str = "metric.name") -> OwnMetric | None:
    """Import what ``metric.name`` names as ``MODULE:FUNCTION``, which runs its module, and bind the further arguments.

    Args:
        name: The name; of a class, such as one of torchmetrics, an object is made.
        config: The other settings, if they are an `OwnMetricConfig`; else its defaults are taken.
        key: The key that has the name.

    Returns:
        None for a name without a colon.

    Raises:
        ConfigError: There is no such function, or it does not take the arguments.
    """
    _, colon, attribute = name.partition(":")
    if not colon:
        return None
    config = config if isinstance(config, OwnMetricConfig) else OwnMetricConfig()
    config.check()
    low, high = config.bounds or (-math.inf, math.inf)
    function = named(key, name, config.folder, config.kwargs)
    higher = known_direction(attribute) is not False if config.maximize is None else config.maximize
    return OwnMetric(function, attribute, higher, (low, high))


def code_of_own(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what identifies the code of the functions that a run's settings name as ``MODULE:FUNCTION``.

    Args:
        settings: The run's, in whose sections ``metric``, ``loss`` and ``data`` may be names of functions, as well as
            in the metric's ``also`` and ``subject_to``.

    Returns:
        By name, see `fingerprint_of_code`; empty if they name no function.

    Raises:
        ConfigError: As from `named`.
    """
    found = dict[str, str]()
    for section, arguments in (("metric", "kwargs"), ("loss", "params"), ("data", "kwargs")):
        own = settings.get(section) or {}
        bound = {own.get("name", ""): own.get(arguments, {})}
        for name in dict.fromkeys([*bound, *own.get("also", ()), *own.get("subject_to", ())]):
            if ":" in name:
                function = named(f"{section}.name", name, own.get("folder", ""), bound.get(name))
                found[name] = fingerprint_of_code(function)
    return found


def try_on_few(judge: Callable[[list[int]], object], count: int) -> None:
    """Call a function of the user's own on a few examples, as one call on all may take long, and on all if it fails.

    Args:
        judge: Calls it on the examples at some places.
        count: Their number.
    """
    try:
        judge([*range(0, count, max(3, count // FEW | 1))])
    except (Exception, SystemExit):
        judge([*range(count)])


def why(error: BaseException) -> str:
    """Return why a metric failed, without a full stop."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
    return str(error).rstrip(".")


def number_within(result: Any, bounds: tuple[float, float], name: str) -> float:
    """Return what a metric returned as a number within its bounds, which rounding may have overshot.

    Raises:
        MetricError: It is not one number, not finite or out of bounds.
    """
    low, high = bounds
    try:
        value = within(number_of(result), low, high)
    except TypeError:
        raise MetricError(f"metric {name!r} must return one number, got {result!r}") from None
    if not (math.isfinite(value) and low <= value <= high):
        raise MetricError(f"metric {name!r} must be within its bounds ({low:g}, {high:g}), got {value:g}")
    return value
