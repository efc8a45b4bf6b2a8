"""The whole job under one query budget: learn f, finetune phi, and keep the change only if the metric agrees."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import BudgetError, FileFormatError
from .files import read_json, write_json
from .fitting import Fit, Learner, NeuralLearner, RidgeLearner, fit_value_function
from .metric import Ledger, Metric
from .observations import Labeller, Observations
from .optimizer import LossStep, MetricOptStep
from .progress import Bars, Watcher
from .seeding import generator
from .task import FinetuneTask
from .trajectory import Policy, Trajectory, TrajectoryStore, collect, rollout

Setting = tuple[float, float]

# Task indices from here on are never collected from, so that finetuning meets fresh starts and fresh batches.
FRESH = 1_000_000


@dataclass(frozen=True)
class Recipe:
    """How `optimize_metric` works. The defaults are meant to be left alone, but for ``steps`` and ``lr``.

    Attributes:
        steps: Finetuning steps T of each task.
        lr: Rate of the loss step.
        evals: Metric queries K along each task, both ends included.
        rounds: Rounds of collection: the first loss-only, the others on-policy under the f fitted so far.
        start_std: Standard deviation of the tasks' starts phi_0.
        explored_step: Centre of the metric step in on-policy rounds, drawn log-uniformly within a factor of 3; the
            loss weight is drawn from [0, 1].
        settings: Candidate pairs (loss weight, metric step) for finetuning; a few queries choose among them.
        trials: Random starts, besides phi = 0, on which each setting is tried, one query each.
        folds: Members of f's ensemble, each held out from as many parts of the trajectories.
        labels: Turns trajectories into labelled points: those observed, or all steps by interpolation
            (`interpolation.GaussianProcessLabels`).
        learners: Kinds of value function to fit; held-out quality chooses.
    """

    steps: int = 50
    lr: float = 0.1
    evals: int = 5
    rounds: int = 6
    start_std: float = 0.2
    explored_step: float = 0.15
    settings: tuple[Setting, ...] = ((0.0, 0.15), (0.3, 0.15), (0.3, 0.3))
    trials: int = 3
    folds: int = 4
    labels: Labeller = Observations.of
    learners: tuple[Learner, ...] = field(default=(NeuralLearner(), RidgeLearner()))

    def __post_init__(self) -> None:
        """Check what a wrong value of would only show late.

        Raises:
            ValueError: A value is out of range; the message prints it.
        """
        for name, least in (("steps", 2), ("evals", 2), ("rounds", 1), ("folds", 2), ("trials", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("lr", "start_std", "explored_step"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.evals > self.steps + 1:
            raise ValueError(f"evals is {self.evals}; a task of {self.steps} steps has {self.steps + 1} points")
        if not self.settings:
            raise ValueError("settings is empty; give at least one pair (loss weight, metric step)")

    @property
    def choice_queries(self) -> int:
        """Queries that choose among the settings."""
        return len(self.settings) * (1 + self.trials) if len(self.settings) > 1 else 0

    @property
    def guard_queries(self) -> int:
        """Queries that a new start costs: start, loss-only end and MetricOpt's end."""
        return 3

    def tasks_per_round(self, queries: int) -> int:
        """Return how many tasks a round can have.

        Raises:
            BudgetError: Fewer than two tasks per fold; the message says how many queries would do.
        """
        fixed, per_task = self.choice_queries + self.guard_queries, self.rounds * self.evals
        tasks = (queries - fixed) // per_task
        least = 2 * self.folds
        if tasks < least:
            raise BudgetError(
                f"{queries} queries are too few for {self.rounds} rounds of at least {least} tasks with {self.evals}"
                f" observations each, {self.choice_queries} queries to choose settings and {self.guard_queries} for"
                f" the end guard: give at least {fixed + least * per_task}, or fewer rounds or evals"
            )
        return tasks


