"""What wraps a model, and what its layers would be called without that."""

import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.words import brief

COMPILED = "OptimizedModule"  # what torch.compile returns; named, because its class takes long to import
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)

# Parts of a module's name that a wrapper has put there, and further ones that PEFT puts before or after.
WRAPPERS = ("module", "_orig_mod", "base_layer")
PEFT_MODEL, PEFT_COPY, UNUSED = "base_model.model.", "modules_to_save", "original_module"


def unwrapped(model: nn.Module, *, searched: bool = False) -> nn.Module:
    """Return the model within DataParallel, DistributedDataParallel and torch.compile: they run it as it is by then.

    A UserWarning says that a DistributedDataParallel which is there already does not average phi's gradients.

    Args:
        model: The model.
        searched: Whether phi is searched for, and never trained by gradients, so that there is nothing to warn of.

    Raises:
        AdapterError: It is no model whose layers can be modulated: no module, one of TorchScript, or one with weights
            that are not there yet, were made in inference mode, or are divided among processes.
    """
    _refuse_others(model)
    while True:
        if isinstance(model, PARALLEL):
            if isinstance(model, nn.parallel.DistributedDataParallel) and not searched:
                warnings.warn(
                    "DistributedDataParallel was made before phi, whose gradients it does not average: that makes no"
                    " difference to a search; to train phi in a loop of your own, attach first and wrap then",
                    stacklevel=3,
                )
            model = model.module
        elif type(model).__name__ == COMPILED:
            inner = model._orig_mod
            assert isinstance(inner, nn.Module)
            model = inner
        else:
            return model


def _refuse_others(model: Any) -> None:
    if not isinstance(model, nn.Module):
        state = "; build the model and load this state dict into it" if isinstance(model, Mapping) else ""
        raise AdapterError(f"model is {brief(model)}; it must be a torch.nn.Module{state}")
    if strange := _strange_in(model):
        raise AdapterError(
            f"{type(model).__name__} has {strange}, which phi can't act on; build the plain model, whose layers and"
            " weights are all there (a lazy layer's are after a batch), load the trained weights into it, and tune that"
        )


def _strange_in(model: nn.Module) -> str:
    """Name what a model has in place of ordinary layers and whole weights; empty if that is nothing.

    What divides weights among processes is known by its marks, as importing it takes long.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return "compiled layers, of TorchScript"
    kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        return "weights that FSDP divides"
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            return f"{name} without a shape, of a lazy layer"
        if isinstance(tensor, nn.Parameter):  # a buffer may be made anew by a forward pass
            if tensor.is_inference():
                return f"{name} of torch.inference_mode"
            if hasattr(tensor, "ds_id") or "DTensor" in (type(tensor).__name__, type(tensor.data).__name__):
                return f"{name} divided among processes"
    return ""


def bare_name(name: str) -> str:
    """Return a module's name without the parts that wrappers of it, or of what holds it, have put there.

    Examples:
        >>> bare_name("trunk.module.bn2"), bare_name("base_model.model.bert.classifier.modules_to_save.default")
        ('trunk.bn2', 'bert.classifier')
    """
    parts = name.removeprefix(PEFT_MODEL).split(".")
    kept = []
    while parts:
        part = parts.pop(0)
        if part == PEFT_COPY:
            parts = parts[1:]  # the adapter's name
        elif part not in WRAPPERS:
            kept.append(part)
    return ".".join(kept)


def is_unused(name: str) -> bool:
    """Whether a module is one that PEFT keeps beside the copy of it which is in use."""
    return UNUSED in name.split(".")
