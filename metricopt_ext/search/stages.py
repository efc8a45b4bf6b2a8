"""What a search does before it searches phi: it looks along lines of starts, then tunes settings of inference.

No gradient reaches a setting, and few matter; a Gaussian process over all of them needs more queries than it is worth.
So each is looked at alone, from the best values so far on, and then a few presets, as some work together only.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

from torch import Tensor

from metricopt_ext.adapters.start import PlacesOnLine, Start, StartLine
from metricopt_ext.search.lines import Known, best_known, first_times, line_search
from metricopt_ext.search.strategy import Answers, Batches
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.settings import Setting, Settings, Value, Values

# Of all queries, lines take at most this share. A line takes at least three, or it is not looked along, and at most
# six: a function of one number that bends once or twice is known by then. Starts that lie on it count among them.
SHARE, LEAST, MOST = 1 / 3, 3, 6

# Queries of one setting: of an interval; and of values, which are followed outwards while the metric gains.
INTERVAL, OUTWARDS = 4, 5

# Even steps of an interval, at which it is looked whether inference takes too long.
STEPS = 100

# Of the stage's queries, presets are left as many as there are, up to this share.
PRESETS = 1 / 2

# What is least of the best evaluation.
Rank = Callable[[Evaluation], Any]


class Point(NamedTuple):
    """A start that the metric was asked for.

    Attributes:
        name: Its name, or its line's.
        start: The start.
        evaluation: The metric's.
    """

    name: str
    start: Start
    evaluation: Evaluation


# --- Lines of starts ---------------------------------------------------------------------------------------------


def line_queries(queries: int, on_lines: Sequence[int], spare: int) -> list[int]:
    """Return how many queries are asked along each line: the rule of how much of a budget goes to starts.

    Args:
        queries: Of the whole run.
        on_lines: How many of the fixed starts lie on each line; they are asked anyway, and count as its own.
        spare: Most queries that may be asked besides the fixed starts.
    """
    found = [0] * len(on_lines)
    for lines in range(len(on_lines), 0, -1):  # the first ones, as many as get three each
        known = on_lines[:lines]
        total = min(int(SHARE * queries + 1e-9), spare + sum(known))
        if total // lines >= LEAST:
            own = [min(MOST, total // lines + (line < total % lines)) for line in range(lines)]
            found[:lines] = [max(0, each - other) for each, other in zip(own, known, strict=True)]
            break
    return found


class PlannedLine(NamedTuple):
    """What a search asks along a line.

    Attributes:
        queries: How many queries, besides those of the starts that lie on it; 0 of a line that is not looked along.
        holds: Names of the fixed starts that lie on it, and count among its queries.
        leads_to: The fixed start at its end, where it begins at the model as it was trained; "" for other lines. Only
            where that start is the better of the two are there any queries.
    """

    queries: int
    holds: tuple[str, ...]
    leads_to: str = ""


def planned_lines(
    lines: Mapping[str, StartLine],
    fixed: Mapping[str, Start],
    queries: int,
    spare: int,
    base: Mapping[str, Tensor],
    ranks: Mapping[str, Any] | None = None,
) -> dict[str, PlannedLine]:
    """Return what is asked along each line, by name; see `line_queries`.

    A line from the model as it was trained to a fixed start is looked along only where that start is better. BatchNorm
    statistics between those of training and deployment gained where the deployment's own did. Where these lose, as on
    a long tail, the queries are better spent elsewhere.

    Args:
        lines: The lines.
        fixed: The fixed starts, ``"start"`` among them, which lies on many a line and counts for none.
        queries: Evaluations of the whole run.
        spare: Most that may be asked besides the fixed starts.
        base: What a start does not replace, by name (`Adapter.base_state_dict`).
        ranks: What is least of the best of the fixed starts, by name; None where they are yet to be asked, so that the
            plan is of what may be asked at most.
    """
    places = {name: _places(line, fixed, base) for name, line in lines.items()}
    leads_to = {name: _leads_to(line, places[name]) for name, line in lines.items()}
    asked = [name for name, end in leads_to.items() if ranks is None or not end or ranks[end] < ranks["start"]]
    holds, taken = dict.fromkeys(lines, tuple[str, ...]()), {"start"}
    for name in asked:
        holds[name] = tuple(each for each in places[name] if each not in taken)
        taken |= places[name].keys()
    shares = dict(zip(asked, line_queries(queries, [len(holds[name]) for name in asked], spare), strict=True))
    return {name: PlannedLine(shares.get(name, 0), holds[name], leads_to[name]) for name in lines}


def _places(line: StartLine, fixed: Mapping[str, Start], base: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the t of those fixed starts that lie on a line, by name."""
    places = PlacesOnLine(line, base)
    return {name: t for name, start in fixed.items() if (t := places.of(start)) is not None}


