"""The loss of Relational Surrogate Loss Learning (Huang et al., 2022): it ranks batches as a metric does."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.runtime.progress import Callback, told
from metricopt_ext.siblings.learned_metric import metric_identity
from metricopt_ext.siblings.reloss.ranked_batches import RankedBatches, true_class_log_probability
from metricopt_ext.siblings.reloss.soft_spearman import soft_spearman, spearman
from metricopt_ext.siblings.training import History
from metricopt_ext.utils.checks import check_above, check_at_least, check_integer
from metricopt_ext.utils.files import content_of, module_of, read_tensors, write_tensors
from metricopt_ext.utils.seeding import generator

Gradient = Literal["probabilities", "logits"]
GRADIENTS: tuple[Gradient, ...] = ("probabilities", "logits")
FILE_FORMAT = "metricopt_ext/relational_loss/1"
WIDTH, LAYERS = 128, 4  # 33,409 parameters: section A.3's 33.4K, which Eq. 10's three layers would not have


class RelationalLoss(nn.Module):
    """The mean over a batch of a network of the true class's probability (Eq. 10): 1-128-128-128-1 with ELU between.

    It is the same for any number of classes, so a loss that was learned on one task can train on another.

    Args:
        metric: Name of the metric that it ranks by; a file keeps it.
        absolute: Whether it is the mean of the network's absolute values, as in the authors' code, so that no loss is
            below 0; a file keeps it.
        identity: The metric's `BatchMetric.identity`; a file keeps it. None if it is not known.
    """

    def __init__(self, metric: str = "", absolute: bool = False, identity: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.metric, self.absolute, self.identity = metric, absolute, identity
        widths = (1, *[WIDTH] * (LAYERS - 1), 1)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            scores: Logits, ``n`` for one of two classes, or ``n x c``.
            labels: ``n`` in 0..c-1.

        Raises:
            DataError: The shapes are others, or a label is no class's number.
        """
        return self.of_probabilities(true_class_log_probability(scores, labels).exp())

    def of_probabilities(self, probabilities: Tensor) -> Tensor:
        """Return the losses of batches, ``...``, from the true class's probability of their examples, ``... x n``."""
        hidden = probabilities.unsqueeze(-1)
        for layer in self.layers[:-1]:
            hidden = F.elu(layer(hidden))
        values: Tensor = self.layers[-1](hidden)
        return (values.abs() if self.absolute else values).mean((-2, -1))

    @torch.no_grad()
    def turn(self) -> None:
        """Let it rank the other way: negate it or, if that changes nothing, take 1 - p for p."""
        layer: nn.Linear = self.layers[0 if self.absolute else -1]  # type: ignore[assignment]
        if self.absolute:
            layer.bias.add_(layer.weight[:, 0])
            layer.weight.neg_()
        else:
            layer.weight.neg_()
            layer.bias.neg_()

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file; `load_relational_loss` reads it."""
        described = {"metric": self.metric, "absolute": self.absolute, "identity": self.identity}
        write_tensors(path, self.state_dict(), FILE_FORMAT, described)


def load_relational_loss(path: str | Path) -> RelationalLoss:
    """Read a loss that `RelationalLoss.save` wrote.

    Raises:
        FileFormatError: The file is corrupt or holds something else.
    """
    tensors, described = read_tensors(path, FILE_FORMAT)
    with content_of(path, "relational loss that it describes"):
        absolute = described["absolute"]
        if not isinstance(absolute, bool):
            raise ValueError(f"absolute is {absolute!r}")
        identity = metric_identity(described)
        loss = module_of(path, tensors, lambda: RelationalLoss(described["metric"], absolute, identity))
        return loss.to(next(iter(tensors.values())))


def gradient_penalty(losses: Tensor, inputs: Tensor, slopes: Tensor | None = None) -> Tensor:
    """Return (||gradient|| - 1)^2 for each batch (Eq. 8), ``N``, itself with a gradient.

    Args:
        losses: ``N``; each depends on its own row of inputs alone.
        inputs: What the losses were computed from, ``N x n``, requiring a gradient. The norm is that of a whole row:
            as Eq. 8 has it, for the loss of a batch and the gradient in all of its predictions.
        slopes: The lengths of the inputs' gradients in the logits, ``N x n``. With them the norm is that of the
            gradient in an example's logits, and the mean over examples is returned, as in the authors' code.
    """
    (gradient,) = torch.autograd.grad(losses.sum(), inputs, create_graph=True)
    if slopes is not None:
        return ((gradient * slopes).abs() - 1).square().mean(1)
    penalties: Tensor = (gradient.norm(dim=1) - 1).square()
    return penalties


@dataclass(frozen=True)
class RelationalTraining:
    """How a relational loss is learned from batches of known cost (Algorithm 1).

    Attributes:
        steps: Number of steps. The paper trains until convergence.
        batches: N, batches that are ranked in a step, at least 2; the time of a step grows with its square.
        lr: Adam's rate (A.2).
        weight_decay: Adam's weight decay (A.2).
        penalty: lambda, the gradient penalty's weight (Eq. 9), at least 0.
        steepness: Of the soft ranks; see `soft_spearman.soft_ranks`.
        checks: How often the correlation with the held-out batches' costs is measured; the best loss is returned.
        gradient: Whose norm is penalised: that in a batch's ``"probabilities"``, or that in the ``"logits"`` of each
            example, as in the authors' code, which has ``batches=256`` and ``absolute=True`` besides.
        absolute: See `RelationalLoss`; of a loss that is learned anew.
    """

    steps: int = 400
    batches: int = 64
    lr: float = 0.01
    weight_decay: float = 1e-4
    penalty: float = 10.0
    steepness: float = 5.0
    checks: int = 20
    gradient: Gradient = "probabilities"
    absolute: bool = False

    def __post_init__(self) -> None:
        """Reject what is out of range.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        if self.gradient not in GRADIENTS:
            raise ValueError(f"gradient is {self.gradient!r}; it must be one of {', '.join(GRADIENTS)}")
        check_integer(1, steps=self.steps, checks=self.checks)
        check_integer(2, batches=self.batches)
        check_above(0, lr=self.lr, steepness=self.steepness)
        check_at_least(0, weight_decay=self.weight_decay, penalty=self.penalty)

    def objective(self, loss: RelationalLoss, batches: RankedBatches) -> tuple[Tensor, Tensor]:
        """Return the two terms of Eq. 9, scalars: rho_S of losses and metric, and the mean penalty without lambda.

        The metric is the cost's negative, which is higher where it is better, so rho_S is to fall to -1.

        Args:
            loss: The loss.
            batches: N of them.
        """
        inputs = batches.probabilities.detach().requires_grad_(True)
        losses = loss.of_probabilities(inputs)
        penalties = gradient_penalty(losses, inputs, batches.slopes if self.gradient == "logits" else None)
        return -soft_spearman(losses, batches.costs, self.steepness), penalties.mean()

    def learn(
        self,
        loss: RelationalLoss,
        training: RankedBatches,
        heldout: RankedBatches,
        *,
        seed: int = 0,
        callback: Callback | None = None,
    ) -> History:
        """Train a loss in place, and leave it as it ranked the held-out batches best.

        It begins with the sign that ranks the first training batches in the cost's order, and is turned again where it
        ranks the held-out ones against it.

        Args:
            loss: The loss.
            training: What it learns from; each batch is used once before any is used again.
            heldout: What it is chosen by.
            seed: Seed of the order.
            callback: Notified of progress.

        Returns:
            ``"spearman"``, of the loss and the cost on the held-out batches, in [-1, 1], higher is better;
            ``"objective"`` and ``"penalty"``: Eq. 9 and the mean of Eq. 8 at these steps.

        Raises:
            FloatingPointError: The objective is no longer finite.
        """
        callback = callback or Callback()
        # Random weights rise with the metric as often as they fall. The penalty would keep them so: between the two
        # slopes of norm 1 lies one of 0.
        if self._spearman(loss, training.split(self.batches)[0]) < 0:
            loss.turn()
        optimizer = torch.optim.Adam(loss.parameters(), self.lr, weight_decay=self.weight_decay)
        history: dict[str, list[tuple[int, float]]] = {name: [] for name in ("spearman", "objective", "penalty")}
        best, kept = -2.0, loss.state_dict()
        checked = {self.steps * (i + 1) // self.checks - 1 for i in range(self.checks)} | {self.steps - 1}
        order = self._order(len(training.costs), seed)
        for step in told(range(self.steps), callback, "relational loss"):
            rows = order[step * self.batches : (step + 1) * self.batches].to(training.costs.device)
            rho, penalty = self.objective(loss, training.take(rows))
            objective = rho + self.penalty * penalty
            if not torch.isfinite(objective):
                raise FloatingPointError(f"the objective is {objective.item()} at step {step}; lower the rate")
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()
            if step not in checked:
                continue
            if (reached := self._spearman(loss, heldout)) < 0:  # absolute values may turn where the network crosses 0
                loss.turn()
                reached = self._spearman(loss, heldout)
            values = {"spearman": reached, "objective": objective.item(), "penalty": penalty.item()}
            for name, value in values.items():
                history[name].append((step, value))
            if reached > best:
                best, kept = reached, {name: value.clone() for name, value in loss.state_dict().items()}
        loss.load_state_dict(kept)
        return dict(history)

    @staticmethod
    @torch.no_grad()
    def _spearman(loss: RelationalLoss, data: RankedBatches) -> float:
        return spearman(loss.of_probabilities(data.probabilities), data.costs)

    def _order(self, size: int, seed: int) -> Tensor:
        """Return rows of the training data for all steps, ``steps * batches``: permutations, one after another."""
        needed = self.steps * self.batches
        rounds = range(-(-needed // size))
        return torch.cat([torch.randperm(size, generator=generator(seed, "order", i)) for i in rounds])[:needed]
