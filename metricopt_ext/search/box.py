"""A box around a start, in units of which other packages' optimizers propose points, and what these have in common."""

import warnings
from collections.abc import Generator
from importlib import import_module

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.search.strategy import Answers, Begun
from metricopt_ext.utils.extras import install


class Box:
    """A start plus or minus a half-width in each coordinate, as [0, 1]^d.

    Args:
        search: Begins in the middle.
        half_width: Above 0.
    """

    def __init__(self, search: Begun, half_width: float) -> None:
        self.search, self.start, self.half_width = search, search.start, half_width
        self._centre = self.start.double().cpu()

    @property
    def dim(self) -> int:
        """D."""
        return len(self.start)

    @property
    def middle(self) -> Tensor:
        """The start in the unit box, ``1 x d``."""
        return torch.full((1, self.dim), 0.5, dtype=torch.float64)

    def proposed(self, unit: Tensor) -> Generator[list[Start], Answers, tuple[Tensor, Tensor]]:
        """Ask for points of the unit box, ``n x d``; return those that were answered, ``m x d``, and their costs.

        A point that was answered elsewhere (`Answer`) is returned as it was.
        """
        points = self._centre + (2 * unit - 1) * self.half_width
        evaluated = yield from self.search.ask(points.to(self.start))
        moved = (evaluated.points_as(points) - self._centre) / (2 * self.half_width) + 0.5
        same = (evaluated.points == points.to(self.start)).all(1, keepdim=True).cpu()
        return torch.where(same, unit, moved)[evaluated.known], evaluated.costs[evaluated.known]


def sobol(dim: int, count: int, seed: int) -> Tensor:
    """Return scrambled Sobol points in the unit box, ``count x d``."""
    points: Tensor = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    return points


def drawn(seeds: torch.Generator) -> int:
    """Draw a seed."""
    return int(torch.randint(2**31, (1,), generator=seeds))


def check_package(package: str, search: str) -> None:
    """Refuse to go on without a package.

    Raises:
        ImportError: It is missing; the message says what to install.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(package)
    except ImportError as error:
        raise ImportError(f"{search} needs the package {package}: {install(package)}") from error
