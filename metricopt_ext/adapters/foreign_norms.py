"""Norms that a model's own code defines, as Hugging Face's RMSNorms: told by their names, and tried before use."""

import re

import torch
from torch import Tensor, nn

from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import evaluating

NAME = re.compile(r"(layer|rms)_?norm$", re.IGNORECASE)  # of a class, as T5LayerNorm and LlamaRMSNorm
KNOWN = (nn.LayerNorm, nn.RMSNorm)
OFFSETS = (0.0, 1.0)  # what is added to a weight before it multiplies; Gemma's are around 0


def is_foreign_norm(module: nn.Module) -> bool:
    """Whether a module, none of torch's, is a norm over the last axis by its name, with a weight for each channel."""
    if isinstance(module, KNOWN) or NAME.search(type(module).__name__) is None or next(module.children(), None):
        return False
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and (bias is None or isinstance(bias, Tensor))


def scales_alone(module: nn.Module) -> bool:
    """Whether a module is a norm over the last axis that has no bias."""
    if isinstance(module, nn.RMSNorm):
        return True
    norm = isinstance(module, nn.LayerNorm) or is_foreign_norm(module)
    return norm and getattr(module, "weight", None) is not None and getattr(module, "bias", None) is None


def weight_offset(norm: nn.Module) -> float | None:
    """Return b where a norm without a bias gives its normalised input times ``b + weight``; None if it gives another.

    It is asked by forward passes with other weights.
    """
    if type(norm).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward):
        return 0.0
    weight = norm.weight
    assert isinstance(weight, Tensor)
    for offset in OFFSETS:
        changed = outputs_with(norm, {"weight": 2 * weight.detach() + offset})
        if changed is not None and _close(changed[1], 2 * changed[0], weight):
            return offset
    return None


def outputs_with(norm: nn.Module, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return what a norm gives as it is and with other tensors; None where it does not take one ``... x C`` alone."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    x = torch.arange(6.0 * len(weight)).sin().view(2, 3, -1).to(weight)
    before = KeptModules(norm)
    try:
        with evaluating(norm), torch.no_grad():
            found = norm(x), torch.func.functional_call(norm, tensors, (x,))
    except BaseException as error:
        before.put_back()
        if isinstance(error, Exception):  # of the norm's own code
            return None
        raise
    return found if all(isinstance(each, Tensor) and each.shape == x.shape for each in found) else None


def is_affine_norm(norm: nn.Module) -> bool:
    """Whether a foreign norm with a bias is affine in its weight and bias."""
    weight, bias = norm.weight, norm.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    found = outputs_with(norm, {"weight": 2 * weight.detach(), "bias": 2 * bias.detach() + 1})
    return found is not None and _close(found[1], 2 * found[0] + 1, weight)


def _close(a: Tensor, b: Tensor, weight: Tensor) -> bool:
    rounding = 16 * torch.finfo(weight.dtype).eps
    return torch.allclose(a, b, rtol=rounding, atol=rounding)
