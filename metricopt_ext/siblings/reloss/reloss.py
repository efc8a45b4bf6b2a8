"""Relational Surrogate Loss Learning (Huang et al., 2022): train by a loss that ranks as the metric does."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.runtime.progress import Callback, told
from metricopt_ext.siblings.checkpoints import train
from metricopt_ext.siblings.learned_metric import check_metric
from metricopt_ext.siblings.reloss.ranked_batches import BatchSource, at_least_single, true_class_log_probability
from metricopt_ext.siblings.reloss.relational_loss import RelationalLoss, RelationalTraining
from metricopt_ext.siblings.sibling import Sibling
from metricopt_ext.siblings.training import History, TrainingTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.modes import evaluating


@dataclass(frozen=True)
class ReLoss(Sibling):
    """Learn a relational loss once (Algorithm 1), then train the model by it as it is (section 4.3, usage).

    Attributes:
        cross_entropy: Whether cross-entropy is added to the learned loss, with weight 1 each, as the paper recommends
            (Table 10).
        source: What the loss is learned from, one query of the batch metric for each batch.
        training: How it is learned.
        begin: A loss that was learned before, on this task or another, instead of learning one; it is not changed.
        steps: Steps of the model.
        lr: Peak rate of Adam for the model, with a one-cycle schedule.
        evals: Queries of the metric of the model, spread evenly over its steps, the last at their end; they decide
            nothing.
        records: About how many points of the history of the model's loss are kept.
    """

    cross_entropy: bool = True
    source: BatchSource = field(default_factory=BatchSource)
    training: RelationalTraining = field(default_factory=RelationalTraining)
    begin: RelationalLoss | None = field(default=None, compare=False, repr=False)
    steps: int = 1000
    lr: float = 0.003
    evals: int = 0
    records: int = 200

    def __post_init__(self) -> None:
        """Reject what is out of range.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        check_integer(1, steps=self.steps, records=self.records)
        check_integer(0, evals=self.evals)
        check_above(0, lr=self.lr)
        if self.evals > self.steps:
            raise ValueError(f"evals is {self.evals}; it must be at most steps = {self.steps}")
        if self.begin is not None and self.training.absolute and not self.begin.absolute:
            raise ValueError(
                "absolute is True, but begin, which is not learned anew, is a loss without absolute values"
            )

    def check(self, task: TrainingTask) -> None:
        """Refuse scores that are no logits, and a loss of another metric.

        Raises:
            DataError: The scores are neither ``n`` nor ``n x c``, or NaN, or a label is no class's number.
            ConfigError: ``begin`` does not fit the task.
            AdapterError: The weights are of float16.
        """
        task.check_precision()
        with evaluating(task.model), torch.no_grad():
            true_class_log_probability(*task.predicted(task.batches(0, 0, 0)))
        if self.begin is not None:
            check_metric("the loss to begin with ranks by", self.begin, task.batch_metric)

    def run(self, task: TrainingTask, seed: int, callback: Callback) -> tuple[RelationalLoss, History]:
        """Learn the loss, unless there is one, and train the model by it.

        Returns:
            The loss, and the history: ``"spearman"``, ``"objective"`` and ``"penalty"`` of learning it, see
            `RelationalTraining.learn`; ``"loss"``, what the model descends; ``"metric"``, the ``evals`` values of its
            metric.
        """
        absolute = self.training.absolute if self.begin is None else self.begin.absolute
        loss = RelationalLoss(task.batch_metric.name, absolute, task.batch_metric.identity)
        loss = loss.to(task.device, at_least_single(task.parameters()[0].dtype))
        history: History = {}
        if self.begin is not None:
            loss.load_state_dict(self.begin.state_dict())
        else:
            parts = self.source.draw(task, seed, callback)
            history |= self.training.learn(loss, *parts, seed=seed, callback=callback)
        history |= self.descend(task, loss, seed, callback)
        return loss, history

    def descend(self, task: TrainingTask, loss: RelationalLoss, seed: int, callback: Callback) -> History:
        """Train the task's model in place by a learned loss, which stays as it is."""
        every = max(1, self.steps // self.records)
        judged = {self.steps * (i + 1) // self.evals - 1 for i in range(self.evals)}
        losses: list[tuple[int, float]] = []
        metric: list[tuple[int, float]] = []
        loss.requires_grad_(False)
        like = next(loss.parameters())

        def total(model: nn.Module, batch: Any) -> Tensor:
            true = true_class_log_probability(*task.predicted(batch))
            learned = loss.of_probabilities(true.exp().to(like.dtype))
            return learned - true.mean() if self.cross_entropy else learned

        values = train(task, total, steps=self.steps, lr=self.lr, seed=seed)
        for step, value in zip(told(range(self.steps), callback, "ReLoss, the model"), values, strict=True):
            if step % every == 0 or step == self.steps - 1:
                losses.append((step, value))
            if step in judged:
                metric.append((step, task.metric.evaluate(task.model, "history").value))
        loss.requires_grad_(True)
        return {name: points for name, points in (("loss", losses), ("metric", metric)) if points}
