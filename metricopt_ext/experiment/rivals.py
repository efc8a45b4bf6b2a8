"""Other packages' optimizers as searches: each is an (ask, tell) pair, whose points lie around the start."""

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.errors import ConfigError
from metricopt_ext.search.direct import AskTell, AskTellStrategy
from metricopt_ext.search.strategy import Batches, Begun
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.extras import require
from metricopt_ext.utils.seeding import generator, seeded_streams

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rival(AskTellStrategy):
    """A search by another package's optimizer, which runs on streams of random numbers of its own.

    Attributes:
        package: Its package.
        scale: How far it looks from the start in each coordinate; above 0.
    """

    package: ClassVar[str]
    scale: float = 0.3

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_above(0, scale=self.scale)

    def check(self, task: FinetuneTask) -> None:
        """Refuse to search without the package (see `SearchStrategy`)."""
        require(self.package)

    @abstractmethod
    def make(self, search: Begun, seed: int) -> AskTell:
        """Make the optimizer of a search that has begun; it is told of the start."""

    def pair(self, search: Begun, seed: int) -> AskTell:
        """Return the optimizer, told of the start (see `AskTellStrategy`)."""
        seeds = generator(seed, self.package)
        with _alone(seeds):
            rival = self.make(search, _drawn(seeds))
            rival.tell(search.start.double().cpu()[None], [search.started[1]])
        return AskTell(_alone(seeds)(rival.ask), _alone(seeds)(rival.tell))


@contextmanager
def _alone(seeds: torch.Generator) -> Iterator[None]:
    """Run another package's code without its warnings, on streams of random numbers of its own."""
    with seeded_streams(_drawn(seeds), CPU), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _drawn(seeds: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=seeds))


@dataclass(frozen=True)
class Nevergrad(Rival):
    """An optimizer of Nevergrad, which knows the budget; ``scale`` is the standard deviation of its first steps.

    Attributes:
        name: Its name in Nevergrad's registry.
    """

    anytime: ClassVar[bool] = False
    package = "nevergrad"
    scale: float = 0.1
    name: str = "NGOpt"

    def make(self, search: Begun, seed: int) -> AskTell:
        """Make the optimizer; the start is suggested to it."""
        import nevergrad as ng
        from nevergrad.optimization import metamodel

        metamodel.float = lambda value: np.asarray(value, dtype=float).item()  # which it calls on arrays of one number
        origin = search.start.double().cpu().numpy()
        space = ng.p.Array(init=origin).set_mutation(sigma=self.scale)
        space.random_state = np.random.RandomState(seed)
        optimizer = ng.optimizers.registry[self.name](parametrization=space, budget=search.budget(), num_workers=1)
        optimizer.suggest(origin)
        asked: list[Any] = [optimizer.ask()]

        def ask() -> Tensor:
            asked.append(optimizer.ask())
            return torch.tensor(asked[-1].value)[None]

        def tell(points: Tensor, evaluations: Sequence[Evaluation]) -> None:
            for point, evaluation in zip(points.numpy(), evaluations, strict=True):
                same = np.array_equal(asked[-1].value, point)
                optimizer.tell(asked[-1] if same else asked[-1].spawn_child(new_value=point), evaluation.cost)

        return AskTell(ask, tell)