@dataclass(frozen=True)
class Result:
    """What `optimize_metric` did, in the metric's own units.

    Attributes:
        metric: The metric's name.
        before: Metric of the model as it came, on the data that the metric sees.
        after: Metric of the model as it is now.
        loss_finetune: Metric after the same number of steps on the loss alone.
        chosen: Which end point the guard kept: ``"start"``, ``"loss_finetune"`` or ``"metricopt"``.
        setting: The (loss weight, metric step) used.
        queries: Queries spent, by purpose.
        queries_per_start: Queries that finetuning another start with the same f would cost.
        fit: The value function with its held-out quality.
        ends: End point phi, ``d``, of each candidate of the guard.
        trajectories: What the value function was learned from.
    """

    metric: str
    before: float
    after: float
    loss_finetune: float
    chosen: str
    setting: Setting
    queries: dict[str, int]
    queries_per_start: int
    fit: Fit
    ends: dict[str, Tensor]
    trajectories: tuple[Trajectory, ...]

    def __str__(self) -> str:
        """Tell the outcome, its cost and whether f was to be trusted, in three lines."""
        kept = {"start": "the model as it was", "loss_finetune": "the loss-only finetune", "metricopt": "MetricOpt"}
        spent = ", ".join(f"{purpose} {n}" for purpose, n in self.queries.items())
        return (
            f"{self.metric}: {self.before:.4f} -> {self.after:.4f} (loss-only {self.loss_finetune:.4f});"
            f" kept {kept[self.chosen]}\n"
            f"queries: {sum(self.queries.values())} ({spent}); {self.queries_per_start} for each further start\n"
            f"value function ({self.fit.f.kind}): {self.fit.f.quality}"
        )


