"""Whether several phi can be computed in one forward pass, as two of them show it on a first batch."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.moves import Mixture
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.seeding import generator

MANY = 16  # phi in one forward pass, where several can be computed so
NEAR = 0.05  # size of a coordinate of the second of two phi that are tried
AGREE, AGREE_ROUGHLY = 1e-3, 0.03  # relative differences that rounding may make; the second in half precision or TF32

LOGGER = logging.getLogger(__name__)

# Losses, ``n``, and gradients, ``n x d``, of phi, ``n x d``, on a first batch of each of some tasks.
Compute = Callable[[Tensor, Sequence[int]], tuple[Tensor, Tensor]]


def why_one_by_one(model: nn.Module, origin: Tensor, compute: Compute) -> str:
    """Return why several phi can't be computed in one forward pass; empty if they can. The model is left as it was.

    Args:
        model: The adapted model.
        origin: phi = 0, ``d``.
        compute: Computes losses and gradients, those of several phi by `torch.func.vmap`.
    """
    if any(isinstance(module, Mixture) for module in model.modules()):
        return "each phi of a mixture has a model of its own in memory"
    drawn = torch.randn(len(origin), generator=generator(0, "population"), dtype=torch.float64)
    phi = torch.stack([origin, NEAR * drawn.to(origin)])
    with _left_as_it_was(model), warnings.catch_warnings(action="ignore"):
        try:
            alone = [compute(phi[row : row + 1], [row]) for row in range(2)]
        except Exception:  # of the user's code, which the search says in its own words
            return "the loss of a first batch fails"
        try:
            losses, gradients = compute(phi, [0, 1])
        except Exception as error:  # of any kind: the model's own code meets what it was not written for
            LOGGER.debug("torch.func.vmap, of two phi: %s: %s", type(error).__name__, error)
            return "torch.func.vmap can't compute this model, loss and batches for two phi at once"
    rough = origin.is_cuda or any(each.dtype in (torch.float16, torch.bfloat16) for each in model.parameters())
    most = AGREE_ROUGHLY if rough else AGREE
    for loss, gradient, (own_loss, own_gradient) in zip(losses, gradients, alone, strict=True):
        off, turned = (loss - own_loss[0]).abs(), (gradient - own_gradient[0]).norm()
        if not (off <= most * own_loss[0].abs().clamp(min=1) and turned <= most * own_gradient[0].norm()):
            LOGGER.debug("of two phi at once, losses differ by %.3g and gradients by %.3g", off, turned)
            return "two phi at once have other losses or gradients than one by one"
    return ""


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put back what modules hold, and their plain attributes: what one caches under ``vmap`` is of no use outside."""
    modules, attributes = KeptModules(model), [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        modules.put_back()
