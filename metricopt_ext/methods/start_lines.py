"""The second stage of a search's beginning: along lines of starts, one after another, each from the best so far."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.adapters.start import PlacesOnLine, Start, StartLine
from metricopt_ext.errors import AdapterError
from metricopt_ext.search.lines import LineState, best_known
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.utils.words import brief

# Of all queries, lines take at most this share. A line takes at least three, or it is not looked along, and at most
# six: a function of one number that bends once or twice is known by then. Starts that lie on it count among them.
SHARE, LEAST, MOST = 1 / 3, 3, 6


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


def divided(starts: Mapping[str, Start | StartLine]) -> tuple[dict[str, Start], dict[str, StartLine]]:
    """Return the starts that are fixed, and the lines of starts, by name."""
    lines = {name: each for name, each in starts.items() if isinstance(each, StartLine)}
    return {name: each for name, each in starts.items() if isinstance(each, Start)}, lines


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


# Yields starts of a line to ask for, and is sent the metric's evaluations; None where nobody waits for one any more.
Batches = Generator[tuple[str, list[Start]], list[Evaluation | None], None]


class StartLinesState:
    """A stage over lines of starts that has begun: asked for starts, and told what the metric is there.

    Of each line with queries, in order: its ``first`` t, then where a Gaussian process of one variable may be least
    (`LineState`). A line on which the model as it was trained lies is looked along from the best start so far
    (`StartLine.through`). Its best, by the process, is a start of the line's name from then on.

    Args:
        lines: The lines, by name.
        planned: What is asked along each, by name (`planned_lines`).
        fixed: The starts that were asked before, by name, ``"start"`` first, with the metric's evaluations.
        base: What a start does not replace, by name (`Adapter.base_state_dict`).
        rank: What is least of the best evaluation.

    Attributes:
        points: All that is known, the fixed starts first.
        best: The best of each line where it is no point that was known before, by the line's name.
        strengths: The t of each of these, by the line's name.
    """

    def __init__(
        self,
        lines: Mapping[str, StartLine],
        planned: Mapping[str, PlannedLine],
        fixed: Sequence[Point],
        base: Mapping[str, Tensor],
        rank: Callable[[Evaluation], Any] = lambda evaluation: evaluation.cost,
    ) -> None:
        self.points, self.best, self.strengths = list(fixed), dict[str, Point](), dict[str, float]()
        self._fixed, self._base, self._rank = tuple(fixed), base, rank
        self._lines = {name: line for name, line in lines.items() if planned[name].queries}
        self._planned = planned
        self._batches: Batches | None = None
        self._open: tuple[str, list[Start]] = "", []
        self._answers: dict[int, Evaluation | None] = {}

    def ask(self) -> tuple[str, list[Start]]:
        """Return the open batch, a line's name and its starts; the next one once all is told; no starts at the end."""
        if self._open[1]:
            return self._open
        try:
            if self._batches is None:
                self._batches = self._stage()
                self._open = next(self._batches)
            elif self._answers:
                answers, self._answers = [self._answers[index] for index in sorted(self._answers)], {}
                self._open = self._batches.send(answers)
        except StopIteration:
            self._open = "", []
        return self._open

    def tell(self, index: int, evaluation: Evaluation | None, start: Start | None = None) -> None:
        """Answer a start of the open batch.

        Args:
            index: Its place in the batch.
            evaluation: The metric's evaluation; None where nobody waits for it any more.
            start: Where it was evaluated if that differs, as of an earlier sitting on another processor.
        """
        name, starts = self._open
        if start is not None:
            starts[index] = start
        self._answers[index] = evaluation
        if len(self._answers) == len(starts):
            evaluated = (self._answers[at] for at in range(len(starts)))
            self.points += [Point(name, s, e) for s, e in zip(starts, evaluated, strict=True) if e is not None]
            self._open = "", []

    def _stage(self) -> Batches:
        for name, line in self._lines.items():
            yield from self._along(name, line)

    def _along(self, name: str, line: StartLine) -> Batches:
        trained, before_it = self._fixed[0].start, len(self.points)
        before = min([*self._fixed, *self.best.values()], key=lambda each: self._rank(each.evaluation)).start
        if before is not trained and PlacesOnLine(line, self._base).of(trained) is not None:
            line = line.through(before)
        places = PlacesOnLine(line, self._base)
        known = [(t, each.evaluation) for each in self.points if (t := places.of(each.start)) is not None]
        start = known[0][0] if known else line.first[0]
        state = LineState((line.low, line.high), self._planned[name].queries, known, start=start, first=line.first)
        while len(points := state.ask()):
            answers = yield name, [line.at(t) for t in points[:, 0].tolist()]
            for index, each in enumerate(answers):
                if each is None:
                    state.give_up(index)
                else:
                    state.tell(index, each)
        own, at = self.points[before_it:], self._best(state)
        if own and at >= len(known):
            self.best[name], self.strengths[name] = own[at - len(known)], state.known[at][0]

    def _best(self, state: LineState) -> int:
        """Return the index of a line's best among what is known; by rank alone where constraints do not hold."""
        at = best_known(state.interval, state.known)
        ranks = [self._rank(evaluation) for _, evaluation in state.known]
        if isinstance(ranks[at], tuple) and ranks[at][0] and not min(ranks)[0]:
            at = ranks.index(min(ranks))
        return at


