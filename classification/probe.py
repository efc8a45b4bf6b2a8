"""How far a unit of phi moves a classifier's logits, on inputs alone: no label is used, and no metric query."""

import math

import torch
from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.data.parts import part_size
from metricopt_ext.data.streamed import taken
from metricopt_ext.utils.modes import evaluating

INPUTS = 1000  # enough for two digits
STEP = 0.05  # of the finite difference
STRENGTH = 3.0  # an offset's effect on the logits, in effects of another coordinate


def output_scale(adapter: Adapter, x: Tensor) -> float:
    """Return the scale at which a unit of an offset moves the logits three times as far as one of the matrices'.

    The effect of a coordinate is the root mean square of its derivative over inputs and classes, less the mean over
    classes if there are several: a shift of all logits decides nothing. For C logits, that of an offset with scale s is
    therefore ``s * sqrt((1 - 1/C) / C)``.

    Args:
        adapter: A classifier's, with FiLM or an input bias; their coordinates are measured at phi = 0.
        x: Inputs, ``n x ...``, of which the first 1,000 are used.

    Returns:
        The scale, in logits per unit, rounded to two significant digits so that other processors find the same; 1 if
        phi moves no logit.
    """
    matrix_dim = adapter.offsets.start
    x, origin = taken(x, slice(INPUTS)), torch.zeros_like(adapter.phi.detach())
    before = _logits(adapter, origin, x)
    squares = []
    for i in range(matrix_dim):
        phi = origin.clone()
        phi[i] = STEP
        squares.append(((_logits(adapter, phi, x) - before) / STEP).square().mean())
    classes = before.shape[1]
    effect = float(torch.stack(squares).mean().sqrt())
    scale = STRENGTH * effect * (1 if classes == 1 else math.sqrt(classes / (1 - 1 / classes)))
    return float(f"{scale:.2g}") if scale > 0 else 1.0


@torch.no_grad()
def _logits(adapter: Adapter, phi: Tensor, x: Tensor) -> Tensor:
    """The logits, ``n x C`` in double precision, less their mean over classes if there are several."""
    with adapter.using(phi) as model, evaluating(model):
        logits = torch.cat([model(part) for part in x.split(part_size(x))]).double().reshape(len(x), -1)
    return logits - logits.mean(1, keepdim=True) if logits.shape[1] > 1 else logits
