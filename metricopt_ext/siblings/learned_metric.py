"""The metric that a loss was learned for: a file tells it, and the loss is refused under another."""

from collections.abc import Mapping
from typing import Any, Protocol

from metricopt_ext.errors import ConfigError
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.utils.words import brief

ABSENT = "nothing"


class Learned(Protocol):
    """A loss that was learned for a metric.

    Attributes:
        metric: The metric's name.
        identity: Its `BatchMetric.identity`; None if only the name is known.
    """

    metric: str
    identity: Mapping[str, Any] | None


def metric_identity(described: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the identity of the metric that a file describes, None if only its name is known.

    Raises:
        ValueError: It is none.
    """
    identity = described["identity"]
    if identity is not None and not isinstance(identity, dict):
        raise ValueError(f"identity is {brief(identity)}")
    return identity


def check_metric(what: str, learned: Learned, metric: BatchMetric) -> None:
    """Refuse a loss that was learned for another metric, as far as it tells.

    Args:
        what: What the loss is, up to the metric, for the message.
        learned: The loss.
        metric: The metric that it is to stand for.

    Raises:
        ConfigError: It was; the message tells what differs.
    """
    if learned.metric != metric.name:
        raise ConfigError(f"{what} {learned.metric!r}, the metric is {metric.name!r}")
    own, theirs = metric.identity, metric.identity if learned.identity is None else learned.identity
    for key in {**own, **theirs}:
        was, now = theirs.get(key, ABSENT), own.get(key, ABSENT)
        if was != now:
            raise ConfigError(
                f"{what} {metric.name!r} with {key} {brief(was)}, the metric has {brief(now)}; begin with one that was"
                " learned for this metric, or leave begin out"
            )
