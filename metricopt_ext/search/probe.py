"""What a model says about phi without a single query: how far to move, and along which directions."""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.gp import GPLearner, Spectrum

GRADIENTS = 64  # random phi whose loss gradients make up the spectrum
DIRECTIONS = 8  # random directions along which the outputs' movement is measured

# How far random phi of the right scale move the outputs, in units of the outputs' own spread.
MOVEMENT = 0.3

# The scale where there is no loss, and so no forward pass: FiLM changes a scale by 2%.
UNPROBED = 0.02

# Scales that are tried, falling in steps of sqrt(2): coarse, so that rounding does not decide.
SCALES: list[float] = [2.0 ** (exponent / 2) for exponent in range(8, -21, -1)]


def probe(task: FinetuneTask, start: Tensor, seed: int) -> GPLearner:
    """Find scale and spectrum around a start, ``d``, by forward and backward passes on batches of the loss.

    Without a loss it is the entropy of the task's inputs that counts (Grandvalet & Bengio, 2004); without these too the
    scale is `UNPROBED`, and all directions are alike unless the task has gradients.

    Returns:
        What fits f: its ``scale`` is the standard deviation of phi's coordinates at which draws from its ``spectrum``
        move the outputs noticeably.

    Raises:
        AdapterError: The loss is no scalar, or has no gradient in phi.
        FloatingPointError: A loss or a gradient is not finite.
    """
    task, tasks = task.probing(), range(GRADIENTS)
    if task.loss is None or task.batches is None:
        flat = Spectrum.flat(task.dim, start.device)
        return GPLearner(UNPROBED, flat if task.gradients is None else spectrum_of(task.gradients.to(start)))
    outputs = partial(_outputs, task.adapter, task.loss, task.batches(seed, 0, 0))
    directions = torch.randn(DIRECTIONS, task.dim, generator=generator(seed, "probe"), dtype=torch.float64)
    anywhere = _largest_scale(outputs, start, directions.to(start))
    _, gradients = task.loss_and_gradient(start + task.starts(2 * anywhere, seed, tasks), seed, tasks, 0)
    spectrum = spectrum_of(gradients)
    shaped = directions.to(spectrum.basis) @ spectrum.root(1.0).T  # as the first design is drawn
    return GPLearner(_largest_scale(outputs, start, shaped.to(start)), spectrum)


def spectrum_of(gradients: Tensor) -> Spectrum:
    """Return the eigen-decomposition of the mean outer product of unit gradients, from gradients, ``m x d``."""
    unit = nn.functional.normalize(gradients.double(), dim=1)
    weights, basis = torch.linalg.eigh(unit.T @ unit / len(gradients))
    if not weights.sum() > 0:
        return Spectrum.flat(gradients.shape[1], gradients.device)  # the loss is flat everywhere
    return Spectrum(weights.clamp(min=0), basis)


def _largest_scale(outputs: Callable[[Tensor], list[Tensor]], start: Tensor, directions: Tensor) -> float:
    """Return the largest scale at which the median direction moves the outputs by at most `MOVEMENT`."""
    still = outputs(start)

    def is_small(scale: float) -> bool:
        moves = [movement(still, outputs(start + scale * direction)) for direction in directions]
        return bool(torch.tensor(moves).median() <= MOVEMENT)  # which outputs that are no longer finite are not

    return SCALES[bisect_left(SCALES, True, hi=len(SCALES) - 1, key=is_small)]  # the movement grows with the scale


def movement(still: list[Tensor], moved: list[Tensor]) -> float:
    """Return how far outputs moved: the root mean square change over the outputs' own spread, the mean over tensors.

    A tensor's spread is that over its first axis, the examples; of a single number, its size.

    Args:
        still: The outputs' tensors at the start.
        moved: The same elsewhere; a tensor of another shape is left out.
    """
    shares = []
    for before, after in zip(still, moved, strict=False):
        spread = (before - before.mean(0) if len(before) > 1 else before).square().mean().sqrt()
        if before.shape == after.shape and spread > 0:  # which is NaN of no numbers
            shares.append(float((after - before).square().mean().sqrt() / spread))
    return sum(shares) / len(shares) if shares else torch.inf


@torch.no_grad()
def _outputs(adapter: Adapter, loss_of: Callable[..., Tensor], batch: Any, phi: Tensor) -> list[Tensor]:
    """Return what the model puts out on a batch while the loss is computed, ``n x m`` tensors; if nothing, the loss."""
    found: list[Any] = []
    with adapter.using(phi) as model, model.register_forward_hook(lambda module, args, output: found.append(output)):
        loss = loss_of(model, batch)
    leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf.double().flatten(1) if leaf.dim() > 1 else leaf.double().view(-1, 1) for leaf in leaves or [loss]]
