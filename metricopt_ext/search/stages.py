"""What a search does before it searches phi: it looks along lines of starts, then tunes settings of inference.

No gradient reaches a setting, and few matter; a Gaussian process over all of them needs more queries than it is worth.
So each is looked at alone, from the best values so far on, and then a few presets, as some work together only.
"""

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.search.strategy import Answers, Batches
from metricopt_ext.search.visited import ranked
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation, noise_of
from metricopt_ext.tasks.settings import Setting, Settings, Value
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Spectrum

# The first two are asked a tenth of the interval to each side of the start: half of an adjustment of [-2.5, 2.5].
# Further out a metric is often ruined, and tells nothing of where it is best.
FIRST = 1 / 10

# The GP's typical distance, a tenth of the interval: its prior length scale is then a fifth, as of a metric that bends
# a few times at most.
TYPICAL = 1 / 10

# Candidates for the next t, evenly spaced: a step is 1% of the interval, less than what a few queries can tell apart.
CANDIDATES = 101

# What is nearer to a known t than this share of the interval is known already.
NEAR = 1 / 250

# Of all queries, lines take at most this share. A line takes at least three, or it is not looked along, and at most
# six: a function of one number that bends once or twice is known by then. Starts that lie on it count among them.
SHARE, LEAST, MOST = 1 / 3, 3, 6

# Queries of one setting: of an interval; and of values, which are followed outwards while the metric gains.
INTERVAL, OUTWARDS = 4, 5

# Even steps of an interval, at which it is looked whether inference takes too long.
STEPS = 100

# Of the stage's queries, presets are left as many as there are, up to this share.
PRESETS = 1 / 2

# The name of what is asked of settings, and of the start that a search has where these were tuned.
SETTINGS = "settings"


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


# Yields starts that the metric is asked for, and returns what they became: None of those that were given up.
Asked = Generator[list[Start], Answers, list[Point | None]]


# --- Along a line ------------------------------------------------------------------------------------------------

# What lies at t is the caller's: phi = start + t v, the strength of an adjustment, or a setting of inference.


class OnLine(NamedTuple):
    """A point that lies on a line, and its t."""

    t: float
    point: Point


def line_search(line: StartLine, queries: int, known: list[OnLine], ask: Callable[[list[Start]], Asked]) -> Batches:
    """Search along a line.

    1. Ask for its ``first`` t, unless something is known nearby.
    2. Fit f, a Gaussian process, to all that is known. Ask where its mean less its standard deviation is least (the
       lower confidence bound; Srinivas et al., 2010). Go on with 2, until nothing that was asked for is answered.

    Args:
        line: The line.
        queries: How many may be answered besides those that are known, at least 0.
        known: What is known on it, the start of the search first; what is answered is added.
        ask: Asks for starts.
    """
    most = len(known) + queries
    times = first_times(line, known)[:queries]
    while len(known) < most:
        times = times or [next_time(line, known)]
        found = yield from ask([line.at(t) for t in times])
        answered = [OnLine(t, point) for t, point in zip(times, found, strict=True) if point is not None]
        if not answered:
            return
        known += answered
        times = []


def first_times(line: StartLine, known: Sequence[OnLine]) -> list[float]:
    """Return which t are asked first: the line's, where nothing is known yet."""
    apart, chosen = FIRST * (line.high - line.low) / 5, [each.t for each in known]
    for t in line.first:
        if all(abs(t - other) > apart for other in chosen):
            chosen.append(t)
    return chosen[len(known) :]


def beside(low: float, high: float, t: float) -> tuple[float, ...]:
    """Return what is asked first on both sides of a t, as far as it is in an interval."""
    step = FIRST * (high - low)
    return tuple(side for side in (t + step, t - step) if low <= side <= high)


