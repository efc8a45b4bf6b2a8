"""Learn a value function from rounds of finetuning, then follow it: for many starts. Algorithm 1 is such a recipe."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.methods.guard import CONFIDENCE, decide_among
from metricopt_ext.methods.strategy import LearningStrategy, Plan, Tuned, check_constraints
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.guided_es import es_direction
from metricopt_ext.search.optimizer import LossStep, MetricOptStep
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.split_half import evaluations_where_used, optimism_of_gain, seen_on_half
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import Policy, Trajectory, TrajectoryStore, collect, observation_steps, rollout
from metricopt_ext.tasks.undone import undone_if_cut_short
from metricopt_ext.utils.checks import check_above, check_at_least, check_bool, check_instance, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.fitting import Fit, fit_value_function
from metricopt_ext.value.learning import Learner, NeuralLearner
from metricopt_ext.value.observations import Labeller, Observations
from metricopt_ext.value.reptile import ReptileLearner
from metricopt_ext.value.value_function import ValueFunction

# Task indices from here on are never used in collection, so finetuning gets fresh starts and batches.
FRESH = 1_000_000

# Queries of a start's guard: the start, the loss-only end, and the end under what was learned.
END_QUERIES = 3

# Tasks of the first round, from which f is learned and measured: two to learn from while two are held out.
LEAST_TASKS = 4

# How boldly f is followed: the weight w of the loss step, and the length of the first metric step in units of f's data
# radius, which is `GuidedESSteps`' alpha_t. Each is a number of at least 0, or ``n x 1`` for a population.
Setting = Sequence[float | Tensor]

# follow(f, recipe, setting, rng, even_untrusted): returns the step rule of a rollout under f. The recipe has the number
# of steps and the loss's rate; rng is the source of its draws. Without held-out skill f need not be followed, unless it
# is to be even untrusted.
Follow = Callable[[ValueFunction, "Recipe", Setting, Generator, bool], Policy]

# collect(round, indices, fit): collects the tasks of a round with any trainer that finetunes phi, under the previous
# round's fit, or under the loss alone for None; returns the trajectories of all rounds up to this one.
Collect = Callable[[int, Sequence[int], Fit | None], Sequence[Trajectory]]


def along_gradient(
    f: ValueFunction, recipe: "Recipe", setting: Setting, rng: Generator, even_untrusted: bool
) -> MetricOptStep:
    """Follow f's gradient, by steps of set lengths within a trust radius; the loss alone if f has no skill."""
    weight, metric_step = setting
    return MetricOptStep(f, recipe.lr, metric_step, weight, recipe.steps, even_untrusted=even_untrusted)


@dataclass(frozen=True)
class GuidedESSteps:
    """Follow Eq. 4's estimates of f's slope, trusted or not (Algorithm 1, lines 10 to 15).

    Attributes:
        history: k of Eq. 3: the loss's last steps, which span the search space.
        history_grows: Let Eq. 3 divide by the number of directions so far until there are k; otherwise by k from the
            first step on, as printed.
        count: P of Eq. 4.
        variance: s^2 of Eq. 4.
    """

    history: int = 3
    history_grows: bool = True
    count: int = 3
    variance: float = 0.01

    def __post_init__(self) -> None:
        """Reject what the equations are not defined for.

        Raises:
            ValueError: A value is out of range; the message gives it.
        """
        check_integer(1, history=self.history, count=self.count)
        check_above(0, variance=self.variance)
        check_bool(history_grows=self.history_grows)

    def __call__(
        self, f: ValueFunction, recipe: "Recipe", setting: Setting, rng: Generator, even_untrusted: bool
    ) -> Policy:
        """Return the step rule of one rollout (see `Follow`)."""
        weight, metric_step = setting
        past, k = deque[Tensor](maxlen=self.history), None if self.history_grows else self.history

        def moved(phi: Tensor, history: Tensor, step: int) -> Tensor:
            past.append(recipe.lr * history[..., -1, :])
            steps = torch.stack([*past], -2)
            u = es_direction(f, phi, steps, generator=rng, count=self.count, variance=self.variance, k=k)  # lines 11-13
            return phi - weight * past[-1] - metric_step * u  # line 14

        return moved


def by_adam(policy: Policy) -> Policy:
    """Return a step rule that is given Adam's directions in place of the loss gradients, for one rollout.

    Args:
        policy: The step rule, whose rate of the loss step is Adam's.
    """
    origin, past = torch.zeros(()), list[Tensor]()
    optimizer = torch.optim.Adam([origin], 1.0)

    def moved(phi: Tensor, history: Tensor, step: int) -> Tensor:
        gradient = history[..., -1, :]
        origin.data, origin.grad = torch.zeros_like(gradient), gradient
        optimizer.step()
        past[:] = [*past, -origin.data][-history.shape[-2] :]
        return policy(phi, torch.stack(past, -2), step)

    return moved


