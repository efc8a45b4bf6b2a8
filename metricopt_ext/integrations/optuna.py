"""An Optuna sampler: a study over float parameters is searched as phi is, by one changed line."""

import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from optuna import Study
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import intersection_search_space
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.errors import MetricError
from metricopt_ext.search.probe import UNPROBED
from metricopt_ext.search.trust_region import GuidedState, GuidedTrustRegion
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import generator

# Standard deviations in units of half a range: of the first design, and of a trial beside the best one.
SPREAD, BESIDE = 0.3, 0.1

FINISHED = (TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED)


class MetricOptSampler(BaseSampler):
    """Samples the float parameters of a study by a guided trust-region search.

    Each range, in log space if ``log``, becomes [-1, 1] around its middle. What the search proposes outside is moved to
    the edge, and rounded to the range's ``step``: one coarser than a twentieth of the range can hold the search up. The
    first trial is the middle of all ranges; enqueue another point to begin there. The search begins at the best trial
    that is finished then, and knows all others: of an earlier session, of other workers, enqueued or added.

    A trial that failed, or whose value is infinite, counts as the worst value so far; one that was pruned is left out.
    Trials come in batches, and the search goes on once all of a batch are finished. While workers wait for the last of
    a batch, they get points beside the best one; after as many of those as a batch has, the search goes on without
    what is missing. So the trials are the same at every run with one worker, not with several.

    Other parameters, and floats that not all trials have or whose range changes, are drawn by `RandomSampler`; a
    warning names each once. The search does not know of them.

    Args:
        queries: Trials of the study, at least 7: a design, what f proposes, and last the mean of the best by f. A study
            that goes on, or has as many already, gets as many again.
        strategy: The search's settings; the default is `GuidedTrustRegion()`.
        seed: Seed of all draws.

    Raises:
        ValueError: A number is out of range; while sampling, also if the study has several objectives.

    Examples:
        >>> import optuna
        >>> study = optuna.create_study(sampler=MetricOptSampler(queries=30))
        >>> study.optimize(lambda trial: trial.suggest_float("x", -2, 4) ** 2, n_trials=30)
        >>> study.trials[0].params
        {'x': 1.0}
    """

    def __init__(self, queries: int = 100, *, strategy: GuidedTrustRegion | None = None, seed: int = 0) -> None:
        self.queries, self.strategy, self.seed = queries, strategy or GuidedTrustRegion(), seed
        check_integer(self.strategy.least_queries(dim=1), queries=queries)
        check_integer(0, seed=seed)
        self._independent = RandomSampler(seed)
        self._warned: set[str] = set()
        self._search: _BoxSearch | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the search, which is begun anew from the study's trials, and the lock."""
        return {key: value for key, value in vars(self).items() if key not in ("_search", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without a search."""
        vars(self).update(state, _search=None, _lock=threading.Lock())

    def reseed_rng(self) -> None:
        """Reseed the independent draws, as each worker of a study does."""
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the float parameters that all complete trials have, with the same range.

        Raises:
            ValueError: The study has several objectives.
        """
        if len(study.directions) != 1:
            raise ValueError(
                f"the study has {len(study.directions)} objectives; MetricOptSampler takes one: combine them, or use"
                " another sampler, as optuna.samplers.NSGAIISampler()"
            )
        space = intersection_search_space(study.get_trials(deepcopy=False))
        return {name: each for name, each in space.items() if isinstance(each, FloatDistribution) and not each.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, float]:
        """Return the next point of the search."""
        ranges = {name: each for name, each in search_space.items() if isinstance(each, FloatDistribution)}
        if not ranges:
            return {}
        sign = -1 if study.direction == StudyDirection.MAXIMIZE else 1
        finished = study.get_trials(deepcopy=False, states=FINISHED)
        with self._lock:
            box = Box(ranges)
            if self._search is None or (self._search.study, self._search.box) != (study.study_name, box):
                self._search = _BoxSearch(study.study_name, box, sign, self)
            self._search.catch_up(finished)
            return box.params(self._search.point_for(trial.number)) if self._search.started else {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the middle of a float's range in the first trial, else a random value."""
        is_float = isinstance(param_distribution, FloatDistribution)
        if isinstance(param_distribution, FloatDistribution) and trial.number == 0:
            return Box({param_name: param_distribution}).params(torch.zeros(1, dtype=torch.float64))[param_name]
        searching = self._search is not None and self._search.started
        if (searching or not is_float) and param_name not in self._warned:
            self._warned.add(param_name)
            why = "not all trials have it with one range" if is_float else "it is no float; suggest_float is searched"
            warnings.warn(f"parameter {param_name!r} is drawn at random: {why}", stacklevel=2)
        return self._independent.sample_independent(study, trial, param_name, param_distribution)


@dataclass(frozen=True)
class Box:
    """The ranges of float parameters, as [-1, 1] each.

    Attributes:
        ranges: The parameters' distributions by name, none of a single value.
    """

    ranges: Mapping[str, FloatDistribution]

    def params(self, point: Tensor) -> dict[str, float]:
        """Return the parameters at a point, ``d``; outside of the box, those at its edge."""
        pairs = zip(self.ranges.items(), point.clamp(-1, 1).tolist(), strict=True)
        return {name: _value(each, coordinate) for (name, each), coordinate in pairs}

    def point(self, params: Mapping[str, float]) -> Tensor | None:
        """Return the point of parameters, ``d``, float64; None if one is missing or out of its range."""
        if any(name not in params or not each.low <= params[name] <= each.high for name, each in self.ranges.items()):
            return None
        coordinates = [_coordinate(each, params[name]) for name, each in self.ranges.items()]
        return torch.tensor(coordinates, dtype=torch.float64)


def _value(each: FloatDistribution, coordinate: float) -> float:
    share = (1 + coordinate) / 2
    if each.log:
        value = math.exp((1 - share) * math.log(each.low) + share * math.log(each.high))
    else:
        value = (1 - share) * each.low + share * each.high
    if each.step is not None:
        value = each.low + each.step * round((value - each.low) / each.step)
    return min(max(value, each.low), each.high)


def _coordinate(each: FloatDistribution, value: float) -> float:
    low, high, at = map(math.log, (each.low, each.high, value)) if each.log else (each.low, each.high, value)
    return (at - low) / (high - low) * 2 - 1


class _BoxSearch:
    """A guided search in a box, which is begun once there is a trial with a value.

    Args:
        study: The study's name.
        box: Its float parameters.
        sign: -1 if higher is better, else 1.
        sampler: Has the settings.
    """

    def __init__(self, study: str, box: Box, sign: int, sampler: MetricOptSampler) -> None:
        self.study, self.box, self._sign = study, box, sign
        self._strategy, self._queries, self._seed = sampler.strategy, sampler.queries, sampler.seed
        self._rng = generator(sampler.seed, "beside")
        self._state: GuidedState | None = None
        self._seen: set[int] = set()
        self._handed: dict[int, int] = {}  # places in the open batch, by the trials' numbers
        self._others: list[tuple[Tensor, Evaluation]] = []  # found since the batch was asked, beside it
        self._size = self._next = 0  # of the open batch: its size, and the place that is handed out next

    def catch_up(self, finished: Sequence[FrozenTrial]) -> None:
        """Tell the search what has finished since it was last told."""
        new = [trial for trial in finished if trial.number not in self._seen]
        self._seen |= {trial.number for trial in new}
        costs = {trial.number: self._cost(trial) for trial in finished if trial.state != TrialState.PRUNED}
        worst = max(filter(math.isfinite, costs.values()), default=math.inf)
        for trial in new:
            index, point = self._handed.pop(trial.number, None), self.box.point(trial.params)
            phi = None if point is None else point * UNPROBED / SPREAD
            if trial.state == TrialState.PRUNED:
                if index is not None and self._state is not None:
                    self._state.give_up(index)
                continue
            failed = not math.isfinite(costs[trial.number])
            evaluation = Evaluation(worst if failed else costs[trial.number], failed=failed)
            if index is not None and self._state is not None:
                self._state.tell(index, evaluation, phi)
            elif phi is not None and math.isfinite(worst):
                self._others.append((phi, evaluation))
        if self._state is None and self._others:
            self._state = self._begin()

    def _cost(self, trial: FrozenTrial) -> float:
        """Return a trial's cost; infinite if it failed."""
        value = trial.value if trial.state == TrialState.COMPLETE else None
        return self._sign * value if value is not None and math.isfinite(value) else math.inf

    @property
    def started(self) -> bool:
        """Whether a trial with a value is known."""
        return self._state is not None

    def point_for(self, number: int) -> Tensor:
        """Return the point of a trial of a search that has begun, ``d``, in units of the box."""
        assert self._state is not None
        if self._next == self._size and len(self._others) >= self._strategy.batch:
            for index in self._handed.values():
                self._state.give_up(index)
            self._handed.clear()
        if self._next == self._size and not self._handed:
            self._take_batch(self._state)
        if self._next == self._size:
            return self._beside(self._state)
        self._handed[number] = self._next
        self._next += 1
        return self._state.ask()[self._next - 1] * SPREAD / UNPROBED

    def _begin(self) -> GuidedState:
        """Begin at the best of what is known."""
        known, self._others = self._others, []
        start, _ = min(known, key=lambda each: each[1].cost)
        stand_in = nn.utils.skip_init(nn.Linear, 1, 1, dtype=torch.float64)  # phi's place; it is never called
        metric = Metric(_told_by_the_study, maximize=False, bounds=None)
        task = FinetuneTask(attach_input_bias(stand_in, dim=len(start)), metric=metric)
        state = self._strategy.begin(task, start, self._queries, known=known, seed=self._seed)
        state.narrows = False  # the ranges say how far to go
        return state

    def _take_batch(self, state: GuidedState) -> None:
        for point, evaluation in self._others:
            state.note(point, evaluation)
        self._others = []
        state.queries = max(state.queries, self._queries * (1 + len(state.points) // self._queries))
        while not len(batch := state.ask()):
            state.queries += self._queries
        self._size, self._next = len(batch), 0

    def _beside(self, state: GuidedState) -> Tensor:
        """Return a point near the best one."""
        found = [*zip(state.points, state.evaluations, strict=True), *state.answered(), *self._others]
        best, _ = min(found, key=lambda each: each[1].cost)
        return best * SPREAD / UNPROBED + BESIDE * torch.randn(len(best), generator=self._rng, dtype=torch.float64)


def _told_by_the_study(model: nn.Module) -> float:
    raise MetricError("a study evaluates its trials itself")
