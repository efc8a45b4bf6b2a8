"""The first stage of a search, over settings of inference: one after another, then those that work together.

No gradient reaches a setting, and few matter; a Gaussian process over all of them needs more queries than it is worth.
So each is looked at alone, from the best values so far on, and then a few presets, as some work together only.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from metricopt_ext.search.lines import LineState, first_times
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.settings import Setting, Settings, Value, Values

# Queries of one setting: of an interval; and of values, which are followed outwards while the metric gains.
INTERVAL, OUTWARDS = 4, 5

# Even steps of an interval, at which it is looked whether inference takes too long.
STEPS = 100

# Of the stage's queries, presets are left as many as there are, up to this share.
PRESETS = 1 / 2


class Tried(NamedTuple):
    """Values that were asked for.

    Attributes:
        values: One for every setting.
        evaluation: The metric's; None of values that were given up.
    """

    values: dict[str, Value]
    evaluation: Evaluation | None


# Yields values to ask for, and is sent what became of them.
Batches = Generator[list[dict[str, Value]], list[Tried], None]


@dataclass(frozen=True)
class SettingsEnd:
    """Where the stage stands.

    Attributes:
        values: The best, one for every setting.
        evaluation: Theirs.
        tried: All that were asked, the first values before.
        queries: Queries that it might ask for.
    """

    values: dict[str, Value]
    evaluation: Evaluation
    tried: tuple[Tried, ...]
    queries: int


class SettingsState:
    """A stage over settings that has begun: asked for values, and told what the metric is there.

    1. For each setting that is tuned alone, in order, from the best values so far: of an interval ask both sides, then
       where a Gaussian process of one variable may be least (`LineState`); of numbers ask one below and two above, then
       go on outwards while it gains; of other values ask each.
    2. Ask the presets, each put on the best so far.

    What takes more inference time than may be taken is left out, and so is what was asked before.

    Args:
        settings: The settings; their ``queries`` bound the stage.
        first: The metric's evaluation at the first values.
        queries: Queries that it may ask for, at most those of the settings.
        rank: What is least of the best evaluation; by default its cost.
        values: The first values, as of a start that has its own; by default those that a run begins with.

    Examples:
        >>> from contextlib import nullcontext
        >>> settings = Settings([Setting("k", values=(1, 2, 3), default=1)], lambda values: nullcontext(values))
        >>> state = SettingsState(settings, Evaluation(0.5))
        >>> while batch := state.ask():
        ...     for index, values in enumerate(batch):
        ...         state.tell(index, Evaluation(0.5 / values["k"]))
        >>> state.end().values
        {'k': 3}
    """

    def __init__(
        self,
        settings: Settings,
        first: Evaluation,
        queries: int | None = None,
        rank: Callable[[Evaluation], Any] = lambda evaluation: evaluation.cost,
        values: Values | None = None,
    ) -> None:
        self.settings, self.rank = settings, rank
        self.queries = settings.queries if queries is None else min(queries, settings.queries)
        self._tried = [Tried(settings.first if values is None else settings.complete(values), first)]
        self._batches: Batches | None = None
        self._open: list[dict[str, Value]] = []
        self._answers: dict[int, Tried] = {}

    @property
    def spent(self) -> int:
        """How many queries were asked for and told, those that were given up not among them."""
        return sum(each.evaluation is not None for each in self._tried) - 1

    def ask(self) -> list[dict[str, Value]]:
        """Return the open batch, a value for every setting each; the next one once all is told; [] at the end."""
        if self._open:
            return self._open
        if self._batches is None:
            self._batches = self._stage()
            self._open = next(self._batches, [])
        else:
            answers, self._answers = [self._answers[index] for index in sorted(self._answers)], {}
            try:
                self._open = self._batches.send(answers) if answers else []
            except StopIteration:
                self._open = []
        return self._open

    def tell(self, index: int, evaluation: Evaluation | None, values: Values | None = None) -> None:
        """Answer values of the open batch.

        Args:
            index: Their place in the batch.
            evaluation: The metric's evaluation; None where nobody waits for it any more.
            values: Where it was evaluated if these are others, as of an earlier sitting.
        """
        self._answers[index] = Tried(dict(self._open[index] if values is None else values), evaluation)
        if len(self._answers) == len(self._open):
            self._tried += [self._answers[each] for each in range(len(self._open))]
            self._open = []

    def end(self) -> SettingsEnd:
        """Return the best of what was told; the first values unless others are better."""
        best = self._best()
        assert best.evaluation is not None
        return SettingsEnd(best.values, best.evaluation, tuple(self._tried), self.queries)

    # --- The stage -----------------------------------------------------------------------------------------------

    def _stage(self) -> Batches:
        for name in self.settings.alone:
            setting = self.settings[name]
            yield from self._interval(setting) if setting.values is None else self._values(setting)
        yield from self._proposed(self._presets()[: self._left])

    def _interval(self, setting: Setting) -> Batches:
        """Search along an interval from the best values so far.

        It is cut to what inference may take where both first steps take too long; else its steps stay large.
        """
        best = self._best()
        assert best.evaluation is not None
        at = setting.share(float(best.values[setting.name]))

        def affords(t: float) -> bool:
            return self.settings.affords({**best.values, setting.name: setting.at(t)})

        low, high = 0.0, 1.0
        if not any(map(affords, first_times((low, high), at, [(at, best.evaluation)]))):
            low, high = _around(at, affords)
            if low == high:
                return
        line = LineState((low, high), min(INTERVAL, self._for_lines), [(at, best.evaluation)], start=at)
        while len(points := line.ask()):
            times = points[:, 0].tolist()
            batch = [{**best.values, setting.name: setting.at(t)} for t in times]
            yield from self._proposed([values for values in batch if self._is_new(values)])
            found = [self._known(values) for values in batch]
            if not any(each is not None and each.evaluation is not None for each in found):
                return  # what the line wants takes too long, or nobody waits for it
            for index, each in enumerate(found):
                if each is None or each.evaluation is None:
                    line.give_up(index)
                else:
                    line.tell(index, each.evaluation)

    def _values(self, setting: Setting) -> Batches:
        """Ask numbers outwards from the best so far while they gain; other values one by one."""
        best, left = self._best(), min(OUTWARDS, self._for_lines)

        def at(value: Value) -> dict[str, Value]:
            return {**best.values, setting.name: value}

        assert setting.values is not None
        if not setting.ordered:
            others = [at(value) for value in setting.values if self._is_new(at(value))]
            yield from self._proposed(others[:left])
            return
        numbers: list[Value] = sorted(setting.values, key=float)
        where = numbers.index(best.values[setting.name])
        beside = [at(numbers[i]) for i in (where - 1, where + 1, where + 2) if 0 <= i < len(numbers)]
        near = [values for values in beside if self._is_new(values)][:left]
        yield from self._proposed(near)
        left -= len(near)
        while left > 0:
            now = numbers.index(self._best().values[setting.name])
            further = [numbers[i] for i in (now + (1 if now > where else -1),) if 0 <= i < len(numbers)]
            new = [at(value) for value in further if now != where and self._is_new(at(value))]
            if not new:
                return
            yield from self._proposed(new)
            left -= len(new)

    def _presets(self) -> list[dict[str, Value]]:
        """Return the presets on the best so far that may be asked, each once."""
        best, found = self._best().values, list[dict[str, Value]]()
        for name in self.settings.presets:
            values = self.settings.preset(name, best)
            if self._is_new(values) and values not in found:
                found.append(values)
        return found

    def _proposed(self, batch: Sequence[dict[str, Value]]) -> Batches:
        if batch:
            yield list(batch)

    @property
    def _left(self) -> int:
        return self.queries - self.spent

    @property
    def _for_lines(self) -> int:
        """How many queries are left for settings alone, presets aside."""
        return max(0, self._left - min(len(self._presets()), math.floor(PRESETS * self.queries)))

    def _is_new(self, values: dict[str, Value]) -> bool:
        return self.settings.affords(values) and self._known(values) is None

    def _known(self, values: dict[str, Value]) -> Tried | None:
        return next((each for each in self._tried if each.values == values), None)

    def _best(self) -> Tried:
        """Return the best of what was told, the first of equals."""
        known = [each for each in self._tried if each.evaluation is not None]
        return min(known, key=lambda each: self.rank(each.evaluation))  # type: ignore[arg-type]


def _around(at: float, affords: Callable[[float], bool]) -> tuple[float, float]:
    """Return the shares of an interval around one between which inference takes no longer than it may."""
    steps = [step / STEPS for step in range(STEPS + 1)]
    below = takewhile(affords, (t for t in reversed(steps) if t < at))
    above = takewhile(affords, (t for t in steps if t > at))
    return min(below, default=at), max(above, default=at)
