"""The errors a user can meet. Each names the offending value and what would be right."""

from metricopt_ext.plain import MESSAGE, plain

__all__ = [
    "AdapterError",
    "BudgetError",
    "ConfigError",
    "DataError",
    "FileFormatError",
    "MetricError",
    "MetricOptError",
    "RankError",
    "ValueFunctionError",
    "WeightsError",
]


class MetricOptError(Exception):
    """Base of every error that metricopt-ext raises on purpose.

    Whatever a message quotes, it is safe to show and has at most `plain.MESSAGE` characters.
    """

    def __str__(self) -> str:
        """Return the message."""
        return plain(super().__str__(), MESSAGE, lines=True)


class AdapterError(MetricOptError, ValueError):
    """A model and an adapter do not fit: no such layer, attached twice, different dimensions."""


class MetricError(MetricOptError, RuntimeError):
    """The black-box metric raised, returned NaN or left its bounds."""


class WeightsError(MetricError):
    """The metric, or the loss, changed the model's weights in a way that a run can't go on after."""


class BudgetError(MetricOptError, RuntimeError):
    """A metric query was requested after the budget was spent, or a budget is too small to plan with."""


class ValueFunctionError(MetricOptError, ValueError):
    """A value function does not fit its use: wrong dimension, too little data to fit."""


class FileFormatError(MetricOptError, ValueError):
    """A file is truncated, corrupt, or belongs to another run."""


class RankError(MetricOptError, RuntimeError):
    """Another rank of a run under torchrun has ended, has not come, judges by other data, or would not answer."""


class DataError(MetricOptError, ValueError):
    """The user's data can't be used: missing, empty, one class only, unreadable."""


class ConfigError(MetricOptError, ValueError):
    """A configuration key or value is unknown or impossible."""
