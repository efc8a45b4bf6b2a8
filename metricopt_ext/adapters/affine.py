"""The affine map of a layer: its weight and bias, its channels, and whether phi can be folded into it."""

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.foreign_norms import is_affine_norm, is_foreign_norm
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import evaluating

UNBATCHED = ((nn.Conv1d, nn.InstanceNorm1d), (nn.Conv2d, nn.InstanceNorm2d), (nn.Conv3d, nn.InstanceNorm3d))
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


def is_affine(layer: nn.Module) -> bool:
    """Whether phi can be folded into a norm's weight and bias; a subclass may add 1 to its weight, as Nemotron's does.

    It is asked by a forward pass with other weights, up to `output_of`, which one with further arguments can't be.
    """
    if type(layer).forward in (nn.LayerNorm.forward, nn.GroupNorm.forward):
        return True
    if is_foreign_norm(layer):
        return is_affine_norm(layer)
    (weight, bias), outputs = affine(layer), []
    shape = (2, 3, len(weight)) if channel_axis(layer) == -1 else (2, len(weight), 1, 3)
    x = torch.arange(6.0 * len(weight)).sin().view(shape).to(weight)
    before = KeptModules(layer)
    try:
        handle = output_of(layer).register_forward_hook(lambda module, args, output: outputs.append(output.clone()))
        with evaluating(layer), torch.no_grad():
            for weights in ({}, {"weight": 2 * weight, "bias": 2 * bias + 1}):
                torch.func.functional_call(layer, weights, (x,))
        handle.remove()
    except BaseException as error:
        before.put_back()
        if isinstance(error, Exception):  # of the subclass's own code
            return False
        raise
    rounding = 16 * torch.finfo(weight.dtype).eps
    return torch.allclose(outputs[1], 2 * outputs[0] + 1, rtol=rounding, atol=rounding)


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
