"""What wraps a model, and what its layers would be called without that."""

import re
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.words import brief, shortened

COMPILED = "OptimizedModule"  # what torch.compile returns; named, because its class takes long to import
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)

# What divides weights among processes; named, because importing it takes long.
DIVIDING = {"FullyShardedDataParallel", "FSDPModule"}

# Parts of a module's name that a wrapper has put there, PEFT's with the adapter's name.
WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|base_layer|modules_to_save(\.[^.]+)?)(?=\.|$)")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model within DataParallel, DistributedDataParallel and torch.compile: they run it as it is by then.

    Raises:
        AdapterError: It is no model whose layers can be modulated: no module, one of TorchScript, or one with weights
            that are not there yet, were made in inference mode, or are divided among processes.
    """
    if not isinstance(model, nn.Module):
        raise AdapterError(f"model is {brief(model)}; it must be a torch.nn.Module, into which a state dict is loaded")
    kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    tensors = chain(model.named_parameters(), model.named_buffers())
    strange = [*sorted(kinds & DIVIDING), *(name for name, tensor in tensors if _is_elsewhere(tensor))]
    if isinstance(model, torch.jit.ScriptModule) or strange:
        raise AdapterError(
            f"phi can't act on {shortened(strange or [type(model).__name__])}, which is of TorchScript, lazy, of"
            " torch.inference_mode or divided among processes; build the plain model, whose weights are all there (a"
            " lazy layer's are after a batch), load the trained ones into it, and tune that"
        )
    while isinstance(model, PARALLEL) or type(model).__name__ == COMPILED:
        model = model.get_submodule("module" if isinstance(model, PARALLEL) else "_orig_mod")
    return model


def _is_elsewhere(tensor: Tensor) -> bool:
    """Whether a weight is not there yet, can't be changed here, or is divided among processes."""
    if not isinstance(tensor, nn.Parameter):  # a buffer may be made anew by a forward pass
        return is_lazy(tensor)
    if is_lazy(tensor) or tensor.is_inference() or hasattr(tensor, "ds_id"):
        return True
    return "DTensor" in (type(tensor).__name__, type(tensor.data).__name__)


def bare_name(name: str) -> str:
    """Return a module's name without the parts that wrappers of it, or of what holds it, have put there.

    Examples:
        >>> bare_name("trunk.module.bn2"), bare_name("base_model.model.bert.classifier.modules_to_save.default")
        ('trunk.bn2', 'bert.classifier')
    """
    return WRAPPERS.sub("", name.removeprefix("base_model.model.")).lstrip(".")


def is_unused(name: str) -> bool:
    """Whether a module is one that PEFT keeps beside the copy of it which is in use."""
    return "original_module" in name.split(".")
