"""What phi does to a layer's output: FiLM, the dynamic bias of a linear layer (paper, Fig. S1), offsets of logits."""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.affine import affine, output_of, weight_of
from metricopt_ext.adapters.signature import Outputs

AdapterKind = Literal["film", "input_bias", "outputs", "lora", "mixture"]

# The random matrices of each modulated layer, by kind: names of buffers.
MATRICES: dict[AdapterKind, tuple[str, ...]] = {
    "film": ("A", "B"),
    "input_bias": ("C",),
    "outputs": (),
    "lora": (),
    "mixture": ("A", "B"),
}
SCALE_ALONE = ("A",)  # of FiLM on a norm without a bias

CONTEXT_NAME = "metricopt"
MODULATION_NAME = "metricopt_modulation"


GENERATOR = "normal/1"  # names how the matrices are drawn; a change of the draws needs a new name


class KeepsPrecision(nn.Module):
    """A module that computes in single precision or better, whatever the model around it is cast to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            rounded = result.is_floating_point() and result.dtype.itemsize < torch.float32.itemsize
            return tensor.to(result.device) if rounded else result

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]


class Context(KeepsPrecision):
    """Holds phi; registered in the model's module tree under the name ``metricopt``.

    Args:
        dim: Number of phi's coordinates that A and B (or C) multiply.
        kind: What the matrices do.
        layers: Names of the modulated layers, that of the logits last.
        seed: Seed of the matrices.
        dtype: Type of phi.
        outputs: How further coordinates act on the logits, with the layer's name; None without any.
        classes: Number C of logits, 0 without outputs.

    Attributes:
        phi: The tuned parameters, ``d``; 0 leaves the model as it was.
        signature: Seed of A, B (or C) and a checksum of where they act, ``2``, so that a checkpoint can't be loaded
            into an adapter for which its phi means something else.
        originals: What a start replaced, by name in the bare model's state dict; no part of any state dict.
        guessed: Whether the logits' layer is merely the last by definition.
    """

    signature: Tensor
    outputs: Outputs | None = None
    classes: int = 0
    guessed: bool = False

    def __init__(
        self,
        dim: int,
        kind: AdapterKind,
        layers: Sequence[str],
        seed: int,
        dtype: torch.dtype,
        outputs: Outputs | None = None,
        classes: int = 0,
    ) -> None:
        super().__init__()
        self.kind: AdapterKind = kind
        self.layers: list[str] = list(layers)
        self.seed = seed
        self.generator = GENERATOR
        self.outputs, self.classes = outputs, classes
        temperatures = 0 if outputs is None else int(outputs.temperature)
        self.phi: nn.Parameter = nn.Parameter(torch.zeros(dim + classes + temperatures, dtype=dtype))
        on_logits = [] if outputs is None else [asdict(outputs), classes]
        place = zlib.crc32(json.dumps([kind, dim, self.layers, *on_logits]).encode())
        self.register_buffer("signature", torch.tensor([seed, place]))
        self.override: Tensor | None = None
        self.originals: dict[str, Tensor] = {}
        self.thawed: list[str] = []
        self.pins: list[Any] = []

    @property
    def offsets(self) -> slice:
        """Which coordinates of phi are the logits' offsets; those before are the matrices', one after a temperature."""
        end = self.phi.numel() - int(self.outputs is not None and self.outputs.temperature)
        return slice(end - self.classes, end)

    def value(self) -> Tensor:
        """Return the phi in use, ``d``: the parameter, or what `Adapter.using` put in its place."""
        return self.phi if self.override is None else self.override

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Cast and move the originals as what is in their place: they are what a bare model would have by then."""
        moved = {id(tensor): fn(tensor) for tensor in {id(each): each for each in self.originals.values()}.values()}
        self.originals = {name: moved[id(tensor)] for name, tensor in self.originals.items()}
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: what `Adapter.using` put in phi's place for a while stays here."""
        return {**self.__dict__, "override": None}

    def forward(self, x: Any) -> Any:
        """Return the input: an ``nn.Sequential`` calls each child, this one included."""
        return x

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        if not any(key.startswith(prefix) for key in state_dict):
            return  # a checkpoint of the bare model: phi stays as it is
        theirs = state_dict.get(prefix + "signature")
        if theirs is not None and not torch.equal(theirs.cpu(), self.signature.cpu()):
            error_msgs.append(
                f"{prefix}signature: the checkpoint's adapter (seed {int(theirs[0])}) differs in its layers, dimension,"
                f" outputs or seed from this one (seed {self.seed}, dim {self.phi.numel()});"
                " attach with the checkpoint's settings before loading"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class Modulation(KeepsPrecision):
    """What is done to one layer's output. Registered as the layer's child, so it follows ``.to`` and ``deepcopy``.

    Attributes:
        merges_into: Names of the layer's tensors that `merge_into` changes.
    """

    merges_into: tuple[str, ...] = ("weight", "bias")

    def __init__(self, context: Context) -> None:
        super().__init__()
        # A tuple hides the shared module from registration: phi must appear only once in the state dict.
        self._context = (context,)
        self.handle: Any = None

    @property
    def phi(self) -> Tensor:
        """The phi in use, ``d``."""
        return self._context[0].value()

    @property
    def channels(self) -> int:
        """Number of modulated channels: the rows of each matrix, or the number of logits."""
        return next(self.buffers()).shape[0]

    def times_phi(self, matrix: Tensor) -> Tensor:
        """Return ``matrix @ phi``, of as many of phi's first coordinates as it has columns, in phi's own precision."""
        phi, columns = self.phi, matrix.shape[1]
        if len(phi) > columns:  # a slice of all would cost a GPU three launches a layer, two of them backward
            phi = phi[:columns]
        device = phi.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            # Autocast would round phi, and cache the first rounded phi until the user's autocast region ends.
            with torch.autocast(device, enabled=False):
                return matrix @ phi
        return matrix @ phi

    def hooked(self, layer: nn.Module) -> Any:
        """Have it act on a layer, before the user's own hooks; returns a handle whose ``remove()`` ends that."""
        return output_of(layer).register_forward_hook(self.hook, prepend=True)

    def hook(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Forward hook of the modulated layer; a bound method, because a closure would not survive ``deepcopy``."""
        modulated: Tensor = self.forward(output)
        return modulated

    def changes(self, layer: nn.Module) -> list[Tensor]:
        """Return further tensors that `merge_into` changes in place."""
        return []

    def merge_into(self, layer: nn.Module) -> None:
        """Fold the modulation at the current phi into the layer's weight and bias."""
        raise NotImplementedError


class FiLM(Modulation):
    """Feature-wise linear modulation ``h * (1 + A phi) + B phi`` (paper, Fig. S1b), per channel.

    Args:
        context: Holds phi.
        channels: Number of channels C of the layer's output.
        axis: The output's channel axis.
        rng: Draws A and B, each ``C x d`` with entries N(0, 1/d).
    """

    A: Tensor
    B: Tensor

    def __init__(self, context: Context, channels: int, axis: int, rng: torch.Generator) -> None:
        super().__init__(context)
        self.axis = axis
        self.register_buffer("A", _gaussian(channels, context, rng), persistent=False)
        self.register_buffer("B", _gaussian(channels, context, rng), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Modulate ``B x C x ...`` (or ``... x C`` for channels-last layers); the dtype is the input's."""
        scale, shift = self.scale_and_shift()
        scaled = h * along(self.axis, scale, h)
        return scaled.add_(along(self.axis, shift, h))  # in place: one tensor of that size less

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Return ``1 + A phi`` and ``B phi``, each ``C``."""
        return 1 + self.times_phi(self.A), self.times_phi(self.B)

    @torch.no_grad()
    def merge_into(self, layer: nn.Module) -> None:
        """Scale the layer's weight and bias, then shift its bias: the layer ends in an affine map per channel."""
        weight, bias = affine(layer)
        scale, shift = self.scale_and_shift()
        weight.mul_(scale.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1)))
        bias.mul_(scale.to(bias.dtype)).add_(shift.to(bias.dtype))


class Scale(Modulation):
    """FiLM of a norm without a bias, as RMSNorm is: ``h * (1 + A phi)``, per channel of the last axis.

    Args:
        context: Holds phi.
        channels: Number of channels C of the layer's output.
        rng: Draws A, ``C x d`` with entries N(0, 1/d).
        offset: What the layer adds to its weight before it multiplies, 1 in Gemma's.
    """

    A: Tensor
    merges_into = ("weight",)

    def __init__(self, context: Context, channels: int, rng: torch.Generator, offset: float = 0.0) -> None:
        super().__init__(context)
        self.offset = offset
        self.register_buffer("A", _gaussian(channels, context, rng), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Modulate ``... x C``; the dtype is the input's."""
        return h * (1 + self.times_phi(self.A)).to(h.dtype)

    @torch.no_grad()
    def merge_into(self, layer: nn.Module) -> None:
        """Scale the layer's weight."""
        weight = weight_of(layer)
        change = self.times_phi(self.A).to(weight.dtype)
        weight.add_((weight + self.offset) * change)


class InputBias(Modulation):
    """Dynamic biases of a fully connected network, ``h = W x + b + C phi`` (paper, section 4.2 and Fig. S1a).

    This is the same as concatenating phi to the layer's input with frozen new weights C.
    """

    C: Tensor
    merges_into = ("bias",)

    def __init__(self, context: Context, features: int, rng: torch.Generator) -> None:
        super().__init__(context)
        self.register_buffer("C", _gaussian(features, context, rng), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Add ``C phi`` to ``... x features``; the dtype is the input's."""
        return h + self.times_phi(self.C).to(h.dtype)

    @torch.no_grad()
    def merge_into(self, layer: nn.Module) -> None:
        """Add ``C phi`` to the layer's bias."""
        _, bias = affine(layer)
        bias.add_(self.times_phi(self.C).to(bias.dtype))


class OutputOffsets(Modulation):
    """Offsets and a temperature of the logits, ``h * exp(t) + scale * o`` with o and t from phi's end (see `Outputs`).

    Decision thresholds (Provost and Fawcett 2001) and logit adjustment (Menon et al. 2021) are such offsets, and a
    temperature (Guo et al. 2017) such a factor, so that a search over phi includes them.

    Args:
        context: Holds phi, and says which of its coordinates are o and t.
        axis: The logits' class axis.
    """

    def __init__(self, context: Context, axis: int) -> None:
        super().__init__(context)
        assert context.outputs is not None
        self.axis, self.scale, self.temperature = axis, context.outputs.scale, context.outputs.temperature
        self.merges_into = ("weight", "bias") if self.temperature else ("bias",)

    @property
    def channels(self) -> int:
        """Number C of logits."""
        return self._context[0].classes

    def forward(self, h: Tensor) -> Tensor:
        """Change logits, ``B x C`` or with C on another axis; the dtype is the input's."""
        factor, offsets = self.factor_and_offsets()
        scaled = h if factor is None else h * factor.to(h.dtype)
        return scaled + along(self.axis, offsets, h)

    def factor_and_offsets(self) -> tuple[Tensor | None, Tensor]:
        """Return ``exp(t)``, a scalar, or None without a temperature, and ``scale * o``, ``C``."""
        phi = self.phi
        return phi[-1].exp() if self.temperature else None, phi[self._context[0].offsets] * self.scale

    @torch.no_grad()
    def merge_into(self, layer: nn.Module) -> None:
        """Multiply the layer's weight and bias by the factor, then add the offsets to its bias, or to a new one."""
        if layer.bias is None:
            weight = weight_of(layer)
            layer.bias = nn.Parameter(weight.new_zeros(len(weight)), requires_grad=False)
        weight, bias = affine(layer)
        factor, offsets = self.factor_and_offsets()
        if factor is not None:
            weight.mul_(factor.to(weight.dtype))
            bias.mul_(factor.to(bias.dtype))
        bias.add_(offsets.to(bias.dtype))


def _gaussian(rows: int, context: Context, rng: torch.Generator) -> Tensor:
    """Draw entries from N(0, 1/d), ``rows x d``, so that a row times phi is about as large as phi's entries.

    d leaves out the coordinates that act on the logits: with and without them the matrices are the same.
    """
    d, dtype = context.offsets.start, context.phi.dtype
    return torch.randn(rows, d, generator=rng, dtype=torch.float64).div(d**0.5).to(dtype)


def along(axis: int, per_channel: Tensor, h: Tensor) -> Tensor:
    """Return ``C`` values in the type of ``h``, shaped such that they broadcast along its axis."""
    shape = [1] * h.dim()
    shape[axis] = -1
    return per_channel.to(h.dtype).view(shape)
