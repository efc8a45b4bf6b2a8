"""Finetuning runs under a learned update rule, for a population at once, differentiable if they are to train it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from metricopt_ext.search.update_rule import UpdateRule
from metricopt_ext.tasks.task import FinetuneTask

# cost_at(phi, step): the cost that each run knows of at a step, ``n``, given phi there, ``n x d``; NaN where unknown.
CostAt = Callable[[Tensor, int], Tensor]


class Unrolled(NamedTuple):
    """A population's finetuning runs.

    Attributes:
        phi: The points phi_0 ... phi_T, ``n x (T + 1) x d``.
        loss: The losses at phi_0 ... phi_{T-1}, and at phi_T if it was asked for, each on its own step's batch,
            ``n x T`` or ``n x (T + 1)``.
    """

    phi: Tensor
    loss: Tensor


def unroll(
    task: FinetuneTask,
    rule: UpdateRule,
    starts: Tensor,
    *,
    steps: int,
    seed: int,
    indices: Sequence[int],
    cost_at: CostAt | None = None,
    weights: Tensor | None = None,
    last_loss: bool = False,
    differentiable: bool = False,
) -> Unrolled:
    """Finetune a population for T steps (Algorithm S1, lines 11-13).

    Args:
        task: What is finetuned.
        rule: Moves phi.
        starts: phi_0, ``n x d``.
        steps: T.
        seed: Seed of the batches.
        indices: The n task indices; a task may occur several times.
        cost_at: What is known of the metric; None for nothing. It is called at every step, and at T too.
        weights: The rule's weights in each run, ``n x W``; None for its own in all.
        last_loss: Whether the loss at phi_T is computed too.
        differentiable: Whether points and losses can be differentiated with respect to ``weights``.
    """
    phi, memory, points, losses = starts, None, [starts], []
    unknown = starts.new_full((len(starts),), torch.nan)
    with nullcontext() if differentiable else torch.no_grad():
        for step in range(steps):
            with torch.enable_grad():
                loss, gradient = task.loss_and_gradient(phi, seed, indices, step, differentiable=differentiable)
            cost = unknown if cost_at is None else cost_at(phi, step)
            change, memory = rule.propose(phi, gradient, loss, cost, memory, weights)
            phi = phi + change
            points.append(phi)
            losses.append(loss)
        if cost_at is not None:
            cost_at(phi, steps)
        if last_loss:
            with torch.enable_grad():
                losses.append(task.loss_and_gradient(phi, seed, indices, steps, differentiable=differentiable)[0])
    return Unrolled(torch.stack(points, 1), torch.stack(losses, 1))
