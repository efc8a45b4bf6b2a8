"""The model to be finetuned: built from the seed, then loaded, resumed or trained."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from metricopt_ext.runtime import distributed
from metricopt_ext.utils.files import save_checkpoint
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.state_dict import load_checkpoint

TRAINING = "training.safetensors"


def pretrained(
    build: Callable[[], nn.Module],
    train: Callable[[nn.Module, Path], object],
    *,
    check: Callable[[nn.Module], object],
    weights: str,
    folder: Path,
    seed: int,
    device: torch.device,
    entry: str = "",
    load: Callable[[nn.Module, str, str], None] = lambda model, weights, entry: load_checkpoint(
        model, Path(weights), entry=entry
    ),
) -> nn.Module:
    """Return a model in evaluation mode, and keep its weights in ``folder`` as ``model.safetensors``.

    Until it is trained, ``folder`` holds the file from which a killed training goes on.

    Of ranks that share a seed all have the first one's, as another kind of processor trains others.

    Args:
        build: Returns the untrained model, with weights drawn from torch's global stream.
        train: ``train(model, file)`` trains it if no weights are given; goes on from the file if there is one.
        check: Called with a copy of the untrained model, which it may change; what it raises, e.g. because the model
            lacks the adapter's layers, is raised before training. Callers merge the adapter too: the merged model is
            written after all queries, too late to find that it can't be.
        weights: File to load weights from, or what else ``load`` understands; empty to train instead.
        folder: Where the weights are kept, and loaded from if an earlier part of the run left them there.
        seed: Seed of the initial weights.
        device: Where the model goes.
        entry: The state dict's key in the file of weights; empty to find it.
        load: ``load(model, weights, entry)`` loads them; a file's by default.

    Raises:
        DataError: The weights don't fit the model.
    """
    kept = folder / "model.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "model").initial_seed())
        model = build()
        check(copy.deepcopy(model))
        if kept.exists():
            load_checkpoint(model, kept)
        elif weights:
            load(model, weights, entry)
        else:
            train(model.to(device), folder / TRAINING)
    if distributed.world() > 1:
        model.load_state_dict(distributed.on_first(model.state_dict))
    if not kept.exists():
        save_checkpoint(kept, model.state_dict())
    (folder / TRAINING).unlink(missing_ok=True)
    return model.to(device).eval()
