"""Meta-trains value functions by first-order Reptile (paper, section 3.1; Algorithm 1, lines 1-8)."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence

from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.learning import Objective, comparable_sigma
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import NeuralValueFunction

# Makes the optimizer of one inner loop, without any history, from the parameters.
InnerOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

SGD = partial(torch.optim.SGD, lr=0.005)  # Algorithm 1, line 5
ADAMW = partial(torch.optim.AdamW, lr=5e-3, weight_decay=1.0, fused=True)


@dataclass(frozen=True)
class ReptileLearner:
    """Fits `NeuralValueFunction` by Reptile on meta-batches that mix tasks; a `learning.Learner`.

    Called, it meta-trains f on all tasks at hand (Algorithm 1); `adapt` adapts f to each task as its metrics arrive
    (Algorithm S1).

    A task is a trajectory, and any task so far may be drawn again. Batches of one trajectory each, as in Algorithm 1,
    would let BatchNorm normalise away what differs between tasks. Over mixed batches Reptile amounts to a slow
    average of the weights.

    Attributes:
        iterations: Meta-iterations, each with one meta-batch per member; the tasks are taken in random order, again and
            again. None takes each task once.
        tasks: Tasks in a meta-batch; all that the member may see, if those are fewer.
        points: Points drawn from each of them, without repetition if there are enough; None draws as many as the
            longest task has.
        inner: Optimizer of the inner loop, created anew in every meta-iteration.
        inner_steps: Its steps, all on the same meta-batch.
        objective: What they minimise.
        standardise: Whether f predicts standardised costs internally; otherwise gamma weighs raw costs.
        adapted: Whether to return the weights w~ of the last inner loop (line 8) instead of the meta-weights w.
    """

    iterations: int | None = 120
    tasks: int = 32
    points: int | None = 4
    inner: InnerOptimizer = ADAMW
    inner_steps: int = 5
    objective: Objective = field(default=Objective())
    standardise: bool = True
    adapted: bool = False

    def __post_init__(self) -> None:
        """Check the values that a fit would choke on.

        Raises:
            ValueError: A value is out of range; the message gives it.
        """
        numbers = {name: getattr(self, name) for name in ("iterations", "tasks", "points", "inner_steps")}
        check_integer(1, **{name: value for name, value in numbers.items() if value is not None})

    @classmethod
    def paper(cls) -> "ReptileLearner":
        """Return Algorithm 1 as printed: one step of plain SGD on each task, hard mining, raw costs, the last w~.

        It trains f badly, and more passes do not help. On a quadratic metric of three dimensions, with 30 tasks to
        learn from and five seeds, its held-out Spearman correlation was at most 0.42 on average with any number of
        updates from 30 to 2,400. With meta-batches of all tasks and 4 points of each, all else being equal, it was 0.97
        after 300 updates; and with the metric divided by 30, so that most of it lay in [0, 1], 0.86 after 300 and 0.95
        after 2,400.
        """
        return cls(
            iterations=None,
            tasks=1,
            points=None,
            inner=SGD,
            inner_steps=1,
            objective=Objective(gamma=10.0, beta=1.0, hardest=True),
            standardise=False,
            adapted=True,
        )

    def __call__(self, data: Observations, fold: Tensor, folds: int, seed: int) -> NeuralValueFunction:
        """Fit an ensemble; member m draws only from the tasks outside fold m.

        Args:
            data: The labelled points, n in all.
            fold: The fold of each point, ``n``, the same along a trajectory.
            folds: Number of folds and members.
            seed: Seed of initial weights, meta-batches and triplets.

        Returns:
            f in evaluation mode, with BatchNorm statistics over all points that a member may see.
        """
        rng = generator(seed, "reptile")
        f = NeuralValueFunction.drawn(data.phi.shape[-1], folds, rng).to(data.phi)
        if self.standardise:
            f.standardise(data.cost)
        tasks = tasks_of(data.trajectory)
        seen = fold[:, None] != torch.arange(folds)
        w = parameters_to_vector(f.parameters()).detach()
        for eta, drawn in self._schedule(seen[tasks[:, 0]].T, rng):
            w_tilde = self._inner_loop(f, data, points_of(tasks[drawn], self.points, rng), rng)
            w = torch.lerp(w, w_tilde, eta)
            vector_to_parameters(w.clone(), f.parameters())  # which the inner loop changes in place
        if self.adapted:
            vector_to_parameters(w_tilde, f.parameters())
        set_statistics(f, data.phi, seen)
        return f

    def adapt(self, f: NeuralValueFunction, w: Tensor, data: Observations, newest: int, rng: torch.Generator) -> Tensor:
        """Adapt f to the newest tasks from meta-weights on: w~ = w - alpha grad L_v(w) (Algorithm S1, line 5).

        The meta-batch is the newest tasks, and earlier ones until there are ``tasks``. BatchNorm's statistics are then
        taken over all labelled points, and costs standardised by them if f predicts standardised costs.

        Args:
            f: A single network, frozen, which is left with the adapted weights.
            w: The meta-weights, flat.
            data: The labelled points of all tasks so far, the newest last.
            newest: How many tasks are new.
            rng: Source of all draws.

        Returns:
            The adapted weights w~, flat.
        """
        vector_to_parameters(w.clone(), f.parameters())
        if self.standardise:
            f.standardise(data.cost)
        tasks = tasks_of(data.trajectory)
        new = torch.arange(len(tasks))[-newest:]
        earlier = torch.randperm(len(tasks) - newest, generator=rng)[: max(0, self.tasks - newest)]
        batch = points_of(tasks[torch.cat([new, earlier])][None], self.points, rng)
        w_tilde = self._inner_loop(f.train().requires_grad_(True), data, batch, rng)
        set_statistics(f, data.phi, torch.ones(len(data.phi), 1, dtype=torch.bool))
        f.set_domain(data.phi)
        return w_tilde

    def _inner_loop(self, f: NeuralValueFunction, data: Observations, batch: Tensor, rng: torch.Generator) -> Tensor:
        """Descend the objective from f's weights with a fresh optimizer; return the weights reached (line 5)."""
        optimizer, sigma = self.inner(f.parameters()), comparable_sigma(data)[batch]
        for _ in range(self.inner_steps):
            optimizer.zero_grad()
            self.objective(f, data.phi[batch], data.cost[batch], sigma, rng).backward()
            optimizer.step()
        return parameters_to_vector(f.parameters()).detach()

    def _schedule(self, seen: Tensor, rng: torch.Generator) -> Iterator[tuple[float, Tensor]]:
        """Yield eta, 1 at first and falling linearly towards 0, and the distinct tasks of a meta-batch, ``M x tasks``.

        Each meta-batch is drawn only when requested, as the points and the triplets come from the same stream.

        Args:
            seen: Whether a member may see a task, ``M x tasks``, bool.
            rng: Source of the draws.
        """
        own = seen.sum(1, keepdim=True)
        at_once = min(self.tasks, int(own.min()))
        per_pass = math.ceil(int(own.max()) / at_once)
        places = torch.arange(per_pass * at_once) % own  # where they do not divide evenly, a member starts again
        iterations = self.iterations or per_pass
        for iteration in range(iterations):
            if iteration % per_pass == 0:
                batches = _shuffled(seen, rng).gather(-1, places).split(at_once, dim=-1)
            yield 1 - iteration / iterations, batches[iteration % per_pass]