def next_time(line: StartLine, known: Sequence[OnLine]) -> float:
    """Return the t on a line at which f's mean less its standard deviation is least, and nothing is known yet.

    While the metric does not vary, that is the t that is furthest from all that is known.

    Args:
        line: The line.
        known: What is known, one at least.
    """
    grid = torch.linspace(line.low, line.high, CANDIDATES, dtype=torch.float64)[:, None]
    apart = (grid - _column(known).T).abs().amin(1)
    f = fit(line, known)
    bound = -apart if f is None else f.members(grid)[:, 0] - f.std(grid)[:, 0]
    bound[apart < NEAR * (line.high - line.low)] = math.inf
    return float(grid[bound.argmin()])


def best_known(line: StartLine, known: Sequence[OnLine]) -> int:
    """Return the index of what is known with the least f, which smooths luck over neighbours; the first of equals."""
    f = fit(line, known)
    return 0 if f is None else int(f.members(_column(known)).argmin())


def fit(line: StartLine, known: Sequence[OnLine]) -> GPValueFunction | None:
    """Return a Gaussian process of t, ``n x 1``, conditioned on what is known; None if the metric does not vary there.

    Mean and amplitude are in closed form, length scale and noise are those of the highest marginal likelihood times
    prior (`GPLearner`), the noise no less than repeats of an evaluation show.
    """
    cost = torch.tensor([each.point.evaluation.cost for each in known], dtype=torch.float64)
    if cost.min() == cost.max():
        return None
    typical = TYPICAL * (line.high - line.low)
    learner = GPLearner(typical / math.sqrt(2), Spectrum.flat(1), exponents=(0.0,))  # all directions are this one
    noise = noise_of([each.point.evaluation for each in known])
    return learner(_column(known), cost, least_noise=noise)


def _column(known: Sequence[OnLine]) -> Tensor:
    return torch.tensor([each.t for each in known], dtype=torch.float64)[:, None]


# --- Lines of starts ---------------------------------------------------------------------------------------------


