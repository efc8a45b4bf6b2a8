"""NGOpt, nevergrad's choice among its optimizers by dimension and budget."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.search.strategy import Batches, DirectSearch, SearchStrategy
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above
from metricopt_ext.utils.extras import install
from metricopt_ext.utils.seeding import generator


@dataclass(frozen=True)
class NGOpt(SearchStrategy):
    """NGOpt (Meunier et al., 2022, "Black-Box Optimization Revisited"), from the package nevergrad.

    It is told the budget, by which it chooses an optimizer, and evaluates one point at a time.

    Attributes:
        sigma: Standard deviation of each coordinate's first mutations, above 0.
    """

    sigma: float = 0.1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_above(0, sigma=self.sigma)

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
            ImportError: The package nevergrad is missing.
        """
        return DirectSearch(start, budget, partial(self._batches, _import_nevergrad(), seed, budget()), known)

    def _batches(self, ng: Any, seed: int, queries: int, state: DirectSearch) -> Batches:
        rng, origin = generator(seed, "ngopt"), state.start.double().cpu().numpy()
        space = ng.p.Array(init=origin).set_mutation(sigma=self.sigma)
        space.random_state = np.random.RandomState(_drawn(rng))
        own = _OwnStream(_drawn(rng), ng.optimization.metamodel)
        with own:
            optimizer = ng.optimizers.NGOpt(parametrization=space, budget=queries, num_workers=1)
            optimizer.suggest(origin)
            optimizer.tell(optimizer.ask(), state.at_start.cost)
        while state.left:
            with own:
                candidate = optimizer.ask()
            proposed = torch.tensor(candidate.value)[None]
            evaluated = yield from state.ask(proposed.to(state.start))
            (evaluation,), (point,) = [each.evaluation for each in evaluated], evaluated.points
            with own:
                if not torch.equal(point, proposed[0].to(point)):
                    candidate = candidate.spawn_child(new_value=evaluated.points_as(proposed)[0].numpy())
                if evaluation is not None:
                    optimizer.tell(candidate, evaluation.cost)


class _OwnStream:
    """Lets nevergrad's own code run: without its warnings, and on a stream of random numbers of its own.

    Optimizers inside NGOpt draw from NumPy's global stream, which is left as it was.

    Args:
        seed: The stream's seed.
        metamodel: nevergrad's module of that name. It calls ``float`` on arrays of one number, an error since NumPy
            2.4, so it gets a ``float`` of its own meanwhile.
    """

    def __init__(self, seed: int, metamodel: Any) -> None:
        self.state, self.metamodel = np.random.RandomState(seed).get_state(), metamodel

    def __enter__(self) -> None:
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("ignore")
        self.before = np.random.get_state()
        np.random.set_state(self.state)
        self.metamodel.float = lambda value: np.asarray(value, dtype=float).item()

    def __exit__(self, *details: Any) -> None:
        del self.metamodel.float
        self.state = np.random.get_state()
        np.random.set_state(self.before)
        self.warnings.__exit__(*details)


def _drawn(rng: torch.Generator) -> int:
    return int(torch.randint(2**32, (1,), generator=rng, dtype=torch.int64))


def _import_nevergrad() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import nevergrad
    except ImportError as error:
        raise ImportError(f"NGOpt needs the package nevergrad: {install('nevergrad')}") from error
    return nevergrad
