"""What a model computes before phi: its forward pass, cut where the first layer that phi acts on begins."""

from collections.abc import Iterator

from torch import nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.pinned import pins_mode
from metricopt_ext.adapters.sequence import Cut, cut_at, modules_of
from metricopt_ext.errors import AdapterError


def cut_before_phi(model: nn.Module) -> Cut | None:
    """Return a model's forward pass in two parts, the first of which phi leaves as it is.

    The cut is at the input of the first layer that phi acts on, or of the module around it from where on one tensor is
    all that is needed, as of a residual block.

    Args:
        model: The model, called on one input.

    Returns:
        None where there is no such cut: the model has no adapter, phi acts on its first layer, ``torch.fx`` can't trace
        it, or it has hooks or another forward pass than its class, of which nothing is known.
    """
    try:
        layers = Adapter(model).layers
    except AdapterError:
        return None
    if "forward" in vars(model):  # which a trace, of its class's own, does not know
        return None
    for layer in layers:
        parts = layer.split(".")
        for depth in range(len(parts), 0, -1):
            first = ".".join(parts[:depth])
            try:
                cut = cut_at(model, first)
            except AdapterError:
                continue
            if not _hooked(model, cut, first):
                return cut
            break  # phi acts before this layer, too
    return None


def why_uncut(model: nn.Module, layer: str) -> str:
    """Say why a model's forward pass is not cut at a layer, in words that follow "as".

    Args:
        model: The model, of which `cut_before_phi` found no cut, or none that is worth it.
        layer: The first layer that phi acts on.
    """
    if "forward" in vars(model):
        return f"{type(model).__name__} has another forward pass than its class"
    try:
        cut = cut_at(model, layer)
    except AdapterError as error:
        return str(error)
    if hooked := _hooked(model, cut, layer):
        return f"{type(hooked[0]).__name__} has hooks, of which nothing is known"
    return f"what comes before {layer!r} is no single tensor"


def _hooked(model: nn.Module, cut: Cut, first: str) -> list[nn.Module]:
    """The modules that something acts on around a cut or before it."""
    parts = first.split(".")
    around = [model.get_submodule(".".join(parts[:at])) for at in range(len(parts))]
    before = [each for name in modules_of(cut.before) for each in model.get_submodule(name).modules()]
    return [each for each in (*around, *before) if _has_hooks(each)]


def _has_hooks(module: nn.Module) -> bool:
    """Whether something acts on a module from outside, as phi does; what keeps a mode does nothing in evaluation."""
    return any(not pins_mode(hook) for hook in _hooks(module))


def _hooks(module: nn.Module) -> Iterator[object]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()
