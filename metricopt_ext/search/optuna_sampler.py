"""Optuna's own samplers, TPE and Gaussian process, as baselines."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.search.box import Box, check_package, drawn
from metricopt_ext.search.strategy import Batches, DirectSearch, SearchStrategy
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above
from metricopt_ext.utils.seeding import generator, seeded_streams

SAMPLERS = ("tpe", "gp")
EXCESSES = "excesses"  # what a trial has of how far it is beyond each limit


@dataclass(frozen=True)
class OptunaSampler(SearchStrategy):
    """A sampler of the package Optuna with its own settings, which proposes one point at a time in a box.

    Each coordinate of phi is a float parameter. The start is the study's first trial. Which points it asks for does not
    depend on the budget; the end is the best point that was evaluated. Constraints are told to the sampler, which heeds
    them in its own way (``constraints_func``). The other way round, our search in Optuna's studies, is
    `metricopt_ext.integrations.optuna`.

    Attributes:
        sampler: ``"tpe"``, the tree-structured Parzen estimator, Optuna's default (Bergstra et al., 2011, "Algorithms
            for Hyper-Parameter Optimization"); or ``"gp"``, a Gaussian process with expected improvement.
        half_width: The search is confined to the start plus or minus this in each coordinate; above 0.
    """

    anytime: ClassVar[bool] = True
    sampler: Literal["tpe", "gp"] = "tpe"
    half_width: float = 0.3

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_above(0, half_width=self.half_width)
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler is {self.sampler!r}; it must be one of {', '.join(SAMPLERS)}")

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget: the starts and one point."""
        return starts + 1

    def begin(
        self,
        task: FinetuneTask,
        start: Start,
        budget: Callable[[], int],
        *,
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
    ) -> DirectSearch:
        """Begin a search (see `SearchStrategy`).

        Raises:
            ImportError: The package optuna is missing.
        """
        check_package("optuna", f"OptunaSampler({self.sampler!r})")
        return DirectSearch(start, budget, partial(self._batches, seed), known)

    def _batches(self, seed: int, state: DirectSearch) -> Batches:
        import optuna

        box, seeds = Box(state, self.half_width), generator(seed, "optuna_sampler")
        names = [f"x{i}" for i in range(box.dim)]
        unit_range: Any = optuna.distributions.FloatDistribution(0.0, 1.0)
        space = dict.fromkeys(names, unit_range)

        limits = state.limits

        def excesses(evaluation: Evaluation) -> list[float]:
            return [] if limits is None else list(limits.excesses(evaluation))

        def as_trial(unit: Tensor, evaluation: Evaluation) -> Any:
            params = dict(zip(names, unit.clamp(0, 1).tolist(), strict=True))
            known = {} if limits is None else {"constraints": excesses(evaluation)}  # as Optuna keeps those it was told
            return optuna.trial.create_trial(
                params=params, distributions=space, value=evaluation.cost, system_attrs=known
            )

        def beyond(trial: Any) -> list[float]:
            found: list[float] = trial.user_attrs[EXCESSES]
            return found

        with quiet(drawn(seeds)):
            kind = optuna.samplers.TPESampler if self.sampler == "tpe" else optuna.samplers.GPSampler
            heeded: dict[str, Any] = {} if limits is None else {"constraints_func": beyond}
            study = optuna.create_study(sampler=kind(seed=drawn(seeds), **heeded))
            study.add_trial(as_trial(box.middle[0], state.at_start))
        while True:
            if not state.left:
                yield []
                continue
            with quiet(drawn(seeds)):
                trial = study.ask(space)
                unit = torch.tensor([[trial.params[name] for name in names]], dtype=torch.float64)
            found, _ = yield from box.proposed(unit)
            answers = state.evaluations[len(state.evaluations) - len(found) :]
            if len(found) and torch.equal(found, unit):
                if limits is not None:
                    trial.set_user_attr(EXCESSES, excesses(answers[0]))
                study.tell(trial, answers[0].cost)
                continue
            study.tell(trial, state=optuna.trial.TrialState.FAIL)  # nobody answered there
            for point, evaluation in zip(found, answers, strict=True):
                study.add_trial(as_trial(point, evaluation))


@contextmanager
def quiet(seed: int) -> Iterator[None]:
    """Run Optuna's code without its log and warnings, on streams of random numbers of its own."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with seeded_streams(seed, torch.device("cpu")), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the Gaussian process is experimental
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
