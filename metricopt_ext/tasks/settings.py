"""Settings of inference: numbers and choices that the model's user sets, and no gradient reaches.

A score threshold, a test image's size, the power of a whitening: they change what a model gives without changing a
weight. A host (a toolkit, a program, your own code) says which there are (`Setting`) and how they are put to use
(`Settings`).
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from torch import nn

from metricopt_ext.utils.checks import check_above, check_at_least, check_finite, check_integer
from metricopt_ext.utils.words import brief, nearest

Scale = Literal["linear", "log", "logit"]
SCALES: tuple[Scale, ...] = ("linear", "log", "logit")

# What a setting may be: what plain text can hold, so that any host can be told of it.
Value = bool | int | float | str

# Queries that lines and presets may take together.
QUERIES = 10

# A factor on inference time may be above the largest by rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Setting:
    """One setting of inference to tune: a number in an interval, or one of several values.

    Attributes:
        name: The host's name for it.
        low: The smallest number, an int or float; None with ``values``.
        high: The largest. If both ends and the default are integers, it is an integer.
        scale: Scale of the interval: linear, logarithmic, or log-odds.
        values: The possible values, instead of an interval. Numbers are tried in order from the default outwards,
            others one by one.
        default: Its present value; in the interval, or among the values.
        inference: The factor on the model's inference time, above 0: a number for every value but the default, whose
            factor is 1; or a function of the value.

    Raises:
        ValueError: A number is out of range, or the default is none of what the setting may be.
        TypeError: A value is neither a number nor text.

    Examples:
        >>> Setting("score_thresh", 0.01, 0.95, scale="logit", default=0.05).at(0.5)
        0.3...
        >>> Setting("flip", values=(False, True), default=False, inference=2.0).factor(True)
        2.0
    """

    name: str
    low: float | None = None
    high: float | None = None
    _: KW_ONLY
    scale: Scale = "linear"
    values: Sequence[Value] | None = None
    default: Value
    inference: float | Callable[[Value], float] = 1.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"a setting's name is {brief(self.name)}; it must be text")
        if self.scale not in SCALES:
            raise ValueError(f"{self.name}: scale is {brief(self.scale)}; it must be linear, log or logit")
        if self.values is not None:
            self._check_values()
        else:
            self._check_interval()
        if not callable(self.inference):
            check_above(0, **{f"{self.name}: inference": self.inference})
        if not self.holds(self.default):
            raise ValueError(f"{self.name}: the default is {brief(self.default)}; it must be {self.said}")
        object.__setattr__(self, "default", self.own(self.default))

    def _check_values(self) -> None:
        values: Any = self.values
        if self.low is not None or self.high is not None:
            raise ValueError(f"{self.name} has values and an interval; give one of the two")
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"{self.name}: values are {brief(values)}; they must be a list, in order")
        if len(values) < 2:
            raise ValueError(f"{self.name}: values are {brief(values)}; they must be two at least")
        if strange := [each for each in values if not isinstance(each, bool | int | float | str)]:
            raise TypeError(f"{self.name}: values have {brief(strange[0])}; each must be a number, True, False or text")
        if any(isinstance(each, int | float) and not _is_finite(each) for each in values):
            raise ValueError(f"{self.name}: values are {brief(values)}; numbers must be finite")
        if len({(type(each) is bool, each) for each in values}) < len(values):
            raise ValueError(f"{self.name}: values are {brief(values)}; one is there twice")
        object.__setattr__(self, "values", tuple(values))

    def _check_interval(self) -> None:
        low, high = self.low, self.high
        if low is None or high is None:
            raise ValueError(f"{self.name} has neither values nor both ends of an interval")
        if not isinstance(low, int | float) or not isinstance(high, int | float):
            raise TypeError(f"{self.name} is from {brief(low)} to {brief(high)}; each must be an int or a float")
        check_finite(**{f"{self.name}: low": low, f"{self.name}: high": high})
        if not low < high:
            raise ValueError(f"{self.name}: low is {low} and high {high}; the lower must be below the upper")
        if not _is_finite(high - low):
            raise ValueError(f"{self.name} is from {low} to {high}, which is too wide for a float; narrow it")
        if self.scale == "log" and low <= 0:
            raise ValueError(f"{self.name}: low is {low}; on a log scale it must be above 0")
        if self.scale == "logit" and not 0 < low < high < 1:
            raise ValueError(f"{self.name} is from {low} to {high}; on a logit scale both must be between 0 and 1")

    @property
    def said(self) -> str:
        """What it may be, in words."""
        if self.values is not None:
            return " or ".join(map(repr, self.values))
        return f"{'an integer' if self.whole else 'a number'} from {self.low:g} to {self.high:g}"

    @property
    def ordered(self) -> bool:
        """Whether its values are numbers in order."""
        return self.values is not None and all(_is_number(each) for each in self.values)

    def holds(self, value: Any) -> bool:
        """Whether it may be a value."""
        if self.values is not None:
            return isinstance(value, bool | int | float | str) and any(_same(value, each) for each in self.values)
        fits = isinstance(value, int) if self.whole else True
        return fits and _is_number(value) and self.low <= value <= self.high

    def check(self, value: Any) -> None:
        """Refuse what it can't be.

        Raises:
            ValueError: It is out of the interval, or none of the values.
        """
        if not self.holds(value):
            raise ValueError(f"{self.name} is {brief(value)}; it must be {self.said}")

    def own(self, value: Any) -> Value:
        """Return a value that it may be as one of Python's own: of several, the one that is the same."""
        if self.values is not None:
            return next(each for each in self.values if _same(value, each))
        found: Value = value
        return found

    def factor(self, value: Value) -> float:
        """Return the factor on inference time at a value.

        Raises:
            ValueError: The function gives none above 0.
        """
        if callable(self.inference):
            found = self.inference(value)
            if found is None:
                raise ValueError(f"{self.name}: inference({value!r}) is None; it must be a number")
            check_above(0, **{f"{self.name}: inference({value!r})": found})
            return float(found)
        return 1.0 if _same(value, self.default) else float(self.inference)

    @property
    def whole(self) -> bool:
        """Whether it is an interval of integers: both ends and the default are integers."""
        return all(isinstance(each, int) for each in (self.low, self.high, self.default))

    def at(self, t: float) -> float:
        """Return the number at a share t of the interval, in [0, 1], on the setting's scale; rounded if it is whole."""
        assert self.low is not None
        assert self.high is not None
        low, high = self._coordinate(self.low), self._coordinate(self.high)
        number = self.low if t <= 0 else self.high if t >= 1 else self._number(low + t * (high - low))
        return round(number) if self.whole else min(max(float(number), self.low), self.high)

    def share(self, number: float) -> float:
        """Return the share of the interval at which a number lies, in [0, 1], on the setting's scale."""
        low, high = self._coordinate(self.low), self._coordinate(self.high)
        return min(1.0, max(0.0, (self._coordinate(number) - low) / (high - low)))

    def _coordinate(self, number: Any) -> float:
        number = float(number)
        if self.scale == "log":
            return math.log(number)
        return math.log(number / (1 - number)) if self.scale == "logit" else number

    def _number(self, coordinate: float) -> float:
        if self.scale == "log":
            return math.exp(coordinate)
        return 1 / (1 + math.exp(-coordinate)) if self.scale == "logit" else coordinate