@dataclass(frozen=True)
class Optuna(Rival):
    """A sampler of Optuna in a box of half-width ``scale``; it is told by how much constraints are broken.

    Attributes:
        name: Its class, such as ``"TPESampler"`` (Bergstra et al., 2011) or ``"GPSampler"``.
    """

    package = "optuna"
    name: str = "TPESampler"

    def make(self, search: Begun, seed: int) -> AskTell:
        """Make a study."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        limits = search.limits

        def excesses(trial: Any) -> list[float]:
            found: list[float] = trial.user_attrs["excesses"]
            return found

        sampler = getattr(optuna.samplers, self.name)
        study = optuna.create_study(sampler=sampler(seed=seed, **({"constraints_func": excesses} if limits else {})))
        low, high = ((search.start.double().cpu() + sign * self.scale).tolist() for sign in (-1, 1))
        ranges = [optuna.distributions.FloatDistribution(*each) for each in zip(low, high, strict=True)]
        space: dict[str, Any] = {f"x{place}": each for place, each in enumerate(ranges)}

        def tell(points: Tensor, evaluations: Sequence[Evaluation]) -> None:
            for point, evaluation in zip(points.tolist(), evaluations, strict=True):
                study.enqueue_trial(dict(zip(space, point, strict=True)))
                trial = study.ask(space)
                if limits is not None:
                    trial.set_user_attr("excesses", list(limits.excesses(evaluation)))
                study.tell(trial, evaluation.cost)

        def ask() -> Tensor:
            trial = study.ask(space)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)  # it is told with its answer, wherever that is
            return torch.tensor([[trial.params[each] for each in space]], dtype=torch.float64)

        return AskTell(ask, tell)


@dataclass(frozen=True)
class BoTorch(Rival):
    """BoTorch's default, noisy expected improvement (Ament et al., 2023), in a box of half-width ``scale``.

    Attributes:
        batch: Points at once.
        initial: Sobol points before, the start among them.
        samples: Samples of the acquisition function; its optimizer has ``restarts`` from the best of ``raw`` points.
        restarts: See above.
        raw: See above.
    """

    package = "botorch"
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
        super().__post_init__()
        check_integer(1, batch=self.batch, samples=self.samples, restarts=self.restarts)
        check_integer(2, initial=self.initial)
        check_integer(self.restarts, raw=self.raw)

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget: the initial points, the best start among them, and one by the Gaussian process.

        The other starts are queries besides.
        """
        return self.initial + starts

    def make(self, search: Begun, seed: int) -> AskTell:
        """Make a Gaussian process of BoTorch's own, and its acquisition function."""
        from botorch.acquisition.logei import qLogNoisyExpectedImprovement
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.optim.optimize import optimize_acqf
        from botorch.sampling.normal import SobolQMCNormalSampler
        from gpytorch.mlls import ExactMarginalLogLikelihood

        centre = search.start.double().cpu()
        bounds = torch.stack([torch.zeros_like(centre), torch.ones_like(centre)])  # of the box, as [0, 1]^d
        sobol = torch.quasirandom.SobolEngine(len(centre), scramble=True, seed=seed)
        known: list[Tensor] = []
        evaluated: list[Evaluation] = []

        def unit() -> Tensor:
            if len(known) < self.initial:
                return sobol.draw(self.initial - len(known), dtype=torch.float64)
            x, y = torch.stack(known), self.learned(evaluated)
            if float(y.std(0).max()) == 0:
                return sobol.draw(self.batch, dtype=torch.float64)  # nothing to learn from yet
            model = SingleTaskGP(x, y)
            fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
            sampler = SobolQMCNormalSampler(torch.Size([self.samples]), seed=seed)
            improvement = qLogNoisyExpectedImprovement(model, X_baseline=x, sampler=sampler, objective=self.objective())
            chosen: Tensor
            chosen, _ = optimize_acqf(
                improvement, bounds, q=self.batch, num_restarts=self.restarts, raw_samples=self.raw, sequential=True
            )
            return chosen

        def tell(points: Tensor, evaluations: Sequence[Evaluation]) -> None:
            known.extend((points - centre) / (2 * self.scale) + 0.5)
            evaluated.extend(evaluations)

        return AskTell(lambda: centre + (2 * unit() - 1) * self.scale, tell)

    def learned(self, evaluations: Sequence[Evaluation]) -> Tensor:
        """Return what the Gaussian process learns, ``n x m``, each to be raised."""
        return torch.tensor([[-each.cost] for each in evaluations], dtype=torch.float64)

    def objective(self) -> Any:
        """Return BoTorch's objective of what is learned; None for that itself."""
        return None


@dataclass(frozen=True)
class BoTorchComposite(BoTorch):
    """The same on all outcomes of a metric, an independent process for each, whose samples are combined as they are.

    That is BoTorch's own way for what Astudillo & Frazier (2019) call composite functions.

    Attributes:
        combination: How the outcomes make the metric's value; the task's, once a search begins.
    """

    combination: Combination | None = field(default=None, repr=False)

    def check(self, task: FinetuneTask) -> None:
        """Refuse a metric that is told as one number, too (see `SearchStrategy`)."""
        super().check(task)
        if task.metric.combination is None:
            raise ConfigError(
                f"metric {task.metric.name!r} is one number, and botorch_composite learns what a metric is made of;"
                " leave it out, or give mo.Metric(..., combine='worst')"
            )

    def batches(self, task: FinetuneTask, seed: int, search: Begun) -> Batches:
        """Ask for what the optimizer does, and tell it (see `SearchStrategy`)."""
        return AskTellStrategy.batches(replace(self, combination=task.metric.combination), task, seed, search)

    def learned(self, evaluations: Sequence[Evaluation]) -> Tensor:
        """Return the outcomes, ``n x m`` (see `BoTorch`)."""
        assert self.combination is not None
        return -self.combination.costs(evaluations)

    def objective(self) -> Any:
        """Return the metric's value of outcomes (see `BoTorch`)."""
        from botorch.acquisition.objective import GenericMCObjective

        assert self.combination is not None
        cost = self.combination.cost
        return GenericMCObjective(lambda samples, X=None: -cost(-samples))
