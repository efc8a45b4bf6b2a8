"""Which layers of a model phi can move, those that a user's patterns mean, and modules whose mode is pinned."""

import re
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.wrappers import bare_name
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.modes import PINNED, evaluating
from metricopt_ext.utils.weights import has_mean
from metricopt_ext.utils.words import nearest

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# Ends of names, as each detector of transformers has its own. Not imported: the core does not depend on a toolkit.
TOOLKIT_NORMS = ("FrozenBatchNorm2d", "LayerNorm2d")
OWN_NORMS = re.compile(r"(layer|rms)_?norm$", re.IGNORECASE)  # of a model's code, as T5LayerNorm and LlamaRMSNorm

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

TOOLKIT_DROPOUTS = ("StochasticDepth", "DropPath", "DropBlock2d", "DropBlock3d")
MODE_DEPENDENT = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)


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
    if not (is_norm(module) or isinstance(module, CONVOLUTIONS) or may_give_logits(module)):
        return f"{kind}, no normalisation, convolution or linear layer that is called as one"
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
    what = f"phi can't move {name}.{own}, which is"
    if tensor is None:
        return f"{what} computed from others; make it a plain parameter first (remove_parametrizations, prune.remove)"
    if not has_mean(tensor) or hasattr(tensor, "__tensor_flatten__"):
        return f"{what} quantised; tune the model before quantisation"
    other = shared_with(model, layer, tensor)
    return other and f"{what} {other} too; give each layer a copy of its own first, or name other layers"


def shared_with(model: nn.Module, layer: nn.Module, tensor: Any) -> str | None:
    """Return the name by which another layer has a layer's tensor; None if the layer alone has it."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    names = (name for name, each in named if each is tensor)
    return next((name for name in names if model.get_submodule(name.rpartition(".")[0]) is not layer), None)


@torch.no_grad()
def origin(layer: nn.Module) -> float | None:
    """Return what a layer adds to its weight before it multiplies, 1 in Gemma's norms; None if that is unknown.

    A norm of a model's own code is asked: with the weight at minus that, and the bias at 0, nothing comes out.
    """
    known = (nn.LayerNorm.forward, nn.RMSNorm.forward)
    if not (isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) or _is_own_norm(layer)) or type(layer).forward in known:
        return 0.0
    weight = weight_of(layer)
    zeros = {} if scales_alone(layer) else {"bias": torch.zeros_like(weight)}
    for shape in ((1, 2, -1), (1, -1, 1, 2)):  # channels last, and after the batch
        x = torch.linspace(-1, 1, 2 * len(weight)).view(shape).to(weight)
        for found in (0.0, 1.0):
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
    found, modules = set[str](), dict(model.named_modules())
    for pattern in patterns:
        named = [name for name in modules if fnmatchcase(name, pattern)]
        # One that none has as it is called is tried without what wrappers have added.
        meant = named or [name for name in usable if fnmatchcase(bare_name(name), pattern)]
        if not meant:
            raise AdapterError(f"layers={pattern!r} matches no layer{nearest(pattern, list(usable))}")
        if not usable.keys() & meant:
            raise AdapterError(f"layers={pattern!r} matches {meant[0]!r}, which {unusable(modules[meant[0]])}")
        found.update(meant)
    return [name for name in usable if name in found]


# --- Modes: modules compute in training as in evaluation, which is what phi is searched for


def mode_dependent(module: nn.Module) -> bool:
    """Whether a module computes otherwise in training than in evaluation."""
    return isinstance(module, MODE_DEPENDENT) or type(module).__name__ in TOOLKIT_DROPOUTS


def pins_mode(hook: object) -> bool:
    """Whether a hook has a module compute as in evaluation, and nothing else."""
    return hook is enter_eval or hook is _leave_eval


def pin_to_eval(module: nn.Module) -> list[Any]:
    """Have a module compute as in evaluation; returns the handles of its hooks."""
    return [module.register_forward_pre_hook(enter_eval), module.register_forward_hook(_leave_eval, always_call=True)]


def enter_eval(module: Any, args: Any) -> None:
    """Have a module compute as in evaluation for its forward pass: a hook before it.

    An RNN drops nothing out, but is in training mode where gradients are computed: cuDNN has no backward pass through
    one in evaluation mode.
    """
    rnn = isinstance(module, nn.RNNBase)
    pinned = {"training": torch.is_grad_enabled(), "dropout": 0.0} if rnn else {"training": False}
    vars(module).update({PINNED: {name: getattr(module, name) for name in pinned}, **pinned})


def _leave_eval(module: Any, args: Any, output: Any) -> None:
    vars(module).update(vars(module).pop(PINNED, {}))
