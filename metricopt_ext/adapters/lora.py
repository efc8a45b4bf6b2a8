"""LoRA's own scales as phi: the layers that PEFT has adapted, each with a factor on what it adds."""

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.words import shortened


def lora_layers(model: nn.Module, adapter_name: str | None = None) -> list[str]:
    """Return the names of the matrices B of the layers that PEFT has adapted by LoRA, one for each.

    Args:
        model: A model of PEFT's, or one with layers of its.
        adapter_name: PEFT's name of the adapter; None for the one that is active.

    Raises:
        AdapterError: There is none, or another is active, or several are; they are merged already; or a factor on B
            can't be merged, as with DoRA.
    """
    layers = dict(adapted_layers(model))
    if not layers:
        raise AdapterError(
            f"{type(model).__name__} has no layer that PEFT has adapted by LoRA; use peft.get_peft_model, or load the"
            " adapter by PeftModel.from_pretrained, without merging it"
        )
    active = {each for layer in layers.values() for each in layer.active_adapters}
    known = {each for layer in layers.values() for each in _names(layer)}
    name = adapter_name if adapter_name is not None else next(iter(sorted(active)), None)
    if name not in known or active != {name}:
        raise AdapterError(
            f"adapter_name is {adapter_name!r}; the model has {shortened(sorted(known))}, of which"
            f" {shortened(sorted(active)) if active else 'none'} acts: set one by model.set_adapter(name)"
        )
    found, without = list[str](), list[str]()
    for where, layer in layers.items():
        if name in _names(layer):
            _check(where, layer, name)
            matrix = f"{where}.lora_B.{name}" if where else f"lora_B.{name}"
            (found if name in layer.lora_B else without).append(matrix)
    if not found:
        raise AdapterError(f"adapter {name!r} changes embeddings alone, whose LoRA has no layer that a factor acts on")
    if without:
        warnings.warn(
            f"phi has no factor for LoRA of embeddings ({shortened(without)}), which stays as it is", stacklevel=4
        )
    return found


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that PEFT has adapted by LoRA, by name; PEFT itself need not be imported for that."""
    for name, module in model.named_modules():
        kinds = type(module).__mro__
        if any(kind.__name__ == "LoraLayer" and kind.__module__.startswith("peft.") for kind in kinds):
            yield name, module


def _names(layer: Any) -> set[str]:
    return {*layer.lora_B.keys(), *layer.lora_embedding_B.keys()}


def _check(where: str, layer: Any, name: str) -> None:
    """Refuse a layer on which a factor would do nothing, or could not be merged."""
    if layer.merged:
        raise AdapterError(f"LoRA of {where!r} is merged into its layer already; call model.unmerge_adapter() first")
    if layer.disable_adapters:
        raise AdapterError(f"LoRA of {where!r} is disabled; call model.enable_adapter_layers() first")
    variants = getattr(layer, "lora_variant", {})
    if name in variants or name in layer.lora_magnitude_vector:
        kind = type(variants[name]).__name__ if name in variants else "DoRA"
        raise AdapterError(f"LoRA of {where!r} is a variant ({kind}), in which a factor on B is not a factor on all")
