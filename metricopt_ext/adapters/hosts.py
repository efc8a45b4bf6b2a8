"""Which merged tensors PEFT's own function leaves out when it saves a model."""

import sys
from collections.abc import Mapping

from torch import Tensor, nn

from metricopt_ext.adapters.wrappers import is_unused
from metricopt_ext.utils.words import shortened


def left_out(model: nn.Module, merged: Mapping[str, Tensor]) -> str:
    """Say what PEFT's own function will leave out when it saves a model; empty if that is nothing.

    Args:
        model: A model that phi was merged into.
        merged: The tensors that it was merged into, by name.
    """
    if not any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        return ""
    used = {name: tensor for name, tensor in merged.items() if not is_unused(name)}
    lost = [name for name in used if "modules_to_save" not in name.split(".")]  # of a part of a PeftModel
    if hasattr(model, "peft_config") and hasattr(model, "save_pretrained"):
        saving = sys.modules["peft"].get_peft_model_state_dict
        states = [saving(model, adapter_name=each) for each in model.peft_config]  # type: ignore[union-attr]
        places = {each.data_ptr() for state in states for each in state.values() if isinstance(each, Tensor)}
        lost = [name for name, tensor in used.items() if tensor.data_ptr() not in places]
    if not lost:
        return ""
    return (
        f"PEFT's save_pretrained saves its own weights and modules_to_save alone, so what was tuned in"
        f" {shortened(lost)} will be lost; save model.merge_and_unload(), or name these layers in modules_to_save"
        " before training"
    )
