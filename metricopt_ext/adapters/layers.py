"""Which layers of a model phi can move, those that a user's patterns mean, and modules whose mode is pinned."""

import math
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.wrappers import bare_name
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.modes import PINNED, evaluating
from metricopt_ext.utils.words import nearest

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# Ends of names, as each detector of transformers has its own. Not imported: the core does not depend on a toolkit.
TOOLKIT_NORMS = ("FrozenBatchNorm2d", "LayerNorm2d")
OWN_NORMS = re.compile(r"(layer|rms)_?norm$", re.IGNORECASE)  # of a model's code, as T5LayerNorm and LlamaRMSNorm

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

TOOLKIT_DROPOUTS = ("StochasticDepth", "DropPath", "DropBlock2d", "DropBlock3d")
MODE_DEPENDENT = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
)


# --- What phi can move


def may_give_logits(module: nn.Module) -> bool:
    """Whether a module is a linear layer or a convolution of 1 pixel."""
    if isinstance(module, CONVOLUTIONS):
        return all(size == 1 for size in module.kernel_size)
    # An attention layer's own projection is never called as a layer.
    return isinstance(module, nn.Linear) and type(module).__name__ != "NonDynamicallyQuantizableLinear"


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its class or its class's name."""
    return isinstance(module, NORMS) or type(module).__name__.endswith(TOOLKIT_NORMS) or _is_own_norm(module)


def _is_own_norm(module: nn.Module) -> bool:
    return OWN_NORMS.search(type(module).__name__) is not None and next(module.children(), None) is None


def scales_alone(module: nn.Module) -> bool:
    """Whether a module is a norm that has a weight and no bias."""
    return is_norm(module) and _is_vector(getattr(module, "weight", None)) and getattr(module, "bias", None) is None


def unusable(module: nn.Module) -> str | None:
    """Why FiLM can't modulate a module; None if it can."""
    kind = f"is a {type(module).__name__}"
    if not (is_norm(module) or isinstance(module, (*CONVOLUTIONS, nn.Linear))):
        return f"{kind}, neither a normalisation, convolution nor linear layer"
    if isinstance(module, nn.Linear) and not may_give_logits(module):
        return "is the output projection of an attention layer, which is never called as a layer"
    if isinstance(module, CONVOLUTIONS) and any(getattr(module, each, None) for each in ("norm", "activation")):
        return f"{kind} with a norm or an activation inside; name its norm instead"  # Detectron2's
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    lacks = not _is_vector(weight) if is_norm(module) else not isinstance(weight, Tensor)
    if lacks or not (_is_vector(bias) or scales_alone(module)):
        return f"{kind} without a weight and a bias for each channel to merge into"
    return f"{kind}, whose output is no multiple of its weight" if origin(module) is None else None


def unmovable(model: nn.Module, name: str, own: str) -> str | None:
    """Why phi can't move a layer's tensor; None if it can.

    Args:
        model: The model.
        name: The layer's name.
        own: ``"weight"`` or ``"bias"``.
    """
    layer = model.get_submodule(name)
    tensor = layer._parameters.get(own, layer._buffers.get(own))
    if tensor is None:
        return (
            f"{name}.{own} is computed from other tensors, so that phi can't move it; make it a plain parameter first,"
            " as torch.nn.utils.parametrize.remove_parametrizations and prune.remove do"
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2 or hasattr(tensor, "__tensor_flatten__"):
        return f"{name}.{own} is quantised, so that phi can't move it; tune the model before quantisation"
    others = [each for each in model.modules() if each is not layer]
    if any(tensor is held for each in others for held in (*each._parameters.values(), *each._buffers.values())):
        return (
            f"{name}.{own} is shared with another layer, which phi would move too; give each layer a copy of its own"
            " first, or name other layers"
        )
    return None


@torch.no_grad()
def origin(layer: nn.Module) -> float | None:
    """Return what a layer adds to its weight before it multiplies, 1 in Gemma's norms; None if that is unknown.

    A norm of a model's own code is asked: with the weight at minus that, and the bias at 0, nothing comes out.
    """
    known = (nn.LayerNorm.forward, nn.RMSNorm.forward)
    if not (isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) or _is_own_norm(layer)) or type(layer).forward in known:
        return 0.0
    weight = weight_of(layer)
    zeros, channels = {} if scales_alone(layer) else {"bias": torch.zeros_like(weight)}, len(weight)
    for shape in ((1, 2, channels), (1, channels, 1, 1)):
        for found in (0.0, 1.0):
            x = torch.linspace(-1, 1, math.prod(shape)).view(shape).to(weight)
            with suppress(Exception), evaluating(layer):  # of the layer's own code
                output = torch.func.functional_call(layer, {"weight": torch.full_like(weight, -found), **zeros}, (x,))
                if isinstance(output, Tensor) and output.shape == x.shape and not output.any():
                    return found
    return None


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight of a layer that has one."""
    assert isinstance(layer.weight, Tensor)
    return layer.weight


def _is_vector(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() == 1


def matching(patterns: list[str], model: nn.Module, usable: dict[str, nn.Module]) -> list[str]:
    """Return the names of usable layers that patterns match, in the model's order."""
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in usable):
            continue
        for name, module in model.named_modules():
            if fnmatchcase(name, pattern):
                raise AdapterError(f"layers={pattern!r} matches {name!r}, which {unusable(module)}")
        if not any(fnmatchcase(bare_name(name), pattern) for name in usable):
            raise AdapterError(f"layers={pattern!r} matches no layer{nearest(pattern, list(usable))}")
    return [name for name in usable if any(_matches(name, pattern, usable) for pattern in patterns)]


def _matches(name: str, pattern: str, usable: dict[str, nn.Module]) -> bool:
    """Whether a pattern is a layer's; one that none has as it is called is tried without what wrappers have added."""
    if any(fnmatchcase(each, pattern) for each in usable):
        return fnmatchcase(name, pattern)
    return fnmatchcase(bare_name(name), pattern)


# --- Modes: modules compute in training as in evaluation, which is what phi is searched for


def mode_dependent(module: nn.Module) -> bool:
    """Whether a module computes otherwise in training than in evaluation."""
    return isinstance(module, MODE_DEPENDENT) or type(module).__name__ in TOOLKIT_DROPOUTS


def pins_mode(hook: object) -> bool:
    """Whether a hook has a module compute as in evaluation, and nothing else."""
    return hook is enter_eval or hook is _leave_eval


def pin_to_eval(module: nn.Module) -> list[Any]:
    """Have a module compute as in evaluation; returns the handles of its hooks."""
    return [
        module.register_forward_pre_hook(enter_eval),
        module.register_forward_hook(_leave_eval, always_call=True),
    ]


def enter_eval(module: Any, args: Any) -> None:
    """Have a module compute as in evaluation for its forward pass: a hook before it.

    An RNN drops nothing out, but is in training mode where gradients are computed: cuDNN has no backward pass through
    one in evaluation mode.
    """
    if isinstance(module, nn.RNNBase):
        setattr(module, PINNED, {"training": module.training, "dropout": module.dropout})
        module.training, module.dropout = torch.is_grad_enabled(), 0.0
    else:
        setattr(module, PINNED, {"training": module.training})
        module.training = False


def _leave_eval(module: Any, args: Any, output: Any) -> None:
    vars(module).update(vars(module).pop(PINNED, {}))
