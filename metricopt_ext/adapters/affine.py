"""The affine map of a layer: its weight and bias, its channels, and whether phi can be folded into it."""

import math

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.foreign_norms import is_affine_norm, is_foreign_norm
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import evaluating

UNBATCHED = ((nn.Conv1d, nn.InstanceNorm1d), (nn.Conv2d, nn.InstanceNorm2d), (nn.Conv3d, nn.InstanceNorm3d))
NORMS_OF_AXES = (
    (nn.BatchNorm1d, nn.InstanceNorm1d),
    (nn.BatchNorm2d, nn.InstanceNorm2d),
    (nn.BatchNorm3d, nn.InstanceNorm3d),
)
# Ends of names, as each detector of transformers has its own. Not imported: the core does not depend on a toolkit.
TOOLKIT_NORMS = ("FrozenBatchNorm2d", "LayerNorm2d")


def affine(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of a layer that has both."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return weight, bias


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight of a layer, which may have no bias."""
    assert isinstance(layer.weight, Tensor)
    return layer.weight


def channel_axis(layer: nn.Module) -> int:
    """Return the channel axis of a layer's output."""
    for spatial, kinds in enumerate(UNBATCHED, start=1):
        if isinstance(layer, kinds):
            return -1 - spatial  # counted from the end: these layers also take an input without a batch axis
    channels_last = isinstance(layer, nn.LayerNorm) and not _takes_channels_first(layer)
    return -1 if channels_last or isinstance(layer, (nn.Linear, nn.RMSNorm)) or is_foreign_norm(layer) else 1


def output_of(layer: nn.Module) -> nn.Module:
    """Return the module whose output is the layer's affine map: itself, but for a norm of timm's with an activation.

    Such a norm applies a dropout of its own, which is pinned to evaluation, and then the activation. Phi acts between
    the two, as only there it can be folded into the norm's weight and bias.
    """
    drop = getattr(layer, "drop", None)
    return drop if isinstance(drop, nn.Module) and isinstance(getattr(layer, "act", None), nn.Module) else layer


def is_affine(layer: nn.Module, *, in_weight: bool = True) -> bool:
    """Whether phi can be folded into a layer's weight and bias; a subclass may change what its base class returns.

    It is asked by a forward pass with other tensors, up to `output_of`, which a layer with further arguments can't be.
    Of torch's own layers it is known, and of one without data, or whose tensors are computed, it can't be asked.

    Args:
        layer: A layer with a weight and a bias.
        in_weight: Whether the weight matters, or the bias alone.
    """
    if _is_of_torch(layer):
        return True
    if is_foreign_norm(layer):
        return is_affine_norm(layer)
    weight, bias = affine(layer)
    if weight.is_meta or not {"weight", "bias"} <= {*layer._parameters, *layer._buffers}:
        return True
    if in_weight and not weight.is_floating_point():  # of a quantised layer
        return False
    outputs, before = list[Tensor](), KeptModules(layer)
    factor = 2 if in_weight else 1
    try:
        with evaluating(layer), torch.no_grad():
            # Before the user's own hooks, as phi acts before them.
            handle = output_of(layer).register_forward_hook(
                lambda module, args, output: outputs.append(output.clone()), prepend=True
            )
            for tensors in ({}, {"weight": factor * weight, "bias": factor * bias + 1}):
                torch.func.functional_call(layer, tensors, (_asked(layer),))
            handle.remove()
    except BaseException as error:
        before.put_back()
        if isinstance(error, Exception):  # of the subclass's own code
            return False
        raise
    if len(outputs) != 2 or not outputs[0].is_floating_point():
        return False
    rounding = max(16 * torch.finfo(bias.dtype).eps, 1e-4)
    size = 1 + float(bias.detach().abs().max()) + float(outputs[0].abs().max())  # of what is summed up
    return torch.allclose(outputs[1], factor * outputs[0] + 1, rtol=rounding, atol=rounding * size)


def _is_of_torch(layer: nn.Module) -> bool:
    """Whether a layer computes by torch's own code."""
    return type(layer).__module__.startswith("torch.nn.modules.") and "forward" not in vars(layer)


def _asked(layer: nn.Module) -> Tensor:
    """Return an input that a layer takes, of batch size 2."""
    weight, bias = affine(layer)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        spatial = zip(layer.dilation, layer.kernel_size, strict=True)
        shape = [2, layer.in_channels, *(dilation * (size - 1) + 2 for dilation, size in spatial)]
    elif channel_axis(layer) == -1:
        shape = [2, 3, layer.in_features if isinstance(layer, nn.Linear) else len(weight)]
    else:
        axes = next((axes for axes, kinds in enumerate(NORMS_OF_AXES, start=1) if isinstance(layer, kinds)), 2)
        shape = [2, len(weight), *[1] * (axes - 1), 3]
    return torch.arange(float(math.prod(shape))).sin().view(shape).to(weight if weight.is_floating_point() else bias)


@torch.no_grad()
def _takes_channels_first(layer: nn.LayerNorm) -> bool:
    """Whether a LayerNorm takes ``B x C x H x W``, as ConvNeXt's do, which has another name in each toolkit."""
    if type(layer).forward is nn.LayerNorm.forward:
        return False
    channels = layer.normalized_shape[0]
    try:
        layer.forward(layer.weight.new_zeros(1, channels, 1, channels % 2 + 1))
    except Exception:  # of the subclass's own code, as the last axis has another size than the weights
        return False
    return True
