"""Which merged tensors PEFT's own function leaves out when it saves a model."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from metricopt_ext.utils.words import shortened


def left_out(model: nn.Module, merged: Mapping[str, Tensor]) -> str:
    """Say what PEFT's own function will leave out when it saves a model; empty if that is nothing.

    Args:
        model: A model that phi was merged into.
        merged: The tensors that it was merged into, by name.
    """
    if not (lost := _by_peft(model, merged)):
        return ""
    return (
        f"PEFT's save_pretrained saves its own weights and modules_to_save alone, so what was tuned in"
        f" {shortened(lost)} will be lost; save model.merge_and_unload(), or name these layers in modules_to_save"
        " before training"
    )


def _by_peft(model: nn.Module, merged: Mapping[str, Tensor]) -> list[str]:
    """Return the names that PEFT's own function saves not; what its copies have replaced does not count."""
    if not any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        return []
    used = {name: tensor for name, tensor in merged.items() if "original_module" not in name.split(".")}
    saved = [name for name in used if "modules_to_save" in name.split(".")]  # of a part of a PeftModel
    if hasattr(model, "peft_config") and hasattr(model, "save_pretrained"):
        adapters: Any = model.peft_config
        saving = sys.modules["peft"].get_peft_model_state_dict
        states = [saving(model, adapter_name=adapter) for adapter in adapters]
        saved = _there(used, *states)
    return [name for name in used if name not in saved]


def _there(merged: Mapping[str, Tensor], *states: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that are in state dicts, whatever they are called there."""
    places = {each.data_ptr() for state in states for each in state.values() if isinstance(each, Tensor)}
    return [name for name, tensor in merged.items() if tensor.data_ptr() in places]
