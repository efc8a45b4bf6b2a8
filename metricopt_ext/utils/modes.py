"""Modules in training or evaluation mode for a while, each restored afterwards."""

from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Any:
    """Put every module of a model into evaluation mode, then restore the mode each was in."""
    with in_mode(model, training=False):
        yield model


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Any:
    """Put every module of a model into training or evaluation mode, then restore the mode each was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield model
    finally:
        for module, before in modes:
            module.training = before