def _leads_to(line: StartLine, places: Mapping[str, float]) -> str:
    """Return the fixed start at a line's end if the model as it was trained is at the other; else ""."""
    opposite = {line.low: line.high, line.high: line.low}.get(places.get("start", math.nan))
    return next((name for name, t in places.items() if t == opposite), "")


def along_line(
    name: str, line: StartLine, queries: int, points: list[Point], best: Start, base: Mapping[str, Tensor], rank: Rank
) -> Generator[list[Start], Answers, tuple[Point, float] | None]:
    """Look along a line of starts: its ``first`` t, then where a Gaussian process may be least (`line_search`).

    A line on which the model as it was trained lies is looked along from the best start so far (`StartLine.through`).

    Args:
        name: The line's.
        line: The line.
        queries: How many may be answered.
        points: What is known, the model as it was trained first; what is answered is added.
        best: The best start so far.
        base: What a start does not replace, by name (`Adapter.base_state_dict`).
        rank: What is least of the best evaluation.

    Returns:
        Its best, by the process, and the t of that; None where that was known before.
    """
    trained, before = points[0].start, len(points)
    if best is not trained and PlacesOnLine(line, base).of(trained) is not None:
        line = line.through(best)
    places = PlacesOnLine(line, base)
    known: Known = [(t, each.evaluation) for each in points if (t := places.of(each.start)) is not None]
    on_line, start = len(known), known[0][0] if known else line.first[0]
    asking, answered = line_search((line.low, line.high), queries, known, start=start, first=line.first), None
    while True:
        try:
            times = asking.send(answered)  # type: ignore[arg-type]
        except StopIteration:
            break
        answers = yield [line.at(t) for t in times]
        points += [Point(name, each.at, each.evaluation) for each in answers if each.evaluation is not None]
        answered = [(t, each.evaluation) for t, each in zip(times, answers, strict=True) if each.evaluation is not None]
    at = best_known((line.low, line.high), known)
    ranks = [rank(evaluation) for _, evaluation in known]
    if isinstance(ranks[at], tuple) and ranks[at][0] and not min(ranks)[0]:  # constraints hold elsewhere
        at = ranks.index(min(ranks))
    return (points[before + at - on_line], known[at][0]) if at >= on_line else None


# --- Settings of inference ---------------------------------------------------------------------------------------


class Tried(NamedTuple):
    """Values that were asked for.

    Attributes:
        values: One for every setting.
        evaluation: The metric's; None of values that were given up.
    """

    values: dict[str, Value]
    evaluation: Evaluation | None


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


