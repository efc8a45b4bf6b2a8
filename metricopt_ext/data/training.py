"""Supervised training of a model in memory, before it is finetuned for a metric."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.data.training_state import TrainingState
from metricopt_ext.data.variation import flip_and_shift
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.utils.seeding import generator


def train_supervised(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Callable[[int, int, int], Any],
    *,
    steps: int,
    lr: float,
    seed: int,
    augment: bool = False,
    checkpoint: Path | None = None,
    callback: Callback | None = None,
) -> None:
    """Train a model's trainable parameters by AdamW with a one-cycle schedule; leaves it in evaluation mode.

    A killed training goes on from its checkpoint and ends where it would have ended, bit for bit.

    Args:
        model: Changed in place.
        loss: ``loss(model, batch) -> scalar``.
        batches: ``batches(seed, 0, step)`` returns the batch of a step; to be augmented, inputs and labels.
        steps: Number of steps, at least 1.
        lr: Peak learning rate.
        seed: Seed of batches and augmentation.
        augment: Whether images are flipped and shifted at random, see `variation.flip_and_shift`.
        checkpoint: File to go on from if it exists, written once a minute; None for none.
        callback: Notified of progress.

    Raises:
        FileFormatError: The checkpoint is corrupt or from another training.
    """
    descent = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(descent, lr, total_steps=steps)
    settings = {"lr": lr, "seed": seed, "augment": augment}
    state = TrainingState(model, descent, steps, settings, checkpoint, callback)
    schedule.last_epoch = len(state.losses)
    model.train()
    for step in state.steps_left():
        batch = batches(seed, 0, step)
        if augment:
            x, y = batch
            batch = flip_and_shift(x, generator(seed, "augment", step)), y
        value = loss(model, batch)
        descent.zero_grad()
        value.backward()
        descent.step()
        schedule.step()
        state.losses.append(float(value.detach()))
    model.eval()
