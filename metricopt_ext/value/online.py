"""Reptile on the fly: f is adapted to each task when its metrics arrive (Algorithm 1, lines 5-6; S1, lines 5 and 7)."""

from functools import partial

import torch
from torch import Tensor

from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.objective import comparable_sigma
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.reptile import (
    ReptileLearner,
    Tasks,
    Weights,
    export_weights,
    import_weights,
    inner_loop,
    interpolate,
    set_statistics,
)
from metricopt_ext.value.value_function import NeuralValueFunction


class OnlineReptile:
    """A value function that is meta-trained while its tasks arrive.

    Args:
        learner: The inner loop and what a meta-batch is: the newest tasks, and earlier ones until there are
            ``learner.tasks``, ``learner.points`` of each. ``iterations``, ``passes`` and ``adapted`` are not used.
        dim: Dimension d of phi.
        seed: Seed of the weights and of all draws.

    Attributes:
        f: The value function, with the meta-weights w_v at first and with the adapted ones w~ after each `adapt`.
        meta_weights: w_v.
    """

    def __init__(self, learner: ReptileLearner, dim: int, seed: int) -> None:
        self.learner, self.seed = learner, seed
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator(seed, "online reptile").initial_seed())
            self.f = NeuralValueFunction(dim, 1)
        self.f.eval().requires_grad_(False)
        self.meta_weights: Weights = export_weights(self.f)

    def adapt(self, data: Observations, newest: int, iteration: int) -> None:
        """Adapt f to the newest tasks from the meta-weights on: w~ = w_v - alpha grad L_v(w_v) (line 5).

        BatchNorm's statistics are then taken over all labelled points, and costs standardised by them if the learner
        does so.

        Args:
            data: The labelled points of all tasks so far, the newest last.
            newest: How many tasks are new.
            iteration: The meta-iteration, for the draws.
        """
        learner, f, rng = self.learner, self.f, generator(self.seed, "online reptile", iteration)
        import_weights(f, self.meta_weights)
        if learner.standardise:
            f.cost_mean.copy_(data.cost.mean())
            std = float(data.cost.std())
            f.cost_std.fill_(std if std > 0 else 1.0)  # costs that are all equal, or a single one
        batch = self._batch(data, newest, rng)
        sigma = comparable_sigma(data)

        def loss() -> Tensor:
            return learner.objective(f, data.phi[batch], data.cost[batch], sigma[batch], rng)

        f.train().requires_grad_(True)
        inner_loop(f, learner.inner, learner.inner_steps, partial(loss))
        f.requires_grad_(False)
        set_statistics(f, data.phi, torch.ones(len(data.phi), 1, dtype=torch.bool))
        f.set_domain(data.phi)

    def update(self, eta: float) -> None:
        """Move the meta-weights towards the adapted ones: w_v <- w_v + eta (w~ - w_v) (line 7)."""
        self.meta_weights = interpolate(self.meta_weights, export_weights(self.f), eta)

    def _batch(self, data: Observations, newest: int, rng: torch.Generator) -> Tensor:
        """Return indices of a meta-batch's points, ``B x 1``."""
        tasks = Tasks.of(data.trajectory, torch.ones(len(data.trajectory), 1, dtype=torch.bool))
        known = tasks.points.shape[0]
        new = torch.arange(known - newest, known)
        earlier = torch.randperm(known - newest, generator=rng)[: max(0, self.learner.tasks - newest)]
        return tasks.points_of(torch.cat([new, earlier])[None], self.learner.points, rng)

    def state_dict(self) -> dict[str, Tensor]:
        """Return f and the meta-weights, for a checkpoint."""
        weights = {f"meta.{i}": weight for i, weight in enumerate(self.meta_weights)}
        return {**{f"f.{name}": value for name, value in self.f.state_dict().items()}, **weights}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        self.f.load_state_dict({k.removeprefix("f."): v for k, v in state.items() if k.startswith("f.")})
        self.meta_weights = [state[f"meta.{i}"].clone() for i in range(len(self.meta_weights))]
