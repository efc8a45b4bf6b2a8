"""Joint training of a value function and an optimizer (supplement B, Algorithm S1, Eqs. 6 and 7).

The paper leaves open what the inputs of Eq. 5 are scaled by, where the metric among them comes from at meta-testing,
and the rate of Adam on the optimizer's weights; `AlgorithmS1` says how they are read here.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.nn.utils import parameters_to_vector

from metricopt_ext.methods.paper.recipe import END_QUERIES, FRESH, finetune, gaussian_process_labels, guarded
from metricopt_ext.methods.strategy import LearningStrategy, Plan, Tuned
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.learned import CostAt, UpdateRule, unroll
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.split_half import evaluations_where_used
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import Trajectory, TrajectoryStore, observation_steps
from metricopt_ext.utils.checks import check_above, check_at_least, check_bool, check_instance, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief
from metricopt_ext.value.fitting import Fit, measure
from metricopt_ext.value.observations import Labeller, Observations
from metricopt_ext.value.reptile import ReptileLearner
from metricopt_ext.value.value_function import NeuralValueFunction, ValueFunction

VARIANCE = 0.01  # epsilon^2 of Eq. 7
CLIP = 10.0  # largest length of a gradient
REPLAY = 256  # latest tasks that f is adapted from

FLOOR = 1e-3  # added to a loss before its logarithm is taken
COST_FLOOR = 1e-2  # least size of a cost that Eq. 6 divides by: f may well predict one of 0 or below

# cost(phi, step, due): the costs at a step, ``n``, given phi there, ``n x d``; runs that are not due have no say.
Observe = Callable[[Tensor, int, Tensor], Tensor]

# Task indices from here on are unrolled to train the optimizer, and never observed.
UNROLLED = 2 * FRESH


@dataclass(frozen=True)
class AlgorithmS1(LearningStrategy):
    """Joint training of a value function and an optimizer, and finetuning with the optimizer alone (Algorithm S1).

    A meta-iteration collects tasks under the optimizer as it is, adapts f to their metrics, and improves the optimizer
    on further tasks, unrolled under perturbed weights, whose metric the adapted f predicts. Only collecting spends
    queries. lambda, beta and epsilon^2 are as printed, and everything of `paper`; the defaults of the others are ours:

    - Eq. 5's metric is the cost as it was last observed, at the K steps of line 3. A rule that sees it needs
      ``evals - 1`` queries for each start at meta-testing too; ``sees_metric=False`` hides it and needs none.
    - f is adapted on meta-batches that mix the newest tasks with earlier ones; batches of one task, as printed, let
      BatchNorm normalise away what differs between tasks.

    Attributes:
        steps: T.
        evals: K, both ends included.
        start_std: Standard deviation of phi_0.
        tasks: Tasks collected in a meta-iteration; 1 as printed.
        updates: Steps of Adam on the optimizer's weights in a meta-iteration; 1 as printed.
        pairs: Antithetic pairs of perturbed weights for each of them, each with a task of its own.
        rate: Adam's rate.
        estimator: Of the gradient of Eq. 7: ``combined`` of two, or ``score`` alone, which does without second
            derivatives, for a loss that has none.
        value: How f is adapted (line 5).
        labels: Line 4; by default the observed points alone.
        sees_loss: Whether the loss is among the optimizer's inputs.
        sees_metric: Whether the metric is.
        hidden: The optimizer's hidden units.
        step: Typical change of a coordinate of phi in a step.
        lr: Rate of the loss-only finetune that the guard compares with.
    """

    learns: ClassVar[str] = "rule"

    steps: int = 50
    evals: int = 5
    start_std: float = 0.2
    tasks: int = 4
    updates: int = 1
    pairs: int = 8
    rate: float = 3e-3
    estimator: Literal["combined", "score"] = "combined"
    value: ReptileLearner = field(default=ReptileLearner())
    labels: Labeller = Observations.of
    sees_loss: bool = True
    sees_metric: bool = True
    hidden: int = 32
    step: float = 0.02
    lr: float = 0.1

    def __post_init__(self) -> None:
        """Reject what the algorithm is not defined for.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        check_integer(1, steps=self.steps, tasks=self.tasks, updates=self.updates)
        check_integer(2, hidden=self.hidden, pairs=self.pairs)  # two pairs, to measure variances
        check_at_least(0, start_std=self.start_std)
        check_above(0, rate=self.rate, step=self.step, lr=self.lr)
        observation_steps(self.steps, self.evals, 0, 0)  # refuses what it can't draw
        if self.estimator not in ("combined", "score"):
            raise ValueError(f"estimator is {self.estimator!r}; it must be 'combined' or 'score'")
        check_bool(sees_loss=self.sees_loss, sees_metric=self.sees_metric)
        check_instance("GaussianProcessLabels()", optional=False, labels=self.labels)
        if not isinstance(self.value, ReptileLearner):  # its inner loop is what is used, not what it fits when called
            raise ValueError(f"value is {brief(self.value)}; it must be an instance, e.g. ReptileLearner()")

    @classmethod
    def paper(cls, steps: int = 200, evals: int = 10) -> "AlgorithmS1":
        """Return what is printed: a task at a time, Gaussian-process labels, f by one step of SGD with hard mining."""
        value, labels = ReptileLearner.paper(), gaussian_process_labels()
        return cls(steps=steps, evals=evals, tasks=1, value=value, labels=labels)

    @property
    def start_queries(self) -> int:
        """Queries of a start: what the optimizer sees on its way, and the ends."""
        return END_QUERIES + (self.evals - 1 if self.sees_metric else 0)

    @property
    def planned(self) -> tuple[str, int, int, int]:
        """Meta-iterations, at least two, and the start's queries (see `LearningStrategy`)."""
        return "iterations", 2, self.tasks * self.evals, self.start_queries

    def learn(self, task: FinetuneTask, context: Plan) -> tuple[UpdateRule, Fit]:
        """Return the optimizer and f (see `LearningStrategy`)."""
        store, callback = context.folder.trajectories, context.callback
        return self.meta_train(task, **context.size, seed=context.seed, store=store, callback=callback)

    def tuned(self, task: FinetuneTask, fit: Fit, learned: UpdateRule, context: Plan) -> Tuned:
        """Finetune phi = 0 with the optimizer alone (see `LearningStrategy`)."""
        context.callback.stage("meta-test")
        path = self.meta_test(task, learned, seed=context.seed)
        loss_only = finetune(task, LossStep(self.lr), self.steps, context.seed)
        return guarded(task, fit, "learned", path, loss_only, context.confidence, [])

    def new_rule(self, seed: int) -> UpdateRule:
        """Return the optimizer that training begins with."""
        sees = {"sees_loss": self.sees_loss, "sees_metric": self.sees_metric}
        return UpdateRule(hidden=self.hidden, step=self.step, seed=seed, **sees)

    def meta_train(
        self,
        task: FinetuneTask,
        *,
        iterations: int,
        seed: int = 0,
        store: TrajectoryStore | None = None,
        callback: Callback | None = None,
    ) -> tuple[UpdateRule, Fit]:
        """Learn an optimizer and the value function that trains it (lines 1-9).

        Args:
            task: Model, loss, batches and metric; ``iterations * tasks * evals`` queries are spent.
            iterations: Number of meta-iterations.
            seed: Seed of all draws.
            store: Keeps the trajectories; those already in it are not observed again.
            callback: Notified of progress.

        Returns:
            The optimizer, frozen, and f, adapted to the last tasks; its ``quality`` is of what it predicted along the
            later half of the trajectories before it had seen them.

        Raises:
            ValueError: ``iterations`` is not an integer of at least 1.
            FloatingPointError: The loss is not finite somewhere.
            AdapterError: The loss can't be differentiated twice, as under gradient checkpointing; ``estimator="score"``
                does without.
            BudgetError, MetricError: As from the metric; finished trajectories are in the store.
        """
        check_integer(1, iterations=iterations)
        if self.estimator == "combined":  # before a query is spent
            task.check_loss(seed, 2, differentiable=True)
        kept, callback = TrajectoryStore() if store is None else store, callback or Callback()
        device = task.origin().device
        rule = self.new_rule(seed).to(device)  # line 1
        adam = torch.optim.Adam([rule.weights], self.rate)
        f = NeuralValueFunction.drawn(task.dim, 1, generator(seed, "online reptile")).eval().requires_grad_(False)
        weights = parameters_to_vector(f.parameters())  # f's meta-weights
        labelled = deque[Observations](maxlen=max(1, REPLAY // self.tasks))  # of the latest meta-iterations
        seen: list[Trajectory] = []
        predicted: list[Tensor] = []
        with task.metric.calling(callback.answered):
            for i in range(iterations):
                if i % max(1, iterations // 10) == 0:
                    callback.stage(f"optimizer {i}/{iterations}")
                new = self.collect(task, rule, kept, iteration=i, seed=seed)  # line 3
                seen += new
                predicted.append(f(torch.cat([each.observed_phi for each in new])).detach().double())
                labelled.append(self.labels(new))  # line 4
                data, rng = Observations.joined(labelled), generator(seed, "online reptile", i)
                adapted = self.value.adapt(f, weights, data, len(new), rng)  # line 5
                f.to(device)
                for update in range(i * self.updates, (i + 1) * self.updates):  # line 6
                    gradient = self.gradient(task, rule, f, seed=seed, update=update)
                    rule.weights.grad = gradient * (CLIP / gradient.norm().clamp(min=CLIP))
                    adam.step()
                f.cpu()
                weights = torch.lerp(weights, adapted, 1 - i / iterations)  # line 7
        data = Observations.of(seen)
        late = data.trajectory >= len(seen) // 2
        foreseen, true = torch.cat(predicted)[late], data.cost[late]
        f.quality, f.signature = measure(foreseen, true, data.trajectory[late]), task.adapter.signature
        return rule.requires_grad_(False), Fit(f.to(device), foreseen, true, evaluations_where_used(seen))  # line 9

    def meta_test(self, task: FinetuneTask, rule: UpdateRule, *, seed: int = 0) -> Tensor:
        """Finetune phi = 0 with the optimizer alone (lines 10-14); the visited phi, ``(T + 1) x d``.

        A rule that sees the metric has it evaluated at ``evals - 1`` steps.

        Args:
            task: What is finetuned.
            rule: The optimizer.
            seed: Seed of the batches and of the steps at which the metric is evaluated.
        """

        def cost(phi: Tensor, step: int, due: Tensor) -> Tensor:
            asked = rule.sees_metric and step < self.steps  # the end is asked for by the guard
            value = task.evaluate(phi[0], "meta_test", f"meta-test, step {step}").cost if asked else math.nan
            return torch.tensor([value], dtype=torch.float64)

        known = self.last_observed(task, cost, seed, [FRESH])
        return unroll(task, rule, task.origin()[None], known, steps=self.steps, seed=seed, indices=[FRESH])[0][0]

    def collect(
        self, task: FinetuneTask, rule: UpdateRule, store: TrajectoryStore, *, iteration: int, seed: int
    ) -> list[Trajectory]:
        """Observe the metric K times along each task of a meta-iteration, under the optimizer (line 3)."""
        indices = range(iteration * self.tasks, (iteration + 1) * self.tasks)
        kept = {index: each for index in indices if (each := store.get(iteration, index)) is not None}
        if len(kept) == self.tasks:
            return [*kept.values()]
        before = [iter(kept[index].evaluations if index in kept else ()) for index in indices]
        told: list[list[Evaluation]] = [[] for _ in indices]

        def cost(phi: Tensor, step: int, due: Tensor) -> Tensor:
            for row in due.nonzero().flatten().tolist():
                where = f"meta-iteration {iteration}, task {indices[row]}, step {step}; {len(store)} trajectories kept"
                told[row].append(next(before[row], None) or task.evaluate(phi[row], "collect", where))
            return torch.tensor([each[-1].cost if each else math.nan for each in told], dtype=torch.float64)

        starts = task.starts(self.start_std, seed, indices)
        known = self.last_observed(task, cost, seed, indices)
        points, losses = unroll(task, rule, starts, known, steps=self.steps, seed=seed, indices=indices)
        for row, index in enumerate(indices):
            if index not in kept:
                observed = observation_steps(self.steps, self.evals, seed, index)
                run = points[row].cpu(), losses[row].cpu(), observed, tuple(told[row]), task.adapter.signature
                kept[index] = Trajectory(iteration, index, *run)
                store.add(kept[index])
        return [kept[index] for index in indices]

    def last_observed(self, task: FinetuneTask, cost: Observe, seed: int, indices: Sequence[int]) -> CostAt:
        """Return what a rule is told of the metric in n runs: the cost at the last of the K steps of line 3.

        Args:
            task: Has the metric.
            cost: Observes it.
            seed: Seed of the steps at which it is observed.
            indices: The n task indices.
        """
        observed = torch.zeros(self.steps + 1, len(indices), dtype=torch.bool)
        for row, index in enumerate(indices):
            observed[observation_steps(self.steps, self.evals, seed, index), row] = True
        known = torch.full((len(indices),), math.nan)

        def cost_at(phi: Tensor, step: int) -> Tensor:
            nonlocal known
            due = observed[step]
            if due.any():
                now = task.metric.normalised(cost(phi, step, due)).to(phi)
                known = now.where(due.to(phi.device), known.to(phi))
            return known

        return cost_at

    def objective_of(
        self, task: FinetuneTask, rule: UpdateRule, f: ValueFunction, weights: Tensor, seed: int, indices: Sequence[int]
    ) -> Tensor:
        """Return L_opt of n finetuning runs under some weights, ``...``, with f in place of the metric (Eq. 6).

        Args:
            task: What is finetuned.
            rule: The optimizer.
            f: The adapted value function.
            weights: The optimizer's weights in each run, ``... x W``.
            seed: Seed of starts, batches and the steps at which the metric is known.
            indices: The n task indices.
        """
        starts, of_each = task.starts(self.start_std, seed, indices), weights.flatten(0, -2)
        known = self.last_observed(task, lambda phi, step, due: f(phi), seed, indices)
        drawn: dict[str, Any] = {"seed": seed, "indices": indices, "differentiable": weights.requires_grad}
        points, losses = unroll(task, rule, starts, known, steps=self.steps, weights=of_each, **drawn)
        with torch.enable_grad():
            last, _ = task.loss_and_gradient(points[:, -1], step=self.steps, **drawn)
        costs = task.metric.normalised(f(points))
        return learned_objective(costs, torch.cat([losses, last[:, None]], 1)).view(weights.shape[:-1])

    def gradient(self, task: FinetuneTask, rule: UpdateRule, f: ValueFunction, *, seed: int, update: int) -> Tensor:
        """Estimate the gradient of Eq. 7 in the optimizer's weights, ``W``.

        Pairs are unrolled in parts of ``task.at_once`` runs.

        Args:
            task: What is finetuned.
            rule: The optimizer.
            f: The adapted value function.
            seed: The run's seed.
            update: Number of the update, which draws tasks and perturbations.
        """
        rng = generator(seed, "weights", update)
        noise = torch.randn(self.pairs, len(rule.weights), generator=rng).to(rule.weights)
        tasks = range(UNROLLED + update * self.pairs, UNROLLED + (update + 1) * self.pairs)
        at_once, std, differentiate = max(1, task.at_once // 2), VARIANCE**0.5, self.estimator == "combined"
        parts = []
        for at in range(0, self.pairs, at_once):
            both, of_some = [*tasks[at : at + at_once]] * 2, noise[at : at + at_once]
            objective = partial(self.objective_of, task, rule, f, seed=seed, indices=both)
            parts.append(gradient_samples(objective, rule.weights, of_some, std, differentiate=differentiate))
        return combine(*(torch.cat(each) for each in zip(*parts, strict=True)))


def learned_objective(costs: Tensor, loss: Tensor, metric_weight: float = 50.0) -> Tensor:
    """Return L_opt = lambda L_metric + L_loss: a better metric and a lower loss all along the way (Eq. 6).

    L_metric = mean_t log(1 + exp(beta (m_t - m_t') / m_t)) with t' = argmin_{i < t} m_i, where the denominator is the
    size of m_t, at least `COST_FLOOR`, and beta is T/2. L_loss = mean_t (log(l_t + eps) - log(l_0 + eps)), where a loss
    below 0 counts as 0, and eps, "small" in the paper, is `FLOOR`.

    Args:
        costs: The costs m_0 ... m_T that f predicts at phi_0 ... phi_T, ``... x (T + 1)``.
        loss: The losses l_0 ... l_T there, ``... x (T + 1)``.
        metric_weight: lambda; 50 in the paper.

    Returns:
        The objective of each finetuning run, ``...``.
    """
    best, later = costs.cummin(-1).values[..., :-1], costs[..., 1:]
    metric = softplus(later.shape[-1] / 2 * (later - best) / later.abs().clamp(min=COST_FLOOR)).mean(-1).to(loss)
    logarithm = (loss.clamp(min=0) + FLOOR).log()
    return torch.add(logarithm[..., 1:].mean(-1) - logarithm[..., 0], metric, alpha=metric_weight)


def gradient_samples(
    objective: Callable[[Tensor], Tensor], weights: Tensor, noise: Tensor, std: float, *, differentiate: bool = True
) -> tuple[Tensor, Tensor]:
    """Estimate the gradient of an objective that is smoothed by Gaussian noise on the weights (Eq. 7), in two ways.

    L(w) = E_{z ~ N(0, I)} l(w + s z) has two unbiased gradient estimators: the reparameterised one, grad l(w + s z),
    which explodes where l is rough, and the score function's (evolution strategies), l(w + s z) z / s, whose variance
    does not depend on how rough l is. Both are taken from P antithetic pairs of draws.

    Args:
        objective: Returns the values, ``2 x P``, at weights, ``2 x P x W``. Both of a pair must be judged by the same
            l: the same task, start and batches.
        weights: w, ``W``.
        noise: z, ``P x W``, standard normal.
        std: s, above 0.
        differentiate: Whether to make the reparameterised estimates, for which the objective is differentiated.

    Returns:
        The reparameterised estimates, ``P x W``, NaN if they were not asked for; and the score function's, ``P x W``.
    """
    moved = weights.detach() + std * torch.stack([noise, -noise])
    with torch.set_grad_enabled(differentiate):
        values = objective(moved.requires_grad_(differentiate))
    slopes = torch.full_like(noise, math.nan)
    if differentiate:
        slopes = torch.autograd.grad(values.sum(), moved)[0].mean(0)
    above, below = values.detach()
    scores = noise * ((above - below) / (2 * std))[:, None].to(noise)
    return slopes, scores


def combine(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean of two estimators of the same vector, weighted by their inverse variances, ``W``.

    So do Metz et al. (Understanding and correcting pathologies in the training of learned optimizers, ICML 2019). The
    variances are measured on the samples themselves, for each weight; where both are 0, both count the same, and a
    first estimate that is not finite counts nothing.

    Args:
        first: Its samples, ``P x W``, P at least 2.
        second: The other's, ``P x W``.
    """
    usable = first.isfinite().all(0)
    first = first.where(usable, 0.0)
    noise, other = first.var(0), second.var(0)
    total = noise + other
    share = (other / total).where(total > 0, 0.5).where(usable, 0.0)  # of the first
    return share * first.mean(0) + (1 - share) * second.mean(0)
