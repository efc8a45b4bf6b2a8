"""A mixture of models as phi: how much of each of a few checkpoints there is in the weights that the model uses."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter_file import MATRIX
from metricopt_ext.adapters.modulation import CONTEXT_NAME, MODULATION_NAME, Context, Modulation
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.folded_batch_norm import FoldedBatchNorm
from metricopt_ext.utils.weights import has_mean

MOST = 8  # checkpoints
WEIGHTS = (-0.5, 1.5)  # each weight is within; a checkpoint's own is 1
VARIANCE = 0.1  # of the base's, which a mixture of variances does not fall below

ROOT = ""  # the model's own name among its modules

_SAVED = re.compile(re.escape(f"{MATRIX}{ROOT}.of") + r"(\d)_\d+")


class Mixture(Modulation):
    """The model's own computation with ``w_0 base + w_1 theta_1 + ... + w_k theta_k``, where ``w_0`` is 1 - sum w.

    The weights w are phi's first k coordinates, each cut off at -0.5 and 1.5; phi = 0 is the base and a unit vector a
    checkpoint, to the last bit. Floating tensors of the state dict are mixed, as model soups are (Wortsman et al.,
    2022, "Model soups"), along directions that may lead beyond the models (Ilharco et al., 2023, "Editing models with
    task arithmetic"). Others are the base's, and so are infinite numbers. A BatchNorm's variance is kept
    above a tenth of the base's.

    It acts in the model's own ``forward``. A layer that is called past it, as by a method ``encode``, would compute
    with the base's weights, so that raises an AdapterError.

    Args:
        context: Holds phi.
        model: The model, without the context.
        states: The checkpoints' tensors by the model's names; names that are missing are the base's.
    """

    merges_into = ()

    def __init__(self, context: Context, model: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(context)
        self.count = len(states)
        base = floating(model)
        self.names = list(base)
        # Infinite numbers, as of an attention's mask, are the base's: a sum of infinities would be none.
        self._infinite = {name for name, own in base.items() if not own.is_meta and not bool(own.isfinite().all())}
        for file, state in enumerate(states):
            for index, name in enumerate(self.names):
                value = state.get(name, base[name]).detach().to(base[name], copy=True)
                if name in self._infinite:
                    value = value.where(base[name].isfinite(), 0)
                self.register_buffer(_buffer(file, index), value, persistent=False)
        self._model, self._forward = (model,), None  # a tuple hides the model from registration below itself
        self._mixing = 0  # calls of the model's forward that are under way

    @property
    def channels(self) -> int:
        """Number k of checkpoints."""
        return self.count

    def forward(self, h: Any) -> Any:
        """Return the input: an ``nn.Sequential`` calls each child, this one included."""
        return h

    def weights(self) -> Tensor:
        """Return the weights of the base and of each checkpoint, ``k + 1``, which sum to 1."""
        own = self.phi[: self.count].clamp(*WEIGHTS)
        return torch.cat([1 - own.sum(0, keepdim=True), own])

    def mixed(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that the model computes with, by name, in its own types; gradients reach phi."""
        weights, base = self.weights(), floating(model)
        found: dict[str, Tensor] = {}
        for index, name in enumerate(self.names):
            own = base[name].detach()
            summed = own.where(own.isfinite(), 0) if name in self._infinite else own
            precise = torch.promote_types(own.dtype, weights.dtype)  # a half's rounding would hide a small step
            total = weights[0] * summed.to(precise)
            for file, weight in enumerate(weights[1:]):
                total = total + weight * self.get_buffer(_buffer(file, index)).to(precise)
            if name.rpartition(".")[2] == "running_var":
                total = total.maximum(VARIANCE * own)
            total = total.to(own.dtype)
            found[name] = total.where(own.isfinite(), own) if name in self._infinite else total
        return found

    def hooked(self, layer: nn.Module) -> Any:
        """Put the mixture's computation in the place of the model's; returns what takes it out again."""
        self._forward = layer.__dict__.get("forward")
        layer.forward = self._mixing_forward
        mixed = {name.rpartition(".")[0] for name in self.names} - {ROOT}
        hooks = [layer.get_submodule(name).register_forward_pre_hook(_Inside(self, name)) for name in sorted(mixed)]
        return _Handle(layer, self, hooks)

    def _mixing_forward(self, *args: Any, **kwargs: Any) -> Any:
        (model,) = self._model
        mixed = {f"model.{name}": value for name, value in self.mixed(model).items()}
        # torch's own BatchNorm has no gradient in its running statistics
        differentiable = any(value.requires_grad for value in mixed.values())
        self._mixing += 1
        try:
            with FoldedBatchNorm() if differentiable else nullcontext():
                return torch.func.functional_call(_Own(model, self._forward), mixed, args, kwargs)
        finally:
            self._mixing -= 1

    def changes(self, layer: nn.Module) -> list[Tensor]:
        """Return the tensors that `merge_into` changes."""
        base = floating(layer)
        return [base[name] for name in self.names]

    @torch.no_grad()
    def merge_into(self, layer: nn.Module) -> None:
        """Have the model's own tensors be the mixture's."""
        base = floating(layer)
        for name, value in self.mixed(layer).items():
            base[name].copy_(value)


class _Own(nn.Module):
    """Runs a model's own forward function alone: its hooks have run, or will.

    Args:
        model: The model.
        forward: What was in the place of its class's function, as accelerate puts there; None for that function.
    """

    def __init__(self, model: nn.Module, forward: Any) -> None:
        super().__init__()
        self.model, self._own = model, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None:
            return self._own(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)


class _Inside:
    """A hook that refuses a call of a layer past the model's forward, where nothing is mixed.

    Args:
        mixture: The mixture.
        name: The layer's.
    """

    def __init__(self, mixture: Mixture, name: str) -> None:
        self._mixture, self._name = (mixture,), name

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        (mixture,) = self._mixture
        if not mixture._mixing:
            (model,) = mixture._model
            raise AdapterError(
                f"layer {self._name!r} was called past {type(model).__name__}.forward, where alone a mixture acts;"
                " attach it to a module whose forward returns what you call for, or merge() first"
            )


class _Handle:
    """Gives a model its own forward function back.

    Args:
        model: The model.
        mixture: What took its place.
        hooks: Of its layers.
    """

    def __init__(self, model: nn.Module, mixture: Mixture, hooks: Sequence[Any]) -> None:
        self._model, self._mixture, self._hooks = (model,), (mixture,), hooks

    def remove(self) -> None:
        """Do it, once."""
        for hook in self._hooks:
            hook.remove()
        (model,), (mixture,) = self._model, self._mixture
        if mixture._forward is None:
            model.__dict__.pop("forward", None)
        else:
            model.forward = mixture._forward


def floating(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict that have a mean by name, each once: no adapter's, no caches."""
    known = {id(each) for each in model.state_dict(keep_vars=True).values() if isinstance(each, Tensor)}
    return {name: each for name, each in _own_tensors(model) if id(each) in known and has_mean(each)}


def saved_count(tensors: Iterable[str]) -> int:
    """Return how many checkpoints an adapter's file has, by the names of its tensors."""
    return len({found[1] for name in tensors if (found := _SAVED.fullmatch(name))})


def saved_shapes(model: nn.Module, count: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a mixture of so many checkpoints, by their names in an adapter's file."""
    shapes = [tuple(each.shape) for each in floating(model).values()]
    return {_saved(file, index): shape for file in range(count) for index, shape in enumerate(shapes)}


def saved_states(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the checkpoints of an adapter's file, whose shapes were checked, by the model's names."""
    names = list(floating(model))
    count = saved_count(tensors)
    return [{name: tensors[_saved(file, index)] for index, name in enumerate(names)} for file in range(count)]


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if not {CONTEXT_NAME, MODULATION_NAME}.intersection(name.split(".")):
            yield name, each


def _buffer(file: int, index: int) -> str:
    return f"of{file}_{index}"


def _saved(file: int, index: int) -> str:
    return f"{MATRIX}{ROOT}.{_buffer(file, index)}"