def line_queries(queries: int, on_lines: Sequence[int], spare: int) -> list[int]:
    """Return how many queries are asked along each line: the rule of how much of a budget goes to starts.

    Args:
        queries: Of the whole run.
        on_lines: How many of the fixed starts lie on each line; they are asked anyway, and count as its own.
        spare: Most queries that may be asked besides the fixed starts.
    """
    for lines in range(len(on_lines), 0, -1):  # the first ones, as many as get three each
        known = on_lines[:lines]
        total = min(int(SHARE * queries + 1e-9), spare + sum(known))
        if total // lines >= LEAST:
            own = [min(MOST, total // lines + (line < total % lines)) for line in range(lines)]
            return [max(0, each - other) for each, other in zip_longest(own, on_lines, fillvalue=0)]
    return [0] * len(on_lines)


class PlannedLine(NamedTuple):
    """What a search asks along a line.

    Attributes:
        queries: How many queries, besides those of the starts that lie on it; 0 of a line that is not looked along.
        holds: Names of the fixed starts that lie on it, and count among its queries.
        leads_to: The fixed start at its end, where it begins at the origin (`planned_lines`); "" for other lines. Only
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
    origin: str = "start",
) -> dict[str, PlannedLine]:
    """Return what is asked along each line, by name; see `line_queries`.

    A line from the origin to a fixed start is looked along only where that start is better. BatchNorm statistics
    between those of training and deployment gained where the deployment's own did. Where these lose, as on a long
    tail, the queries are better spent elsewhere.

    Args:
        lines: The lines.
        fixed: The fixed starts, the origin among them, which lies on many a line and counts for none.
        queries: Evaluations of the whole run.
        spare: Most that may be asked besides the fixed starts.
        base: What a start does not replace, by name (`Adapter.base_state_dict`).
        ranks: What is least of the best of the fixed starts, by name; None where they are yet to be asked, so that the
            plan is of what may be asked at most.
        origin: Name of the model as it was trained, or of the start that is presumed in its place.
    """
    ends, holds, taken = dict[str, str](), dict[str, tuple[str, ...]](), {origin}
    for name, line in lines.items():
        known = known_on(line, fixed.values(), base)
        places = {each: known[start] for each, start in fixed.items() if start in known}
        opposite = {line.low: line.high, line.high: line.low}.get(places.get(origin, math.nan))
        end = ends[name] = next((each for each, t in places.items() if t == opposite), "")
        if ranks is None or not end or ranks[end] < ranks[origin]:
            holds[name] = tuple(each for each in places if each not in taken)
            taken |= places.keys()
    shares = dict(zip(holds, line_queries(queries, [*map(len, holds.values())], spare), strict=True))
    return {name: PlannedLine(shares.get(name, 0), holds.get(name, ()), end) for name, end in ends.items()}


def known_on(line: StartLine, starts: Collection[Start], base: Mapping[str, Tensor]) -> dict[Start, float]:
    """Return the t of those starts that lie on a line, at a tenth of its way or where it asks first.

    Args:
        line: The line.
        starts: The starts.
        base: What a start does not replace, by name (`Adapter.base_state_dict`).
    """
    tenths = [line.low + tenth / 10 * (line.high - line.low) for tenth in range(10)]
    places = ((t, line.at(t)) for t in (*tenths, line.high, *line.first))  # one by one, as each may be a whole model
    return {start: t for t, there in places for start in starts if start.is_same_model(there, base)}


def along_line(
    name: str,
    line: StartLine,
    queries: int,
    points: list[Point],
    best: Start,
    base: Mapping[str, Tensor],
    limits: Limits | None,
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
        limits: The metric's constraints; None without any.

    Returns:
        Its best, by the process, and the t of that; None where that was known before.
    """
    trained = points[0].start
    if best is not trained and known_on(line, [trained], base):
        line = line.through(best)
    places = known_on(line, [each.start for each in points], base)
    known = [OnLine(places[each.start], each) for each in points if each.start in places]
    before = len(known)

    def ask(starts: list[Start]) -> Asked:
        answers = yield starts
        found = [each.evaluation and Point(name, each.at, each.evaluation) for each in answers]
        points.extend(filter(None, found))
        return found

    yield from line_search(line, queries, known, ask)
    at = best_known(line, known)
    ranks = [ranked(each.point.evaluation, limits) for each in known]
    if ranks[at][0] and not min(ranks)[0]:  # constraints hold elsewhere
        at = ranks.index(min(ranks))
    return (known[at].point, known[at].t) if at >= before else None


# --- Settings of inference ---------------------------------------------------------------------------------------


class SettingsStage:
    """A stage over settings of inference at one start.

    1. For each setting that is tuned alone, in order, from the best values so far: an interval is a line, looked along
       from both sides of the best on (`line_search`); of numbers ask one below and two above, then go on outwards while
       it gains; of other values ask each.
    2. Ask the presets, each put on the best so far.

    What takes more inference time than may be taken is left out, and so is what was asked before.

    Args:
        settings: The settings; their ``queries`` bound the stage.
        at: The start, whose settings are the first values; what it does not say is what a run begins with.
        first: The metric's evaluation there.
        queries: Queries that it may ask for, at most those of the settings.
        limits: The metric's constraints; None without any.

    Attributes:
        points: What is known, the first values before; each start has a value for every setting.
        given_up: The starts whose evaluation was given up.
    """

    def __init__(
        self, settings: Settings, at: Start, first: Evaluation, queries: int | None = None, limits: Limits | None = None
    ) -> None:
        self.settings: Settings = settings
        self.limits: Limits | None = limits
        self.queries: int = settings.queries if queries is None else min(queries, settings.queries)
        self.points: list[Point] = [Point("", self._complete(at), first)]
        self.given_up: list[Start] = []

    def _complete(self, start: Start) -> Start:
        values = self.settings.complete({**self.settings.first, **start.settings})
        return replace(start, settings=values, presumed=False)

    @property
    def best(self) -> Point:
        """The best of what is known, the first of equals."""
        return min(self.points, key=lambda each: ranked(each.evaluation, self.limits))

    @property
    def spent(self) -> int:
        """How many queries were asked for and told, those that were given up not among them."""
        return len(self.points) - 1

    def batches(self) -> Batches:
        """Yield starts with other settings, and be sent what became of them."""
        for name in self.settings.alone:
            setting, best = self.settings[name], self.best
            if setting.values is None:
                here = setting.share(float(best.start.settings[name]))
                if (line := self._line(setting, best.start, here)) is not None:
                    yield from line_search(line, min(INTERVAL, self._for_lines), [OnLine(here, best)], self._asked)
            elif setting.ordered:
                yield from self._outwards(setting, sorted(setting.values, key=float), best.start)
            else:
                starts = self._new([_with(best.start, setting, value) for value in setting.values])
                yield from self._asked(starts[: min(OUTWARDS, self._for_lines)])
        yield from self._asked(self._presets()[: self.queries - self.spent])

    def _line(self, setting: Setting, best: Start, here: float) -> StartLine | None:
        """Return the line of a setting's interval, on its scale, on which the best so far is at t = ``here``.

        It is cut to what inference may take, and None where it may take no longer at all.
        """

        def at(t: float) -> Start:
            return _with(best, setting, setting.at(t))

        low, high = _around(here, lambda t: self.settings.affords(at(t).settings))
        return None if low == high else StartLine(at, low, high, beside(low, high, here))

    def _outwards(self, setting: Setting, order: Sequence[Value], best: Start) -> Batches:
        """Ask for numbers in order, outwards from the best so far, while they gain."""
        began = order.index(best.settings[setting.name])
        near, left = [began - 1, began + 1, began + 2], min(OUTWARDS, self._for_lines)
        while new := self._new([_with(best, setting, order[at]) for at in near if 0 <= at < len(order)])[:left]:
            yield from self._asked(new)
            left -= len(new)
            now = order.index(self.best.start.settings[setting.name])
            near = [now + (now > began) - (now < began)]  # where nothing gained, one that is known

    def _presets(self) -> list[Start]:
        """Return the presets on the best so far that may be asked, each once."""
        best = self.best.start
        merged = [{**best.settings, **values} for values in self.settings.presets.values()]
        return self._new([self._complete(replace(best, settings=values)) for values in merged])

    def _asked(self, starts: list[Start]) -> Asked:
        """Ask for those starts that are new, and return what is known of all."""
        if new := self._new(starts):
            for each in (yield new):
                start = self._complete(each.at)
                if each.evaluation is None:
                    self.given_up.append(start)
                else:
                    self.points.append(Point(SETTINGS, start, each.evaluation))
        known = self.points
        return [next((point for point in known if point.start.settings == each.settings), None) for each in starts]

    @property
    def _for_lines(self) -> int:
        """How many queries are left for settings alone, presets aside."""
        kept = min(len(self._presets()), math.floor(PRESETS * self.queries))
        return max(0, self.queries - self.spent - kept)

    def _new(self, starts: Sequence[Start]) -> list[Start]:
        """Return those starts that were not asked for, and whose inference takes no longer than it may, each once."""
        asked = [each.settings for each in (*self.given_up, *(point.start for point in self.points))]
        found = list[Start]()
        for each in starts:
            if each.settings not in asked and self.settings.affords(each.settings):
                found.append(each)
                asked.append(each.settings)
        return found


def _with(start: Start, setting: Setting, value: Value) -> Start:
    return replace(start, settings={**start.settings, setting.name: value})


def _around(at: float, affords: Callable[[float], bool]) -> tuple[float, float]:
    """Return the shares of an interval around one between which inference takes no longer than it may."""
    steps = [step / STEPS for step in range(STEPS + 1)]
    below = takewhile(affords, (t for t in reversed(steps) if t < at))
    above = takewhile(affords, (t for t in steps if t > at))
    return min(below, default=at), max(above, default=at)
