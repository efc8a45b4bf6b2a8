"""Learners, which fit value functions to observations."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from metricopt_ext.utils.checks import check_above, check_at_least, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.objective import Objective, comparable_sigma
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import NeuralValueFunction, ValueFunction


class Learner(Protocol):
    """Fits an ensemble; member m must not see the trajectories of fold ``m % folds``."""

    def __call__(self, data: Observations, fold: Tensor, folds: int, seed: int) -> ValueFunction:
        """Return the fitted f, with ``folds`` members or a multiple of it.

        Args:
            data: The observed points.
            fold: The fold of each point, ``n``, the same along a trajectory.
            folds: Number of folds, at least 2.
            seed: Seed of initial weights and mini-batches.
        """
        ...


@dataclass(frozen=True)
class NeuralLearner:
    """Fits `NeuralValueFunction` by AdamW with a one-cycle rate on batches that mix all tasks.

    Batches of one trajectory, as in Algorithm 1, would let BatchNorm normalise away what differs between tasks.

    Attributes:
        iterations: Steps of AdamW.
        batch_size: Observed points per step and member.
        nets: Members for each fold, which differ in their initial weights and their batches.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay; strong, because there are only a few hundred points.
        objective: What is minimised; by default Eq. 2's regression alone.
    """

    iterations: int = 400
    batch_size: int = 256
    nets: int = 2
    lr: float = 1e-2
    weight_decay: float = 1.0
    objective: Objective = field(default=Objective(gamma=1.0, beta=0.0))

    def __post_init__(self) -> None:
        """Check the values that a fit would choke on.

        Raises:
            ValueError: A value is out of range; the message gives it.
        """
        check_integer(1, iterations=self.iterations, batch_size=self.batch_size, nets=self.nets)
        check_above(0, lr=self.lr)
        check_at_least(0, weight_decay=self.weight_decay)

    @classmethod
    def offline(cls) -> "NeuralLearner":
        """Return Reptile's baseline in the paper's Fig. 3b: Eq. 2 on all trajectories stored offline."""
        return cls(iterations=2000, batch_size=64, nets=1, objective=Objective(gamma=10.0, beta=1.0))

    def __call__(self, data: Observations, fold: Tensor, folds: int, seed: int) -> ValueFunction:
        """Minimise the objective for all members at once."""
        rng = generator(seed, "fit")
        f = NeuralValueFunction.drawn(data.phi.shape[-1], folds * self.nets, rng).to(data.phi)
        f.standardise(data.cost)
        sigma = comparable_sigma(data)
        seen = [(fold != member % folds).nonzero().squeeze(1) for member in range(folds * self.nets)]
        optimizer = torch.optim.AdamW(f.parameters(), self.lr, weight_decay=self.weight_decay, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=self.iterations)
        f.train()
        for _ in range(self.iterations):
            batch = torch.stack(
                [points[torch.randint(len(points), (self.batch_size,), generator=rng)] for points in seen], dim=1
            )
            loss = self.objective(f, data.phi[batch], data.cost[batch], sigma[batch], rng)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return f.eval()
