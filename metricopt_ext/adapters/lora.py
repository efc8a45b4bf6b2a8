"""LoRA's own scales as phi: the layers that PEFT has adapted, each with a factor on what it adds."""

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.words import shortened


def lora_layers(model: nn.Module) -> list[str]:
    """Return the names of the matrices B of the layers that PEFT has adapted by LoRA, one for each.

    Args:
        model: A model of PEFT's, or one with layers of its.

    Raises:
        AdapterError: There is none, or several adapters are active; they are merged already; or a factor on B can't be
            merged, as with DoRA.
    """
    layers = dict(adapted_layers(model))
    if not layers:
        raise AdapterError(
            f"{type(model).__name__} has no layer that PEFT has adapted by LoRA; use peft.get_peft_model, or load the"
            " adapter by PeftModel.from_pretrained, without merging it"
        )
    active = sorted({each for layer in layers.values() for each in layer.active_adapters})
    if len(active) != 1:
        raise AdapterError(f"PEFT's active adapters are {active}; set one by model.set_adapter(name)")
    name = active[0]
    adapted = {where: layer for where, layer in layers.items() if name in layer.scaling}
    for where, layer in adapted.items():
        _check(where, layer, name)
    found = [f"{where}.lora_B.{name}".lstrip(".") for where, layer in adapted.items() if name in layer.lora_B]
    if not found:
        raise AdapterError(f"adapter {name!r} changes embeddings at most, whose LoRA has no layer for a factor")
    if without := [where for where, layer in adapted.items() if name not in layer.lora_B]:
        warnings.warn(
            f"phi has no factor for LoRA of embeddings ({shortened(without)}), which stays as it is", stacklevel=3
        )
    return found


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that PEFT has adapted by LoRA, by name; PEFT itself need not be imported for that."""
    for name, module in model.named_modules():
        kinds = type(module).__mro__
        if any(kind.__name__ == "LoraLayer" and kind.__module__.startswith("peft.") for kind in kinds):
            yield name, module


def _check(where: str, layer: Any, adapter: str) -> None:
    """Refuse a layer on which a factor would do nothing, or could not be merged."""
    if layer.merged or layer.disable_adapters:
        raise AdapterError(
            f"LoRA of {where!r} is {'merged' if layer.merged else 'disabled'}; call model.unmerge_adapter() or"
            " model.enable_adapter_layers() first"
        )
    if adapter in getattr(layer, "lora_variant", {}) or adapter in layer.lora_magnitude_vector:
        raise AdapterError(f"LoRA of {where!r} is a variant as DoRA is, in which a factor on B is not a factor on all")
