"""Which layers of a model are called on a batch, and which of them gives what the model returns."""

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.affine import channel_axis, output_of
from metricopt_ext.adapters.modulation import along
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.words import brief

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NAMES_OF_LOGITS = ("logits", "out")  # Hugging Face's and torchvision's, where a model returns several tensors by name
DEPTH = 4  # of containers that outputs are looked for in


class Calls:
    """What was recorded of a model.

    Attributes:
        outputs: Outputs of the recorded layers, by name, in the order of their last calls.
        returned: What the outermost modules that were called returned: the model itself, or its parts.
        probes: A zero for each channel of a layer, which was added to the layer's outputs: its gradient is theirs.
            Empty without probing.
        candidates: Names of the layers that may give the logits.
    """

    def __init__(self, probing: bool) -> None:
        self.probing = probing
        self.outputs: dict[str, list[Tensor]] = {}
        self.returned: list[Any] = []
        self.probes: dict[str, Tensor] = {}
        self.candidates: set[str] = set()
        self._axes: dict[str, int] = {}
        self._known: dict[int, dict[str, Tensor | None]] = {}  # gradients, by the tensor's id
        self._depth = 0

    def record(self, name: str, layer: nn.Module, output: Any) -> Any:
        """Record a layer's output; returns it, with a probe added if there is one."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        axis = self._axes[name] = channel_axis(layer)
        if self.probing and torch.is_grad_enabled():
            if name not in self.probes:
                self.probes[name] = output.new_zeros(output.shape[axis]).requires_grad_(True)
            output = output + along(axis, self.probes[name], output)
        self.outputs[name] = [*self.outputs.pop(name, []), output]
        return output

    def enter(self, module: Any, args: Any) -> None:
        """Note that a module is called."""
        self._depth += 1

    def leave(self, module: Any, args: Any, output: Any) -> None:
        """Note that a module has returned."""
        self._depth -= 1
        if self._depth == 0:
            self.returned.append(output)

    def giving(self) -> tuple[str | None, Tensor | None]:
        """Return the name of the layer that gives the logits and the returned tensor that they are; None if unknown.

        It is the last layer that was called, that the tensor depends on and that has its shape, or else its channels,
        as where logits are scaled up, flattened or permuted. Of several tensors it is the one named as logits, or else
        the first; but one that was computed from another layer's output comes before that layer's.
        """
        found: tuple[str | None, Tensor | None] = (None, None)
        for tensor in self.logits():
            name = self.behind(tensor)
            known = found[0]
            if name is not None and (known is None or (name != known and self.is_after(tensor, known))):
                found = name, tensor
        return found

    def logits(self) -> list[Tensor]:
        """Return the tensors that may be logits, of those that were returned last."""
        for returned in reversed(self.returned):
            named = [(name, each) for name, each in tensors_in(returned) if each.is_floating_point() and each.dim()]
            if named:
                for known in NAMES_OF_LOGITS:
                    if chosen := [each for name, each in named if name == known]:
                        return chosen
                return [each for name, each in named if "logits" in name] or [each for _, each in named]
        return []

    def behind(self, tensor: Tensor) -> str | None:
        """Return the layer that gives a tensor, None if there is none; see `giving`."""
        best, fit = None, 0
        linked = {name for name, gradient in self._gradients(tensor).items() if gradient is not None}
        for name, outputs in self.outputs.items():
            own = max(self._fit(name, output, tensor) for output in outputs)
            known = not (self.probing and tensor.requires_grad) or name in linked  # without gradients all may do
            if own and own >= fit and known and name in self.candidates:
                best, fit = name, own
        return best

    def is_after(self, tensor: Tensor, name: str) -> bool:
        """Whether a tensor was computed from a layer's output."""
        return self._gradients(tensor).get(name) is not None

    def alike(self, first: str, second: str) -> bool:
        """Whether constants added to one layer's channels do to the logits what they do added to the other's."""
        for tensor in self.logits():
            gradients = self._gradients(tensor)
            a, b = gradients.get(first), gradients.get(second)
            if a is not None and b is not None and a.shape == b.shape and torch.allclose(a, b):
                return True
        return False

    def fits(self, name: str) -> bool:
        """Whether a layer's output has the shape or the channels of what may be logits."""
        outputs = self.outputs.get(name, [])
        return any(self._fit(name, output, tensor) for output in outputs for tensor in self.logits())

    def is_returned(self, name: str) -> bool:
        """Whether a layer's output is all that may be logits: the tensor itself, which leaves no doubt."""
        logits = self.logits()
        return len(logits) == 1 and any(self._fit(name, each, logits[0]) == 3 for each in self.outputs.get(name, []))

    def shape(self, name: str) -> str:
        """Return the shape of a layer's last output as text."""
        return shape_of(self.outputs[name][-1])

    def _fit(self, name: str, output: Tensor, tensor: Tensor) -> int:
        """How well a layer's output fits a tensor: 3 if it is the tensor, 2 in shape, 1 in channels, 0 not at all."""
        if tensor is output or (tensor.data_ptr() == output.data_ptr() and tensor.numel() == output.numel() > 0):
            return 3
        if tensor.shape == output.shape:
            return 2
        channels = output.shape[self._axes.get(name, -1)]
        batch = channels == 1 and output.dim() > 0 and tensor.shape[0] == output.shape[0]
        return int(batch or tensor.numel() == output.numel() or channels in tensor.shape[min(1, tensor.dim() - 1) :])

    def _gradients(self, tensor: Tensor) -> dict[str, Tensor | None]:
        """Return the gradients of random multiples of a tensor's entries in the probes, None where none leads there."""
        if not tensor.requires_grad or not self.probes:
            return {}
        if id(tensor) not in self._known:
            probes = list(self.probes.values())
            given = torch.autograd.grad(projected([tensor]), probes, retain_graph=True, allow_unused=True)
            self._known[id(tensor)] = dict(zip(self.probes, given, strict=True))
        return self._known[id(tensor)]


