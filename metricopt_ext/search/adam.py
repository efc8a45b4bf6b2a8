"""Adam's direction as a pure function, so that its steps may span and join a search (paper, Algorithm 1)."""

from typing import NamedTuple

import torch
from torch import Tensor

BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's defaults


class AdamMemory(NamedTuple):
    """What Adam remembers between steps.

    Attributes:
        first: Running average of the gradients, ``... x d``.
        second: Running average of their squares, ``... x d``.
        steps: Steps taken.
    """

    first: Tensor
    second: Tensor
    steps: int


def adam_direction(gradient: Tensor, memory: AdamMemory | None = None) -> tuple[Tensor, AdamMemory]:
    """Return what Adam descends along at rate 1, ``... x d``, and what to remember.

    Args:
        gradient: The loss gradient, ``... x d``.
        memory: What the previous step returned; None at the first.
    """
    zero = torch.zeros_like(gradient)
    before = AdamMemory(zero, zero, 0) if memory is None else memory
    first = BETAS[0] * before.first + (1 - BETAS[0]) * gradient
    second = BETAS[1] * before.second + (1 - BETAS[1]) * gradient**2
    steps = before.steps + 1
    spread = (second / (1 - BETAS[1] ** steps)).sqrt() + EPSILON
    return first / (1 - BETAS[0] ** steps) / spread, AdamMemory(first, second, steps)