def optimize_metric(
    task: FinetuneTask,
    *,
    queries: int,
    recipe: Recipe | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Result:
    """Finetune a frozen model's phi for its metric within a number of metric queries.

    Learns f from rounds of trajectories, chooses how boldly to follow it, finetunes from phi = 0, and leaves in the
    model whichever of start, loss-only end and MetricOpt's end the metric likes best: it never ends worse than it
    began on the data that the metric sees.

    Args:
        task: Model, loss, batches and metric. What the run spends is charged to ``task.metric.ledger`` at its end.
        queries: Metric queries that may be spent in all.
        recipe: How to work.
        seed: Seed of all draws.
        output_dir: Keeps trajectories, ``value_function.safetensors`` and ``adapter.safetensors``; None keeps nothing.
        resume: Go on with what an interrupted run left in ``output_dir``; the result is the same bit for bit.
        watcher: Is told of the progress; by default a bar on the terminal.

    Returns:
        The result; the tuned phi is in the model.

    Raises:
        BudgetError: ``queries`` is too small to plan with.
        MetricError: The metric failed; finished work is in ``output_dir``.
        FileFormatError: ``output_dir`` holds another run, or a run and ``resume`` is False.
    """
    if watcher is None:
        with Bars() as bars:
            return optimize_metric(
                task,
                queries=queries,
                recipe=recipe,
                seed=seed,
                output_dir=output_dir,
                resume=resume,
                watcher=bars.watch(task.metric.name, queries),
            )
    recipe = recipe or Recipe()
    tasks = recipe.tasks_per_round(queries)
    if queries > task.metric.ledger.left:
        raise BudgetError(f"{queries} queries asked for, {task.metric.ledger.left} are left in the metric's own budget")
    folder = None if output_dir is None else Path(output_dir)
    store = open_store(task, recipe, tasks, seed, folder, resume)
    stages = _Stages(None if folder is None else folder / "stages.json")
    with _counted(task.metric, queries) as ledger:
        if len(store):
            ledger.spend("collect", store.queries)

        fit = meta_train(task, tasks=tasks, recipe=recipe, seed=seed, store=store, watcher=watcher)

        watcher.stage("choose settings")
        setting = stages.remember(
            "setting", lambda: _choose_setting(task, fit, recipe, seed, watcher), ledger, "choose"
        )

        watcher.stage("finetune")
        ends = {
            "start": task.origin(),
            "loss_finetune": finetune(task, LossStep(recipe.lr), recipe.steps, seed)[-1],
            "metricopt": finetune(task, metric_policy(fit, recipe, setting), recipe.steps, seed)[-1],
        }

        watcher.stage("guard")
        costs = stages.remember("guard", lambda: _guard(task, ends, watcher), ledger, "guard")
    watcher.done()
    chosen = min(costs, key=lambda name: costs[name])
    task.adapter.set_phi(ends[chosen])
    if folder is not None:
        fit.f.save(folder / "value_function.safetensors")
        task.adapter.save(folder / "adapter.safetensors")
    value = task.metric.to_value
    return Result(
        metric=task.metric.name,
        before=value(costs["start"]),
        after=value(costs[chosen]),
        loss_finetune=value(costs["loss_finetune"]),
        chosen=chosen,
        setting=(setting[0], setting[1]),
        queries=dict(ledger.spent_on),
        queries_per_start=recipe.guard_queries,
        fit=fit,
        ends=ends,
        trajectories=tuple(store),
    )


def meta_train(
    task: FinetuneTask,
    *,
    tasks: int,
    recipe: Recipe | None = None,
    seed: int = 0,
    store: TrajectoryStore | None = None,
    watcher: Watcher | None = None,
) -> Fit:
    """Learn a value function from rounds of ``tasks`` trajectories (Algorithm 1, meta-training).

    The first round follows the loss alone; each later one follows the f fitted so far, with step lengths and loss
    weights drawn at random, so that f is corrected where it is going to be used.

    Args:
        task: Model, loss, batches and metric; ``rounds * tasks * evals`` queries are spent.
        tasks: Number of tasks per round.
        recipe: How to work.
        seed: Seed of all draws.
        store: Keeps the trajectories; those that it has are not collected again.
        watcher: Is told of the progress.
    """
    recipe = recipe or Recipe()
    store = TrajectoryStore() if store is None else store
    watcher = watcher or Watcher()
    fit: Fit | None = None
    for round in range(recipe.rounds):
        skill = "loss only" if fit is None or fit.f.quality is None else f"f at {fit.f.quality.spearman:.2f}"
        watcher.stage(f"round {round + 1}/{recipe.rounds}, {skill}")
        collect(
            task,
            store,
            partial(_collection_policy, fit, recipe, seed),
            round=round,
            indices=range(round * tasks, (round + 1) * tasks),
            start_std=recipe.start_std,
            steps=recipe.steps,
            evals=recipe.evals,
            seed=seed,
            on_query=partial(_tell, watcher, task),
        )
        seen = [trajectory for trajectory in store if trajectory.round <= round]
        fit = fit_value_function(recipe.labels(seen), recipe.learners, folds=recipe.folds, seed=seed)
        fit.f.to(task.origin().device)
    assert fit is not None
    assert fit.f.quality is not None
    watcher.say(f"value function ({fit.f.kind}): {fit.f.quality}")
    return fit


def finetune(task: FinetuneTask, policy: Policy, steps: int, seed: int, start: Tensor | None = None) -> Tensor:
    """Finetune one start, by default phi = 0, without any query; returns the visited phi, ``(steps + 1) x d``."""
    phi = task.origin() if start is None else start
    points, _ = rollout(task, phi[None], policy, steps=steps, seed=seed, indices=[FRESH])
    return points[0]


def metric_policy(fit: Fit, recipe: Recipe, setting: Sequence[float]) -> MetricOptStep:
    """Return the step rule of finetuning under a setting (loss weight, metric step)."""
    weight, metric_step = setting
    return MetricOptStep(fit.f, recipe.lr, metric_step, weight, recipe.steps)


def open_store(
    task: FinetuneTask, recipe: Recipe, tasks: int, seed: int, folder: Path | None, resume: bool
) -> TrajectoryStore:
    """Open the run's trajectories, refusing to mix two runs.

    Raises:
        FileFormatError: The folder holds a run and ``resume`` is False, or it holds a run with other settings.
    """
    if folder is None:
        return TrajectoryStore()
    trajectories = folder / "trajectories"
    if not resume and (trajectories.exists() or (folder / "stages.json").exists()):
        raise FileFormatError(f"{folder} holds an earlier run; resume it, or use another output folder")
    context, metric = task.adapter.context, task.metric
    identity = {
        **asdict(recipe),
        "labels": repr(recipe.labels),
        "learners": [repr(learner) for learner in recipe.learners],
        "tasks": tasks,
        "seed": seed,
        "population": task.population,
        "metric": [metric.name, metric.maximize, metric.bounds],  # stored costs depend on the last two
        "adapter": [context.kind, task.dim, context.layers, context.seed],
    }
    return TrajectoryStore(trajectories, identity)


@contextmanager
def _counted(metric: Metric, queries: int) -> Iterator[Ledger]:
    """Count a run in a ledger of its own, and charge the metric's own once it is over.

    A run that fails charges nothing: what it did comes back when it is resumed.
    """
    own, metric.ledger = metric.ledger, Ledger(queries)
    run = metric.ledger
    try:
        yield run
    finally:
        metric.ledger = own
    for purpose, spent in run.spent_on.items():
        own.spend(purpose, spent)


class _Stages:
    """Answers of the stages after collection, kept in a file, so that a resumed run does not ask again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.answers: dict[str, Any] = {} if path is None or not path.exists() else read_json(path)

    def remember(self, name: str, compute: Any, ledger: Ledger, purpose: str) -> Any:
        if name in self.answers:
            if self.answers[name]["queries"]:
                ledger.spend(purpose, self.answers[name]["queries"])
        else:
            before = ledger.spent
            answer = compute()
            self.answers[name] = {"answer": answer, "queries": ledger.spent - before}
            if self.path is not None:
                write_json(self.path, self.answers)
        return self.answers[name]["answer"]


def _collection_policy(fit: Fit | None, recipe: Recipe, seed: int, chunk: Sequence[int]) -> Policy:
    """Round 0 follows the loss; later rounds follow f, trusted or not: this is how it gets corrected."""
    if fit is None:
        return LossStep(recipe.lr)
    draws = torch.stack([torch.rand(2, generator=generator(seed, "policy", index)) for index in chunk])
    draws = draws.to(fit.f.radius.device)
    metric_step = recipe.explored_step * torch.exp((2 * draws[:, 0] - 1) * math.log(3))
    return MetricOptStep(fit.f, recipe.lr, metric_step, draws[:, 1], recipe.steps, even_untrusted=True)


def _choose_setting(task: FinetuneTask, fit: Fit, recipe: Recipe, seed: int, watcher: Watcher) -> Setting:
    """Try each setting from phi = 0 and a few random starts; the least mean cost wins."""
    if len(recipe.settings) == 1 or not fit.f.trusted:
        return recipe.settings[0]
    indices = range(FRESH + 1, FRESH + 1 + recipe.trials)
    starts = task.origin()[None]
    if recipe.trials:
        starts = torch.cat([starts, task.starts(recipe.start_std, seed, indices)])
    n, m = len(starts), len(recipe.settings)
    settings = torch.tensor(recipe.settings, dtype=starts.dtype, device=starts.device)
    weight, metric_step = settings.repeat_interleave(n, dim=0).unbind(1)
    policy = MetricOptStep(fit.f, recipe.lr, metric_step, weight, recipe.steps)
    trial_tasks = [FRESH + 1 + recipe.trials, *indices] * m
    points, _ = rollout(task, starts.repeat(m, 1), policy, steps=recipe.steps, seed=seed, indices=trial_tasks)
    costs: list[float] = []
    for phi in points[:, -1]:
        costs.append(_ask(task, phi, "choose", f"choosing settings, trial {len(costs)}"))
        _tell(watcher, task, costs[-1])
    return recipe.settings[int(torch.tensor(costs).view(m, n).mean(1).argmin())]


def _guard(task: FinetuneTask, ends: dict[str, Tensor], watcher: Watcher) -> dict[str, float]:
    """Ask the metric about each end point; without a trusted f two of them are the same and cost one query."""
    costs: dict[str, float] = {}
    for name, phi in ends.items():
        same = next((other for other in costs if torch.equal(ends[other], phi)), None)
        costs[name] = costs[same] if same else _ask(task, phi, "guard", f"end guard, {name}")
        _tell(watcher, task, costs[name])
    return costs


def _ask(task: FinetuneTask, phi: Tensor, purpose: str, where: str) -> float:
    return float(task.costs_at(phi[None], purpose, f"{where}; "))


def _tell(watcher: Watcher, task: FinetuneTask, cost: float) -> None:
    metric = task.metric
    watcher.query(metric.ledger.spent, f"{metric.name} {metric.to_value(cost):.4f}")
