"""Supervised training of a model in memory, before it is finetuned for a metric."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.data.training_state import TrainingState
from metricopt_ext.data.variation import flip_and_shift
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.utils.seeding import generator

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}


def train_supervised(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Callable[[int, int, int], Any],
    *,
    steps: int,
    lr: float,
    seed: int,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    augment: bool = False,
    bfloat16: bool = False,
    checkpoint: Path | None = None,
    callback: Callback | None = None,
) -> None:
    """Train a model's trainable parameters with a one-cycle schedule; leaves it in evaluation mode.

    A killed training goes on from its checkpoint and ends where it would have ended, bit for bit.

    Args:
        model: Changed in place.
        loss: ``loss(model, batch) -> scalar``.
        batches: ``batches(seed, 0, step)`` returns the batch of a step; to be augmented, inputs and labels.
        steps: Number of steps, at least 1.
        lr: Peak learning rate.
        seed: Seed of batches and augmentation.
        optimizer: ``"adamw"``, or ``"sgd"`` with Nesterov's momentum, which the schedule moves between 0.95 and 0.85.
        weight_decay: AdamW's, the share of the rate by which weights shrink in each step (0 makes it Adam), or SGD's,
            the factor of a penalty.
        augment: Whether images are flipped and shifted at random, see `variation.flip_and_shift`.
        bfloat16: Whether convolutions and matrix products are computed in bfloat16, and images' channels lie last.
        checkpoint: File to go on from if it exists, written once a minute; None for none.
        callback: Notified of progress.

    Raises:
        FileFormatError: The checkpoint is corrupt or from another training.
    """
    if bfloat16:
        model.to(memory_format=torch.channels_last)
    descent = OPTIMIZERS[optimizer](model.parameters(), lr, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(descent, lr, total_steps=steps)
    settings = {"optimizer": optimizer, "lr": lr, "seed": seed, "weight_decay": weight_decay}
    settings |= {"augment": augment, "bfloat16": bfloat16}
    state = TrainingState(model, descent, steps, settings, checkpoint, callback)
    schedule.last_epoch, device = len(state.losses), next(model.parameters()).device
    model.train()
    for step in state.steps_left():
        batch = batches(seed, 0, step)
        if augment:
            x, y = batch
            batch = flip_and_shift(x, generator(seed, "augment", step)), y
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            value = loss(model, batch)
        descent.zero_grad()
        value.backward()
        descent.step()
        schedule.step()
        state.losses.append(float(value.detach()))
    if bfloat16:
        model.to(memory_format=torch.contiguous_format)
    model.eval()
