"""Which layers of a model phi can modulate, and those that a user's patterns mean."""

from fnmatch import fnmatchcase

from torch import nn

from metricopt_ext.adapters.affine import TOOLKIT_NORMS, is_affine, weight_of
from metricopt_ext.adapters.foreign_norms import is_foreign_norm, scales_alone, weight_offset
from metricopt_ext.adapters.wrappers import bare_name
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.words import nearest

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def may_give_logits(module: nn.Module) -> bool:
    """Whether a module is a linear layer or a convolution of 1 pixel."""
    if isinstance(module, CONVOLUTIONS):
        return all(size == 1 for size in module.kernel_size)
    # An attention layer's own projection is never called as a layer.
    return isinstance(module, nn.Linear) and type(module).__name__ != "NonDynamicallyQuantizableLinear"


def _inner(module: nn.Module) -> bool:
    """Whether a module is the output projection of an attention layer, which is never called as a layer."""
    return isinstance(module, nn.Linear) and not may_give_logits(module)


def unusable(module: nn.Module, *, in_weight: bool = True) -> str | None:
    """Why FiLM can't modulate a module, or what acts on its bias alone (``in_weight=False``); None if it can."""
    kind = type(module).__name__
    foreign = is_foreign_norm(module)
    if not (isinstance(module, (*NORMS, *CONVOLUTIONS, nn.Linear)) or kind.endswith(TOOLKIT_NORMS) or foreign):
        return f"is a {kind}, neither a normalisation, convolution nor linear layer"
    if _inner(module):
        return "is the output projection of an attention layer, which is never called as a layer"
    if scales_alone(module):
        if getattr(module, "weight", None) is None or weight_of(module).dim() != 1:
            return f"is a {kind} without a weight per channel to merge into"
        if weight_offset(module) is None:
            return f"is a {kind}, whose output is no multiple of its weight, so phi could not be merged"
        return None
    if getattr(module, "weight", None) is None or getattr(module, "bias", None) is None:
        return f"is a {kind} without a weight and a bias to merge into"
    if isinstance(module, CONVOLUTIONS) and any(
        getattr(module, name, None) is not None for name in ("norm", "activation")
    ):
        # Detectron2's: the layer's output is not affine in its weight, so phi could not be merged.
        return f"is a {kind} with a norm or an activation inside; name its norm instead"
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
        return f"is a {kind} over {len(module.normalized_shape)} axes, which has no channel axis"
    if not is_affine(module, in_weight=in_weight):
        what = "affine in its weight and bias" if in_weight else "its bias plus what does not depend on it"
        return f"is a {kind}, whose output is not {what}, so phi could not be merged"
    return None


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
