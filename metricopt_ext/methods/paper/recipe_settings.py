"""The settings of a `Recipe`, which learns a value function and then follows it."""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from metricopt_ext.errors import BudgetError
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.utils.checks import check_above, check_at_least, check_instance, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted
from metricopt_ext.value.fitting import Fit, fit_value_function
from metricopt_ext.value.learning import Learner, NeuralLearner
from metricopt_ext.value.observations import Labeller, Observations


class StepWeights(NamedTuple):
    """How boldly f is followed.

    Attributes:
        loss_weight: Weight w of the loss step, at least 0.
        metric_step: Length of the first metric step in units of f's data radius, at least 0.
    """

    loss_weight: float
    metric_step: float


def checked_weights(pair: Sequence[float]) -> StepWeights:
    """Return a pair of numbers as a `StepWeights`.

    Raises:
        ValueError: It is no pair, or a number in it is not finite or below 0.
    """
    if not isinstance(pair, Sized) or len(pair) != 2:
        raise ValueError(f"settings has {pair!r}; each must be a pair (loss weight, metric step)")
    setting = StepWeights(*pair)
    check_at_least(0, **setting._asdict())
    return setting


# Tasks of the first round, from which f is learned and measured: two to learn from while two are held out.
LEAST_TASKS = 4

# Most queries of a start's guard: the start, the loss-only end, MetricOpt's, and, of a metric that reports halves, the
# two cross-checked ends.
START_QUERIES = 5


@dataclass(frozen=True)
class RecipeSettings:
    """How a `Recipe` works. The defaults are meant to be left alone, except ``steps`` and ``lr``.

    Attributes:
        steps: Finetuning steps T of each task.
        lr: Rate of the loss step.
        evals: Metric queries K along each task, both ends included.
        rounds: Rounds of collection: the first loss-only, the others on-policy under the f fitted so far.
        start_std: Standard deviation of the tasks' starts phi_0.
        explored_step: Centre of the metric step in on-policy rounds, drawn log-uniformly within a factor of 3; the
            loss weight is drawn from [0, 1].
        settings: Candidate `StepWeights` for finetuning, or pairs of numbers; a few queries choose among them.
        trials: Random starts, besides phi = 0, on which each setting is tried, one query each.
        folds: Parts of the trajectories; each is held out from some members of f's ensemble, to measure f. Early
            rounds with fewer than two trajectories per part use fewer parts.
        labels: Turns trajectories into labelled points: the observed ones, or all steps by interpolation
            (`labels.GaussianProcessLabels`).
        learner: Fits f.
    """

    steps: int = 50
    lr: float = 0.1
    evals: int = 5
    rounds: int = 6
    start_std: float = 0.2
    explored_step: float = 0.15
    settings: tuple[StepWeights, ...] = (StepWeights(0.0, 0.15), StepWeights(0.3, 0.15), StepWeights(0.3, 0.3))
    trials: int = 3
    folds: int = 4
    labels: Labeller = Observations.of
    learner: Learner = field(default=NeuralLearner())

    def __post_init__(self) -> None:
        """Reject values that would only fail later.

        Raises:
            ValueError: A value is out of range; the message gives it.
        """
        check_integer(2, steps=self.steps, evals=self.evals, folds=self.folds)
        check_integer(1, rounds=self.rounds)
        check_integer(0, trials=self.trials)
        check_above(0, lr=self.lr, start_std=self.start_std, explored_step=self.explored_step)
        if self.evals > self.steps + 1:
            raise ValueError(
                f"evals is {self.evals}; a task of {counted(self.steps, 'step')} has {self.steps + 1} points"
            )
        if not self.settings:
            raise ValueError("settings is empty; give at least one pair (loss weight, metric step)")
        object.__setattr__(self, "settings", tuple(map(checked_weights, self.settings)))
        check_instance("NeuralLearner()", optional=False, learner=self.learner)
        check_instance("GaussianProcessLabels()", optional=False, labels=self.labels)

    def explored_settings(self, seed: int, indices: Sequence[int]) -> Tensor:
        """Return (loss weight, metric step) of on-policy tasks, ``n x 2``, drawn from the seed for each index."""
        draws = torch.stack([torch.rand(2, generator=generator(seed, "policy", index)) for index in indices])
        metric_step = self.explored_step * torch.exp((2 * draws[:, 0] - 1) * math.log(3))
        return torch.stack([draws[:, 1], metric_step], dim=1)

    @property
    def choice_queries(self) -> int:
        """Number of queries for choosing among the settings."""
        return len(self.settings) * (1 + self.trials) if len(self.settings) > 1 else 0

    def folds_for(self, trajectories: int) -> int:
        """Return the number of parts for this many trajectories: at least 2, otherwise two trajectories in each."""
        return max(2, min(self.folds, trajectories // 2))

    def fit(self, trajectories: Sequence[Trajectory], seed: int) -> Fit:
        """Label trajectories and fit a value function to them; see `fitting.fit_value_function`."""
        folds = self.folds_for(len(trajectories))
        return fit_value_function(self.labels(trajectories), self.learner, folds=folds, seed=seed)

    def tasks_per_round(self, queries: int) -> int:
        """Return how many tasks a round can have.

        Raises:
            BudgetError: Fewer than `LEAST_TASKS`; the message says how many queries are needed.
        """
        fixed, per_task = self.choice_queries + START_QUERIES, self.rounds * self.evals
        tasks = (queries - fixed) // per_task
        if tasks < LEAST_TASKS:
            raise BudgetError(
                f"{queries} queries are too few for {counted(self.rounds, 'round')} of at least {LEAST_TASKS} tasks"
                f" with {counted(self.evals, 'observation')} each, {self.choice_queries} queries to choose settings and"
                f" {START_QUERIES} for the start: give at least {fixed + LEAST_TASKS * per_task}, or fewer rounds"
                " or evals"
            )
        return tasks
