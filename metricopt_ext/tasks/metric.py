"""The black-box metric: a function of the model that returns one number, each call of which is counted."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, MetricError, WeightsError
from metricopt_ext.tasks.constraints import Constraint, parse_constraints
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation, Outcome, Pairs
from metricopt_ext.tasks.halved import Halved, pairs_of
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.settings import Values, parameter_of
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.numbers import number_of
from metricopt_ext.utils.weights import Watched
from metricopt_ext.utils.words import and_more, brief, counted


class Query(NamedTuple):
    """A query that was answered, as its metric's callbacks are told of it.

    Attributes:
        item: What was judged: a model, or phi, ``d``; None of a trajectory on file, whose points are not looked up.
        evaluation: The answer.
        purpose: What the ledger booked it under.
        spent: Queries in the ledger by then, this one and its repeats among them.
        on_file: Whether an interrupted run had asked it, and its answer was on file.
    """

    item: nn.Module | Tensor | None
    evaluation: Evaluation
    purpose: str
    spent: int
    on_file: bool = False

    @property
    def value(self) -> float:
        """The metric's value, in its own unit."""
        return self.evaluation.value


OnQuery = Callable[[Query], None]


class Metric(CostScale):
    """A black-box evaluation metric (paper, section 3).

    Args:
        function: Returns the metric as a float. It takes the model, or nothing if it already knows the model. If it has
            a parameter named ``settings``, that gets the task's settings of inference by name (`FinetuneTask`). It is
            called in evaluation mode and without gradients, once per phi; an error that it raises ends the run, so it
            catches those that it can mend. It may instead return ``(value, (half,
            half))``, its value on all of its data and on two random halves: they show how much of a gain is chance
            (`split_half`). This is still one query, as it takes one pass over the data. ``(value, ((half, half), (half,
            half), ...))`` gives several pairs of halves, from as many splits of the data each time; where one pair is
            needed, the first counts. ``(value, None)`` is the value alone. So are ``(value, "why there are no
            halves")`` and a half that is NaN, where the metric is undefined: a warning says so once. A dict gives
            several quantities from one pass: its ``name`` entry is the metric, and the others are outcomes beside it,
            each in any of these forms.
        maximize: Whether higher is better.
        bounds: Lowest and highest possible value; None for a metric without known bounds.
        name: Its name in tables.
        ledger: Counts the queries; give several metrics one ledger to share a budget.
        repeats: How many calls make one evaluation, at least 1, for a noisy function: their mean is the value, and
            their spread shows the search how large the noise is. Each call is a query.
        new_classes: Whether the model will be judged on classes other than the metric's, as in retrieval, and the
            halves have different classes. A guided search then keeps only part of the step to its end (`kept_share`).
        also: Functions for other quantities, by name, that show what a gain costs elsewhere; they take the model, or
            nothing. They are called only for the model as trained and for what is kept. They cost no query and decide
            nothing, unless ``subject_to`` names them.
        subject_to: Constraints on other quantities, by name: ``">= 0.9"``, or relative to the model as trained, ``">=
            start - 0.005"``. A search respects them, and the guard keeps no end that violates one. Each query gives
            their values, in the dict that ``function`` returns or else by the functions in ``also``.

    Attributes:
        constraints: What ``subject_to`` says.
        takes_model: Whether all that is evaluated at a query takes the model, and so can judge a copy of it.
        callbacks: Each is told of every `Query`, after whoever asked has stored the answer. Metrics derived from this
            one begin with the same callbacks.
        log: Keeps the evaluations, and answers what was asked in an earlier process (`logged`); None for none.

    Examples:
        >>> metric = Metric(lambda: 0.75, maximize=True, name="recall")
        >>> metric.evaluate(nn.Identity(), "example").value, metric.ledger.spent
        (0.75, 1)
    """

    function: Callable[..., Any]
    repeats: int
    new_classes: bool
    also: dict[str, Callable[..., Any]]
    subject_to: dict[str, str]
    constraints: tuple[Constraint, ...]
    takes_model: bool
    log: Log | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        maximize: bool,
        bounds: tuple[float, float] | None = (0.0, 1.0),
        name: str | None = None,
        ledger: Ledger | None = None,
        repeats: int = 1,
        new_classes: bool = False,
        also: Mapping[str, Callable[..., Any]] | None = None,
        subject_to: Mapping[str, str] | None = None,
    ) -> None:
        check_integer(1, repeats=repeats)
        if not callable(function):
            raise TypeError(f"function is {function!r}; it must be a function that returns the metric of a model")
        name = name or getattr(function, "__name__", "metric").strip("<>")
        super().__init__(maximize=maximize, bounds=bounds, name=name, ledger=ledger)
        self.function, self.repeats, self.new_classes = function, repeats, new_classes
        self.constraints = parse_constraints(subject_to, name)
        self.also, self.subject_to = _checked_functions(also, name), dict(subject_to or {})
        functions = [function, *(self.also[each] for each in self.subject_to if each in self.also)]
        self.takes_model = all(map(_takes_model, functions))
        self.callbacks: list[OnQuery] = []
        self._lacked = False
        self._pairs = 0  # how many it reports, once known

    @property
    def settings(self) -> dict[str, Any]:
        """What it was made with besides the function and the ledger."""
        names = ("maximize", "bounds", "name", "repeats", "new_classes", "also", "subject_to")
        return {name: getattr(self, name) for name in names}

    def with_settings(self, **changes: Any) -> "Metric":
        """Return the same metric, with an empty ledger without a budget and, perhaps, other ``settings``."""
        metric = copy.copy(self)
        metric.log = None
        Metric.__init__(metric, self.function, **{**self.settings, **changes})
        metric.callbacks = list(self.callbacks)
        return metric

    def with_callbacks(self, *callbacks: OnQuery) -> "Metric":
        """Return the same metric, with the same ledger, and more callbacks."""
        metric = copy.copy(self)
        metric.callbacks = [*self.callbacks, *callbacks]
        return metric

    def logged(self, log: Log) -> "Metric":
        """Return the same metric, with the same ledger and callbacks, that keeps its evaluations."""
        metric = copy.copy(self)
        metric.log = log
        return metric

    @contextmanager
    def calling(self, *callbacks: OnQuery) -> Iterator[None]:
        """Have callbacks told of what is asked inside the ``with`` block, each once, however often it is named."""
        before = list(self.callbacks)
        self.callbacks += [each for each in callbacks if each not in before]
        try:
            yield
        finally:
            self.callbacks[:] = before

    def cost(self, model: nn.Module, purpose: str) -> float:
        """Evaluate the metric on the model as it is and return the cost; see `evaluate`."""
        return self.evaluate(model, purpose).cost

    def evaluate(self, model: nn.Module, purpose: str) -> Evaluation:
        """Evaluate the metric on the model as it is; one query, or as many as it is repeated.

        Args:
            model: The model to judge.
            purpose: What the ledger books the queries under.

        Raises:
            BudgetError: The budget is spent; the metric was not evaluated.
            MetricError: As from `judge`. The query still counts.
        """
        return self.ask(partial(self.judge, model), purpose, model, Start(phi_of(model)))

    def ask(self, judged: Callable[[], Evaluation], purpose: str, item: Any, at: Start) -> Evaluation:
        """Return an evaluation that is on file, or else has to be made; one query, or as many as it is repeated.

        Args:
            judged: Has `judge` evaluate a model.
            purpose: What the ledger books the queries under.
            item: What the callbacks are told of: a model, or phi, ``d``.
            at: What the log knows it by.

        Raises:
            BudgetError: The budget is spent; the metric was not evaluated.
            MetricError, WeightsError: As from `judge`. The query still counts.
        """
        self.ledger.spend(purpose, self.repeats)
        evaluation, on_file = (judged(), False) if self.log is None else self.log.evaluated(at, judged, self.repeats)
        self.tell(evaluation, purpose, item, on_file=on_file)
        return evaluation

    def tell(
        self, evaluation: Evaluation, purpose: str, item: Any = None, spent: int | None = None, *, on_file: bool = False
    ) -> None:
        """Tell the callbacks of a query that was answered, booked and kept (see `Query`)."""
        if self.callbacks:
            spent = self.ledger.spent if spent is None else spent
            for callback in tuple(self.callbacks):
                callback(Query(item, evaluation, purpose, spent, on_file))

    def judge(self, model: nn.Module, settings: Values | None = None) -> Evaluation:
        """Evaluate the metric on the model as it is, without booking the queries.

        Args:
            model: The model.
            settings: The settings of inference that are in force, for functions that have such a parameter.

        Raises:
            MetricError: The metric raised, did not return a finite number, or left its bounds.
            WeightsError: It changed the model's parameters, persistent buffers (as a forward pass in training mode
                does), layers, hooks, or what is trained. Changes that leave no trace, as through ``.data``, are looked
                for in some entries of each parameter, in all at a run's end (`FinetuneTask.keeping_weights`). Modes
                and other buffers are put back.
        """
        calls = [self._call(model, settings) for _ in range(self.repeats)]
        if len(calls) == 1:
            return calls[0]
        names = [name for name in calls[0].outcomes if all(name in each.outcomes for each in calls)]
        outcomes = {name: _mean_of([each.outcomes[name] for each in calls]) for name in names}
        whole = _mean_of([Outcome(each.value, each.pairs) for each in calls])
        return Evaluation(whole.value, outcomes, whole.pairs, whole.noise, sign=self.sign)

    def look(self, model: nn.Module, settings: Values | None = None) -> dict[str, float]:
        """Return what ``also`` has of the model as it is, by name, but for what each query tells; it costs no query.

        Raises:
            MetricError, WeightsError: As from `judge`, as for the arguments.
        """
        return {name: self._outcome(name, model, settings).value for name in self.also if name not in self.subject_to}

    def _outcome(self, name: str, model: nn.Module, settings: Values | None) -> Outcome:
        returned = self._returned(self.also[name], model, settings, f"{self.name!r}: also[{name!r}]")
        return _outcome_of(returned, name, self.name)

    def _call(self, model: nn.Module, settings: Values | None) -> Evaluation:
        """Call the function, and those of ``also`` for what is bounded and missing from what it returned."""
        returned, outcomes = self._taken_apart(self._returned(self.function, model, settings, repr(self.name)))
        evaluation = self._read(returned)
        for name in self.subject_to:
            if name in self.also:
                outcomes[name] = self._outcome(name, model, settings)
            elif name not in outcomes:
                known = f"told {', '.join(map(brief, outcomes))} besides" if outcomes else "tells nothing besides"
                raise MetricError(
                    f"subject_to names {brief(name)}, but metric {self.name!r} {known}; let it return a dict,"
                    f" {{{self.name!r}: value, {name!r}: value}}, or give also={{{name!r}: function}}"
                )
        return evaluation._replace(outcomes=outcomes)

    def _taken_apart(self, returned: Any) -> tuple[Any, dict[str, Outcome]]:
        """Return what a function returned for the metric itself, and the other quantities by name."""
        if not isinstance(returned, Mapping):
            return returned, {}
        if self.name not in returned:
            raise MetricError(
                f"metric {self.name!r} returned a dict without its own name, {brief(dict(returned))}; give the metric"
                " the name that its value has there, Metric(..., name=NAME)"
            )
        if doubled := [name for name in returned if name in self.also]:
            raise MetricError(
                f"metric {self.name!r} returned {brief(doubled[0])}, which also= has too; leave one of them out"
            )
        others = {name: each for name, each in returned.items() if name != self.name}
        return returned[self.name], {name: _outcome_of(each, name, self.name) for name, each in others.items()}

    def _returned(self, function: Callable[..., Any], model: nn.Module, settings: Values | None, who: str) -> Any:
        """Call a function on the model, which is left as it was."""
        arguments, more = [model] if _takes_model(function) else [], {}
        taken = parameter_of(function, "settings")
        if settings is None and taken and taken.default is taken.empty:
            raise MetricError(
                f"metric {who} takes settings, but there are none; give FinetuneTask(..., settings=mo.Settings(...))"
            )
        if settings is not None and taken:
            more = {"settings": dict(settings)}
        modules, weights = KeptModules(model), Watched(model)
        with evaluating(model), torch.no_grad():
            try:
                returned = function(*arguments, **more)
            except (Exception, SystemExit) as error:
                left = modules.changed() or weights.changed(model)
                and_left = f"; it left the model's {and_more(left)} changed" if left else ""
                raise MetricError(f"metric {who} raised {type(error).__name__}: {error}{and_left}") from error
        if changed := modules.changed() or weights.changed(model):
            raise WeightsError(
                f"metric {who} changed the model's {and_more(changed)}, so later values would be of another model."
                " Leave the model in evaluation mode and its hooks and weights as they are, or evaluate a copy of it"
            )
        return returned

    def _read(self, returned: Any) -> Evaluation:
        """Read a number, or a number and two halves."""
        try:
            value, halves = _parts_of(returned)
        except (TypeError, ValueError, RuntimeError) as error:
            raise MetricError(
                f"metric {self.name!r} returned {brief(returned)}; it must be a number, or (number, (half, half)),"
                " or (number, ((half, half), ...)) with several pairs of halves"
            ) from error
        value = self.checked(value)
        pairs, why = (None, halves) if isinstance(halves, str) else (halves, "")
        if pairs is not None and any(map(math.isnan, chain(*pairs))):
            pairs, why = None, "it is nan on a half of its data"
        if pairs is None:
            self._without_halves(why)
            return Evaluation(value, sign=self.sign)
        if len(pairs) != (before := self._pairs or len(pairs)):
            raise MetricError(
                f"metric {self.name!r} returned {counted(len(pairs), 'pair')} of halves, but {before} before; divide"
                " the data in the same ways at each call"
            )
        self._pairs = len(pairs)
        return Evaluation(value, pairs=self.checked_pairs(pairs), sign=self.sign)

    def _without_halves(self, why: str) -> None:
        """Say once why there are none, if a reason is given; where a few phi alone have none, the guard has others'."""
        if why and not self._lacked:
            self._lacked = True
            where = " at some phi" if self._pairs else ""
            warnings.warn(
                f"metric {self.name!r} reports no halves{where}, as {why}; a gain can't be told from chance by them",
                stacklevel=4,
            )


