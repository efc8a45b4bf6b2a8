"""The usual baselines where no class decides: cut points, or a shift and scale of predictions, found by Nelder-Mead."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from metricopt_ext.classification.offsets import Remembered, WithOffsets, merged
from metricopt_ext.classification.predictions import predict
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer

FIRST_CUT = 1.0  # logits by which the first simplex moves a cut point
FIRST_SHIFT, FIRST_SCALE = 0.25, 0.25  # in standard deviations of the predictions, and as the logarithm of a factor


class WithLine(nn.Module):
    """A model of quantities whose outputs are scaled about a centre and shifted.

    Args:
        model: Maps inputs, ``n x ...``, to ``n`` or ``n x 1``.
        centre: What stays when scaled.
        shift: What is added.
        scale: The factor.
    """

    def __init__(self, model: nn.Module, centre: float, shift: float, scale: float) -> None:
        super().__init__()
        self.model, self.centre, self.shift, self.scale = model, centre, shift, scale

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs, ``n x ...``, to outputs of the model's shape."""
        return self._moved(self.model(x))

    def recalled(self, rows: tuple[int, ...]) -> Tensor | None:
        """Return the outputs for images on disk if the model keeps its own, None if not; see `Remembered.recalled`."""
        recalled = getattr(self.model, "recalled", None)
        outputs = None if recalled is None else recalled(rows)
        return None if outputs is None else self._moved(outputs)

    def _moved(self, outputs: Tensor) -> Tensor:
        return self.centre + self.shift + self.scale * (outputs - self.centre)


@torch.no_grad()
def tune_cut_points(task: FinetuneTask, budget: int, *, start: Tensor | None = None) -> nn.Module:
    """Return the original model with offsets of all its logits that Nelder-Mead finds: cut points of ranks.

    Args:
        task: Its model, at phi = 0, is judged by its metric, on batches whose first item is inputs.
        budget: Most queries, at least 1, the model as it is the first.
        start: Another phi, ``d``, that is merged into the model.
    """
    check_integer(1, budget=budget)
    model = merged(task, start)
    kept = Remembered(model)
    count = _outputs(task, model)

    def moved(offsets: Sequence[float]) -> WithOffsets:
        return WithOffsets(kept, torch.tensor(offsets))

    best = nelder_mead(lambda point: task.metric.cost(moved(point), "cut points"), [FIRST_CUT] * count, budget)
    return WithOffsets(model, torch.tensor(best))


@torch.no_grad()
def tune_line(task: FinetuneTask, x: Tensor, budget: int, *, start: Tensor | None = None) -> nn.Module:
    """Return the original model of quantities with a shift and a scale of its predictions that Nelder-Mead finds.

    Args:
        task: Its model, at phi = 0, is judged by its metric.
        x: Inputs, ``n x ...``, whose predictions say how far to move.
        budget: Most queries, at least 1, the model as it is the first.
        start: Another phi, ``d``, that is merged into the model.
    """
    check_integer(1, budget=budget)
    model = merged(task, start)
    predicted, kept = predict(model, x).double(), Remembered(model)
    centre, spread = float(predicted.mean()), float(predicted.std(correction=0)) or 1.0

    def moved(base: nn.Module, point: Sequence[float]) -> WithLine:
        return WithLine(base, centre, point[0] * spread, math.exp(point[1]))

    def cost(point: Sequence[float]) -> float:
        return task.metric.cost(moved(kept, point), "shift and scale")

    return moved(model, nelder_mead(cost, [FIRST_SHIFT, FIRST_SCALE], budget))


def nelder_mead(cost: Callable[[list[float]], float], steps: Sequence[float], budget: int) -> list[float]:
    """Minimise a cost from the origin within a number of evaluations; returns the best point, the first of equals.

    Args:
        cost: Of a point of ``d`` numbers; the origin is evaluated first.
        steps: How far the first simplex goes along each of them.
        budget: Most evaluations, at least 1.
    """
    from scipy.optimize import minimize

    found: list[tuple[float, list[float]]] = []

    def spent(point: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        if len(found) == budget:
            raise StopIteration  # SciPy's own limit is checked once in a step, which takes several
        found.append((cost(point.tolist()), point.tolist()))
        return found[-1][0]

    simplex = np.vstack([np.zeros(len(steps)), np.diag(steps)])
    options = {"initial_simplex": simplex, "maxfev": budget, "xatol": 1e-3, "fatol": 1e-6}
    with suppress(StopIteration):
        minimize(spent, simplex[0], method="Nelder-Mead", options=options)
    return min(found, key=lambda each: each[0])[1]


def _outputs(task: FinetuneTask, model: nn.Module) -> int:
    """Return how many logits a model has, by the task's first batch of inputs."""
    assert task.batches is not None
    x = task.batches(0, 0, 0)[0][:1]
    logits: Tensor = model(x)
    return logits.numel()
