"""Modules in training or evaluation mode for a while, each restored afterwards."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from torch import nn

PINNED = "_metricopt_mode"  # the attribute for the mode of a module that evaluates whatever its mode is


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
    modes = [(module, vars(module).get(PINNED, module.training)) for model in models for module in model.modules()]

    def put_back() -> None:
        for module, before in modes:
            vars(module).pop(PINNED, None)  # of a call that was cut short
            module.training = before

    return put_back
