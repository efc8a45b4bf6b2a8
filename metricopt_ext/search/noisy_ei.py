"""BoTorch's default for noisy black boxes: a Gaussian process and batches by noisy expected improvement."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.search.box import Box, check_package, drawn, sobol
from metricopt_ext.search.strategy import Batches, DirectSearch, SearchStrategy
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.seeding import generator, seeded_streams

CPU = torch.device("cpu")


@dataclass(frozen=True)
class NoisyEI(SearchStrategy):
    """Bayesian optimization as BoTorch's users run it: `SingleTaskGP` and `qLogNoisyExpectedImprovement`.

    The Gaussian process has BoTorch's own kernel, whose lengths grow with the root of the dimension (Hvarfner et al.,
    2024, "Vanilla Bayesian Optimization Performs Great in High Dimensions"). A batch maximises the logarithm of the
    expected improvement over the best of noisy points (Ament et al., 2023, "Unexpected Improvements to Expected
    Improvement for Bayesian Optimization"), one point after another. Which points it asks for does not depend on the
    budget. The end is the best point that was evaluated.

    Attributes:
        half_width: The search is confined to the start plus or minus this in each coordinate; above 0.
        batch: Points per batch, at least 1.
        initial: Sobol points before the first batch, the start included; at least 2.
        samples: Samples of the posterior by which improvement is estimated, at least 1.
        restarts: Starts of the acquisition's ascent, at least 1.
        raw: Points from which these are drawn, at least ``restarts``.
    """

    anytime: ClassVar[bool] = True
    half_width: float = 0.3
    batch: int = 4
    initial: int = 8
    samples: int = 128
    restarts: int = 4
    raw: int = 128

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_above(0, half_width=self.half_width)
        check_integer(1, batch=self.batch, samples=self.samples, restarts=self.restarts)
        check_integer(2, initial=self.initial)
        check_integer(self.restarts, raw=self.raw)

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget: the initial points, the best start among them, and one by the Gaussian process.

        The other starts are queries besides.
        """
        return self.initial + starts

    def begin(
        self,
        task: FinetuneTask,
        start: Start,
        budget: Callable[[], int],
        *,
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
    ) -> DirectSearch:
        """Begin a search (see `SearchStrategy`); a batch ends where the budget does.

        Raises:
            ImportError: The package botorch is missing.
        """
        check_package("botorch", "NoisyEI")
        return DirectSearch(start, budget, partial(self._batches, seed), known)

    def _batches(self, seed: int, state: DirectSearch) -> Batches:
        box, seeds = Box(state, self.half_width), generator(seed, "noisy_ei")
        x, y = box.middle, torch.tensor([state.at_start.cost], dtype=torch.float64)
        new = sobol(box.dim, min(self.initial - 1, state.left), drawn(seeds))
        while len(new):
            new, costs = yield from box.proposed(new)
            x, y = torch.cat([x, new]), torch.cat([y, costs])
            new = self._propose(x, y, drawn(seeds))[: state.left] if state.left else x[:0]

    def _propose(self, x: Tensor, y: Tensor, seed: int) -> Tensor:
        """Return a batch, ``batch x d``, for points ``n x d`` in the unit box and their costs, ``n``."""
        from botorch.acquisition.logei import qLogNoisyExpectedImprovement
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.optim.optimize import optimize_acqf
        from botorch.sampling.normal import SobolQMCNormalSampler
        from gpytorch.mlls import ExactMarginalLogLikelihood

        with seeded_streams(seed, CPU), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of jitter, and of a fit that has taken all of its steps
            if float(y.std()) == 0:
                return sobol(x.shape[1], self.batch, seed)  # nothing to learn from yet
            model = SingleTaskGP(x, -y[:, None])
            fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
            improvement = qLogNoisyExpectedImprovement(
                model, X_baseline=x, sampler=SobolQMCNormalSampler(torch.Size([self.samples]), seed=seed)
            )
            unit = torch.stack([torch.zeros_like(x[0]), torch.ones_like(x[0])])
            chosen: Tensor
            chosen, _ = optimize_acqf(
                improvement, unit, q=self.batch, num_restarts=self.restarts, raw_samples=self.raw, sequential=True
            )
        return chosen
