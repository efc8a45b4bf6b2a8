"""Algorithm 1 of the paper as printed, for anyone who wants to reproduce it; otherwise, prefer `optimize_metric`.

The paper leaves open the rate alpha_t of the metric step, the spread of phi_0 and the rate of SGD or Adam; they are
arguments here. Everything else has the paper's value.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from metricopt_ext.errors import BudgetError, ValueFunctionError
from metricopt_ext.methods.guard import decide_among
from metricopt_ext.methods.paper.recipe import Recipe, RecipeDetails
from metricopt_ext.methods.paper.recipe_settings import LEAST_TASKS, StepWeights
from metricopt_ext.methods.paper.tuning import FRESH, evaluate_ends, finetune
from metricopt_ext.methods.result import Result, of_learner, outcome
from metricopt_ext.methods.strategy import Context, LearningStrategy
from metricopt_ext.runtime.identity import described
from metricopt_ext.search.guided_es import es_direction
from metricopt_ext.tasks.split_half import evaluations_where_used
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import (
    Ends,
    Policy,
    Trajectory,
    TrajectoryStore,
    collect,
    observation_steps,
    rollout,
)
from metricopt_ext.utils.checks import check_above, check_at_least, check_bool, check_instance, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted
from metricopt_ext.value.fitting import Fit, fit_value_function
from metricopt_ext.value.learning import Learner
from metricopt_ext.value.observations import Labeller
from metricopt_ext.value.reptile import ReptileLearner
from metricopt_ext.value.value_function import ValueFunction

# Queries of the guard: the start, the end of the loss alone and that of the algorithm.
END_QUERIES = 3


class LossOptimizer:
    """The steps of torch's SGD or Adam on the loss, for a population; it has state, so each rollout needs its own.

    Args:
        name: ``"sgd"`` or ``"adam"``.
        lr: Learning rate.
    """

    def __init__(self, name: Literal["sgd", "adam"], lr: float) -> None:
        self.origin = torch.zeros(())
        self.optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]([self.origin], lr)

    def step(self, gradient: Tensor) -> Tensor:
        """Return the step to descend by, ``n x d``, from the loss gradient, ``n x d``."""
        self.origin.data, self.origin.grad = torch.zeros_like(gradient), gradient
        self.optimizer.step()
        return -self.origin.data


@dataclass(frozen=True)
class Algorithm1(LearningStrategy[RecipeDetails]):
    """MetricOpt with SGD or Adam, as the paper's Algorithm 1 prints it.

    As printed it did not lower a metric whose optimum is known. On the quadratic problems of
    tests/methods/paper/test_algorithm1.py, over 20 seeds, the true cost of the starts changed by +6% on average
    (standard error 5%) with each task taken once, by +10% (7%) with 35 passes, by -71% (3%) if Reptile's meta-batches
    mix 32 tasks, and by -82% (2%) with `NeuralLearner.offline`.

    Attributes:
        steps: T.
        evals: K; 5% of T in the paper.
        lr: Rate of SGD or Adam on the loss, not given in the paper.
        metric_rate: alpha_t, not given in the paper.
        optimizer: The optimizer whose trajectories are collected and whose steps span the search space.
        start_std: Standard deviation of phi_0, not given in the paper.
        ends: Whether both ends are among the K steps, or all are random; see `observation_steps`.
        history: k of Eq. 3.
        history_grows: Let Eq. 3 divide by the number of directions so far until there are k; otherwise by k from the
            first step on, as printed.
        count: P of Eq. 4.
        variance: s^2 of Eq. 4.
        learner: Lines 5-6: Reptile with one SGD step on each task, each taken once, at alpha = 0.005, eta from 1 to 0,
            gamma = 10 and hard mining. An offline learner is the alternative of Fig. 3b.
        labels: Line 4: Gaussian-process interpolation.
    """

    steps: int = 200
    evals: int = 10
    lr: float = 0.1
    metric_rate: float = 1.0
    optimizer: Literal["sgd", "adam"] = "sgd"
    start_std: float = 0.2
    ends: Ends = "observed"
    history: int = 3
    history_grows: bool = True
    count: int = 3
    variance: float = 0.01
    learner: Learner | None = None
    labels: Labeller | None = None

    def __post_init__(self) -> None:
        """Reject what the algorithm is not defined for.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        if self.optimizer not in ("sgd", "adam"):
            raise ValueError(f"optimizer is {self.optimizer!r}; it must be 'sgd' or 'adam'")
        check_integer(1, steps=self.steps, evals=self.evals, history=self.history, count=self.count)
        check_above(0, lr=self.lr, start_std=self.start_std, variance=self.variance)
        check_at_least(0, metric_rate=self.metric_rate)
        observation_steps(self.steps, self.evals, 0, 0, ends=self.ends)  # refuses what it can't draw
        check_bool(history_grows=self.history_grows)
        check_instance("ReptileLearner.paper()", learner=self.learner)
        check_instance("GaussianProcessLabels()", labels=self.labels)

    def meta_train(
        self,
        task: FinetuneTask,
        *,
        tasks: int,
        seed: int = 0,
        store: TrajectoryStore | None = None,
    ) -> ValueFunction:
        """Learn f from loss-only trajectories (lines 1-8); ``tasks * evals`` queries.

        The trajectories do not depend on f, so they are collected first; Reptile then takes them task by task.

        Raises:
            ValueFunctionError: As in `learn`; too few tasks are rejected before the first query.
            BudgetError: The metric's budget ran out; finished trajectories are in the store.
            MetricError: The metric failed; finished trajectories are in the store.
        """
        refuse_too_few(tasks)
        trajectories = collect(  # line 3, for T ~ p(T)
            task,
            TrajectoryStore() if store is None else store,
            lambda chunk: self.loss_only(),
            round=0,
            indices=range(tasks),
            start_std=self.start_std,
            steps=self.steps,
            evals=self.evals,
            seed=seed,
            ends=self.ends,
        )
        return self.learn(trajectories, seed)

    def tasks(self, queries: int) -> int:
        """Return how many tasks can be learned from, with `END_QUERIES` queries kept for the ends.

        Raises:
            BudgetError: Fewer than `recipe.LEAST_TASKS`; the message says how many queries are needed.
        """
        tasks = (queries - END_QUERIES) // self.evals
        if tasks < LEAST_TASKS:
            raise BudgetError(
                f"{queries} queries are too few for {LEAST_TASKS} tasks with {counted(self.evals, 'observation')}"
                f" each and {END_QUERIES} for the ends: give at least {END_QUERIES + LEAST_TASKS * self.evals},"
                " or fewer evals"
            )
        return tasks

    def size(self, evaluations: int, dim: int, starts: int = 1) -> dict[str, int]:
        """Return the number of tasks (see `LearningStrategy`)."""
        return {"tasks": self.tasks(evaluations)}

    def identity(self) -> dict[str, Any]:
        """Return the settings, parts by their descriptions (see `LearningStrategy`)."""
        return {"paper": {name: described(value) for name, value in vars(self).items()}}

    def run(self, context: Context) -> Result[RecipeDetails]:
        """Learn f, follow it, and let the guard decide (see `LearningStrategy`)."""
        callback, seed = context.callback, context.seed
        with context.folder.counted(context.task, context.queries) as task:
            store, ledger = context.folder.trajectories, task.metric.ledger
            context.retell(task, store)
            callback.stage("meta-train")
            f = self.meta_train(task, tasks=context.size["tasks"], seed=seed, store=store)
            assert f.quality is not None  # `learn` has measured it
            callback.quality(store.queries, f.quality.spearman)
            callback.stage("meta-test")
            start = task.origin()
            loss_only = finetune(task, self.loss_only(), self.steps, seed)[-1]
            path = self.meta_test(task, f, start, seed=seed, index=FRESH)
            before, ends = ledger.spent, {"start": start, "loss_finetune": loss_only, "metricopt": path[-1]}
            evaluated = evaluate_ends(task, ends)
        decision = decide_among(evaluated, evaluations_where_used(list(store)), context.confidence)
        return Result(
            **outcome(task.metric, evaluated, decision, ends),
            **of_learner(evaluated, task.origin(), list(store)),
            queries=dict(ledger.spent_on),
            queries_per_start=ledger.spent - before,
            fit=Fit(f),
            path=path,
            details=RecipeDetails(evaluated["loss_finetune"].value, StepWeights(0.0, self.metric_rate), tuple(store)),
        )

    def learn(self, trajectories: Sequence[Trajectory], seed: int = 0) -> ValueFunction:
        """Interpolate the metrics (line 4) and meta-train f on them (lines 5-6); no query.

        f is one network that saw all tasks, as printed. Its ``quality`` is measured on further networks, which the same
        learner fits without some of the trajectories each, as in `fitting.fit_value_function`: `MetricOpt` follows f
        only if it shows skill. `meta_test` follows f in any case.

        Raises:
            ValueFunctionError: There are fewer than `recipe.LEAST_TASKS` trajectories, so that quality can't be
                measured, or all costs are equal.
        """
        refuse_too_few(len(trajectories))
        from metricopt_ext.value.interpolation import GaussianProcessLabels  # gpytorch is slow to import

        labels = self.labels or GaussianProcessLabels()
        learner = self.learner or ReptileLearner.paper()
        data = labels(trajectories)
        in_no_fold = torch.full_like(data.trajectory, -1)
        f = learner(data, in_no_fold, 1, seed)
        f.set_domain(data.phi)
        f.signature = data.signature
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # f itself has already warned
            folds = Recipe().folds_for(len(trajectories))
            f.quality = fit_value_function(data, learner, folds=folds, seed=seed).f.quality
        return f

    def meta_test(
        self, task: FinetuneTask, f: ValueFunction, start: Tensor, *, seed: int = 0, index: int = 0
    ) -> Tensor:
        """Finetune a new start under f (lines 9-16); the visited phi, ``(T + 1) x d``. No query.

        Args:
            task: What is finetuned.
            f: The value function.
            start: phi_0, ``d``.
            seed: Seed of batches and perturbations.
            index: The task's index, for its batches.

        Raises:
            ValueFunctionError: f was fitted for another adapter.
        """
        f.check_fits(task.adapter.signature)
        policy = GuidedSearch(self, f, generator(seed, "perturbation", index))
        points, _ = rollout(
            task, start[None], policy, steps=self.steps, seed=seed, indices=[index], history=self.history
        )
        return points[0]

    def loss_only(self) -> Policy:
        """Return the step rule of SGD or Adam."""
        rule = self.rule()
        return lambda phi, history, step: phi - rule.step(history[..., -1, :])

    def rule(self) -> LossOptimizer:
        """Return a fresh loss optimizer."""
        return LossOptimizer(self.optimizer, self.lr)


