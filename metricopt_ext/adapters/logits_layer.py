"""The layer that gives a model's logits, on which outputs act."""

from torch import nn

from metricopt_ext.adapters.calls import CONVOLUTIONS, Calls, may_give_logits, shape_of
from metricopt_ext.adapters.foreign_norms import scales_alone
from metricopt_ext.adapters.layers import unusable
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.wrappers import bare_name, is_unused
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.words import nearest


def logits_layer(outputs: Outputs, model: nn.Module, others: list[str], calls: Calls | None) -> tuple[str, nn.Module]:
    """The name of the layer that outputs act on, and the layer, which must be none of the others."""
    if not isinstance(outputs, Outputs):
        raise AdapterError(f"outputs is {outputs!r}; it must be Outputs(...), or None for no offsets of the logits")
    known, name = dict(model.named_modules()), outputs.layer
    if name is None and calls is not None:
        name = _found(model, calls)
    if name is None:
        linear = [each for each, module in known.items() if _may_be_the_last(each, module)]
        if not linear:
            raise AdapterError(
                f"{type(model).__name__} has no linear layer; say which gives the logits, Outputs(layer)"
            )
        name = linear[-1]
    name = _as_called(name, known)
    if calls is not None and name in known and name not in calls.outputs and may_give_logits(known[name]):
        raise AdapterError(f"the outputs' layer {name!r} is not called on the example")
    if name not in known:
        raise AdapterError(f"the outputs' layer {name!r} is no layer of the model{nearest(name, list(known))}")
    why = _why_no_offsets(model, known[name], outputs)
    if why is not None:
        raise AdapterError(f"the outputs' layer {name!r} {why}; it must be the layer that gives the logits")
    if name in others:
        raise AdapterError(
            f"layer {name!r} gives the logits, on which the outputs act; name other layers, or leave the outputs out"
        )
    return name, known[name]


def _as_called(name: str, known: dict[str, nn.Module]) -> str:
    """Return the name of the one layer that wrappers of its parts have given another, or the name itself."""
    fitting = [each for each, module in known.items() if bare_name(each) == name and may_give_logits(module)]
    used = [each for each in fitting if not is_unused(each)]
    return used[0] if name not in known and len(used) == 1 else name


def _may_be_the_last(name: str, module: nn.Module) -> bool:
    """Whether a module is a linear layer of the model itself; LoRA's matrices beside a layer are none."""
    own = not {"lora_A", "lora_B"} & set(name.split(".")) and not is_unused(name)
    return own and isinstance(module, nn.Linear) and may_give_logits(module)


def _why_no_offsets(model: nn.Module, layer: nn.Module, outputs: Outputs) -> str | None:
    """Why a layer's output can't get offsets; None if it can: it has a bias, or can be given one."""
    kind = f"is a {type(layer).__name__}"
    if scales_alone(layer):
        return f"{kind} without a bias"
    if (
        not may_give_logits(layer)
        or getattr(layer, "weight", None) is None
        or getattr(layer, "bias", layer) is not None
    ):
        return unusable(layer, in_weight=outputs.temperature)
    if type(layer).forward not in (nn.Linear.forward, *(each.forward for each in CONVOLUTIONS)):
        return f"{kind} without a bias, whose own code need not add one"
    tied = [
        each
        for each, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is layer.weight and model.get_submodule(each.rpartition(".")[0]) is not layer
    ]
    if tied:
        return f"{kind} without a bias, and its weight is {tied[0]} too, so a saved model has no place for a bias"
    return None


def _found(model: nn.Module, calls: Calls) -> str:
    """The name of the layer that gives the logits on an example."""
    name, _ = calls.giving()
    if name is None:
        kind, returned = type(model).__name__, ", ".join(map(shape_of, calls.logits())) or "no tensor"
        seen = [f"{each!r} ({calls.shape(each)})" for each in calls.outputs]
        raise AdapterError(
            f"{kind} returns {returned} on the example, which no linear layer or 1 x 1 convolution gives (called:"
            f" {', '.join(seen[-5:]) or 'none'}); say which gives the logits, Outputs(layer)"
        )
    return name
