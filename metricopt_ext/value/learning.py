"""What a value function is trained for (paper, section 3.1, Eq. 2), and its training by batches that mix all tasks.

Each of M members of an ensemble has its own batch of B points. A loss is a mean over the member's batch, summed over
the members: no member's gradient depends on the others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import softplus

from metricopt_ext.utils.checks import check_at_least, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import NeuralValueFunction, ValueFunction

# Fisher's ratio from which two costs count as different.
CUTOFF = 2.0

RESOLUTION = 0.1  # sigma of labels that are all equally certain, in standard deviations of the costs


class Triplets(NamedTuple):
    """One positive t_p and one negative t_n for every anchor t.

    Attributes:
        positive: Index of t_p in the batch, ``B x M``.
        negative: Index of t_n in the batch, ``B x M``.
        valid: Whether the anchor has both, ``B x M``; if not, the indices mean nothing.
    """

    positive: Tensor
    negative: Tensor
    valid: Tensor


def regression_loss(predicted: Tensor, cost: Tensor, sigma: Tensor) -> Tensor:
    """Return L_regress = (sum_t |f(phi_t) - m_t| / sigma_t) / (sum_t 1 / sigma_t), a scalar (Eq. 2).

    Args:
        predicted: f(phi_t), ``B x M``.
        cost: Labels m_t, ``B x M``.
        sigma: Their standard deviations, above 0, ``B x M``; only ratios matter.
    """
    weight = 1 / sigma
    return ((weight * (predicted - cost).abs()).sum(0) / weight.sum(0)).sum()


def fisher_ratio(cost: Tensor, sigma: Tensor) -> Tensor:
    """Return r_tt' = (m_t - m_t')^2 / (sigma_t^2 + sigma_t'^2), ``B x B x M``: how certainly two labels differ.

    Args:
        cost: Labels, ``B x M``.
        sigma: Their standard deviations in units of the cost, above 0, ``B x M``.
    """
    return (cost[:, None] - cost) ** 2 / (sigma[:, None] ** 2 + sigma**2)


def triplets_of(ratio: Tensor, far: Tensor, near: Tensor) -> Triplets:
    """Take as t_p the member of P_t (r < 2, not t itself) with the largest ``far``, as t_n that of N_t by ``near``.

    Distances of embeddings, and these negated, give the hardest triplets: the farthest positive, the nearest negative.
    Random numbers draw both uniformly.

    Args:
        ratio: Fisher's ratios, ``B x B x M``, anchors first.
        far: A number for each pair, ``B x B x M``.
        near: Another.
    """
    alike = ratio < CUTOFF
    itself = torch.eye(len(ratio), dtype=torch.bool, device=ratio.device)[..., None]
    positive, negative = far.where(alike & ~itself, -torch.inf).max(1), near.where(~alike, -torch.inf).max(1)
    return Triplets(positive.indices, negative.indices, valid=positive.values.isfinite() & negative.values.isfinite())


def ordinal_loss(features: Tensor, triplets: Triplets) -> Tensor:
    """Return L_oe = mean_t log(1 + exp(-(D_t,tn - D_t,tp))) over the valid anchors, a scalar (Eq. 2).

    D is the distance of embeddings; where it is 0, so is its gradient. A member without any valid anchor adds 0.

    Args:
        features: Embeddings, ``B x M x e``.
        triplets: The anchors' positives and negatives.
    """
    indices = (index[..., None].expand_as(features) for index in triplets[:2])
    to_positive, to_negative = (vector_norm(features - features.gather(0, index), dim=-1) for index in indices)
    loss = softplus(to_positive - to_negative) * triplets.valid
    return (loss.sum(0) / triplets.valid.sum(0).clamp(min=1)).sum()


@dataclass(frozen=True)
class Objective:
    """L_v = gamma L_regress + beta L_oe (Eq. 2, where beta is 1).

    L_regress is in units of the value function's ``cost_std``, so the same weights suit any metric.

    Attributes:
        gamma: Weight of the regression term.
        beta: Weight of the ordinal embedding term; 0 leaves it out.
        hardest: Whether triplets are the hardest of a batch, as printed, or drawn from all.
    """

    gamma: float = 10.0
    beta: float = 0.1
    hardest: bool = False

    def __post_init__(self) -> None:
        """Reject weights below 0.

        Raises:
            ValueError: A weight is below 0; the message gives its value.
        """
        check_at_least(0, gamma=self.gamma, beta=self.beta)

    def __call__(
        self, f: NeuralValueFunction, phi: Tensor, cost: Tensor, sigma: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            f: The value function.
            phi: What each member is given, ``B x M x d``.
            cost: Labels, ``B x M``.
            sigma: Their standard deviations in units of the cost, ``B x M``.
            generator: Source of the draws of triplets.
        """
        features = f.features(phi)
        loss = self.gamma * regression_loss(f.predict(features), cost, sigma) / f.cost_std
        if self.beta:
            ratio = fisher_ratio(cost, sigma)
            if self.hardest:
                embedded = features.detach()
                far = vector_norm(embedded[:, None] - embedded, dim=-1)
                near = -far
            else:
                far = near = -torch.rand(ratio.shape, generator=generator).to(ratio)
            loss = loss + self.beta * ordinal_loss(features, triplets_of(ratio, far, near))
        return loss


def comparable_sigma(data: Observations) -> Tensor:
    """Return sigma in units of the cost, ``n``, as Fisher's ratio needs it.

    If all labels are equally certain, sigma has no unit; differences are then judged against the labels' spread.

    Args:
        data: The labelled points.
    """
    if data.sigma.min() < data.sigma.max():
        return data.sigma
    return torch.full_like(data.sigma, RESOLUTION * float(data.cost.std()))


# Fits an ensemble to labelled points, given the fold of each, ``n``, the number of folds, and a seed: ``folds`` members
# or a multiple of it, of which member m must not see the trajectories of fold ``m % folds``.
Learner = Callable[[Observations, Tensor, int, int], ValueFunction]


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
        for _ in range(self.iterations):
            drawn = [points[torch.randint(len(points), (self.batch_size,), generator=rng)] for points in seen]
            batch = torch.stack(drawn, dim=1)
            loss = self.objective(f, data.phi[batch], data.cost[batch], sigma[batch], rng)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return f.eval()
