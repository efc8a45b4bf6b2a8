"""What a relational loss learns from: batches of random outputs and of a network's at its checkpoints, with costs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.checkpoints import Checkpoints
from metricopt_ext.siblings.class_labels import class_labels
from metricopt_ext.siblings.random_batches import first_defined
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.utils.checks import check_above, check_finite, check_integer
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator

PURPOSE = "reloss"
STREAM = 1  # of the batches that checkpoints predict; training has stream 0


@dataclass(frozen=True, eq=False)
class RankedBatches:
    """Batches as a relational loss sees them.

    Attributes:
        probabilities: The true class's probability of each example, ``N x n``.
        slopes: The length of that probability's gradient in the example's logits, ``N x n``.
        costs: Each batch's cost by the metric, ``N``; lower is better.
    """

    probabilities: Tensor
    slopes: Tensor
    costs: Tensor

    def split(self, first: int) -> tuple["RankedBatches", "RankedBatches"]:
        """Return the first batches, all if there are fewer, and the others."""
        return self.take(slice(first)), self.take(slice(first, None))

    def take(self, rows: slice | Tensor) -> "RankedBatches":
        """Return some of the batches, by a slice or by their numbers."""
        return RankedBatches(self.probabilities[rows], self.slopes[rows], self.costs[rows])


def true_class_log_probability(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the logarithm of the probability that scores give to the true class; its negative is cross-entropy.

    Args:
        scores: Logits, ``n`` for one of two classes, or ``n x c``.
        labels: ``n`` integers in 0..c-1.

    Returns:
        ``n``, at most 0.

    Raises:
        DataError: The shapes are others, the scores are no floats, or a label is no class's number.
    """
    labels = class_labels(scores, labels)
    if scores.dim() == 1:
        return F.logsigmoid(torch.where(labels == 1, scores, -scores))
    return scores.log_softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return a precision in which batches can be ranked: half ones tell too few values apart."""
    return torch.promote_types(dtype, torch.float32)


def slope_in_logits(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the length of the gradient of the true class's probability in the logits of each example, ``n``.

    It is p (1 - p) of a single logit, and p |e - q| of several, with the classes' probabilities q and the true one's e.

    Args:
        scores: Logits, ``n`` for one of two classes, or ``n x c``.
        labels: ``n`` integers.
    """
    if scores.dim() == 1:
        return scores.sigmoid() * (-scores).sigmoid()
    probabilities = scores.softmax(1)
    true = F.one_hot(class_labels(scores, labels), scores.shape[1]).to(scores)
    length: Tensor = (true * probabilities).sum(1) * (true - probabilities).norm(dim=1)
    return length


@dataclass(frozen=True)
class RandomOutputs:
    """The generator G_R (section 4.3): logits and labels that are drawn uniformly, without any data.

    Attributes:
        scale: Logits are uniform in [-scale, scale].
        matched: Whether each batch draws a share, uniform in [0, 1], of labels that are the class of the highest score,
            the others being uniform over the classes, so that accuracy covers its range. With labels that are all
            uniform, as the paper's words may be read too, every batch is near chance.
    """

    scale: float = 5.0
    matched: bool = True

    def __post_init__(self) -> None:
        """Reject what is out of range.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        check_above(0, scale=self.scale)

    def draw(self, size: int, outputs: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return scores, ``n`` or ``n x c``, and labels, ``n``, of one batch.

        Args:
            size: n.
            outputs: Logits per example: 1, or the number c of classes.
            rng: Source of the draws, on the CPU.
        """
        scores = (2 * torch.rand((size, outputs), generator=rng) - 1) * self.scale
        if outputs == 1:
            scores = scores.squeeze(1)
        labels = torch.randint(max(2, outputs), (size,), generator=rng)
        if not self.matched:
            return scores, labels
        best = (scores > 0).long() if outputs == 1 else scores.argmax(1)
        share = torch.rand(1, generator=rng)
        return scores, torch.where(torch.rand(size, generator=rng) < share, best, labels)