def _checked_functions(also: Mapping[str, Callable[..., Any]] | None, metric: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of other quantities than the metric by name.

    Raises:
        TypeError: They are no functions.
        ValueError: One has the metric's own name, or none.
    """
    if also is not None and not isinstance(also, Mapping):
        raise TypeError(f"also is {brief(also)}; it must map names to functions of the model")
    for name, function in (also or {}).items():
        if not isinstance(name, str) or not name or name == metric:
            raise ValueError(f"also has the name {brief(name)}; it must be a text other than the metric's own name")
        if not callable(function):
            remedy = "give its function, metric.function" if isinstance(function, Metric) else "give a function"
            raise TypeError(f"also[{name!r}] is {brief(function)}; {remedy} that returns a number for a model")
    return dict(also or {})


def _outcome_of(returned: Any, name: Any, metric: str) -> Outcome:
    """Return what was found of a quantity besides the metric: a number, or a number and halves, as of the metric.

    Raises:
        MetricError: It is no finite number, or its name is no text.
    """
    try:
        value, halves = _parts_of(returned)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MetricError(f"metric {metric!r}: {brief(name)} is {brief(returned)}; it must be a number") from error
    if not isinstance(name, str) or not math.isfinite(value):
        raise MetricError(f"metric {metric!r}: {brief(name)} is {value}; it must be a finite number with a name")
    if halves is None or isinstance(halves, str) or not all(map(math.isfinite, chain(*halves))):
        return Outcome(value)
    return Outcome(value, halves)


def _parts_of(returned: Any) -> tuple[float, Pairs | str | None]:
    """Return the number, and the pairs of halves or why there are none, of what a function returned.

    Raises:
        TypeError, ValueError, RuntimeError: It is something else.
    """
    given = (returned, returned.halves) if isinstance(returned, Halved) else returned
    value, halves = given if isinstance(given, tuple) else (given, None)
    return number_of(value), halves if halves is None or isinstance(halves, str) else pairs_of(halves)


def _mean_of(calls: Sequence[Outcome]) -> Outcome:
    """Return the means of several calls, with the standard error of the value's; of pairs, if all have them."""
    pairs = tuple(
        (mean(first for first, _ in each), mean(second for _, second in each))
        for each in zip(*(call.pairs for call in calls), strict=False)
    )
    values = [each.value for each in calls]
    return Outcome(mean(values), pairs, stdev(values) / math.sqrt(len(values)))


def phi_of(model: nn.Module) -> Tensor:
    """Return a model's phi, ``d``; that of one without an adapter has no numbers."""
    try:
        return Adapter(model).phi.detach()
    except AdapterError:
        return torch.zeros(0)


def _takes_model(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "settings"
    ]
    if len(required) > 1:
        raise ValueError(
            f"a metric takes the model or nothing, and settings, but {getattr(function, '__name__', function)!r} needs"
            f" {[p.name for p in required]}; bind the rest with functools.partial"
        )
    return bool(required) or any(p.kind is p.VAR_POSITIONAL for p in parameters)
