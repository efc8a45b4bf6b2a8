"""MetricOpt with a jointly learned optimizer: one call that trains it within a budget, and finetunes phi with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.guard import CONFIDENCE, deviates
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.run_folder import RunFolder, identity_of_task
from metricopt_ext.methods.siblings.algorithm_s1 import AlgorithmS1, JointlyLearned
from metricopt_ext.methods.tuning import finetune, judge_ends
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.progress import Watcher, watched
from metricopt_ext.utils.words import counted

CHECKPOINT = "joint_training.safetensors"


@dataclass(frozen=True)
class LearnedResult(Result):
    """What `metricopt_learned` did, in the metric's own units.

    Attributes:
        loss_finetune: Metric after the same number of steps on the loss alone.
        path: The points that the optimizer visited, ``(T + 1) x d``.
        learned: The optimizer and the value function that trained it.
    """

    loss_finetune: float
    path: Tensor
    learned: JointlyLearned

    def lines(self) -> list[str]:
        """Return what ``str`` joins."""
        return [*super().lines(), f"value function ({self.learned.f.kind}): {self.learned.f.quality}"]

    def beside(self) -> str:
        """Return what is printed next to the outcome."""
        return f" (loss-only {self.loss_finetune:.4f})"


def metricopt_learned(
    task: FinetuneTask,
    *,
    queries: int,
    settings: AlgorithmS1 | None = None,
    lr: float = 0.1,
    guard_confidence: float = CONFIDENCE,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> LearnedResult:
    """Learn an optimizer by Algorithm S1 within a number of metric queries, and finetune phi with it.

    The metric then judges the start, the end of a loss-only finetune and the optimizer's end; the model keeps the best
    if its gain on the start exceeds chance.

    Args:
        task: Model, loss, batches and metric. What the run spends is charged to ``task.metric.ledger`` at its end.
        queries: Metric queries that may be spent in all.
        settings: The algorithm's.
        lr: Rate of the loss-only finetune that the guard compares with.
        guard_confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
        seed: Seed of all draws.
        output_dir: Keeps the trajectories, the state of training, ``update_rule.safetensors``,
            ``value_function.safetensors`` and ``adapter.safetensors``; None keeps nothing.
        resume: Continue what an interrupted run left in ``output_dir``; the result is the same bit for bit.
        watcher: Notified of progress; by default a bar on the terminal.

    Returns:
        The result; the tuned phi is in the model.

    Raises:
        ValueError: A number is out of range.
        BudgetError: ``queries`` are too few, or more than the metric's own budget has left.
        MetricError: The metric failed; finished work is in ``output_dir``.
        FileFormatError: ``output_dir`` holds another run, or holds one and ``resume`` is False.
    """
    settings = settings or AlgorithmS1()
    check_integer(0, queries=queries, seed=seed)
    check_above(0, lr=lr)
    deviates(guard_confidence)  # refuses what is out of range
    iterations = settings.iterations(queries // task.metric.repeats)
    if queries > task.metric.ledger.left:
        raise BudgetError(
            f"{counted(queries, 'query')} requested, {task.metric.ledger.left} left in the metric's own budget"
        )
    identity: dict[str, Any] = {}
    if output_dir is not None:
        identity = {"learned": repr(settings), "lr": lr, "iterations": iterations, **identity_of_task(task, seed)}
    folder = RunFolder(output_dir, identity)
    with folder.writing(resume, task.adapter.model), watched(watcher, task.metric.name, queries) as shown:
        with folder.counted(task.metric, queries) as cached:
            store, ledger, judged = folder.trajectories, cached.ledger, task.judged_by(cached)
            if len(store):
                ledger.spend("collect", store.queries * task.metric.repeats)
            learned = settings.meta_train(
                task,
                iterations=iterations,
                seed=seed,
                store=store,
                checkpoint=None if folder.path is None else folder.path / CHECKPOINT,
                watcher=shown,
            )
            before = ledger.spent
            shown.stage("meta-test")
            path = settings.meta_test(judged, learned.rule, task.origin(), seed=seed)
            loss_only = finetune(task, LossStep(lr), settings.steps, seed)[-1]
            ends = {"start": task.origin(), "loss_finetune": loss_only, "learned": path[-1]}
            outcome = judge_ends(judged, ends, list(store), guard_confidence, shown)
        result = LearnedResult(
            **outcome,
            queries=dict(ledger.spent_on),
            queries_per_start=ledger.spent - before,
            path=path,
            learned=learned,
        )
        task.adapter.set_phi(ends[result.chosen])
        if folder.path is not None:
            learned.rule.save(folder.path / "update_rule.safetensors")
        folder.keep(task, learned.f, {})
        shown.outcome(f"{result.metric} {result.before:.4f} -> {result.after:.4f}")
        shown.done()
    return result
