"""Settings of inference: numbers and choices that the model's user sets, and no gradient reaches.

A score threshold, a test image's size, the power of a whitening: they change what a model gives without changing a
weight. A host (a toolkit, a program, your own code) says which there are (`Setting`) and how they are put to use
(`Settings`).
"""

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self, TypeGuard

from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.utils.checks import check_above, check_at_least, check_integer
from metricopt_ext.utils.words import brief, nearest

Scale = Literal["linear", "log", "logit"]

# What a scale may hold, both bounds left out; the coordinate in which it is even, of a number, and back.
SCALES: dict[Scale, tuple[float, float, Callable[[float], float], Callable[[float], float]]] = {
    "linear": (-math.inf, math.inf, float, float),
    "log": (0, math.inf, math.log, math.exp),
    "logit": (0, 1, lambda number: math.log(number / (1 - number)), lambda at: 1 / (1 + math.exp(-at))),
}

# What a setting may be: what plain text can hold, so that any host can be told of it.
Value = bool | int | float | str

# Queries that lines and presets may take together.
QUERIES = 10

# What bounds a search of settings, and is one's own to choose.
LIMITS = ("alone", "inference", "queries", "free", "presets")


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
            factor is 1; or a function of the value, which is divided by what it is of the default.

    Raises:
        ValueError: A number is out of range, a value is neither a finite number nor printable text, or the default is
            none of what the setting may be.

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
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise ValueError(f"a setting's name is {brief(self.name)}; it must be printable text")
        if self.scale not in SCALES:
            raise ValueError(f"{self.name}: scale is {brief(self.scale)}; it must be linear, log or logit")
        low, high, (least, most, *_) = self.low, self.high, SCALES[self.scale]
        if self.values is not None:
            self._check_values(self.values)
        elif not (_is_number(low) and _is_number(high) and least < low < high < most and _is_number(high - low)):
            limits = f"{least} < low < high < {most}"
            raise ValueError(f"{self.name} is from {brief(low)} to {brief(high)}; its scale needs {limits}, or values")
        check_above(0, **{f"{self.name}: inference": 1.0 if callable(self.inference) else self.inference})
        object.__setattr__(self, "default", self.own(self.default, "the default of "))

    def _check_values(self, values: Any) -> None:
        if {self.low, self.high} != {None} or isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"{self.name}: values are {brief(values)}; they must be a list, without low and high")
        if strange := [each for each in values if not is_value(each)]:
            raise ValueError(f"{self.name} has {brief(strange[0])}; it must be a finite number, bool or printable text")
        if not 1 < len(set(map(_key, values))) == len(values):
            raise ValueError(f"{self.name}: values are {brief(values)}; give two at least, each once")
        object.__setattr__(self, "values", tuple(values))

    @property
    def _ends(self) -> tuple[float, float]:
        return self.low, self.high  # type: ignore[return-value]  # of values there are none

    @property
    def said(self) -> str:
        """What it may be, in words."""
        if self.values is not None:
            return " or ".join(map(repr, self.values))
        return f"{'an integer' if self.whole else 'a number'} from {self.low:g} to {self.high:g}"

    @property
    def ordered(self) -> bool:
        """Whether its values are numbers in order."""
        return self.values is not None and all(map(_is_number, self.values))

    @property
    def whole(self) -> bool:
        """Whether it is an interval of integers: both ends and the default are integers."""
        return all(isinstance(each, int) for each in (self.low, self.high, self.default))

    def own(self, value: Any, what: str = "") -> Value:
        """Return what it may be: of several values, the one that is the same.

        Args:
            value: Anything.
            what: What it is, for messages.

        Raises:
            ValueError: It is out of the interval, or none of the values.
        """
        if self.values is not None:
            found = [each for each in self.values if is_value(value) and _key(value) == _key(each)]
        else:
            fits = _is_number(value) and self._ends[0] <= value <= self._ends[1]
            found = [value] if fits and (isinstance(value, int) or not self.whole) else []
        if not found:
            raise ValueError(f"{what}{self.name} is {brief(value)}; it must be {self.said}")
        return found[0]

    def factor(self, value: Value) -> float:
        """Return how many times as long inference takes at a value as at the default.

        Raises:
            ValueError: The function gives none above 0.
        """
        if _key(value) == _key(self.default):
            return 1.0
        if not callable(self.inference):
            return float(self.inference)
        times = {f"{self.name}: inference({each!r})": self.inference(each) for each in (value, self.default)}
        check_above(0, **times)
        own, default = times.values()
        return float(own) / float(default)

    def at(self, t: float) -> float:
        """Return the number at a share t of the interval, in [0, 1], on the setting's scale; rounded if it is whole."""
        _, _, coordinate, number = SCALES[self.scale]
        low, high = map(coordinate, self._ends)
        found = self._ends[0] if t <= 0 else self._ends[1] if t >= 1 else number(low + t * (high - low))
        return round(found) if self.whole else min(max(float(found), self._ends[0]), self._ends[1])

    def share(self, number: float) -> float:
        """Return the share of the interval at which a number lies, in [0, 1], on the setting's scale."""
        at, low, high = map(SCALES[self.scale][2], (number, *self._ends))
        return min(1.0, max(0.0, (at - low) / (high - low)))