def refuse_too_few(tasks: int) -> None:
    """Reject too few tasks to hold some out and still learn from others.

    Raises:
        ValueError: ``tasks`` is not an integer.
        ValueFunctionError: There are too few tasks; the message gives their number.
    """
    check_integer(0, tasks=tasks)
    if tasks < LEAST_TASKS:
        raise ValueFunctionError(
            f"{tasks} tasks are too few to measure f's quality on held-out tasks; give at least {LEAST_TASKS}"
        )


class GuidedSearch:
    """The step rule of lines 10-15: the loss spans the search space, f gives the direction in it."""

    def __init__(self, settings: Algorithm1, f: ValueFunction, rng: torch.Generator) -> None:
        self.settings, self.f, self.rng = settings, f, rng
        self.rule = settings.rule()
        self.past: list[Tensor] = []

    def __call__(self, phi: Tensor, history: Tensor, step: int) -> Tensor:
        """Return the next phi, ``n x d``."""
        s = self.settings
        self.past = [*self.past, self.rule.step(history[..., -1, :])][-s.history :]  # past k steps of SGD or Adam
        u = es_direction(  # lines 11-13
            self.f,
            phi,
            torch.stack(self.past, -2),
            generator=self.rng,
            count=s.count,
            variance=s.variance,
            k=None if s.history_grows else s.history,
        )
        return phi - s.metric_rate * u  # line 14
