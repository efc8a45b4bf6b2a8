"""Training of a detector with its own loss, e.g. from scratch before it is finetuned for a metric."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metricopt_ext.detection.toolkit import Toolkit
from metricopt_ext.errors import FileFormatError
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.utils.files import check_tensors, content_of, read_tensors, write_tensors
from metricopt_ext.utils.seeding import generator, seeded_streams

FILE_FORMAT = "metricopt_ext.detector_training"
CHECKPOINTS = 10  # per training run, or more ...
CHECKPOINT_STEPS = 1000  # ... so that no more steps than this are lost


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
) -> list[float]:
    """Train a detector by SGD with momentum: a linear warm-up, then a cosine decay to 0.

    A killed training run continues from its checkpoint and ends where it would have ended, bit for bit.

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
        checkpoint: File to continue from if it exists, written after each tenth of the steps, or each 1000 if
            those are fewer.

    Returns:
        The loss of each step.

    Raises:
        FloatingPointError: The loss or its gradient is not finite; the message says at which step.
        FileFormatError: The checkpoint is corrupt or from another run.
    """
    settings = {"steps": steps, "lr": lr, "seed": seed, "warmup": warmup, "momentum": momentum}
    settings |= {"weight_decay": weight_decay, "clip": clip}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    losses: list[float] = []
    if checkpoint is not None and checkpoint.exists():
        losses = _load(checkpoint, model, optimizer, settings)
    every = max(1, min(steps // CHECKPOINTS, CHECKPOINT_STEPS))
    for step in range(len(losses), steps):
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
        losses.append(float(loss.detach()))
        if checkpoint is not None and (step + 1) % every == 0:
            _save(checkpoint, model, optimizer, losses, settings)
    return losses


def _save(
    path: Path, model: nn.Module, optimizer: torch.optim.SGD, losses: list[float], settings: dict[str, Any]
) -> None:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if (momentum := optimizer.state.get(parameter, {}).get("momentum_buffer")) is not None:
            tensors[f"momentum.{name}"] = momentum
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    write_tensors(path, tensors, FILE_FORMAT, settings)


def _load(path: Path, model: nn.Module, optimizer: torch.optim.SGD, settings: dict[str, Any]) -> list[float]:
    """Put the model and the momentum back, and return the losses of the steps taken so far."""
    tensors, theirs = read_tensors(path, FILE_FORMAT)
    for key, value in settings.items():
        if theirs.get(key) != value:
            raise FileFormatError(
                f"{path} is from another run: {key} was {theirs.get(key)!r}, now {value!r}; delete it to train anew"
            )
    state = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    own = model.state_dict()
    try:
        check_tensors(path, state, {name: value.shape for name, value in own.items()})
    except FileFormatError as error:
        raise FileFormatError(f"{path} is from another detector; delete it to train anew ({error})") from error
    moving = {name: value for name, value in model.named_parameters() if f"momentum.{name}" in tensors}
    check_tensors(
        path,
        {name: tensors[f"momentum.{name}"] for name in moving},
        {name: value.shape for name, value in moving.items()},
    )
    with content_of(path, "state of a detector's training"):
        losses: list[float] = [float(loss) for loss in tensors["losses"]]
        model.load_state_dict(state)
    for name, parameter in moving.items():
        optimizer.state[parameter]["momentum_buffer"] = tensors[f"momentum.{name}"].to(parameter)
    return losses