# Values by their settings' names, and several of these by a name of their own.
Values = Mapping[str, Value]
Presets = Mapping[str, Values]


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
        presets: Candidates by name, each a few values that work together, tried after the single settings.
        set_on: ``set_on(model, values)`` permanently sets non-default values on the model, as far as its host can
            express them. It returns what else must be done, in a sentence with code, or "". None if a model can hold
            none of them.

    Attributes:
        names: Names of the settings, in order.
        alone: Names of those that are tuned alone.
        inference: As above, and so are ``queries``, ``free`` and ``presets``.

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

    def __init__(
        self,
        settings: Sequence[Setting],
        apply: Callable[..., AbstractContextManager[Any]],
        *,
        alone: Sequence[str] | None = None,
        inference: float = 1.0,
        queries: int = QUERIES,
        free: Values | None = None,
        presets: Presets | None = None,
        set_on: Callable[[Any, dict[str, Value]], str] | None = None,
    ) -> None:
        self._settings = {each.name: each for each in settings if isinstance(each, Setting)}
        if not settings or len(self._settings) < len(settings):
            raise ValueError(f"settings are {brief(settings)}; they must be a list of Setting(...) of different names")
        self.names: tuple[str, ...] = tuple(self._settings)
        self._apply, self._set_on = apply, set_on
        self._limit(self.names if alone is None else alone, inference, queries, free or {}, presets or {})

    def _limit(self, alone: Sequence[str], inference: float, queries: int, free: Values, presets: Presets) -> None:
        check_at_least(1, inference=inference)
        check_integer(0, queries=queries)
        self.alone: tuple[str, ...] = tuple(self[name].name for name in dict.fromkeys(alone))
        self.inference: float = inference
        self.queries: int = queries
        self.presets: dict[str, Values] = dict(presets)
        self.free: dict[str, Value] = {name: value for name, value in self.complete(free).items() if name in free}
        for values in presets.values():
            self.complete(values)
        if not self.affords(free):
            raise ValueError(f"free is {free}, at {self.factor(free):g} times the inference; make it a preset")

    def limited(self, **limits: Any) -> Self:
        """Return the same settings within other limits.

        Args:
            limits: ``alone``, ``inference``, ``queries``, ``free`` or ``presets``, as of a new one; others stay.

        Raises:
            ValueError: As from a new one.
        """
        other = copy.copy(self)
        other._limit(**{name: getattr(self, name) for name in LIMITS} | limits)
        return other

    def only(self, names: Sequence[str]) -> Self:
        """Return settings of which these alone are tuned, one by one in this order and by presets of them.

        Raises:
            ValueError: There is no such setting.
        """
        presets = {name: values for name, values in self.presets.items() if set(values) <= set(names)}
        return self.limited(alone=names, presets=presets)

    @property
    def defaults(self) -> dict[str, Value]:
        """The values as the model is used now."""
        return self.complete({})

    @property
    def first(self) -> dict[str, Value]:
        """The values that a run begins with: the defaults, and what is free."""
        return self.complete(self.free)

    def __getitem__(self, name: str) -> Setting:
        """Return a setting by its name.

        Raises:
            ValueError: There is none of this name.
        """
        if name not in self._settings:
            raise ValueError(f"there is no setting {brief(name)}{nearest(str(name), list(self.names))}")
        return self._settings[name]

    def judges(self, metric: CostScale) -> bool:
        """Whether a metric judges the model as these settings have it: any does, unless they act on some alone."""
        return True

    def complete(self, values: Values) -> dict[str, Value]:
        """Return a value for every setting: the given ones, and else the defaults.

        Raises:
            ValueError: There is no such setting, or it can't have this value.
        """
        given = {name: self[name].own(value) for name, value in values.items()}
        return {name: given.get(name, each.default) for name, each in self._settings.items()}

    def factor(self, values: Values) -> float:
        """Return the factor on inference time of values beside the defaults', the product of the settings' own."""
        return math.prod(self[name].factor(value) for name, value in self.complete(values).items())

    def affords(self, values: Values) -> bool:
        """Whether values take no more inference time than may be taken."""
        return self.factor(values) <= self.inference * (1 + 1e-9)  # which rounding may add

    def changed(self, values: Values) -> dict[str, Value]:
        """Return the values that are not the defaults."""
        return {name: each for name, each in self.complete(values).items() if each != self[name].default}

    @contextmanager
    def applied(self, values: Values, model: Any = None) -> Iterator[dict[str, Value]]:
        """Apply values to the model and its post-processing inside the ``with`` block; yields one for every setting.

        Args:
            values: Values by name; the others are the defaults.
            model: The model that acts, an ``nn.Module``, for an ``apply`` that takes one.

        Raises:
            ValueError: As from `complete`.
            TypeError: ``apply`` returns no context manager.
        """
        complete = self.complete(values)
        more = {"model": model} if model is not None and parameter_of(self._apply, "model") else {}
        acting = self._apply(dict(complete), **more)
        if not isinstance(acting, AbstractContextManager):
            raise TypeError(f"apply returned {brief(acting)}; have it yield once, below @contextlib.contextmanager")
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
            ValueError: As from `complete`, or they were set before.
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
            **{name: getattr(self, name) for name in LIMITS},
            "presets": list(self.presets.items()),  # in their order
        }


def _refuse(*_: Any, **__: Any) -> Any:
    raise ValueError("these settings were set on their model for good, which has others by default now; make new ones")


def parameter_of(function: Callable[..., Any], name: str) -> inspect.Parameter | None:
    """Return a function's parameter of a name; None if it has none."""
    with suppress(TypeError, ValueError):  # a builtin without a signature
        return inspect.signature(function).parameters.get(name)
    return None


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_value(value: Any) -> TypeGuard[Value]:
    """Whether it is what a setting may be: a finite number, True, False or printable text."""
    return _is_number(value) or isinstance(value, bool) or (isinstance(value, str) and value.isprintable())


def _key(value: Value) -> tuple[bool, Value]:
    """Return what is the same for values that are; True is not 1."""
    return isinstance(value, bool), value