@dataclass(frozen=True)
class Recipe(LearningStrategy):
    """Learn f in rounds, the first on the loss alone, the others under the f so far; then finetune phi under f.

    The defaults are meant to be left alone, except ``steps`` and ``lr``.

    Attributes:
        steps: Finetuning steps T of each task.
        lr: Rate of the loss step.
        evals: Metric queries K along each task.
        rounds: Rounds of collection: the first loss-only, the others on-policy under the f fitted so far.
        start_std: Standard deviation of the tasks' starts phi_0.
        explored_step: Centre of the metric step in on-policy rounds, drawn log-uniformly within a factor of 3; the
            loss weight is drawn from [0, 1].
        settings: Candidates of how boldly f is followed in finetuning, among which a few queries choose: pairs of the
            loss step's weight and the first metric step's length in units of f's data radius, each at least 0.
        trials: Random starts, besides phi = 0, on which each setting is tried, one query each.
        folds: Parts of the trajectories; each is held out from some members of f's ensemble, to measure f. Early
            rounds with fewer than two trajectories per part use fewer parts.
        labels: Turns trajectories into labelled points: the observed ones, or all steps by interpolation
            (`interpolation.GaussianProcessLabels`).
        learner: Fits f.
        follow: How f is followed.
        optimizer: ``"sgd"`` or ``"adam"``: whose steps on the loss are taken, and span the search space.
        ends: Whether both ends are among the K steps, or all are random; see `observation_steps`.
        ensemble: Whether f is the ensemble by which it is measured, and is fitted to each half of the metric's data as
            well, to cross-check its gain by two queries; otherwise f is one network that has seen all tasks, and
            further networks, which have not, measure its quality.
    """

    learns: ClassVar[str] = "setting"

    steps: int = 50
    lr: float = 0.1
    evals: int = 5
    rounds: int = 6
    start_std: float = 0.2
    explored_step: float = 0.15
    settings: tuple[tuple[float, float], ...] = ((0.0, 0.15), (0.3, 0.15), (0.3, 0.3))
    trials: int = 3
    folds: int = 4
    labels: Labeller = Observations.of
    learner: Learner = field(default=NeuralLearner())
    follow: Follow = along_gradient
    optimizer: Literal["sgd", "adam"] = "sgd"
    ends: Literal["observed", "random"] = "observed"
    ensemble: bool = True

    def __post_init__(self) -> None:
        """Reject values that would only fail later.

        Raises:
            ValueError: A value is out of range; the message gives it.
        """
        check_integer(2, steps=self.steps, folds=self.folds)
        check_integer(1, rounds=self.rounds)
        check_integer(0, trials=self.trials)
        check_above(0, lr=self.lr, start_std=self.start_std, explored_step=self.explored_step)
        observation_steps(self.steps, self.evals, 0, 0, ends=self.ends)  # refuses what it can't draw
        if not self.settings:
            raise ValueError("settings is empty; give at least one pair (loss weight, metric step)")
        for pair in self.settings:
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise ValueError(f"settings has {pair!r}; each must be a pair (loss weight, metric step)")
            check_at_least(0, loss_weight=pair[0], metric_step=pair[1])
        object.__setattr__(self, "settings", tuple(map(tuple, self.settings)))
        check_instance("GaussianProcessLabels()", optional=False, labels=self.labels)
        check_instance("NeuralLearner()", optional=False, learner=self.learner)
        check_instance("GuidedESSteps()", optional=False, follow=self.follow)
        if self.optimizer not in ("sgd", "adam"):
            raise ValueError(f"optimizer is {self.optimizer!r}; it must be 'sgd' or 'adam'")
        check_bool(ensemble=self.ensemble)

    def loss_only(self) -> Policy:
        """Return the step rule of the optimizer on the loss, for one rollout."""
        return self._by_optimizer(LossStep(self.lr))

    def policy(
        self, f: ValueFunction, setting: Setting, *, seed: int = 0, index: int = FRESH, even_untrusted: bool = False
    ) -> Policy:
        """Return the step rule under f, for one rollout.

        Args:
            f: The value function.
            setting: Loss weight and metric step; or both as ``n x 1``, for a population.
            seed: Seed of perturbations.
            index: The (first) task's index, for them.
            even_untrusted: Whether to follow an f without held-out skill, too.
        """
        rng = generator(seed, "perturbation", index)
        return self._by_optimizer(self.follow(f, self, setting, rng, even_untrusted))

    def _by_optimizer(self, policy: Policy) -> Policy:
        return by_adam(policy) if self.optimizer == "adam" else policy

    def explored_settings(self, seed: int, indices: Sequence[int]) -> Tensor:
        """Return (loss weight, metric step) of on-policy tasks, ``n x 2``, drawn from the seed for each index."""
        draws = torch.stack([torch.rand(2, generator=generator(seed, "policy", index)) for index in indices])
        metric_step = self.explored_step * torch.exp((2 * draws[:, 0] - 1) * math.log(3))
        return torch.stack([draws[:, 1], metric_step], dim=1)

    def folds_for(self, trajectories: int) -> int:
        """Return the number of parts for this many trajectories: at least 2, otherwise two trajectories in each."""
        return max(2, min(self.folds, trajectories // 2))

    def fit(self, trajectories: Sequence[Trajectory], seed: int) -> Fit:
        """Label trajectories, fit a value function to them and measure it; see `fitting.fit_value_function`."""
        data, folds = self.labels(trajectories), self.folds_for(len(trajectories))
        fit = fit_value_function(data, self.learner, folds=folds, seed=seed)
        if self.ensemble:
            return fit
        f = self.learner(data, torch.full_like(data.trajectory, -1), 1, seed)
        f.set_domain(data.phi)
        f.signature, f.quality = data.signature, fit.f.quality
        return replace(fit, f=f)

    @property
    def choice_queries(self) -> int:
        """Number of queries for choosing among the settings."""
        return len(self.settings) * (1 + self.trials) if len(self.settings) > 1 else 0

    @property
    def start_queries(self) -> int:
        """Most queries of a start's guard: the three ends, and, of a metric that reports halves, two cross-checks."""
        return END_QUERIES + 2 * self.ensemble

    @property
    def planned(self) -> tuple[str, int, int, int]:
        """Tasks of a round, each with its queries in all rounds (see `LearningStrategy`)."""
        return "tasks", LEAST_TASKS, self.rounds * self.evals, self.choice_queries + self.start_queries

    def learn(self, task: FinetuneTask, context: Plan) -> tuple[tuple[float, float], Fit]:
        """Return how boldly to follow f, and f (see `LearningStrategy`)."""
        seed, store, callback = context.seed, context.folder.trajectories, context.callback
        fit = meta_train(task, **context.size, recipe=self, seed=seed, store=store, callback=callback)
        callback.stage("choose settings")
        return choose_setting(task, fit, self, seed), fit

    def tuned(self, task: FinetuneTask, fit: Fit, learned: tuple[float, float], context: Plan) -> Tuned:
        """Follow f from phi = 0 (see `LearningStrategy`)."""
        recipe, sure = replace(self, settings=(learned,)), context.confidence
        seed, callback = context.seed, context.callback
        return tune_start(task, fit, recipe=recipe, guard_confidence=sure, seed=seed, callback=callback)


def gaussian_process_labels() -> Labeller:
    """Return the labels that Algorithm 1 prints."""
    from metricopt_ext.value.interpolation import GaussianProcessLabels  # gpytorch is slow to import

    return GaussianProcessLabels()


@dataclass(frozen=True)
class Algorithm1(Recipe):
    """The recipe that the paper's Algorithm 1 prints, to reproduce it; otherwise, prefer `optimize_metric`'s default.

    Its fields are those of `Recipe`, with other defaults. One round by SGD or Adam (lines 2 to 3; K is 5% of T),
    labels by Gaussian-process interpolation (line 4), Reptile with one SGD step on each task, each taken once, at
    alpha = 0.005, eta from 1 to 0, gamma = 10 and hard mining (lines 5 to 6; an offline learner is the alternative of
    Fig. 3b), and Guided ES with the metric alone (lines 9 to 16). The paper leaves open the rate alpha_t of the metric
    step (``settings``), the spread of phi_0 and the rate of SGD or Adam.

    As printed it did not lower a metric whose optimum is known. On the quadratic problems of
    tests/methods/paper/test_algorithm1.py, over 20 seeds, the true cost of the starts changed by +6% on average
    (standard error 5%) with each task taken once, by +10% (7%) with 35 passes, by -71% (3%) if Reptile's meta-batches
    mix 32 tasks, and by -82% (2%) with `NeuralLearner.offline`.
    """

    steps: int = 200
    evals: int = 10
    rounds: int = 1
    settings: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    labels: Labeller = field(default_factory=gaussian_process_labels)
    learner: Learner = field(default=ReptileLearner.paper())
    follow: Follow = GuidedESSteps()
    ensemble: bool = False


DEFAULT = Recipe()


@undone_if_cut_short
def meta_train(
    task: FinetuneTask,
    *,
    tasks: int,
    recipe: Recipe = DEFAULT,
    seed: int = 0,
    store: TrajectoryStore | None = None,
    callback: Callback | None = None,
) -> Fit:
    """Learn a value function from rounds of ``tasks`` trajectories (Algorithm 1, meta-training).

    The first round follows the loss alone; each later one follows the f fitted so far, with step lengths and loss
    weights drawn at random, so that f is corrected where it will be used.

    Args:
        task: Model, loss, batches and metric; ``rounds * tasks * evals`` queries are spent.
        tasks: Number of tasks per round.
        recipe: How f is learned.
        seed: Seed of all draws.
        store: Keeps the trajectories; those already in it are not collected again.
        callback: Notified of progress.

    Raises:
        ValueError: ``tasks`` is not an integer of at least 2.
        BudgetError, MetricError: As from the metric; finished trajectories are in the store.
    """
    kept, callback, device = TrajectoryStore() if store is None else store, callback or Callback(), task.origin().device
    settings = {name: getattr(recipe, name) for name in ("start_std", "steps", "evals", "ends")}

    def collect_round(round: int, indices: Sequence[int], fit: Fit | None) -> list[Trajectory]:
        def policy(chunk: Sequence[int]) -> Policy:
            """Round 0 follows the loss; later rounds follow f, trusted or not: this is how it gets corrected."""
            if fit is None:
                return recipe.loss_only()
            setting = recipe.explored_settings(seed, chunk).to(fit.f.radius).split(1, 1)
            return recipe.policy(fit.f, setting, seed=seed, index=chunk[0], even_untrusted=True)

        collect(task, kept, policy, round=round, indices=indices, seed=seed, **settings)
        return [trajectory for trajectory in kept if trajectory.round <= round]

    with task.metric.calling(callback.answered):
        return learn_in_rounds(collect_round, recipe, tasks=tasks, seed=seed, callback=callback, device=device)


def learn_in_rounds(
    collect: Collect, recipe: Recipe, *, tasks: int, seed: int, callback: Callback, device: torch.device | str = "cpu"
) -> Fit:
    """Learn f from rounds of ``tasks`` trajectories that any trainer collects; see `meta_train`.

    Args:
        collect: Collects a round.
        recipe: Number of rounds, and how f is fitted.
        tasks: Number of tasks in a round.
        seed: Seed of the fits.
        callback: Notified of progress.
        device: Device that f is put on.

    Raises:
        ValueError: ``tasks`` is not an integer of at least 2: f is measured on trajectories that are held out.
    """
    check_integer(2, tasks=tasks)
    fit, skill = None, "loss only"
    for round in range(recipe.rounds):
        callback.stage(f"round {round + 1}/{recipe.rounds}, {skill}")
        seen = collect(round, range(round * tasks, (round + 1) * tasks), fit)
        fit = recipe.fit(seen, seed)
        fit.f.to(device)
        assert fit.f.quality is not None  # the fit has measured it
        rank = fit.f.quality.spearman
        callback.quality(sum(len(trajectory.cost) for trajectory in seen), rank)
        skill = f"f at {rank:.2f}"
    assert fit is not None
    callback.say(f"value function ({fit.f.kind}): held-out Spearman {rank:.2f}")
    half_fits: tuple[ValueFunction, ...] = ()
    if recipe.ensemble and all(trajectory.halves is not None for trajectory in seen):
        with suppress(ValueFunctionError):  # the metric never varies on one half
            half_fits = tuple(recipe.fit(seen_on_half(seen, half), seed).f.to(device) for half in (0, 1))
    return replace(fit, visited=evaluations_where_used(seen), half_fits=half_fits)


def choose_setting(task: FinetuneTask, fit: Fit, recipe: Recipe, seed: int) -> tuple[float, float]:
    """Try each setting from phi = 0 and a few random starts; the lowest mean cost wins."""
    if len(recipe.settings) == 1 or not fit.f.trusted:
        return recipe.settings[0]
    last = FRESH + 1 + recipe.trials
    indices = [last, *range(FRESH + 1, last)]
    starts = task.starts(recipe.start_std, seed, indices)
    starts[0] = 0  # phi = 0, on batches that none of the others meets
    n, m = len(starts), len(recipe.settings)
    settings = starts.new_tensor(recipe.settings).repeat_interleave(n, dim=0).split(1, 1)
    policy = recipe.policy(fit.f, settings, seed=seed, index=last)
    points, _ = rollout(task, starts.repeat(m, 1), policy, steps=recipe.steps, seed=seed, indices=indices * m)
    ends = enumerate(points[:, -1])
    costs = [task.evaluate(phi, "choose", f"choosing settings, trial {trial}").cost for trial, phi in ends]
    return recipe.settings[int(torch.tensor(costs).view(m, n).mean(1).argmin())]


@undone_if_cut_short
def tune_start(
    task: FinetuneTask,
    fit: Fit,
    *,
    recipe: Recipe = DEFAULT,
    start: Tensor | None = None,
    index: int = FRESH,
    guard_confidence: float = CONFIDENCE,
    seed: int = 0,
    callback: Callback | None = None,
) -> Tuned:
    """Finetune one start under a value function learned earlier; at most ``recipe.start_queries`` queries.

    The metric judges the start, the end of a loss-only finetune and MetricOpt's end, and, if it reports halves, two
    ends that show how optimistic MetricOpt's gain is. The start is kept unless another end is better by more
    than chance and optimism (`guard.decide_among`).

    Args:
        task: Model, loss, batches and metric. The model is left unchanged: set the phi of ``ends[chosen]`` yourself.
        fit: The value function with its held-out quality; without skill a recipe's default does not follow it. For one
            from a file, ``Fit(load_value_function(path))``, on phi's device, the ends alone show how large chance is.
        recipe: How the start is tuned: f is followed by the first of its settings; as a run did, by
            ``replace(recipe, settings=(result.setting,))``.
        start: phi_0, ``d``; by default 0, the model as it was trained.
        index: The task index, for the batches; a different one for each start.
        guard_confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
        seed: Seed of batches and search.
        callback: Notified of progress.

    Raises:
        ValueFunctionError: f was fitted for another adapter.
        ValueError: ``index`` or ``seed`` is out of range, or the metric is subject to constraints.
    """
    check_constraints(task.metric, "tune_start")
    fit.f.check_fits(task.adapter.signature)
    callback = callback or Callback()
    check_integer(0, index=index, seed=seed)
    tuned = partial(finetune, task, steps=recipe.steps, seed=seed, start=start, index=index)
    under = partial(recipe.policy, setting=recipe.settings[0], seed=seed, index=index)
    with task.metric.calling(callback.answered):
        callback.stage("finetune")
        loss_only, path = tuned(recipe.loss_only()), tuned(under(fit.f))
        # With half the data f may look untrusted; not following it here would show no optimism at all.
        crossed = [tuned(under(f, even_untrusted=True))[-1] for f in fit.half_fits] if fit.f.trusted else []
        callback.stage("guard")
        return guarded(task, fit, "metricopt", path, loss_only, guard_confidence, crossed)


def guarded(
    task: FinetuneTask, fit: Fit, name: str, path: Tensor, loss_only: Tensor, confidence: float, crossed: list[Tensor]
) -> Tuned:
    """Keep the end of a path from a start, that of the loss alone, or the start; a query for each that differs.

    Args:
        task: Model and metric.
        fit: What was learned, with the metric's evaluations where finetuning goes.
        name: Of the path's end among the candidates.
        path: The phi visited from the start on, ``(T + 1) x d``.
        loss_only: Those of the same number of steps on the loss alone.
        confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
        crossed: Ends found with half of the metric's data each, ``d``; a query each tells how optimistic the gain is.
    """
    ends = {"start": path[0], "loss_finetune": loss_only[-1], name: path[-1]}
    evaluations: dict[str, Evaluation] = {}
    for end, phi in ends.items():
        same = next((other for other in evaluations if torch.equal(ends[other], phi)), None)
        evaluations[end] = evaluations[same] if same else task.evaluate(phi, "guard", f"end guard, {end}")
    halves = [task.evaluate(phi, "guard", f"cross-check, half {half}") for half, phi in enumerate(crossed)]
    decision = decide_among(evaluations, fit.visited, confidence, {name: optimism_of_gain(halves)})
    return Tuned(ends, evaluations, decision.kept, decision.verdict, path)


def finetune(
    task: FinetuneTask,
    policy: Policy,
    steps: int,
    seed: int,
    start: Tensor | None = None,
    index: int = FRESH,
    callback: Callback | None = None,
) -> Tensor:
    """Finetune one start, by default phi = 0, without any query; returns the visited phi, ``(steps + 1) x d``."""
    phi = task.origin() if start is None else start
    points, _ = rollout(task, phi[None], policy, steps=steps, seed=seed, indices=[index], callback=callback)
    return points[0]