class SettingsStage:
    """A stage over settings of inference at one start.

    1. For each setting that is tuned alone, in order, from the best values so far: of an interval ask both sides, then
       where a Gaussian process of one variable may be least (`line_search`); of numbers ask one below and two above,
       then go on outwards while it gains; of other values ask each.
    2. Ask the presets, each put on the best so far.

    What takes more inference time than may be taken is left out, and so is what was asked before.

    Args:
        settings: The settings; their ``queries`` bound the stage.
        at: The start, whose settings are the first values; what it does not say is what a run begins with.
        first: The metric's evaluation there.
        queries: Queries that it may ask for, at most those of the settings.
        rank: What is least of the best evaluation; by default its cost.
    """

    def __init__(
        self,
        settings: Settings,
        at: Start,
        first: Evaluation,
        queries: int | None = None,
        rank: Rank = lambda evaluation: evaluation.cost,
    ) -> None:
        self.settings, self.at, self.rank = settings, at, rank
        self.queries = settings.queries if queries is None else min(queries, settings.queries)
        self._tried = [Tried(self._values_of(at), first)]

    def _values_of(self, start: Start) -> dict[str, Value]:
        return self.settings.complete({**self.settings.first, **start.settings})

    @property
    def spent(self) -> int:
        """How many queries were asked for and told, those that were given up not among them."""
        return sum(each.evaluation is not None for each in self._tried) - 1

    def end(self) -> SettingsEnd:
        """Return the best of what was told; the first values unless others are better."""
        best = self._best()
        assert best.evaluation is not None
        return SettingsEnd(best.values, best.evaluation, tuple(self._tried), self.queries)

    def batches(self) -> Batches:
        """Yield the start with other settings, and be sent what became of them."""
        for name in self.settings.alone:
            setting = self.settings[name]
            yield from self._interval(setting) if setting.values is None else self._values(setting)
        yield from self._asked(self._presets()[: self._left])

    def _asked(self, batch: Sequence[Values]) -> Batches:
        if batch:
            answers = yield [replace(self.at, settings=dict(values)) for values in batch]
            self._tried += [Tried(self._values_of(each.at), each.evaluation) for each in answers]

    def _interval(self, setting: Setting) -> Batches:
        """Search along an interval from the best values so far.

        It is cut to what inference may take where both first steps take too long; else its steps stay large.
        """
        best = self._best()
        assert best.evaluation is not None
        at = setting.share(float(best.values[setting.name]))
        known: Known = [(at, best.evaluation)]

        def affords(t: float) -> bool:
            return self.settings.affords({**best.values, setting.name: setting.at(t)})

        low, high = 0.0, 1.0
        if not any(map(affords, first_times((low, high), at, known))):
            low, high = _around(at, affords)
            if low == high:
                return
        asking, answered = line_search((low, high), min(INTERVAL, self._for_lines), known, start=at), None
        while True:
            try:
                times = asking.send(answered)  # type: ignore[arg-type]
            except StopIteration:
                return
            batch = [{**best.values, setting.name: setting.at(t)} for t in times]
            yield from self._asked([values for values in batch if self._is_new(values)])
            found = [self._known(values) for values in batch]
            answered = [(t, each.evaluation) for t, each in zip(times, found, strict=True) if each and each.evaluation]
            if not answered:
                return  # what the line wants takes too long, or nobody waits for it

    def _values(self, setting: Setting) -> Batches:
        """Ask numbers outwards from the best so far while they gain; other values one by one."""
        best, left = self._best(), min(OUTWARDS, self._for_lines)

        def at(value: Value) -> dict[str, Value]:
            return {**best.values, setting.name: value}

        assert setting.values is not None
        if not setting.ordered:
            others = [at(value) for value in setting.values if self._is_new(at(value))]
            yield from self._asked(others[:left])
            return
        numbers: list[Value] = sorted(setting.values, key=float)
        where = numbers.index(best.values[setting.name])
        beside = [at(numbers[i]) for i in (where - 1, where + 1, where + 2) if 0 <= i < len(numbers)]
        near = [values for values in beside if self._is_new(values)][:left]
        yield from self._asked(near)
        left -= len(near)
        while left > 0:
            now = numbers.index(self._best().values[setting.name])
            further = [numbers[i] for i in (now + (1 if now > where else -1),) if 0 <= i < len(numbers)]
            new = [at(value) for value in further if now != where and self._is_new(at(value))]
            if not new:
                return
            yield from self._asked(new)
            left -= len(new)

    def _presets(self) -> list[dict[str, Value]]:
        """Return the presets on the best so far that may be asked, each once."""
        best, found = self._best().values, list[dict[str, Value]]()
        for name in self.settings.presets:
            values = self.settings.preset(name, best)
            if self._is_new(values) and values not in found:
                found.append(values)
        return found

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
