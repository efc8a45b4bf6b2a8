"""What the paper's learners share: finetune a start under what was learned, and keep the end if the guard agrees."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.guard import CONFIDENCE, Verdict, decide_among
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.strategy import LearningStrategy, Plan
from metricopt_ext.runtime.identity import described
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.evaluation import Evaluation, stacked_halves
from metricopt_ext.tasks.split_half import correlation_of_halves, optimism_of_gain
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import Policy, rollout
from metricopt_ext.value.fitting import Fit

# Task indices from here on are never used in collection, so finetuning gets fresh starts and batches.
FRESH = 1_000_000

# Queries of a start's guard: the start, the loss-only end, and the end under what was learned.
END_QUERIES = 3


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning a start.

    Attributes:
        ends: End point phi, ``d``, of each candidate: ``"start"`` itself, ``"loss_finetune"``, and the end under what
            was learned, ``"metricopt"`` of a recipe.
        evaluations: The metric's evaluation of each of them.
        chosen: The candidate to keep.
        verdict: What the guard thinks of the best of the others than the start.
        path: The phi visited from the start to the end under what was learned, ``(T + 1) x d``.
    """

    ends: dict[str, Tensor]
    evaluations: dict[str, Evaluation]
    chosen: str
    verdict: Verdict
    path: Tensor


class TrajectoryLearner(LearningStrategy):
    """A strategy that learns from trajectories, finetunes phi under what it learned, and has the guard decide.

    Attributes:
        learns: The field of a `Result` that has what is learned besides f.
    """

    learns: ClassVar[str]

    def identity(self) -> dict[str, Any]:
        """Return the settings, by their descriptions (see `LearningStrategy`)."""
        return {name: described(value) for name, value in vars(self).items()}

    @abstractmethod
    def learn(self, task: FinetuneTask, context: Plan) -> tuple[Any, Fit]:
        """Return what is learned besides f, and f; keep the trajectories in the run's folder."""

    @abstractmethod
    def tuned(self, task: FinetuneTask, fit: Fit, learned: Any, context: Plan) -> Tuned:
        """Tune phi = 0 under what was learned."""

    def run(self, context: Plan) -> Result:
        """Learn, follow what was learned, and let the guard decide (see `LearningStrategy`)."""
        metric, store = context.task.metric, context.folder.trajectories
        with context.folder.own_ledger(metric, context.queries):
            log, ledger = context.folder.log(metric), metric.ledger
            task = context.task.judged_by(metric.logged(log))
            context.callback.on_file(log.answered * metric.repeats)
            for trajectory in store:  # its queries are booked, and told of, from the log
                for phi in trajectory.observed_phi.to(task.origin()):
                    task.evaluate(phi, "collect")
            learned, fit = self.learn(task, context)
            before = ledger.spent
            tuned = self.tuned(task, fit, learned, context)
        values, seen = tuned.evaluations, tuple(store)
        starts = [each.evaluations[0] for each in seen if each.observed[0] == 0 and each.halves is not None]
        return Result.of(
            task.metric,
            values,
            chosen=tuned.chosen,
            verdict=tuned.verdict,
            ends=tuned.ends,
            starts={"start": values["start"].value},
            started_at="start",
            candidates={"start": Start(task.origin())},
            split_half=correlation_of_halves(stacked_halves(starts)),
            points=torch.cat([each.observed_phi for each in seen]),
            costs=tuple(task.metric.normalised(cost) for each in seen for cost in each.cost.tolist()),
            queries=dict(ledger.spent_on),
            queries_per_start=ledger.spent - before,
            fit=fit,
            path=tuned.path,
            loss_finetune=values["loss_finetune"].value,
            trajectories=seen,
            **{self.learns: learned},
        )


def guarded(
    task: FinetuneTask,
    name: str,
    path: Tensor,
    loss_only: Tensor,
    visited: Sequence[Evaluation],
    *,
    crossed: Sequence[Tensor] = (),
    confidence: float = CONFIDENCE,
) -> Tuned:
    """Keep the end of a path from a start, that of the loss alone, or the start; a query for each that differs.

    Args:
        task: Model and metric.
        name: Of the path's end among the candidates.
        path: The phi visited from the start on, ``(T + 1) x d``.
        loss_only: Those of the same number of steps on the loss alone.
        visited: The metric's evaluations made before, where finetuning goes.
        crossed: Ends found with half of the metric's data each, ``d``; a query each tells how optimistic the gain is.
        confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
    """
    ends = {"start": path[0], "loss_finetune": loss_only[-1], name: path[-1]}
    evaluations: dict[str, Evaluation] = {}
    for end, phi in ends.items():
        same = next((other for other in evaluations if torch.equal(ends[other], phi)), None)
        evaluations[end] = evaluations[same] if same else task.evaluate(phi, "guard", f"end guard, {end}")
    halves = [task.evaluate(phi, "guard", f"cross-check, half {half}") for half, phi in enumerate(crossed)]
    decision = decide_among(evaluations, visited, confidence, {name: optimism_of_gain(halves)})
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
