"""Modules in training or evaluation mode for a while, each restored afterwards."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from torch import nn

PINNED = "_metricopt_mode"  # the attribute of a module that computes as in evaluation, for what that has changed


@contextmanager
def evaluating(model: nn.Module) -> Any:
    """Put every module of a model into evaluation mode, then restore the mode each was in."""
    with in_mode(model, training=False):
        yield model


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Any:
    """Put every module of a model into training or evaluation mode, then restore the mode each was in."""
    put_back = kept_modes(model)
    try:
        model.train(training)
        yield model
        put_back()
    except BaseException:  # also one that cuts the line before short
        put_back()
        raise


def trains(model: nn.Module) -> bool:
    """Whether a model is in training mode, or a norm of it, whose statistics are estimated: each pass then counts."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    return model.training or any(norm.training for norm in norms)


def kept_modes(*models: nn.Module) -> Callable[[], None]:
    """Return a function that puts every module of some models into the mode that it is in now."""
    every = [module for model in models for module in model.modules()]
    modes = [(module, vars(module).get(PINNED, {"training": module.training})) for module in every]

    def put_back() -> None:
        for module, before in modes:
            vars(module).update({**vars(module).pop(PINNED, {}), **before})  # what a call that was cut short left, too

    return put_back
