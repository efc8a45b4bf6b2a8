"""Supervised training of a model in memory, before it is finetuned for a metric."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.data.images import flip_and_shift
from metricopt_ext.data.training_state import TrainingState
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.utils.seeding import generator


def train_supervised(
    model: nn.Module,
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor],
    batches: Callable[[int, int, int], Any],
    *,
    steps: int,
    lr: float,
    seed: int,
    augment: bool = False,
    checkpoint: Path | None = None,
    watcher: Watcher | None = None,
) -> None:
    """Train a model's trainable parameters by Adam with a one-cycle schedule; leaves it in evaluation mode.

    A killed training goes on from its checkpoint and ends where it would have ended, bit for bit.

    Args:
        model: Changed in place.
        loss: ``loss(model, (x, y)) -> scalar``.
        batches: ``batches(seed, 0, step)`` returns the inputs and labels of a step.
        steps: Number of steps, at least 1.
        lr: Peak learning rate.
        seed: Seed of batches and augmentation.
        augment: Whether images are flipped and shifted at random, see `images.flip_and_shift`.
        checkpoint: File to go on from if it exists, written once a minute; None for none.
        watcher: Notified of progress.

    Raises:
        FileFormatError: The checkpoint is corrupt or from another training.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    state = TrainingState(model, optimizer, steps, {"lr": lr, "seed": seed, "augment": augment}, checkpoint, watcher)
    schedule.last_epoch = len(state.losses)
    model.train()
    for step in state.steps_left():
        x, y = batches(seed, 0, step)
        if augment:
            x = flip_and_shift(x, generator(seed, "augment", step))
        value = loss(model, (x, y))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        state.losses.append(float(value.detach()))
    model.eval()
