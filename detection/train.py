"""Training of a detector with its own loss, e.g. from scratch before it is finetuned for a metric."""

import math
from pathlib import Path

import torch
from torch import nn

from metricopt_ext.data.training_state import TrainingState
from metricopt_ext.detection.toolkit import Toolkit
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.utils.seeding import generator, seeded_streams


def train_detector(
    toolkit: Toolkit,
    model: nn.Module,
    batches: Batches,
    *,
    steps: int,
    lr: float,
    seed: int = 0,
    warmup: int = 50,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    clip: float = 10.0,
    checkpoint: Path | None = None,
    callback: Callback | None = None,
) -> list[float]:
    """Train a detector by SGD with momentum: a linear warm-up, then a cosine decay to 0.

    A killed training goes on from its checkpoint and ends where it would have ended, bit for bit.

    Args:
        toolkit: The detector's toolkit.
        model: The detector; its parameters that require gradients are changed in place.
        batches: ``batches(seed, 0, step)`` returns the examples of a step (`task.ExampleBatches`).
        steps: Number of steps, at least 1.
        lr: Highest learning rate.
        seed: Seed of the batches, and of the anchors and proposals that the loss samples.
        warmup: Steps over which the rate rises; 0 for none.
        momentum: Of SGD.
        weight_decay: Of SGD.
        clip: Maximum length of the gradient; longer ones are shortened to it.
        checkpoint: File to go on from if it exists, written once a minute; None for none.
        callback: Notified of progress.

    Returns:
        The loss of each step.

    Raises:
        FloatingPointError: The loss or its gradient is not finite; the message says at which step.
        FileFormatError: The checkpoint is corrupt or from another run.
    """
    settings = {"lr": lr, "seed": seed, "warmup": warmup, "momentum": momentum}
    settings |= {"weight_decay": weight_decay, "clip": clip}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    state = TrainingState(model, optimizer, steps, settings, checkpoint, callback)
    for step in state.steps_left():
        rise, fall = min(1.0, (step + 1) / max(1, warmup)), (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = lr * rise * fall
        with seeded_streams(generator(seed, "sampling", step).initial_seed(), parameters[0].device):
            try:
                loss = toolkit.loss(model, batches(seed, 0, step))
            except FloatingPointError as error:
                raise FloatingPointError(f"step {step}: {error}") from error
        optimizer.zero_grad()
        loss.backward()
        length = nn.utils.clip_grad_norm_(parameters, clip)
        if not length.isfinite():
            raise FloatingPointError(f"step {step}: the gradient of the detector's loss is not finite; lower the lr")
        optimizer.step()
        state.losses.append(float(loss.detach()))
    return state.losses
