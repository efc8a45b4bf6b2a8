"""Adapters: a small vector phi that modulates a frozen model (paper, section 3.1 and Fig. S1).

`attach_film` scales and shifts the channels of chosen layers, ``h * (1 + A phi) + B phi``; `attach_input_bias` adds
``C phi`` to a linear layer. A, B and C are drawn once from a seed and stay fixed, so phi = 0 is the original model and
`Adapter.merge` can fold the tuned phi into the layers' own weights.
"""

import difflib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .errors import AdapterError, FileFormatError
from .files import read_tensors, write_tensors
from .seeding import generator

Kind = Literal["film", "input_bias"]

CONTEXT_NAME = "metricopt"
MODULATION_NAME = "metricopt_modulation"
FILE_FORMAT = "metricopt_ext/adapter/1"

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
UNBATCHED = ((nn.Conv1d, nn.InstanceNorm1d), (nn.Conv2d, nn.InstanceNorm2d), (nn.Conv3d, nn.InstanceNorm3d))
# Named, not imported: the core knows no vision toolkit.
TOOLKIT_NORMS = ("FrozenBatchNorm2d", "LayerNorm2d")
TOOLKIT_DROPOUTS = ("StochasticDepth", "DropPath", "DropBlock2d", "DropBlock3d")
MODE_DEPENDENT = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
)


