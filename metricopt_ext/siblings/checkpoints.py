"""A network at checkpoints of its training by the original loss, and the loop that trains it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.modes import evaluating


def train(
    task: TrainingTask, loss: Callable[[nn.Module, Any], Tensor], *, steps: int, lr: float, seed: int
) -> Iterator[float]:
    """Train a task's model in place by Adam with a one-cycle schedule, and yield the loss of each step after it.

    Args:
        task: What is trained; the model is left in whatever mode it is in.
        loss: ``loss(model, batch) -> scalar``.
        steps: Number of steps, at least 1.
        lr: Peak rate, above 0.
        seed: Seed of the batches.

    Raises:
        FloatingPointError: The loss is no longer finite.
        DataError: It never was, as the model's scores are NaN.
    """
    optimizer = torch.optim.Adam(task.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for step in range(steps):
        batch = task.batches(seed, 0, step)
        value = loss(task.model, batch)
        if not torch.isfinite(value):
            task.predicted(batch)  # raises where the inputs are to blame
            raise FloatingPointError(f"the loss is {value.item()} at step {step}; lower the rate")
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        yield value.item()


@dataclass(frozen=True)
class Checkpoints:
    """Where a network's training by the original loss is looked at; the source of ReLoss's G_M (section 4.3).

    Attributes:
        steps: Training steps.
        lr: Peak rate of Adam, with a one-cycle schedule.
        count: K checkpoints, the untrained and the finished network among them. The k-th is after
            ``steps * ((k - 1) / (K - 1))^2`` steps, as the metric moves most at first; the paper does not say where.
    """

    steps: int = 1000
    lr: float = 0.003
    count: int = 16

    def __post_init__(self) -> None:
        """Reject what is out of range.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        check_integer(1, steps=self.steps)
        check_integer(2, count=self.count)
        check_above(0, lr=self.lr)

    def due(self) -> list[int]:
        """Return the numbers of steps after which the network is looked at, ``count``, from 0 to ``steps``."""
        return [round(self.steps * (k / (self.count - 1)) ** 2) for k in range(self.count)]

    def models(self, task: TrainingTask, seed: int) -> Iterator[nn.Module]:
        """Train a network by the task's loss and yield it at each checkpoint, in evaluation mode.

        Args:
            task: Its ``build`` makes the network, of which all weights are trained; without one, a copy of its model
                is trained from where it stands, as far as the task says.
            seed: Seed of the network and of the batches.
        """
        own = task.untrained(seed) if task.build else task.copied()
        own.model.train()
        losses, done = train(own, own.loss, steps=self.steps, lr=self.lr, seed=seed), 0
        for due in self.due():
            for _ in range(due - done):
                next(losses)
            done = due
            with evaluating(own.model):
                yield own.model