@dataclass(frozen=True)
class BatchSource:
    """Where the batches that a relational loss learns from come from, and how many there are.

    Each is asked for once, whichever steps use it: with as many as steps times batches in a step, Algorithm 1 is as
    printed, which draws anew in each.

    Attributes:
        training: Batches to learn from, one query of the batch metric each.
        heldout: Batches to choose the loss by, likewise.
        random: p, the probability that a batch is random; the others are a network's outputs on training data. The
            paper does not give it.
        outputs: How random batches are drawn.
        checkpoints: Where the network is looked at.
    """

    training: int = 4096
    heldout: int = 512
    random: float = 0.5
    outputs: RandomOutputs = field(default_factory=RandomOutputs)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    def __post_init__(self) -> None:
        """Reject what is out of range.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        check_integer(2, training=self.training, heldout=self.heldout)
        check_finite(random=self.random)
        if not 0 <= self.random <= 1:
            raise ValueError(f"random is {self.random}; it must be in [0, 1]")

    def are_random(self, seed: int) -> Tensor:
        """Return which batches are random ones, ``training + heldout`` booleans."""
        return torch.rand(self.training + self.heldout, generator=generator(seed, "random or not")) < self.random

    def draw(
        self, task: TrainingTask, seed: int, callback: Callback | None = None
    ) -> tuple[RankedBatches, RankedBatches]:
        """Draw the batches and ask for their costs; ``training + heldout`` queries of the task's batch metric.

        A random batch on which the metric fails, as a class is missing, is drawn again.

        Args:
            task: What the network is trained by, and the metric.
            seed: Seed of all draws but dropout's.
            callback: Notified of progress.

        Returns:
            The training and the held-out batches.

        Raises:
            DataError: The task's scores are no logits, or NaN.
            FloatingPointError: The network's training diverged.
            MetricError: The metric failed where no class is missing, or on too many random batches in a row.
        """
        callback, are_random = callback or Callback(), self.are_random(seed)
        with evaluating(task.model), torch.no_grad():
            like, labels = task.predicted(task.batches(seed, STREAM, 0))
        like = like.to(at_least_single(like.dtype))
        size, outputs = len(labels), 1 if like.dim() == 1 else like.shape[1]
        probabilities, slopes = like.new_empty(2, len(are_random), size)
        costs = like.new_empty(len(are_random))

        def ask(scores: Tensor, labels: Tensor) -> float:
            return task.batch_metric.cost(scores, labels, PURPOSE)

        def keep(row: int, scores: Tensor, labels: Tensor, cost: float) -> None:
            probabilities[row] = true_class_log_probability(scores, labels).exp()
            slopes[row] = slope_in_logits(scores, labels)
            costs[row] = cost

        def drawn(row: int) -> Iterator[tuple[Tensor, Tensor]]:
            rng = generator(seed, "random outputs", row)
            while True:
                scores, of_random = self.outputs.draw(size, outputs, rng)
                yield scores.to(like), of_random.to(labels.device)

        callback.stage("random outputs")
        booked: dict[str, Any] = {"classes": max(2, outputs), "ledger": task.batch_metric.ledger}
        for row in are_random.nonzero().flatten().tolist():
            keep(row, *first_defined(drawn(row), ask, **booked))
        rows, count = (~are_random).nonzero().flatten().tolist(), self.checkpoints.count
        for k, model in enumerate(self.checkpoints.models(task, seed) if rows else ()):
            callback.stage(f"outputs of checkpoint {k + 1} of {count}")
            with torch.no_grad():
                for row in rows[k::count]:
                    scores, true = task.predicted(task.batches(seed, STREAM, row), model)
                    scores = scores.to(like.dtype)
                    keep(row, scores, true, ask(scores, true))
        return RankedBatches(probabilities, slopes, costs).split(self.training)