class Context(nn.Module):
    """Holds phi; stands in the model's module tree under the name ``metricopt``.

    Attributes:
        phi: The tuned parameters, ``d``; 0 leaves the model as it was.
        signature: Seed of A, B (or C) and a checksum of where they act, ``2``, so that a checkpoint can't be loaded
            into an adapter to which its phi means something else.
    """

    signature: Tensor

    def __init__(self, dim: int, kind: Kind, layers: Sequence[str], seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.layers = list(layers)
        self.seed = seed
        self.phi = nn.Parameter(torch.zeros(dim, dtype=dtype))
        place = zlib.crc32(json.dumps([kind, dim, self.layers]).encode())
        self.register_buffer("signature", torch.tensor([seed, place]))
        self.override: Tensor | None = None
        self.thawed: list[str] = []
        self.pins: list[Any] = []

    def value(self) -> Tensor:
        """Return the phi in use, ``d``: the parameter, or what `Adapter.using` put in its place."""
        return self.phi if self.override is None else self.override

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
                f"{prefix}signature: the checkpoint's adapter (seed {int(theirs[0])}) modulates other layers, has"
                f" another dimension or another seed than this one (seed {self.seed}, dim {self.phi.numel()});"
                " attach with its settings before loading"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class Modulation(nn.Module):
    """What is done to one layer's output. Registered as the layer's child, so it follows ``.to`` and ``deepcopy``.

    Attributes:
        merges_into: Names of the layer's tensors that `merge_into` changes.
    """

    merges_into: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def __init__(self, context: Context) -> None:
        super().__init__()
        # A tuple hides the shared module from registration: phi must appear once in the state dict.
        self._context = (context,)
        self.handle: Any = None

    @property
    def phi(self) -> Tensor:
        """The phi in use, ``d``."""
        return self._context[0].value()

    def times_phi(self, matrix: Tensor) -> Tensor:
        """Return ``matrix @ phi`` in phi's own precision."""
        phi = self.phi
        device = phi.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            # It would round phi, and keep the first rounded phi until the user's autocast region ends.
            with torch.autocast(device, enabled=False):
                return matrix @ phi
        return matrix @ phi

    def hook(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Forward hook of the modulated layer; a bound method, because a closure would not survive ``deepcopy``."""
        modulated: Tensor = self.forward(output)
        return modulated

    def merge_into(self, layer: nn.Module) -> None:
        """Fold the modulation at the present phi into the layer's weight and bias."""
        raise NotImplementedError


class FiLM(Modulation):
    """Feature-wise linear modulation ``h * (1 + A phi) + B phi`` (paper, Fig. S1b), per channel.

    Args:
        context: Where phi is.
        channels: Number of channels C of the layer's output.
        axis: The output's channel axis.
        rng: Draws A and B, each ``C x d`` with entries N(0, 1/d).
    """

    A: Tensor
    B: Tensor

    def __init__(self, context: Context, channels: int, axis: int, rng: torch.Generator) -> None:
        super().__init__(context)
        self.axis = axis
        self.register_buffer("A", _gaussian(channels, context.phi, rng), persistent=False)
        self.register_buffer("B", _gaussian(channels, context.phi, rng), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Modulate ``B x C x ...`` (or ``... x C`` for channels-last layers); the dtype is the input's."""
        scale, shift = self.scale_and_shift()
        shape = [1] * h.dim()
        shape[self.axis] = -1
        return h * scale.to(h.dtype).view(shape) + shift.to(h.dtype).view(shape)

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Return ``1 + A phi`` and ``B phi``, each ``C``."""
        return 1 + self.times_phi(self.A), self.times_phi(self.B)

    @torch.no_grad()
    def merge_into(self, layer: nn.Module) -> None:
        """Scale the layer's weight and bias, then shift its bias: the layer ends in an affine map per channel."""
        weight, bias = _affine(layer)
        scale, shift = self.scale_and_shift()
        weight.mul_(scale.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1)))
        bias.mul_(scale.to(bias.dtype)).add_(shift.to(bias.dtype))


class InputBias(Modulation):
    """Dynamic biases of a fully connected network, ``h = W x + b + C phi`` (paper, section 4.2 and Fig. S1a).

    Concatenating phi to the layer's input and freezing its new weights C is the same thing.
    """

    C: Tensor
    merges_into = ("bias",)

    def __init__(self, context: Context, features: int, rng: torch.Generator) -> None:
        super().__init__(context)
        self.register_buffer("C", _gaussian(features, context.phi, rng), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Add ``C phi`` to ``... x features``; the dtype is the input's."""
        return h + self.times_phi(self.C).to(h.dtype)

    @torch.no_grad()
    def merge_into(self, layer: nn.Module) -> None:
        """Add ``C phi`` to the layer's bias."""
        _, bias = _affine(layer)
        bias.add_(self.times_phi(self.C).to(bias.dtype))


class Adapter:
    """Handle on the adapter that is attached to a model; `attach_film` and `attach_input_bias` make one.

    It keeps no state of its own: ``Adapter(copy.deepcopy(model))`` is the handle on the copy's adapter.

    Args:
        model: A model with an attached adapter.

    Raises:
        AdapterError: The model has no adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(getattr(model, CONTEXT_NAME, None), Context):
            raise AdapterError(f"{type(model).__name__} has no adapter: call attach_film or attach_input_bias first")
        self.model = model

    @property
    def context(self) -> Context:
        """The module that holds phi."""
        context = getattr(self.model, CONTEXT_NAME, None)
        if not isinstance(context, Context):
            raise AdapterError("this adapter was removed or merged; attach a new one")
        return context

    @property
    def phi(self) -> nn.Parameter:
        """The tuned parameters, ``d``."""
        return self.context.phi

    @property
    def dim(self) -> int:
        """The dimension d of phi."""
        return self.phi.numel()

    @property
    def layers(self) -> list[str]:
        """Names of the modulated layers."""
        return list(self.context.layers)

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer tunes: phi."""
        return [self.phi]

    @torch.no_grad()
    def set_phi(self, phi: Tensor) -> None:
        """Copy ``phi``, ``d``, into the model."""
        if phi.shape != self.phi.shape:
            raise AdapterError(f"phi has shape {tuple(phi.shape)}, this adapter's is {tuple(self.phi.shape)}")
        self.phi.copy_(phi)

    @contextmanager
    def using(self, phi: Tensor) -> Iterator[nn.Module]:
        """Let the model compute with ``phi``, ``d``, in place of the parameter; works inside ``torch.func.vmap``."""
        context = self.context
        before, context.override = context.override, phi
        try:
            yield self.model
        finally:
            context.override = before

    def modulations(self) -> list[tuple[nn.Module, Modulation]]:
        """Pairs of modulated layer and modulation."""
        return [
            (layer, layer.get_submodule(MODULATION_NAME))  # type: ignore[misc]
            for layer in map(self.model.get_submodule, self.context.layers)
        ]

    def base_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the model without its adapter; loads strictly into a bare model."""
        prefix = CONTEXT_NAME + "."
        return {key: value for key, value in self.model.state_dict().items() if not key.startswith(prefix)}

    def remove(self) -> nn.Module:
        """Detach; the model is again what it was, bit for bit. Returns the model."""
        context = self.context
        for layer, modulation in self.modulations():
            modulation.handle.remove()
            delattr(layer, MODULATION_NAME)
        for pin in context.pins:
            pin.remove()
        thawed = set(context.thawed)
        for name, parameter in self.model.named_parameters():
            if name in thawed:
                parameter.requires_grad_(True)
        delattr(self.model, CONTEXT_NAME)
        return self.model

    def merge(self) -> nn.Module:
        """Fold phi into the modulated layers and detach: a plain model computing what the adapted one did.

        Every host can save, export and serve it, and it costs nothing at inference. Returns the model.

        Raises:
            AdapterError: A modulated layer shares its weight with another, or computes it; nothing was changed.
        """
        tensors = [
            t for module in self.model.modules() for t in (*module._parameters.values(), *module._buffers.values())
        ]
        owners = Counter(map(id, tensors))
        for name, (layer, modulation) in zip(self.layers, self.modulations(), strict=True):
            for key in modulation.merges_into:
                tensor = layer._parameters.get(key, layer._buffers.get(key))
                if tensor is None:
                    raise AdapterError(f"{name}.{key} is computed from other tensors, so phi can't be folded into it")
                if owners[id(tensor)] > 1:
                    raise AdapterError(
                        f"{name}.{key} is shared with another layer, which folding phi into it would change"
                    )
        for layer, modulation in self.modulations():
            modulation.merge_into(layer)
        return self.remove()

    def save(self, path: str | Path) -> None:
        """Write phi, A, B (or C) and where they act to a safetensors file."""
        tensors = {"phi": self.phi.detach()}
        for name, (_, modulation) in zip(self.layers, self.modulations(), strict=True):
            tensors.update({f"{name}.{key}": value for key, value in modulation.named_buffers()})
        context = self.context
        described = {"kind": context.kind, "dim": self.dim, "seed": context.seed, "layers": context.layers}
        write_tensors(path, tensors, FILE_FORMAT, described)

    def load(self, path: str | Path) -> None:
        """Read phi and the matrices from a file that `save` wrote for an adapter of the same kind, dim and layers.

        Raises:
            FileFormatError: The file is corrupt or no adapter file.
            AdapterError: The file's adapter differs from this one.
        """
        tensors, described = read_tensors(path, FILE_FORMAT)
        context = self.context
        for key, mine in (("kind", context.kind), ("dim", self.dim), ("layers", context.layers)):
            if described[key] != mine:
                raise AdapterError(f"{path}: {key} is {described[key]}, but the attached adapter's is {mine}")
        self.set_phi(tensors["phi"])
        for name, (_, modulation) in zip(self.layers, self.modulations(), strict=True):
            for key, buffer in modulation.named_buffers():
                buffer.copy_(tensors[f"{name}.{key}"])
        context.seed = described["seed"]  # of the matrices that are here now
        context.signature[0] = context.seed

    def __repr__(self) -> str:
        """Say what is attached and where."""
        context = self.context
        return f"Adapter({context.kind}, dim={self.dim}, layers={_shortened(context.layers)}, seed={context.seed})"


def attach_film(
    model: nn.Module, layers: str | Sequence[str] | None = None, *, dim: int = 128, seed: int = 0
) -> Adapter:
    """Freeze a model and modulate some of its layers by FiLM (paper, Fig. S1b).

    The output is unchanged until phi moves from 0. Every parameter is frozen; normalisation and dropout layers compute
    as in evaluation whatever ``model.training`` says (functional dropout that a model's own code applies is beyond
    reach).

    Args:
        model: Any module. It is changed in place.
        layers: Patterns of module names, e.g. ``"layer4.*.bn2"``; by default every normalisation layer with weight
            and bias. Convolutions and linear layers with a bias can be named as well.
        dim: Dimension d of phi, at least 1.
        seed: Seed of A and B.

    Returns:
        The handle to tune, save, merge or remove the adapter.

    Raises:
        AdapterError: A pattern matches no layer that FiLM can modulate, or the model has an adapter already.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> attach_film(model, dim=8).layers
        ['1']
    """
    usable = {name: module for name, module in model.named_modules() if _unusable(module) is None}
    if layers is None:
        names = [name for name, module in usable.items() if not isinstance(module, (*CONVOLUTIONS, nn.Linear))]
        if not names:
            raise AdapterError(
                f"{type(model).__name__} has no normalisation layer with weight and bias; name layers to modulate,"
                f" e.g. {_shortened(list(usable)) if usable else 'none of its layers has both weight and bias'}"
            )
    else:
        names = _matching([layers] if isinstance(layers, str) else list(layers), model, usable)

    def modulation(context: Context, index: int, layer: nn.Module) -> Modulation:
        channels = _affine(layer)[0].shape[0]
        return FiLM(context, channels, _channel_axis(layer), generator(seed, "film", index))

    return _attach(model, "film", names, dim, seed, modulation)


def attach_input_bias(model: nn.Module, layer: str | None = None, *, dim: int = 16, seed: int = 0) -> Adapter:
    """Freeze a fully connected network and give a linear layer a dynamic bias ``C phi`` (paper, section 4.2).

    Args:
        model: Any module with a linear layer. It is changed in place, as by `attach_film`.
        layer: Name of the linear layer; by default the first.
        dim: Dimension d of phi, at least 1.
        seed: Seed of C.

    Raises:
        AdapterError: There is no such linear layer with a bias, or the model has an adapter already.
    """
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.bias is not None
    }
    if not linear:
        raise AdapterError(f"{type(model).__name__} has no linear layer with a bias; use attach_film")
    if layer is not None and layer not in linear:
        raise AdapterError(f"no linear layer with a bias is named {layer!r}{_nearest(layer, list(linear))}")
    names = [layer if layer is not None else next(iter(linear))]

    def modulation(context: Context, index: int, layer: nn.Module) -> Modulation:
        return InputBias(context, _affine(layer)[0].shape[0], generator(seed, "input_bias", index))

    return _attach(model, "input_bias", names, dim, seed, modulation)


def load_adapter(model: nn.Module, path: str | Path) -> Adapter:
    """Attach to a bare model the adapter that `Adapter.save` wrote.

    Raises:
        FileFormatError: The file is corrupt or no adapter file.
        AdapterError: The model lacks a layer that the file names.
    """
    _, described = read_tensors(path, FILE_FORMAT)
    kind, layers, dim, seed = (described[key] for key in ("kind", "layers", "dim", "seed"))
    if kind == "film":
        adapter = attach_film(model, layers, dim=dim, seed=seed)
    elif kind == "input_bias":
        adapter = attach_input_bias(model, layers[0], dim=dim, seed=seed)
    else:
        raise FileFormatError(f"{path}: unknown adapter kind {kind!r}, expected 'film' or 'input_bias'")
    adapter.load(path)
    return adapter


def _attach(model: nn.Module, kind: Kind, names: list[str], dim: int, seed: int, modulation: Any) -> Adapter:
    if hasattr(model, CONTEXT_NAME) or any(isinstance(module, Context) for module in model.modules()):
        raise AdapterError(f"{type(model).__name__} has an adapter already; remove() or merge() it first")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise AdapterError(
            f"{type(model).__name__} wraps the model that checkpoints are made of; attach before wrapping it, or phi is"
            " not among what they hold"
        )
    if dim < 1:
        raise AdapterError(f"dim is {dim}; phi needs at least one dimension")
    if seed < 0:
        raise AdapterError(f"seed is {seed}; it must be at least 0")
    example, _ = _affine(model.get_submodule(names[0]))
    dtype = torch.float64 if example.dtype == torch.float64 else torch.float32
    context = Context(dim, kind, names, seed, dtype)
    context.thawed = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    context.pins = [pin for module in model.modules() if _mode_dependent(module) for pin in _pin_to_eval(module)]
    for index, name in enumerate(names):
        layer = model.get_submodule(name)
        child = modulation(context, index, layer).to(example.device)
        child.handle = layer.register_forward_hook(child.hook)
        layer.add_module(MODULATION_NAME, child)
    model.add_module(CONTEXT_NAME, context.to(example.device))
    return Adapter(model)


def _gaussian(rows: int, phi: Tensor, rng: torch.Generator) -> Tensor:
    """Entries N(0, 1/d), ``rows x d``, so that a row times phi is about as long as phi's entries."""
    return torch.randn(rows, phi.numel(), generator=rng, dtype=torch.float64).div(phi.numel() ** 0.5).to(phi.dtype)


def _affine(layer: nn.Module) -> tuple[Tensor, Tensor]:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return weight, bias


def _channel_axis(layer: nn.Module) -> int:
    for spatial, kinds in enumerate(UNBATCHED, start=1):
        if isinstance(layer, kinds):
            return -1 - spatial  # counted from the end: these layers also take an input without a batch axis
    channels_last = isinstance(layer, (nn.Linear, nn.LayerNorm)) and type(layer).__name__ not in TOOLKIT_NORMS
    return -1 if channels_last else 1


def _unusable(module: nn.Module) -> str | None:
    """Why FiLM can't modulate a module; None where it can."""
    kind = type(module).__name__
    if not (isinstance(module, (*NORMS, *CONVOLUTIONS, nn.Linear)) or kind in TOOLKIT_NORMS):
        return f"is a {kind}, neither a normalisation, convolution nor linear layer"
    if kind == "NonDynamicallyQuantizableLinear":
        return "is the output projection of an attention, which is never called as a layer"
    if getattr(module, "weight", None) is None or getattr(module, "bias", None) is None:
        return f"is a {kind} without a weight and a bias to merge into"
    if isinstance(module, CONVOLUTIONS) and any(
        getattr(module, name, None) is not None for name in ("norm", "activation")
    ):
        # Detectron2's: what leaves the layer is no longer affine in its weight, so phi could not be merged.
        return f"is a {kind} with a norm or an activation inside; name its norm instead"
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
        return f"is a {kind} over {len(module.normalized_shape)} axes, which has no channel axis"
    return None


def _mode_dependent(module: nn.Module) -> bool:
    return isinstance(module, MODE_DEPENDENT) or type(module).__name__ in TOOLKIT_DROPOUTS


def _pin_to_eval(module: nn.Module) -> list[Any]:
    return [
        module.register_forward_pre_hook(_enter_eval),
        module.register_forward_hook(_leave_eval, always_call=True),
    ]


def _enter_eval(module: Any, args: Any) -> None:
    module._metricopt_mode = module.training
    module.training = False


def _leave_eval(module: Any, args: Any, output: Any) -> None:
    module.training = module.__dict__.pop("_metricopt_mode", module.training)


def _matching(patterns: list[str], model: nn.Module, usable: dict[str, nn.Module]) -> list[str]:
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in usable):
            continue
        for name, module in model.named_modules():
            if fnmatchcase(name, pattern):
                raise AdapterError(f"layers={pattern!r} matches {name!r}, which {_unusable(module)}")
        raise AdapterError(f"layers={pattern!r} matches no layer{_nearest(pattern, list(usable))}")
    return [name for name in usable if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    return f"; did you mean {near}?" if near else f"; there are {_shortened(known)}"


def _shortened(names: list[str]) -> str:
    return str(names) if len(names) <= 6 else f"[{', '.join(map(repr, names[:5]))}, ... {len(names)} in all]"