def tasks_of(trajectory: Tensor) -> Tensor:
    """Group points by their trajectory, ``n``; the points' indices, ``tasks x longest``, padded with -1."""
    _, task, count = trajectory.unique(return_inverse=True, return_counts=True)
    by_task = task.argsort(stable=True).split(count.tolist())
    return pad_sequence(list(by_task), batch_first=True, padding_value=-1)


def points_of(tasks: Tensor, points: int | None, rng: torch.Generator) -> Tensor:
    """Draw some points of each task; see `ReptileLearner`.

    Args:
        tasks: Points of each member's tasks as `tasks_of` returns them, ``M x tasks x longest``.
        points: Points of each task to draw; None for as many as the longest has.
        rng: Source of the draws.

    Returns:
        Indices of points, ``B x M``, where B is tasks times points.
    """
    own = tasks >= 0
    wanted = torch.arange(points or tasks.shape[-1]) % own.sum(-1, keepdim=True)  # a short task starts again
    return tasks.gather(-1, _shuffled(own, rng).gather(-1, wanted)).flatten(1).T


def _shuffled(wanted: Tensor, rng: torch.Generator) -> Tensor:
    """Return the places of what is wanted, ``... x n``, in random order; the others come last."""
    return torch.rand(wanted.shape, generator=rng).masked_fill(~wanted, 2.0).argsort(-1)


@torch.no_grad()
def set_statistics(f: NeuralValueFunction, phi: Tensor, seen: Tensor) -> None:
    """Put f into evaluation mode, with BatchNorm's statistics taken exactly over each member's points.

    In evaluation mode a member then computes what training mode would over all of its points as one batch.

    Args:
        f: The value function.
        phi: ``n x d``.
        seen: Whether a point belongs to a member, ``n x M``, bool.
    """
    f.eval()
    share = (seen / seen.sum(0))[..., None]
    h = phi[:, None].expand(-1, f.members_count, -1)
    for linear, norm in zip(f.linears, f.norms, strict=True):
        h = linear(h)
        mean = (share * h).sum(0)
        variance = (share * (h - mean) ** 2).sum(0)
        norm.running_mean, norm.running_var = mean.flatten(), variance.flatten()
        h = norm(h.flatten(1)).view_as(h).relu()