# Values by their settings' names.
Values = Mapping[str, Value]


class Settings:
    """The settings of a host, and how to apply them.

    Args:
        settings: The settings, the most valuable first: they are tried in this order.
        apply: ``apply(values)`` is a context manager in which the model and its post-processing use these values;
            afterwards everything is as it was. It gets a value for every setting. If it has a parameter named
            ``model``, that gets the model that is judged: a copy, if a start replaces tensors.
        alone: Names of those to tune alone, in order; by default all. The others come with presets.
        inference: The largest factor on inference time that may be chosen, at least 1.
        queries: Most metric queries for lines and presets together, at least 0.
        free: Values that cost nothing at inference and by their nature can't lower the metric: they are applied before
            the first query, at no cost.
        presets: Candidates by name, each a few values that work together, tried after the single settings. A preset may
            be a function of the best values so far, such as sizes around the best size.
        set_on: ``set_on(model, values)`` permanently sets non-default values on the model, as far as its host can
            express them. It returns what else must be done, in a sentence with code, or "". None if a model can hold
            none of them.

    Attributes:
        names: Of the settings, in order.
        alone: Names of those that are tuned alone.
        defaults: The values as the model is used now.

    Raises:
        ValueError: Two settings have one name, there are none, ``free`` or a preset has a setting or value that there
            is not, or a number is out of range.

    Examples:
        >>> from contextlib import nullcontext
        >>> settings = Settings([Setting("k", 0.0, 2.0, default=1.0)], apply=lambda values: nullcontext())
        >>> with settings.applied({"k": 0.5}) as values:
        ...     values
        {'k': 0.5}
    """

    inference: float
    queries: int
    free: dict[str, Value]
    alone: tuple[str, ...]

    def __init__(
        self,
        settings: Sequence[Setting],
        apply: Callable[..., AbstractContextManager[Any]],
        *,
        alone: Sequence[str] | None = None,
        inference: float = 1.0,
        queries: int = QUERIES,
        free: Values | None = None,
        presets: Mapping[str, Values | Callable[[dict[str, Value]], Values]] | None = None,
        set_on: Callable[[Any, dict[str, Value]], str] | None = None,
    ) -> None:
        if isinstance(settings, Setting | str | Mapping) or not isinstance(settings, Iterable):
            raise ValueError(f"settings are {brief(settings)}; they must be a list of Setting(...)")
        settings = list(settings)
        if strange := [each for each in settings if not isinstance(each, Setting)]:
            raise ValueError(f"settings have {brief(strange[0])}; each must be a Setting(...)")
        self._settings = {each.name: each for each in settings}
        if not settings:
            raise ValueError("there are no settings; give one at least")
        if len(self._settings) < len(settings):
            names = [each.name for each in settings]
            raise ValueError(f"settings are {', '.join(names)}; two have one name")
        if not callable(apply):
            raise ValueError(f"apply is {brief(apply)}; it must be a function of the values, a context manager")
        check_at_least(1, inference=inference)
        check_integer(0, queries=queries)
        self.inference, self.queries = inference, queries
        for name, given in (("free", free), ("presets", presets)):
            if given is not None and not isinstance(given, Mapping):
                raise ValueError(f"{name} is {brief(given)}; it must be a dict by name")
        self._apply, self._presets = apply, dict(presets or {})
        self._takes_model, self._set_on = takes(apply, "model"), set_on
        self.alone = self.names if alone is None else self._named(alone)
        self.check(free or {})
        self.free = {name: self._settings[name].own(value) for name, value in (free or {}).items()}
        for name in self._presets:
            self.preset(name, self.first)
        self._check_free()

    def _check_free(self) -> None:
        if not self.affords(self.first):
            raise ValueError(
                f"free is {self.free}, by which inference takes {self.factor(self.first):g} times as long, and it may"
                f" take {self.inference:g} times; what is free costs nothing: make it a preset"
            )

    def limited(self, *, inference: float | None = None, queries: int | None = None, free: bool = True) -> "Settings":
        """Return the same settings within other limits.

        Args:
            inference: The largest factor on inference time, at least 1; None for what it was.
            queries: Metric queries for lines and presets together, at least 0; None for what it was.
            free: Whether what is free is put to use.

        Raises:
            ValueError: A number is out of range.
        """
        check_at_least(1, inference=inference)
        check_integer(0, queries=self.queries if queries is None else queries)
        other = copy.copy(self)
        other.inference = self.inference if inference is None else inference
        other.queries = self.queries if queries is None else queries
        other.free = self.free if free else {}
        other._check_free()
        return other

    def only(self, names: Sequence[str]) -> "Settings":
        """Return some of the settings, in another order; the others keep their defaults. All if no name is given.

        Presets that need another setting are left out.

        Raises:
            ValueError: There is no such setting.
        """
        if not names:
            return self
        names = self._named(names)
        other, apply, left_out = copy.copy(self), self._apply, {**self.defaults}
        other._settings = {name: self._settings[name] for name in names}
        other._presets = {
            name: each
            for name, each in self._presets.items()
            if set(names) >= set(each(self.defaults) if callable(each) else each)
        }
        other.free = {name: value for name, value in self.free.items() if name in names}
        other.alone = names
        other._apply = lambda values, **more: apply({**left_out, **values}, **more)
        return other

    def without_presets(self) -> "Settings":
        """Return the same settings without presets: each is tuned alone."""
        other = copy.copy(self)
        other._presets = {}
        return other

    @property
    def names(self) -> tuple[str, ...]:
        """The settings' names, in order."""
        return tuple(self._settings)

    @property
    def presets(self) -> tuple[str, ...]:
        """The presets' names, in order."""
        return tuple(self._presets)

    @property
    def defaults(self) -> dict[str, Value]:
        """The values as the model is used now."""
        return {name: each.default for name, each in self._settings.items()}

    def __getitem__(self, name: str) -> Setting:
        """Return a setting by its name."""
        return self._settings[name]

    def check(self, values: Values) -> None:
        """Refuse values of settings that there are not, or that these can't be.

        Raises:
            ValueError: There is one.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"values of settings are {brief(values)}; they must be a dict by name")
        self._check_names(values)
        for name, value in values.items():
            self._settings[name].check(value)

    def _named(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return names of settings that there are, each once."""
        if isinstance(names, str):
            raise ValueError(f"names of settings are {names!r}; they must be a list, [{names!r}]")
        self._check_names(names)
        return tuple(dict.fromkeys(names))

    def _check_names(self, names: Iterable[str]) -> None:
        if unknown := [name for name in names if name not in self._settings]:
            raise ValueError(f"there is no setting {brief(unknown[0])}{nearest(str(unknown[0]), list(self.names))}")

    def complete(self, values: Values) -> dict[str, Value]:
        """Return a value for every setting: the given ones, and else the defaults.

        Raises:
            ValueError: As from `check`.
        """
        self.check(values)
        return {name: each.own(values.get(name, each.default)) for name, each in self._settings.items()}

    def preset(self, name: str, values: Values) -> dict[str, Value]:
        """Return the values of a preset, put on others that were best so far.

        Raises:
            ValueError: A function that stands for it gave what a setting can't be.
        """
        preset, values = self._presets[name], self.complete(values)
        try:
            given = preset(dict(values)) if callable(preset) else preset
            self.check(given)
            return self.complete({**values, **given})
        except ValueError as error:
            raise ValueError(f"preset {name!r}: {error}") from error

    def factor(self, values: Values) -> float:
        """Return the factor on inference time of values beside the defaults', the product of the settings' own."""
        complete = self.complete(values)
        return math.prod(
            each.factor(complete[name]) / each.factor(each.default) for name, each in self._settings.items()
        )

    def rows(self, values: Values) -> dict[str, dict[str, Value | None]]:
        """Return what ``inference.yaml`` has of each setting (`save_inference`): its value, default and factor.

        Raises:
            ValueError: As from `check`.
        """
        complete = self.complete(values)
        return {
            name: {
                "value": complete[name],
                "default": each.default,
                "factor": each.factor(complete[name]) / each.factor(each.default),
            }
            for name, each in self._settings.items()
        }

    def changed(self, values: Values) -> dict[str, Value]:
        """Return the values that are not the defaults."""
        return {name: each for name, each in self.complete(values).items() if not _same(each, self[name].default)}

    def affords(self, values: Values) -> bool:
        """Whether values take no more inference time than may be taken."""
        return self.factor(values) <= self.inference * (1 + ROUNDING)

    @property
    def first(self) -> dict[str, Value]:
        """The values that a run begins with: the defaults, and what is free."""
        return self.complete(self.free)

    @contextmanager
    def applied(self, values: Values, model: nn.Module | None = None) -> Iterator[dict[str, Value]]:
        """Apply values to the model and its post-processing inside the ``with`` block; yields one for every setting.

        Args:
            values: Values by name; the others are the defaults.
            model: The model that acts, for an ``apply`` that takes one.

        Raises:
            ValueError: As from `check`.
            TypeError: ``apply`` returns no context manager.
        """
        complete = self.complete(values)
        more = {"model": model} if self._takes_model and model is not None else {}
        acting = self._apply(dict(complete), **more)
        if not hasattr(acting, "__enter__") or not hasattr(acting, "__exit__"):
            raise TypeError(
                f"apply returned {brief(acting)}; it must return a context manager: let it yield once, below"
                " @contextlib.contextmanager"
            )
        with acting:
            yield complete

    def set_on(self, model: Any, values: Values) -> str:
        """Set values on the model for good, as far as its host can express them.

        Free values (`free`) belong to the metric only and are left alone. These settings describe the model as it was;
        make new ones for the changed model.

        Args:
            model: The model that they were made of, or a copy.
            values: Values by name; the others are the defaults, which are left as they are.

        Returns:
            What has to be done besides, in a sentence with code; empty where nothing must be.

        Raises:
            ValueError: As from `check`, or they were set before.
        """
        changed = {name: value for name, value in self.changed(values).items() if self.free.get(name) != value}
        if not changed:
            return ""
        if self._set_on is None:
            return f"no model holds {', '.join(changed)}: call it inside `with settings.applied({changed}):`"
        said, self._apply, self._set_on = self._set_on(model, changed), _refuse, _refuse
        return said

    def identity(self) -> dict[str, Any]:
        """Return what a run depends on, as JSON, to tell it from others."""
        known = self._settings.values()
        return {
            "settings": [[each.name, each.low, each.high, each.scale, each.values, each.default] for each in known],
            "alone": self.alone,
            "free": self.free,
            "presets": [[name, *([] if callable(each) else [each])] for name, each in self._presets.items()],
            "inference": self.inference,
            "queries": self.queries,
        }


def _refuse(*_: Any, **__: Any) -> Any:
    raise ValueError("these settings were set on their model for good, which has others by default now; make new ones")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of a name."""
    return _parameter(function, name) is not None


def needs(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of a name, without a default."""
    found = _parameter(function, name)
    return found is not None and found.default is found.empty


def _parameter(function: Callable[..., Any], name: str) -> inspect.Parameter | None:
    try:
        return inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same; True is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
