"""Learn a value function from rounds of finetuning, then follow it: for many starts, or inside a trainer."""

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from metricopt_ext.methods.guard import Decision
from metricopt_ext.methods.paper.recipe_settings import RecipeSettings, StepWeights
from metricopt_ext.methods.paper.rounds import meta_train
from metricopt_ext.methods.paper.tuning import choose_setting, tune_start
from metricopt_ext.methods.result import Details, Result, of_learner, outcome
from metricopt_ext.methods.strategy import Context, LearningStrategy
from metricopt_ext.runtime.identity import described
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.utils.words import decimals


@dataclass(frozen=True)
class RecipeDetails(Details):
    """What a learner has to tell that follows f by finetuning: a `Recipe`, or `Algorithm1`.

    Attributes:
        loss_finetune: Metric after the same number of steps on the loss alone.
        setting: The (loss weight, metric step) used.
        trajectories: The trajectories that f was learned from.
    """

    finetunes: ClassVar[bool] = True

    loss_finetune: float
    setting: StepWeights
    trajectories: tuple[Trajectory, ...]

    def lines(self, result: Result[Any]) -> list[str]:
        """Return how good f is, and how much the metric's halves have in common."""
        assert result.fit is not None
        known = not math.isnan(result.split_half)
        halves = f"; the metric's halves correlate at {result.split_half:.2f}" if known else ""
        return [f"value function ({result.fit.f.kind}): {result.quality}{halves}"]

    def beside(self) -> str:
        """Return what the loss alone comes to."""
        return f" (loss-only {decimals(self.loss_finetune)})"


@dataclass(frozen=True)
class Recipe(RecipeSettings, LearningStrategy[RecipeDetails]):
    """Learn f in rounds, the first on the loss alone, the others under the f so far; then finetune phi under f.

    Its fields are those of `RecipeSettings`.
    """

    def size(self, evaluations: int, dim: int, starts: int = 1) -> dict[str, int]:
        """Return the number of tasks in a round (see `LearningStrategy`)."""
        return {"tasks": self.tasks_per_round(evaluations)}

    def identity(self) -> dict[str, Any]:
        """Return the settings, parts by their descriptions (see `LearningStrategy`)."""
        return {**asdict(self), **{name: described(getattr(self, name)) for name in ("labels", "learner")}}

    def run(self, context: Context) -> Result[RecipeDetails]:
        """Learn f, follow it, and let the guard decide (see `LearningStrategy`)."""
        callback, seed = context.callback, context.seed
        with context.folder.counted(context.task, context.queries) as task:
            store, ledger = context.folder.trajectories, task.metric.ledger
            context.retell(task, store)
            fit = meta_train(task, tasks=context.size["tasks"], recipe=self, seed=seed, store=store, callback=callback)
            callback.stage("choose settings")
            setting = choose_setting(task, fit, self, seed)
            before = ledger.spent
            tuned = tune_start(
                task,
                fit,
                recipe=self,
                setting=setting,
                guard_confidence=context.confidence,
                seed=seed,
                callback=callback,
            )
        return Result(
            **outcome(task.metric, tuned.evaluations, Decision(tuned.chosen, tuned.verdict), tuned.ends),
            **of_learner(tuned.evaluations, task.origin(), list(store)),
            queries=dict(ledger.spent_on),
            queries_per_start=ledger.spent - before,
            fit=fit,
            path=tuned.path,
            details=RecipeDetails(tuned.evaluations["loss_finetune"].value, setting, tuple(store)),
        )
