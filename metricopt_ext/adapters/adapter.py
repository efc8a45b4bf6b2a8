"""The handle to an attached adapter: set phi, save and load it, merge it into the model or remove it."""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from metricopt_ext.adapters.modulation import (
    CONTEXT_NAME,
    GENERATOR,
    MODULATION_NAME,
    AdapterKind,
    Context,
    Modulation,
)
from metricopt_ext.adapters.signature import Outputs, Signature
from metricopt_ext.errors import AdapterError, FileFormatError
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import check_tensors, content_of, read_tensors, write_tensors
from metricopt_ext.utils.words import brief, shortened

FILE_FORMAT = "metricopt_ext/adapter/1"

COMPILED = "OptimizedModule"  # what torch.compile returns; named, because its class takes long to import

TAG = "metricopt_signature"  # the attribute of a parameter that says what its numbers mean


class Adapter:
    """Handle to the adapter that is attached to a model, as `attach_film` and the other attaching functions return it.

    It keeps no state of its own: ``Adapter(copy.deepcopy(model))`` is the handle to the copy's adapter.

    Args:
        model: A model with an attached adapter.

    Raises:
        AdapterError: The model has no adapter, or wraps the model that may have one.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_wrapper(model)
        if not isinstance(getattr(model, CONTEXT_NAME, None), Context):
            raise AdapterError(
                f"{type(model).__name__} has no adapter: call attach_film, attach_input_bias or attach_outputs first"
            )
        self.model = model
        self._tag_phi()

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
        """Names of the modulated layers, that of the logits last if phi acts on them."""
        return list(self.context.layers)

    @property
    def outputs(self) -> Outputs | None:
        """How phi acts on the logits, with their layer's name; None if it doesn't."""
        return self.context.outputs

    @property
    def offsets(self) -> slice:
        """Which coordinates of phi are the classes' offsets, in units of ``outputs.scale`` logits; may be empty."""
        return self.context.offsets

    @property
    def signature(self) -> Signature:
        """What phi means here. A value function is followed only under the signature that it was fitted for."""
        context = self.context
        channels = tuple(modulation.channels for _, modulation in self.modulations())
        return Signature(
            context.kind,
            tuple(context.layers),
            channels,
            context.seed,
            self.dim,
            context.generator,
            context.outputs,
        )

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer tunes: phi."""
        return [self.phi]

    def _tag_phi(self) -> None:
        """Let the parameter itself say what it means: an optimizer, which sees nothing else, compares it with f's."""
        setattr(self.phi, TAG, self.signature)

    @torch.no_grad()
    def set_phi(self, phi: Tensor) -> None:
        """Copy ``phi``, ``d``, into the model."""
        self.check_phi(phi)
        self.phi.copy_(phi)

    def check_phi(self, phi: Tensor) -> None:
        """Check that phi is ``d``.

        Raises:
            AdapterError: It is not.
        """
        if phi.shape != self.phi.shape:
            raise AdapterError(f"phi has shape {tuple(phi.shape)}, this adapter's is {tuple(self.phi.shape)}")

    @contextmanager
    def using(self, phi: Tensor) -> Iterator[nn.Module]:
        """Make the model compute with ``phi``, ``d``, in place of the parameter; works inside ``torch.func.vmap``."""
        context = self.context
        before, context.override = context.override, phi
        try:
            yield self.model
        finally:
            context.override = before

    def modulations(self) -> list[tuple[nn.Module, Modulation]]:
        """Pairs of a modulated layer and its modulation."""
        return [
            (layer, layer.get_submodule(MODULATION_NAME))  # type: ignore[misc]
            for layer in map(self.model.get_submodule, self.context.layers)
        ]

    def base_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the model without its adapter; loads strictly into a bare model."""
        prefix = CONTEXT_NAME + "."
        return {key: value for key, value in self.model.state_dict().items() if not key.startswith(prefix)}

    def merged_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of a copy into which phi is merged; loads strictly into a bare model.

        Raises:
            AdapterError: As from `merge`.
        """
        return Adapter(copy.deepcopy(self.model)).merge().state_dict()

    def remove(self) -> nn.Module:
        """Detach, which restores the model bit for bit. Returns the model."""
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
        """Fold phi into the modulated layers and detach: the plain model computes what the adapted one did.

        Every host can save, export and serve it, and it costs nothing at inference. Returns the model.

        Raises:
            AdapterError: A modulated layer shares its weight with another, or computes it; nothing is changed.
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
        described = Described(**self._place(), seed=context.seed, generator=context.generator)
        write_tensors(path, tensors, FILE_FORMAT, asdict(described))

    def load(self, path: str | Path) -> None:
        """Read phi and the matrices from a file that `save` wrote for an adapter of the same kind, dim and layers.

        The outputs must be the same too: their scale is a part of what phi means.

        Raises:
            FileFormatError: The file is corrupt or not an adapter file.
            AdapterError: The file's adapter differs from this one.
        """
        described, tensors = read_adapter(path)
        self.load_described(path, described, tensors)

    @torch.no_grad()
    def load_described(self, path: str | Path, described: "Described", tensors: dict[str, Tensor]) -> None:
        """Set phi and the matrices to what `read_adapter` read; on an error nothing is changed.

        Raises:
            FileFormatError: The tensors are not those of the adapter that the file describes.
            AdapterError: The file's adapter differs from this one.
        """
        for key, mine in self._place().items():
            theirs = getattr(described, key)
            if theirs != mine:
                raise AdapterError(f"{path}: {key} is {brief(theirs)}, but the attached adapter's is {brief(mine)}")
        own = {"phi": self.phi.detach()}
        for name, (_, modulation) in zip(self.layers, self.modulations(), strict=True):
            own.update({f"{name}.{key}": buffer for key, buffer in modulation.named_buffers()})
        check_tensors(path, tensors, {name: value.shape for name, value in own.items()})
        for name, value in own.items():
            value.copy_(tensors[name])
        context = self.context
        context.seed = described.seed  # the seed of the matrices just copied
        context.generator = described.generator
        context.signature[0] = context.seed
        self._tag_phi()

    def _place(self) -> dict[str, Any]:
        """Where phi acts: what a file's adapter must have in common with this one."""
        context = self.context
        return {
            "kind": context.kind,
            "dim": self.dim,
            "layers": context.layers,
            "outputs": context.outputs,
            "matrix_dim": context.offsets.start,
        }

    def __repr__(self) -> str:
        """Say what is attached and where."""
        context = self.context
        outputs = "" if context.outputs is None else f", outputs={context.outputs}"
        layers = shortened(context.layers)
        return f"Adapter({context.kind}, dim={self.dim}, layers={layers}, seed={context.seed}{outputs})"


