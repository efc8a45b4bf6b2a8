"""TuRBO, Bayesian optimization in a trust region, on BoTorch's parts."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from metricopt_ext.search.box import Box, check_package, drawn, sobol
from metricopt_ext.search.strategy import Batches, DirectState, SearchStrategy
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.seeding import generator, seeded_streams

LENGTH, SHORTEST, LONGEST = 0.8, 0.5**7, 1.6  # of the region's side in the unit box, when it starts, restarts and grows
SUCCESSES = 3  # batches in a row that improve, after which the side is doubled
IMPROVEMENT = 1e-3  # of the best cost's size: less is no improvement
MOVED = 20  # expected number of coordinates in which a candidate differs from the region's centre
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TuRBO(SearchStrategy):
    """TuRBO-1 (Eriksson et al., 2019, "Scalable Global Optimization via Local Bayesian Optimization").

    A Gaussian process (Matern 5/2, one length per coordinate) is fitted to the points of one trust region, a box around
    the best of them whose sides follow the lengths; each batch is Thompson-sampled from Sobol points in it. The region
    grows after successes, shrinks after failures, and starts anew, from new points, once it is too small. Which points
    it asks for does not depend on the budget. Constants are those of the paper and of its authors' code.

    Attributes:
        half_width: The search is confined to the start plus or minus this in each coordinate; above 0.
        batch: Points per batch, at least 1.
        initial: Points of each region before its first batch, the first region's start included; at least 2. The
            authors' 2 d would take up small budgets.
        candidates: Maximum number of points that a batch is chosen from, at least ``batch``; 100 d if that is less.
        iterations: Maximum number of L-BFGS steps of each fit, at least 1.
    """

    anytime: ClassVar[bool] = True
    half_width: float = 0.3
    batch: int = 8
    initial: int = 16
    candidates: int = 2000
    iterations: int = 50

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_above(0, half_width=self.half_width)
        check_integer(1, batch=self.batch, iterations=self.iterations)
        check_integer(2, initial=self.initial)
        check_integer(self.batch, candidates=self.candidates)

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget: the initial points, the best start among them, and one by the Gaussian process.

        The other starts are queries besides.
        """
        return self.initial + starts

    def begin(
        self,
        task: FinetuneTask,
        start: Tensor,
        queries: int,
        *,
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
    ) -> DirectState:
        """Begin a search (see `SearchStrategy`); a batch ends where the budget does.

        Raises:
            ImportError: The package botorch is missing.
        """
        check_package("botorch", "TuRBO")
        return DirectState(start, queries, partial(self._batches, seed), known)

    def _batches(self, seed: int, state: DirectState) -> Batches:
        box, seeds = Box(state.start, self.half_width), generator(seed, "turbo")
        x, y = box.middle, torch.tensor([state.start_cost], dtype=torch.float64)
        while state.left:  # one region after another
            new, costs = yield from box.proposed(sobol(box.dim, min(self.initial - len(x), state.left), drawn(seeds)))
            x, y, region = torch.cat([x, new]), torch.cat([y, costs]), Region(math.ceil(box.dim / self.batch))
            while state.left and len(x) > 1 and region.length >= SHORTEST:
                new = self._propose(x, y, region.length, drawn(seeds))[: state.left]
                before = float(y.min())
                new, costs = yield from box.proposed(new)
                x, y = torch.cat([x, new]), torch.cat([y, costs])
                region = region.after(float(y.min()) < before - IMPROVEMENT * abs(before))
            x, y = x[:0], y[:0]

    def _propose(self, x: Tensor, y: Tensor, length: float, seed: int) -> Tensor:
        """Return a batch, ``batch x d``, for points ``n x d`` in the unit box and their costs, ``n``."""
        from botorch.generation.sampling import MaxPosteriorSampling
        from gpytorch.settings import cholesky_max_tries

        dim, best = x.shape[1], x[y.argmin()]
        with seeded_streams(seed, CPU), warnings.catch_warnings(), cholesky_max_tries(9):
            warnings.simplefilter("ignore")  # of jitter, and of a fit that has taken all of its steps
            model = _fitted(x, y, self.iterations)
            scales = model.covar_module.base_kernel.lengthscale.detach().flatten()
            sides = length * scales / scales.log().mean().exp()  # a volume of length^d
            low, high = (best - sides / 2).clamp(0, 1), (best + sides / 2).clamp(0, 1)
            count = max(self.batch, min(100 * dim, self.candidates))
            spread = low + (high - low) * sobol(dim, count, seed)
            moved = torch.rand(count, dim) < min(1.0, MOVED / dim)
            moved[torch.arange(count), torch.randint(dim, (count,))] |= ~moved.any(1)
            points = torch.where(moved, spread, best)
            with torch.no_grad():
                chosen: Tensor = MaxPosteriorSampling(model, replacement=False)(points, num_samples=self.batch)
        return chosen


@dataclass(frozen=True)
class Region:
    """A trust region's side and what has happened since it last changed (Eriksson et al., 2019, section 2).

    Attributes:
        patience: Batches in a row without improvement after which the side is halved, at least 1.
        length: The side in the unit box.
        successes: Batches in a row that improved.
        failures: Batches in a row that did not.
    """

    patience: int
    length: float = LENGTH
    successes: int = 0
    failures: int = 0

    def after(self, improved: bool) -> "Region":
        """Return the region after one more batch."""
        successes, failures = (self.successes + 1, 0) if improved else (0, self.failures + 1)
        if successes == SUCCESSES:
            return Region(self.patience, min(2 * self.length, LONGEST))
        if failures == self.patience:
            return Region(self.patience, self.length / 2)
        return Region(self.patience, self.length, successes, failures)


def _fitted(x: Tensor, y: Tensor, iterations: int) -> Any:
    """Fit a Gaussian process to the negative, standardised costs."""
    from botorch.models import SingleTaskGP
    from botorch.optim.fit import fit_gpytorch_mll_scipy
    from gpytorch.constraints import Interval
    from gpytorch.kernels import MaternKernel, ScaleKernel
    from gpytorch.likelihoods import GaussianLikelihood
    from gpytorch.mlls import ExactMarginalLogLikelihood

    spread = float(y.std())
    target = (y.mean() - y) / (spread if spread > 0 else 1.0)
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=x.shape[1], lengthscale_constraint=Interval(0.005, 4.0)))
    likelihood = GaussianLikelihood(noise_constraint=Interval(1e-8, 1e-3))
    model = SingleTaskGP(x, target[:, None], covar_module=kernel, likelihood=likelihood, outcome_transform=None)
    objective = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll_scipy(objective, options={"maxiter": iterations})
    return model.eval()
