"""What a model says about phi without a single query: how far to move, and along which directions."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._pytree import tree_leaves

from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.gp import Spectrum

GRADIENTS = 64  # random phi whose loss gradients make up the spectrum
DIRECTIONS = 8  # random directions along which the outputs' movement is measured

# How far random phi of the right scale move the outputs, in units of the outputs' own spread.
MOVEMENT = 0.3

# The scale where there is no loss, and so no forward pass: FiLM changes a scale by 2%.
UNPROBED = 0.02

# Scales that are tried, in steps of sqrt(2): coarse, so that rounding does not decide.
SCALES: list[float] = [2.0 ** (exponent / 2) for exponent in range(-20, 9)]


class Probe(NamedTuple):
    """What is known of phi's directions before any query.

    Attributes:
        scale: Standard deviation of phi's coordinates at which draws from the spectrum move the outputs noticeably.
        spectrum: Directions along which the loss changes, and how much.
    """

    scale: float
    spectrum: Spectrum


def probe(task: FinetuneTask, start: Tensor, seed: int) -> Probe:
    """Find scale and spectrum around a start, ``d``, by forward and backward passes on batches of the loss.

    Without a loss it is the entropy of the task's inputs that counts (Grandvalet & Bengio, 2004); without these too the
    scale is `UNPROBED`, and all directions are alike unless the task has gradients.

    Raises:
        AdapterError: The loss is no scalar, or has no gradient in phi.
        FloatingPointError: A loss or a gradient is not finite.
    """
    task = task.probing()
    if task.loss is None:
        given = task.gradients
        return Probe(UNPROBED, Spectrum.flat(task.dim, start.device) if given is None else spectrum_of(given.to(start)))
    directions = torch.randn(DIRECTIONS, task.dim, generator=generator(seed, "probe"), dtype=torch.float64)
    anywhere = _largest_scale(task, start, directions.to(start), seed)
    spectrum = loss_spectrum(task, start, 2 * anywhere, seed)
    shaped = directions.to(spectrum.basis) @ spectrum.root(1.0).T  # as the first design is drawn
    return Probe(_largest_scale(task, start, shaped.to(start), seed), spectrum)


def loss_spectrum(task: FinetuneTask, start: Tensor, std: float, seed: int) -> Spectrum:
    """Return the eigen-decomposition of the mean outer product of unit loss gradients at random phi.

    Args:
        task: Model, loss and batches; its metric is not evaluated.
        start: Where phi is drawn around, ``d``.
        std: Standard deviation of the draws.
        seed: Seed of phi and batches.
    """
    indices = range(GRADIENTS)
    _, gradients = task.loss_and_gradient(start + task.starts(std, seed, indices), seed, indices, 0)
    return spectrum_of(gradients)


def spectrum_of(gradients: Tensor) -> Spectrum:
    """Return the eigen-decomposition of the mean outer product of unit gradients, from gradients, ``m x d``."""
    unit = normalize(gradients.double(), dim=1)
    weights, basis = torch.linalg.eigh(unit.T @ unit / len(gradients))
    if not weights.sum() > 0:
        return Spectrum.flat(gradients.shape[1], gradients.device)  # the loss is flat everywhere
    return Spectrum(weights.clamp(min=0), basis)


def _largest_scale(task: FinetuneTask, start: Tensor, directions: Tensor, seed: int) -> float:
    """Return the largest scale at which the median direction moves the outputs by at most `MOVEMENT`."""
    assert task.batches is not None
    batch = task.batches(seed, 0, 0)
    still = _outputs(task, start, batch)

    def too_far(scale: float) -> bool:
        moves = [movement(still, _outputs(task, start + scale * direction, batch)) for direction in directions]
        return not torch.tensor(moves).median() <= MOVEMENT  # outputs that are no longer finite are too far

    low, high = 0, len(SCALES) - 1  # the movement grows with the scale: halve the range
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if too_far(SCALES[middle]) else (middle, high)
    return SCALES[low]


def movement(still: list[Tensor], moved: list[Tensor]) -> float:
    """Return how far outputs moved: the root mean square change over the outputs' own spread, the mean over tensors.

    A tensor's spread is that over its first axis, the examples; of a single number, its size.

    Args:
        still: The outputs' tensors at the start.
        moved: The same elsewhere; a tensor of another shape is left out.
    """
    shares = []
    for before, after in zip(still, moved, strict=False):
        if before.shape != after.shape or before.numel() == 0:
            continue
        spread = (before - before.mean(0)).square().mean().sqrt() if len(before) > 1 else before.square().mean().sqrt()
        if spread > 0:
            shares.append(float((after - before).square().mean().sqrt() / spread))
    return sum(shares) / len(shares) if shares else math.inf


@torch.no_grad()
def _outputs(task: FinetuneTask, phi: Tensor, batch: Any) -> list[Tensor]:
    """Return what the model puts out on a batch while the loss is computed, ``n x m`` tensors; if nothing, the loss."""
    assert task.loss is not None
    found: list[Any] = []
    before = KeptModules(task.adapter.model)
    try:
        with task.adapter.using(phi) as model:
            handle = model.register_forward_hook(lambda module, args, output: found.append(output))
            loss = task.loss(model, batch)
        handle.remove()
    except BaseException:
        before.put_back()
        raise
    leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf.double().flatten(1) if leaf.dim() > 1 else leaf.double().view(-1, 1) for leaf in leaves or [loss]]
