"""The black-box metric: a function of the model that returns one number, each call of which is counted."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, MetricError, WeightsError
from metricopt_ext.tasks.combine import Combination, Combine
from metricopt_ext.tasks.constraints import Constraint, parse_constraints
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation, Outcome, mean_of
from metricopt_ext.tasks.halved import Halved, by_name, pairs_of
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.settings import Values, parameter_of
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.numbers import number_of
from metricopt_ext.utils.weights import Watched
from metricopt_ext.utils.words import and_more, brief


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
            each in any of these forms. ``({NAME: value, ...}, ({...}, {...}))`` has all of them on two halves, or on
            several pairs, as above.
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
        combine: How the outcomes in that dict make the metric, which has no entry of its own then: ``"worst"``, the
            lowest if higher is better, else the highest; ``"mean"``; or a function of a tensor, ``... x m``, in the
            dict's order, to ``...``, differentiable by torch. A search learns each outcome: they are smooth where a
            worst of several has kinks. None for a metric that is told as a number.
        combined: Names of what is combined, in order, perhaps of ``also`` or ``subject_to``; None for all of the dict
            but what ``subject_to`` names.
        directions: Whether higher is better, by name, of what a function combines, as far as it is known; for
            ``"worst"`` and ``"mean"`` it is as of the metric.

    Attributes:
        constraints: What ``subject_to`` says.
        callbacks: Each is told of every `Query`, after whoever asked has stored the answer. Metrics derived from this
            one begin with the same callbacks.
        log: Keeps the evaluations, and answers what was asked in an earlier process (`logged`); None for none.
        combination: What ``combine`` says; None without it.

    Examples:
        >>> metric = Metric(lambda: 0.75, maximize=True, name="recall")
        >>> metric.evaluate(nn.Identity(), "example").value, metric.ledger.spent
        (0.75, 1)
        >>> recalls = Metric(lambda: {"cat": 0.75, "dog": 0.5}, maximize=True, combine="worst")
        >>> recalls.evaluate(nn.Identity(), "example").value
        0.5
    """

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
        combine: Combine | None = None,
        combined: Sequence[str] | None = None,
        directions: Mapping[str, bool] | None = None,
    ) -> None:
        check_integer(1, repeats=repeats)
        for each in (function, *(also or {}).values()):
            if not callable(each):
                raise TypeError(f"{brief(each)} is no function that returns a quantity of a model")
            takes_model(each)  # or raises
        name = name or getattr(function, "__name__", "metric").strip("<>")
        if name in (also or {}):
            raise ValueError(f"also has {name!r}, which is the metric itself; leave it out")
        super().__init__(maximize=maximize, bounds=bounds, name=name, ledger=ledger)
        if combine is not None:
            those: Any = tuple(combined) if isinstance(combined, list) else combined
            told = {} if directions is None else directions
            self.combination: Combination | None = Combination(combine, self.sign, those, tuple(subject_to or ()), told)
        elif combined is not None or directions is not None:
            raise ValueError("combined and directions are for a metric that is made of outcomes; give combine='worst'")
        self._made_of = {"combine": combine, "combined": combined, "directions": directions}
        self.function: Callable[..., Any] = function
        self.repeats: int = repeats
        self.new_classes: bool = new_classes
        self.also: dict[str, Callable[..., Any]] = dict(also or {})
        self.constraints: tuple[Constraint, ...] = parse_constraints(subject_to, name)
        for bound in self.constraints:
            if (directions or {}).get(bound.name, bound.at_least) != bound.at_least:
                raise ValueError(f"directions say the opposite of subject_to, {bound}; leave {bound.name!r} out of one")
        self.subject_to: dict[str, str] = dict(subject_to or {})
        self.callbacks: list[OnQuery] = []
        self.log: Log | None = None
        self._lacked = False
        self._pairs = 0  # how many it reports, once known

    @property
    def settings(self) -> dict[str, Any]:
        """What it was made with besides the function and the ledger."""
        names = ("maximize", "bounds", "name", "repeats", "new_classes", "also", "subject_to")
        return {**{name: getattr(self, name) for name in names}, **self._made_of}

    def outcome_sign(self, name: str) -> int | None:
        """Return what turns an outcome into a cost: -1 if higher is better, 1 if lower is, None if nothing tells."""
        made = self.combination
        if made is not None and not callable(made.combine) and made.combines(name):
            return self.sign
        sides = {each.name: each.at_least for each in self.constraints}
        higher = {**({} if made is None else made.directions), **sides}.get(name)
        return None if higher is None else -1 if higher else 1

    def with_settings(self, **changes: Any) -> "Metric":
        """Return the same metric, with an empty ledger without a budget and, perhaps, other ``settings``."""
        metric = copy.copy(self)
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

    def evaluate(self, model: nn.Module, purpose: str, settings: Values | None = None) -> Evaluation:
        """Evaluate the metric on the model as it is; one query, or as many as it is repeated.

        Args:
            model: The model to judge.
            purpose: What the ledger books the queries under.
            settings: As of `judge`.

        Raises:
            BudgetError: The budget is spent; the metric was not evaluated.
            MetricError: As from `judge`. The query still counts.
        """
        try:
            phi = Adapter(model).phi.detach()
        except AdapterError:
            phi = torch.zeros(0)  # without an adapter it has no numbers
        return self.ask(
            partial(self.judge, model, *([] if settings is None else [settings])), purpose, model, Start(phi)
        )

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
        query = Query(item, evaluation, purpose, self.ledger.spent if spent is None else spent, on_file)
        for callback in tuple(self.callbacks):
            callback(query)

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
        names = [name for name in calls[0] if all(name in each for each in calls)]
        outcomes = {name: mean_of([each[name] for each in calls]) for name in names}
        value, pairs, noise = outcomes.pop(self.name)
        if self.combination is not None and self.repeats > 1:  # of the means, which have less noise than one call
            value, pairs, _ = self.combined_of(outcomes)
        return Evaluation(value, outcomes, pairs, noise, sign=self.sign)

    def look(self, model: nn.Module, settings: Values | None = None) -> dict[str, float]:
        """Return what ``also`` has of the model as it is, by name, but for what each query tells; it costs no query.

        Raises:
            MetricError, WeightsError: As from `judge`, as for the arguments.
        """
        others = [name for name in self.also if name not in self._needed]
        return {name: self._outcome(name, self._returned(name, model, settings)).value for name in others}

    @property
    def _needed(self) -> tuple[str, ...]:
        """The names of what each query must tell besides the metric, as far as they are known."""
        listed = (self.combination and self.combination.combined) or ()
        return tuple(dict.fromkeys((*self.subject_to, *listed)))

    def _call(self, model: nn.Module, settings: Values | None) -> dict[str, Outcome]:
        """Call the function, and those of ``also`` that each query needs; returns all quantities by name."""
        returned = self._returned(self.name, model, settings)
        told = self.named(returned)
        if doubled := sorted(told.keys() & self.also.keys()):
            raise MetricError(f"metric {self.name!r} returned {doubled[0]!r}, which also= has too; leave one out")
        told |= {name: self._returned(name, model, settings) for name in self._needed if name in self.also}
        outcomes = self.read(told)
        self.remember({name: each for name, each in outcomes.items() if name != self.name})
        if (pairs := outcomes[self.name].pairs) and self._pairs not in (0, len(pairs)):
            raise MetricError(f"metric {self.name!r} has {len(pairs)} pairs of halves; give {self._pairs}, as before")
        self._pairs = len(pairs) or self._pairs
        return outcomes

    def read(self, told: Mapping[Any, Any], *, noisy: bool = False) -> dict[str, Outcome]:
        """Return all quantities by name, the metric's own last, of what is told of a model, each as of the function.

        Args:
            told: Numbers by name, each perhaps with halves.
            noisy: Whether it is told from outside: each may be ``(number, halves or None, standard error)`` as well,
                and halves are finite numbers.

        Raises:
            MetricError: One is missing, or no such number.
        """
        own = () if self.combination else (self.name,)
        if lacking := [name for name in (*own, *self._needed) if name not in told]:
            why = ", which it is subject to" * (lacking[0] in self.subject_to)
            raise MetricError(
                f"metric {self.name!r} told {', '.join(map(brief, told))}, but not {lacking[0]!r}{why}; let it tell a"
                " dict that has its own name, or give combine='worst' to make it of the others; and the names of"
                " subject_to and combined, or give also={NAME: function}"
            )
        outcomes = {name: self._outcome(name, each, noisy) for name, each in told.items()}
        if self.combination is None:
            value, pairs, noise = outcomes.pop(self.name)
        else:
            value, pairs, noise = self.combined_of(outcomes)
            alone = [name for name in self.combination.names(outcomes) if not outcomes[name].pairs]
            if 0 < len(alone) < len(self.combination.names(outcomes)) and not self._lacked:  # or it was warned of
                raise MetricError(
                    f"metric {self.name!r}: {alone[0]!r} has no halves, and others have; give them of all outcomes,"
                    " nan where one is not defined on a half, or of none"
                )
        return {**outcomes, self.name: Outcome(self.checked(value), self.checked_pairs(pairs), noise)}

    def named(self, returned: Any) -> dict[Any, Any]:
        """Return what the function told, by name, each with its own halves.

        Raises:
            MetricError: It is no dict of outcomes that ``combine`` needs, or its halves are not of the same names.
        """
        both = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Mapping)
        values, halves = returned if both else (returned, None)
        if not isinstance(values, Mapping):
            if self.combination is not None:
                raise MetricError(f"metric {self.name!r} told {brief(returned)}; combine needs a dict, {{NAME: value}}")
            return {self.name: returned}
        try:
            return by_name(values, halves)
        except (TypeError, ValueError) as error:
            raise MetricError(f"metric {self.name!r}: {error}") from error

    def _returned(self, name: str, model: nn.Module, settings: Values | None) -> Any:
        """Call the function of the metric, or of another quantity, on the model, which is left as it was."""
        function = self.also.get(name, self.function)
        arguments = [model] if takes_model(function) else []
        taken = parameter_of(function, "settings")
        more = {} if settings is None or not taken else {"settings": dict(settings)}
        who = repr(name) if name == self.name else f"{self.name!r}: also[{name!r}]"
        if settings is None and taken and taken.default is taken.empty:
            raise MetricError(f"metric {who} takes settings; give FinetuneTask(..., settings=mo.Settings(...))")
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

    def _outcome(self, name: Any, returned: Any, noisy: bool = False) -> Outcome:
        """Read a number, perhaps with halves and a standard error, of the metric or of another quantity."""
        given = (returned, returned.halves) if isinstance(returned, Halved) else returned
        given = given if isinstance(given, tuple) else (given, None)
        try:
            value, halves, noise = given if noisy and len(given) == 3 else (*given, None)
            value, noise = number_of(value), None if noise is None else number_of(noise)
            pairs = () if halves is None or (isinstance(halves, str) and not noisy) else pairs_of(halves)
        except (TypeError, ValueError) as error:
            raise MetricError(
                f"metric {self.name!r}: {brief(name)} is {brief(returned)}; give a number, or (number, (half, half))"
                + ", or (number, halves or None, noise)" * noisy
                + "; several numbers by name are for combine='worst'" * isinstance(next(iter(given), None), Mapping)
            ) from error
        if any(map(math.isnan, chain(*pairs))) and not noisy:
            pairs, halves = (), "it is nan on a half of its data"
        if not isinstance(name, str):
            raise MetricError(f"metric {self.name!r} names a number {brief(name)}; names are text, as 'class {name}'")
        if not all(map(math.isfinite, (value, *chain(*pairs)))):
            raise MetricError(
                f"metric {self.name!r}: {name!r} is {brief(returned)}; give finite numbers, and leave out what has no"
                " examples"
            )
        if noise is not None and not 0 <= noise < math.inf:
            raise MetricError(
                f"metric {self.name!r}: noise of {brief(name)} is {noise}; give a standard error of 0 or more"
            )
        made, told = self.combination, name in self._needed or name not in self.also
        counts = name == self.name if made is None else told and made.combines(name)
        if counts and isinstance(halves, str) and not self._lacked:
            self._lacked = True
            of = "" if name == self.name else f" of {name!r}"
            warnings.warn(
                f"metric {self.name!r} reports no halves{of}, as {halves}; a gain can't be told from chance by them",
                stacklevel=4,
            )
        return Outcome(value, pairs, noise)


def takes_model(function: Callable[..., Any]) -> bool:
    """Whether a metric's function takes the model; if not, it knows it already.

    Raises:
        ValueError: It takes more than that and settings.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    variadic = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in parameters if p.default is p.empty and p not in variadic and p.name != "settings"]
    if len(required) > 1:
        raise ValueError(f"a metric takes the model and settings alone, not {required}; bind others with partial")
    return bool(required) or any(p.kind is p.VAR_POSITIONAL for p in variadic)
