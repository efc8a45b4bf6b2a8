"""A metric of what a host reports by name: of one value, or of several that ``combine`` makes one."""

from collections.abc import Callable, Sequence
from typing import Any

from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.combine import Combine
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.named import name_of
from metricopt_ext.utils.words import and_more, brief


def names_of(given: str | Sequence[str], combine: Combine | None) -> tuple[str, ...]:
    """Return the names under which a host reports what is to be tuned.

    Args:
        given: One name, or several.
        combine: How several make the metric, as of `Metric`; None of one.

    Raises:
        ConfigError: Several are given without combine, or one with it, or none, or one twice.
    """
    names = (given,) if isinstance(given, str) else tuple(given)
    if isinstance(given, str) != (combine is None) or not names or len({*names}) < len(names):
        raise ConfigError(
            f"what is to be tuned is {brief(given)}, with combine={brief(combine)}; give one name, or a list of"
            " several, each once, and combine='worst'"
        )
    return names


def metric_of(
    function: Callable[[], dict[str, Any]],
    *,
    names: Sequence[str],
    higher: Callable[[str], bool],
    bounds: tuple[float, float] | None,
    combine: Combine | None,
) -> Metric:
    """Return the metric that a host reports.

    Args:
        function: Returns what each name is, a number with or without its values on two halves, as of `Metric`.
        names: The names.
        higher: Returns whether higher is better, by a name.
        bounds: As of `Metric`.
        combine: See `names_of`.

    Raises:
        ConfigError: Of one name higher is better, and of another lower; or as from ``higher``.
    """
    if len(directions := {higher(name) for name in names}) > 1:
        raise ConfigError(f"of {brief(list(names))} some are better if higher, some if lower; say maximize=")
    how = combine if isinstance(combine, str) else name_of(combine)
    name = names[0] if combine is None else f"{how} of {and_more(names)}"
    return Metric(function, maximize=directions.pop(), bounds=bounds, name=name, combine=combine)