@dataclass(frozen=True)
class Described:
    """What an adapter's file says besides its tensors.

    Attributes:
        kind: What the matrices do.
        dim: Dimension d of phi.
        layers: Names of the modulated layers, that of the logits last.
        outputs: How phi acts on the logits; None if it doesn't, as in files of earlier versions, which do not say it.
        matrix_dim: Number of phi's coordinates that the matrices multiply.
        seed: Seed of the matrices.
        generator: How the matrices were drawn.
    """

    kind: AdapterKind
    dim: int
    layers: list[str]
    outputs: Outputs | None
    matrix_dim: int
    seed: int
    generator: str


def read_adapter(path: str | Path) -> tuple[Described, dict[str, Tensor]]:
    """Read what `Adapter.save` wrote: the description, and phi and the matrices.

    Raises:
        FileFormatError: The file is corrupt or not an adapter file.
    """
    tensors, described = read_tensors(path, FILE_FORMAT)
    with content_of(path, "adapter"):
        if described["kind"] not in get_args(AdapterKind):
            kinds = ", ".join(map(repr, get_args(AdapterKind)))
            raise FileFormatError(f"{path}: unknown adapter kind {brief(described['kind'])}, expected one of {kinds}")
        # What files of earlier versions do not say.
        earlier = {"generator": GENERATOR, "outputs": None, "matrix_dim": described["dim"]}
        content = from_json(Described, {**earlier, **described})
        check_integer(0, dim=content.dim, matrix_dim=content.matrix_dim, seed=content.seed)
    return content, tensors


def refuse_wrapper(model: nn.Module) -> None:
    """Check that a model is none that wraps another, whose names and checkpoints differ from those of the model itself.

    Raises:
        AdapterError: It is; the message says how to get at the model.
    """
    kind = type(model).__name__
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise AdapterError(
            f"{kind} wraps the model that is checkpointed; attach before wrapping it, or checkpoints will lack phi (the"
            " model itself is its .module)"
        )
    if kind == COMPILED:
        raise AdapterError(
            f"{kind} wraps the model that is checkpointed; attach before wrapping it by torch.compile, or pass the"
            " model itself, its ._orig_mod: what was compiled is then compiled anew"
        )
    if isinstance(model, AveragedModel):
        raise AdapterError(f"{kind} wraps a copy of the model, with a phi of its own; pass the copy, its .module")


def signature_of(parameter: Tensor) -> Signature | None:
    """Return what a parameter's numbers mean if it is an adapter's phi, else None."""
    return getattr(parameter, TAG, None)