def line_between(a: Start, b: Start, base: Mapping[str, Tensor] | None = None) -> StartLine:
    """Return the line between two starts, from the first, at 0, to the second, at 1.

    phi and all tensors with a fraction are mixed linearly, in float64, and have the first's dtype; others are the
    first's. At 0 and at 1 the mixed ones are exactly those of the starts, as these are now.

    Args:
        a: The first start.
        b: The second; it has the settings of inference of the first.
        base: The model's own tensors, by name, ``task.adapter.base_state_dict()``: what one start replaces and the
            other leaves. None if both replace the same.

    Raises:
        AdapterError: One is no start, or they have different settings; they replace different tensors, and ``base``
            lacks one; or a tensor has two shapes, or is a buffer of one and a parameter of the other.
    """
    if strange := [each for each in (a, b) if not isinstance(each, Start)]:
        raise AdapterError(f"a line is between two starts, got {brief(strange[0])}; leave it out where one is None")
    if dict(a.settings) != dict(b.settings):
        raise AdapterError("the starts have different settings of inference, which can't be mixed; give both the same")
    if both := sorted((a.buffers.keys() & b.parameters.keys()) | (a.parameters.keys() & b.buffers.keys())):
        raise AdapterError(f"{both[0]!r} is a buffer in one start and a parameter in the other; give it alike in both")
    own = dict(base or {})
    for name in sorted(a.replaced.keys() ^ b.replaced.keys()):
        if name not in own:
            raise AdapterError(
                f"only one of the starts replaces {name!r}; say what the other has, by"
                " line_between(a, b, task.adapter.base_state_dict())"
            )
    buffers, parameters = (
        {name: (_copied(first, own, name), _copied(second, own, name)) for name in {**first, **second}}
        for first, second in ((a.buffers, b.buffers), (a.parameters, b.parameters))
    )
    phi = a.phi.detach().clone(), b.phi.detach().clone()  # copies, as the model's own may be among all these
    for name, (mine, theirs) in {"phi": phi, **buffers, **parameters}.items():
        if mine.shape != theirs.shape:
            raise AdapterError(f"{name!r} has shapes {tuple(mine.shape)} and {tuple(theirs.shape)} in the two starts")

    def at(t: float) -> Start:
        first, second = ({name: mixed(*pair, t) for name, pair in each.items()} for each in (buffers, parameters))
        return Start(mixed(*phi, t), first, second, dict(a.settings))

    return StartLine(at, 0.0, 1.0)


def _copied(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], name: str) -> Tensor:
    return (tensors if name in tensors else own)[name].detach().clone()


@torch.no_grad()
def mixed(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Return ``(1 - t) a + t b`` of a's type, computed in float64; a itself if it has no fractions."""
    if not a.is_floating_point() or t == 0:
        return a.detach().clone()
    if t == 1:
        return b.detach().to(a, copy=True)
    return ((1 - t) * a.detach().cpu().double() + t * b.detach().cpu().double()).to(a)
