"""Which merged tensors a host's own function leaves out when it saves a model, as far as the model tells."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from metricopt_ext.utils.words import shortened

AVERAGE = re.compile(r"EMA|Ema(?![a-z])|MovingAverage")  # in a class's name


def left_out(model: nn.Module, merged: Mapping[str, Tensor]) -> Iterator[str]:
    """Say what saving a model will leave out.

    Args:
        model: A model that phi was merged into.
        merged: The tensors that it was merged into, by name.
    """
    if lost := _by_peft(model, merged):
        yield (
            f"PEFT's save_pretrained saves its own weights and modules_to_save alone, so what was tuned in"
            f" {shortened(lost)} will be lost; save model.merge_and_unload(), or name these layers in modules_to_save"
            " before training"
        )
    elif lost := [name for name in merged if any(_of(module, "loralib") for module in model.modules())]:
        yield (
            f"lora_state_dict saves LoRA's weights alone, so phi in {shortened(lost)} will be lost; save state_dict()"
        )
    if lost := _by_state_dict(model, merged):
        yield (
            f"the state dict that {type(model).__name__} saves leaves out {shortened(lost)}, where phi is now; save"
            " these tensors too"
        )
    for name, module in model.named_modules():
        kind = type(module).__name__
        average = isinstance(module, AveragedModel) or AVERAGE.search(kind) is not None
        tails = [f".{each.removeprefix('module.')}" for each, _ in module.named_parameters()] if average else []
        copies = any(f".{each}".endswith(tail) for each in merged for tail in tails)
        if name and copies and not any(each.startswith(f"{name}.") for each in merged):
            yield (
                f"{name} ({kind}) keeps an average of the weights, which lacks phi; save the model itself, or attach to"
                " the average"
            )


def not_read(model: nn.Module, added: Sequence[str]) -> Iterator[str]:
    """Say what loading a saved model will leave out.

    Args:
        model: A model that phi is merged into.
        added: Names of the biases that it gets by that.
    """
    if added and any(kind.__name__ == "PreTrainedModel" for each in model.modules() for kind in type(each).__mro__):
        yield (
            f"from_pretrained makes the model without {shortened(list(added))}, where phi is now, and leaves it out;"
            " save the adapter before merging (Adapter.save), and load it into the model that from_pretrained makes"
        )


def _by_peft(model: nn.Module, merged: Mapping[str, Tensor]) -> list[str]:
    """Return the names that PEFT's own function saves not; what its copies have replaced does not count."""
    if not any(_of(module, "peft") for module in model.modules()):
        return []
    used = {name: tensor for name, tensor in merged.items() if "original_module" not in name.split(".")}
    saved = [name for name in used if "modules_to_save" in name.split(".")]  # of a part of a PeftModel
    if hasattr(model, "peft_config") and hasattr(model, "save_pretrained"):
        adapters: Any = model.peft_config
        saving = sys.modules["peft"].get_peft_model_state_dict
        states = [saving(model, adapter_name=adapter) for adapter in adapters]
        saved = _there(used, *states)
    return [name for name in used if name not in saved]


def _by_state_dict(model: nn.Module, merged: Mapping[str, Tensor]) -> list[str]:
    """Return the names whose tensors are not in what a model's own functions say that it saves."""
    try:
        state = model.state_dict()
        if hook := getattr(model, "on_save_checkpoint", None):  # Lightning's
            checkpoint = {"state_dict": dict(state)}
            hook(checkpoint)
            state = checkpoint["state_dict"]
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()  # Hugging Face's
        state = {name: each for name, each in state.items() if not any(re.search(key, name) for key in ignored)}
        there = _there(merged, state)
    except Exception:  # of the model's own code
        return []
    return [name for name in merged if name not in there]


def _there(merged: Mapping[str, Tensor], *states: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that are in state dicts, whatever they are called there."""
    places = {each.data_ptr() for state in states for each in state.values() if isinstance(each, Tensor)}
    return [name for name, tensor in merged.items() if tensor.data_ptr() in places]


def _of(module: nn.Module, package: str) -> bool:
    return type(module).__module__.split(".")[0] == package
