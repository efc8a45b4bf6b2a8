"""Meta-trains value functions by first-order Reptile (paper, section 3.1; Algorithm 1, lines 1-8)."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.objective import Objective, comparable_sigma, hardest_triplets, warn_of_collapse
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import NeuralValueFunction

Weights = list[Tensor]

# Fewer updates barely train f, see `ReptileLearner.paper`.
LEAST_UPDATES = 300


# Makes the optimizer of one inner loop, without any history, from the parameters.
InnerOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

SGD = partial(torch.optim.SGD, lr=0.005)  # Algorithm 1, line 5
ADAMW = partial(torch.optim.AdamW, lr=5e-3, weight_decay=1.0, fused=True)


@dataclass(frozen=True)
class ReptileLearner:
    """Fits `NeuralValueFunction` by Reptile on meta-batches that mix tasks; a `learners.Learner`.

    A task is a trajectory, and any task so far may be drawn again. Batches of one trajectory each, as in Algorithm 1,
    would let BatchNorm normalise away what differs between tasks. Over mixed batches Reptile amounts to a slow
    average of the weights.

    Attributes:
        iterations: Meta-iterations, each with one meta-batch per member, its tasks drawn anew; not used with `passes`.
        passes: Passes over the tasks to make instead, each taking every task once, in random order.
        tasks: Tasks in a meta-batch; all that the member may see, if those are fewer.
        points: Points drawn from each of them, without repetition if there are enough; None draws as many as the
            longest task has.
        inner: Optimizer of the inner loop, created anew in every meta-iteration.
        inner_steps: Its steps, all on the same meta-batch.
        objective: What they minimise.
        standardise: Whether f predicts standardised costs internally; otherwise gamma weighs raw costs.
        adapted: Whether to return the weights w~ of the last inner loop (line 8) instead of the meta-weights w.
    """

    iterations: int = 120
    passes: int | None = None
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
        check_integer(1, iterations=self.iterations, tasks=self.tasks, inner_steps=self.inner_steps)
        optional = {"passes": self.passes, "points": self.points}
        check_integer(1, **{name: value for name, value in optional.items() if value is not None})
        if self.points is not None and self.points * self.tasks < 2:
            raise ValueError(
                f"points is {self.points} and tasks is {self.tasks}; BatchNorm needs at least 2 points in a meta-batch"
            )

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
            passes=1,
            tasks=1,
            points=None,
            inner=SGD,
            inner_steps=1,
            objective=Objective(gamma=10.0, beta=1.0, miner=hardest_triplets),
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
        f = self._initialise(data, folds, rng)
        seen = fold[:, None] != torch.arange(folds)
        tasks = Tasks.of(data.trajectory, seen)
        sigma = comparable_sigma(data)

        def loss(batch: Tensor) -> Tensor:
            return self.objective(f, data.phi[batch], data.cost[batch], sigma[batch], rng)

        w = export_weights(f)
        for eta, drawn in self._schedule(tasks, rng):
            batch = tasks.points_of(drawn, self.points, rng)
            w_tilde = inner_loop(f, self.inner, self.inner_steps, partial(loss, batch))
            w = interpolate(w, w_tilde, eta)
            import_weights(f, w)
        if self.adapted:
            import_weights(f, w_tilde)

        set_statistics(f, data.phi, seen)
        warn_of_collapse(f, data.phi, data.cost)
        return f

    def _schedule(self, tasks: "Tasks", rng: torch.Generator) -> Iterator[tuple[float, Tensor]]:
        """Yield the meta learning rate eta, 1 at first and falling linearly towards 0, and the tasks of a meta-batch.

        Each meta-batch is drawn only when requested, as the points and the triplets come from the same stream.
        """
        if self.passes is None:
            for iteration in range(self.iterations):
                yield 1 - iteration / self.iterations, tasks.draw(self.tasks, rng)
            return
        iterations = self.passes * tasks.draws_per_pass(self.tasks)
        updates = iterations * self.inner_steps
        if updates < LEAST_UPDATES:
            enough = math.ceil(self.passes * LEAST_UPDATES / updates)
            warnings.warn(
                f"f gets only {updates} updates, and fewer than {LEAST_UPDATES} barely train it: set passes to {enough}"
                f" or more (it is {self.passes}), and let meta-batches mix many tasks (tasks is {self.tasks})",
                stacklevel=4,
            )
        batches = chain.from_iterable(tasks.draw_all(self.tasks, rng) for _ in range(self.passes))
        for iteration, drawn in enumerate(batches):
            yield 1 - iteration / iterations, drawn

    def _initialise(self, data: Observations, members: int, rng: torch.Generator) -> NeuralValueFunction:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rng.initial_seed())
            f = NeuralValueFunction(data.phi.shape[-1], members).like(data.phi)
        if self.standardise:
            f.cost_mean.copy_(data.cost.mean())
            f.cost_std.copy_(data.cost.std().clamp(min=1e-8))
        return f


@dataclass(frozen=True)
class Tasks:
    """The tasks (trajectories) that the members draw their meta-batches from.

    Attributes:
        points: Indices of each task's points, ``tasks x longest``, padded with 0.
        count: How many of them are its points, ``tasks``.
        seen: Whether a member may see a task, ``M x tasks``, bool.
    """

    points: Tensor
    count: Tensor
    seen: Tensor

    @classmethod
    def of(cls, trajectory: Tensor, seen: Tensor) -> "Tasks":
        """Group points by task.

        Args:
            trajectory: The task of each point, ``n``.
            seen: Whether a member may see a point, ``n x M``, the same along a trajectory.
        """
        _, task, count = trajectory.unique(return_inverse=True, return_counts=True)
        by_task = task.argsort(stable=True).split(count.tolist())
        points = pad_sequence(list(by_task), batch_first=True)
        return cls(points, count, seen[points[:, 0]].T)

    def draw(self, tasks: int, rng: torch.Generator) -> Tensor:
        """Draw distinct tasks for each member, ``M x tasks``; all that a member may see, if those are fewer."""
        return torch.multinomial(self.seen.float(), self._at_once(tasks), generator=rng)

    def draw_all(self, tasks: int, rng: torch.Generator) -> list[Tensor]:
        """Shuffle each member's tasks and divide them into meta-batches as `draw` returns them.

        Every task is in one of them. If they do not divide evenly, a member starts again with its first.
        """
        own = self.seen.sum(1, keepdim=True)  # M x 1
        keys = torch.rand(self.seen.shape, generator=rng)
        shuffled = keys.masked_fill(~self.seen, 2.0).argsort(-1)  # what the member may not see comes last
        at_once = self._at_once(tasks)
        places = torch.arange(self.draws_per_pass(tasks) * at_once) % own
        return list(shuffled.gather(-1, places).split(at_once, dim=-1))

    def draws_per_pass(self, tasks: int) -> int:
        """Return the number of meta-batches of `draw_all`."""
        return math.ceil(int(self.seen.sum(1).max()) / self._at_once(tasks))

    def _at_once(self, tasks: int) -> int:
        return min(tasks, int(self.seen.sum(1).min()))

    def points_of(self, drawn: Tensor, points: int | None, rng: torch.Generator) -> Tensor:
        """Draw some points of each task; see `ReptileLearner`.

        Args:
            drawn: The tasks of each member, ``M x tasks``.
            points: Points of each of them; None for as many as the longest task has.
            rng: Source of the draws.

        Returns:
            Indices of points, ``B x M``, where B is tasks times points.
        """
        count, longest = self.count[drawn][..., None], self.points.shape[1]
        keys = torch.rand(*drawn.shape, longest, generator=rng)
        shuffled = keys.masked_fill(torch.arange(longest) >= count, 2.0).argsort(-1)  # padding comes last
        wanted = torch.arange(points or longest) % count  # a short task starts again
        return self.points[drawn].gather(-1, shuffled.gather(-1, wanted)).flatten(1).T


def export_weights(f: NeuralValueFunction) -> Weights:
    """Return a copy of f's parameters; BatchNorm's running statistics are not among them."""
    return [parameter.detach().clone() for parameter in f.parameters()]


@torch.no_grad()
def import_weights(f: NeuralValueFunction, weights: Weights) -> None:
    """Copy weights that `export_weights` returned into f."""
    for parameter, weight in zip(f.parameters(), weights, strict=True):
        parameter.copy_(weight)


def interpolate(old: Weights, new: Weights, eta: float) -> Weights:
    """Return old + eta (new - old) (Algorithm 1, line 6)."""
    return [torch.lerp(a, b, eta) for a, b in zip(old, new, strict=True)]


def inner_loop(f: NeuralValueFunction, inner: InnerOptimizer, steps: int, loss: Callable[[], Tensor]) -> Weights:
    """Descend a loss of f from its current weights with a fresh optimizer; return the weights reached (line 5)."""
    optimizer = inner(f.parameters())
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    return export_weights(f)


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
        statistics = dict(norm.named_buffers())
        statistics["running_mean"].copy_(mean.flatten())
        statistics["running_var"].copy_(variance.flatten())
        h = norm(h.flatten(1)).view_as(h).relu()