@contextmanager
def recorded(model: nn.Module, layers: Iterable[str] = (), *, probing: bool = False) -> Iterator[Calls]:
    """Record a model's calls for a while: of each layer that may give logits, and of some others.

    Args:
        model: With or without an adapter, whose phi then shows in what is recorded.
        layers: Names of the others, with a channel axis.
        probing: Whether to add probes, by which `Calls.giving` knows what a tensor depends on; shapes alone tell less.
    """
    calls, wanted = Calls(probing), set(layers)
    with ExitStack() as handles, eager():
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if may_give_logits(module):
                calls.candidates.add(name)
            if name in wanted or name in calls.candidates:

                def take(_: Any, args: Any, output: Any, name: str = name, layer: nn.Module = module) -> Any:
                    return calls.record(name, layer, output)

                handles.callback(output_of(module).register_forward_hook(take).remove)
            handles.callback(module.register_forward_pre_hook(calls.enter).remove)
            handles.callback(module.register_forward_hook(calls.leave, always_call=True).remove)
        yield calls


def calls_on(model: nn.Module, example: Any, layers: Iterable[str]) -> Calls:
    """Run a model on an example, in evaluation mode, and return what was called.

    Args:
        model: A model without an adapter.
        example: Its inputs: a tuple of arguments, a mapping of named ones, or the one argument.
        layers: See `recorded`.

    Raises:
        AdapterError: The model fails on the example.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    with (
        recorded(model, layers, probing=True) as calls,
        evaluating(model),
        torch.enable_grad(),
        seeded_streams(0, device),
    ):
        try:
            if isinstance(example, Mapping) and _takes(model, example):
                model(**example)
            elif isinstance(example, tuple):
                model(*example)
            else:
                model(example)
        except Exception as error:
            raise AdapterError(
                f"{type(model).__name__} fails on the example, a {type(example).__name__}: {brief(error)}; give its"
                " inputs alone: a tensor, a tuple of arguments, or a dict of named ones"
            ) from error
    return calls


def may_give_logits(module: nn.Module) -> bool:
    """Whether a module is a linear layer or a convolution of 1 pixel."""
    if isinstance(module, CONVOLUTIONS):
        return all(size == 1 for size in module.kernel_size)
    # An attention layer's own projection is never called as a layer.
    return isinstance(module, nn.Linear) and type(module).__name__ != "NonDynamicallyQuantizableLinear"


def tensors_in(output: Any, name: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of what a model returned, each with the name that it has there, empty without one."""
    if isinstance(output, Tensor):
        yield name, output
    elif depth:
        if isinstance(output, Mapping):
            children = [(str(key), each) for key, each in output.items()]
        elif isinstance(output, tuple) and hasattr(output, "_fields"):
            children = list(zip(output._fields, output, strict=True))
        elif isinstance(output, (list, tuple)):
            children = [(name, each) for each in output]
        elif is_dataclass(output) and not isinstance(output, type):
            children = [(field.name, getattr(output, field.name)) for field in fields(output)]
        else:
            children = list(vars(output).items()) if hasattr(output, "__dict__") and not callable(output) else []
        for key, each in children:
            yield from tensors_in(each, key, depth - 1)


def projected(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the entries of tensors with gradients, each times a fixed random number, a scalar."""
    rng = generator(0, "projection")
    parts = [
        (tensor * torch.randn(tensor.shape, generator=rng).to(tensor)).sum()
        for tensor in tensors
        if tensor.requires_grad
    ]
    return torch.stack([part.to(parts[0]) for part in parts]).sum()


def shape_of(tensor: Tensor) -> str:
    """Return a shape as text.

    Examples:
        >>> shape_of(torch.zeros(2, 3)), shape_of(torch.tensor(1.0))
        ('2 x 3', 'a scalar')
    """
    return " x ".join(map(str, tensor.shape)) or "a scalar"


def _takes(model: nn.Module, example: Mapping[Any, Any]) -> bool:
    """Whether a model takes a mapping's entries as named arguments; if it can't be told, it is tried."""
    try:
        inspect.signature(model.forward).bind(**example)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def eager() -> Any:
    """Have compiled parts of a model run as written: compiled code would not be told of hooks, or would keep them."""
    compiler = sys.modules.get("torch._dynamo")  # which takes long to import
    set_stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if compiler is None or set_stance is None else set_stance("force_eager")
