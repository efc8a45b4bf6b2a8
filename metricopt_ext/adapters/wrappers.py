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
            that are not there yet or were made in inference mode; or each process holds only a part of its weights.
    """
    _refuse_others(model)
    if (by := sharded_by(model)) is not None:
        raise AdapterError(
            f"{type(model).__name__}'s weights are sharded by {by}, and a layer's shard is not its weight: save the"
            " trained weights as one full state dict, load them into a model that is not sharded, and tune that"
        )
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
    if isinstance(model, torch.jit.ScriptModule):
        raise AdapterError(
            f"{type(model).__name__} is of TorchScript, whose layers are compiled, so that none can be modulated;"
            " attach to the model that was scripted or traced"
        )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise AdapterError(f"{name} has no shape yet, as of a lazy layer; run the model on a batch first")
        if tensor.is_inference() and isinstance(tensor, nn.Parameter):  # a buffer may be made anew by a forward pass
            raise AdapterError(
                f"{name} was made under torch.inference_mode, so nothing can be differentiated through it; build or"
                " load the model outside of that"
            )


def sharded_by(model: nn.Module) -> str | None:
    """Return what has left each process only a part of a model's parameters: FSDP, DTensor or DeepSpeed; else None.

    They are known by their marks, as importing them takes long.
    """
    kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        return "FSDP"
    if any(hasattr(each, "ds_id") for each in model.parameters()):
        return "DeepSpeed's ZeRO stage 3"
    kinds = {type(each).__name__ for each in (*model.parameters(), *(p.data for p in model.parameters()))}
    return "torch.distributed, as a DTensor" if "DTensor" in kinds else None


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
