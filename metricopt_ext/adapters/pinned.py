"""Modules whose mode is pinned: they compute in training as in evaluation, which is what phi is searched for."""

from typing import Any

from torch import nn

from metricopt_ext.utils.modes import PINNED

TOOLKIT_DROPOUTS = ("StochasticDepth", "DropPath", "DropBlock2d", "DropBlock3d")
MODE_DEPENDENT = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
)


def pins_mode(hook: object) -> bool:
    """Whether a hook has a module compute as in evaluation, and nothing else."""
    return hook is enter_eval or hook is _leave_eval


def mode_dependent(module: nn.Module) -> bool:
    """Whether a module computes otherwise in training than in evaluation."""
    return isinstance(module, MODE_DEPENDENT) or type(module).__name__ in TOOLKIT_DROPOUTS


def pin_to_eval(module: nn.Module) -> list[Any]:
    """Have a module compute as in evaluation; returns the handles of its hooks."""
    return [
        module.register_forward_pre_hook(enter_eval),
        module.register_forward_hook(_leave_eval, always_call=True),
    ]


def enter_eval(module: Any, args: Any) -> None:
    """Put a module into evaluation mode for its forward pass: a hook before it."""
    setattr(module, PINNED, module.training)
    module.training = False


def _leave_eval(module: Any, args: Any, output: Any) -> None:
    module.training = module.__dict__.pop(PINNED, module.training)
