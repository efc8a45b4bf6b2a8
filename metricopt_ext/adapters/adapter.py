"""The handle to an attached adapter: set phi, apply a start, save and load both, merge them or remove them."""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from metricopt_ext.adapters.adapter_file import FILE_FORMAT, MATRIX, REPLACED, Described, Saved, read_adapter
from metricopt_ext.adapters.hosts import left_out
from metricopt_ext.adapters.modulation import CONTEXT_NAME, MODULATION_NAME, Context, Modulation
from metricopt_ext.adapters.signature import Outputs, Signature
from metricopt_ext.adapters.start import Start
from metricopt_ext.adapters.wrappers import COMPILED, PARALLEL
from metricopt_ext.errors import AdapterError
from metricopt_ext.runtime.identity import fingerprint
from metricopt_ext.utils.files import check_tensors, write_tensors
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import kept_modes
from metricopt_ext.utils.weights import same_bits
from metricopt_ext.utils.words import brief, nearest, shortened

TAG = "metricopt_signature"  # the attribute of a parameter that says what its numbers mean

# Of each model, by what holds its phi: lets one thread at a time change what it holds for a while. It is no attribute
# of the model, which must be copied and pickled, as a lock can't be.
_CHANGING: WeakKeyDictionary[Context, Any] = WeakKeyDictionary()


class Adapter:
    """Handle to the adapter attached to a model, as returned by `attach_film` and the other attaching functions.

    It has no state of its own: ``Adapter(copy.deepcopy(model))`` is the handle to the copy's adapter. The model is its
    base, the trained weights, plus phi and whatever a start replaced (`apply`); `remove` leaves the base.

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
        """Copy ``phi``, ``d``, into the model.

        Raises:
            AdapterError: It is not ``d`` finite numbers.
        """
        self.check(Start(phi))
        self.phi.copy_(phi)

    def check_phi(self, phi: Tensor) -> None:
        """Check that phi is ``d``.

        Raises:
            AdapterError: It is not.
        """
        if phi.shape != self.phi.shape:
            raise AdapterError(f"phi has shape {tuple(phi.shape)}, this adapter's is {tuple(self.phi.shape)}")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have other threads wait that would change what the model holds for a while (`using`, `applied`)."""
        with _CHANGING.setdefault(self.context, RLock()):
            yield

    @contextmanager
    def using(self, phi: Tensor) -> Iterator[nn.Module]:
        """Make the model compute with ``phi``, ``d``, in place of the parameter; works inside ``torch.func.vmap``.

        Other threads wait meanwhile (`alone`). A phi of another type or on another device is copied, as by `set_phi`.

        Raises:
            AdapterError: It is not ``d``.
        """
        self.check_phi(phi)
        phi = phi.to(self.phi)
        with self.alone():
            context, before = self.context, self.context.override
            try:
                context.override = phi
                yield self.model
                context.override = before
            except BaseException:  # also one that cuts the line before short
                context.override = before
                raise

    def modulations(self) -> list[tuple[nn.Module, Modulation]]:
        """Pairs of a modulated layer and its modulation."""
        return [
            (layer, layer.get_submodule(MODULATION_NAME))  # type: ignore[misc]
            for layer in map(self.model.get_submodule, self.context.layers)
        ]

    def check(self, start: Start) -> None:
        """Check that a start can be applied.

        Raises:
            AdapterError: Its phi is not ``d`` finite numbers. The bare model's state dict has no such buffer or
                parameter, or one of another shape or type; or one tensor with two names is given two values.
        """
        self.check_phi(start.phi)
        if not start.phi.is_meta and not start.phi.isfinite().all():
            raise AdapterError(f"phi is not finite: {brief(start.phi.tolist())}")
        self._given(start)

    def apply(self, start: Start) -> None:
        """Make the model its base with a start: the start's phi, and its tensors in place of the base's.

        Their values are copied into the model's own tensors, so optimizers, tied weights, DDP and compiled graphs stay
        valid. The originals are kept outside the state dict until `remove` or another start restores them; they follow
        the model's copies, casts and moves. A state dict loaded later changes the tensors in place, not the originals,
        so call ``apply(Start(phi))`` before loading other weights.

        Raises:
            AdapterError: As from `check`; nothing is changed.
        """
        self.check(start)
        held = self.as_start()
        try:
            self._put(start)
        except BaseException:
            self._put(held)
            raise

    @contextmanager
    def applied(self, start: Start) -> Iterator[nn.Module]:
        """Apply a start for a while, then put the model back to what it held; other threads wait (`alone`).

        Raises:
            AdapterError: As from `check`; nothing is changed.
        """
        with self.alone():
            held, put_back_modes = self.as_start(), kept_modes(self.model)
            self.check(start)
            try:
                self._put(start)
                yield self.model
                self._put(held)
            except BaseException:  # also one that cuts the line before short, or a pass in which modes are pinned
                put_back_modes()
                self._put(held)
                raise

    def as_start(self) -> Start:
        """Return copies of what the model holds beyond its base; `apply` brings it back."""
        originals = self.context.originals
        if not originals:
            return Start(self.phi.detach().clone())
        own = self._own()
        unique = {id(tensor): name for name, tensor in reversed(own.items()) if name in originals}
        replaced = {name: own[name].detach().clone() for name in reversed(unique.values())}
        return Start(self.phi.detach().clone(), replaced)

    def _own(self) -> dict[str, Tensor]:
        """Return the tensors that the bare model's state dict names; a tied one under each of its names."""
        known, model = self.base_state_dict(), self.model
        own = (model.named_buffers(remove_duplicate=False), model.named_parameters(remove_duplicate=False))
        return {name: each for name, each in chain(*own) if name in known}

    def _given(self, start: Start) -> dict[int, Tensor]:
        """Return the values for the model's tensors, by the tensors' ids.

        Raises:
            AdapterError: As from `check`.
        """
        given, own = dict[int, tuple[str, Tensor]](), self._own() if start.tensors else {}
        for name, value in start.tensors.items():
            what = f"tensor {brief(name)}"
            if name not in own:
                raise AdapterError(f"the model has no {what}{nearest(str(name)[:100], list(own))}")
            tensor = own[name]
            if not isinstance(value, Tensor):
                raise AdapterError(f"{what} is {brief(value)}; it must be a tensor")
            if value.shape != tensor.shape:
                raise AdapterError(f"{what} has shape {tuple(value.shape)}, the model's {tuple(tensor.shape)}")
            if value.dtype != tensor.dtype:
                raise AdapterError(f"{what} has type {value.dtype}, the model's {tensor.dtype}; convert it first")
            other, earlier = given.setdefault(id(tensor), (name, value))
            if not same_bits(value, earlier):
                raise AdapterError(f"{what} is the same tensor as {other!r}, but was given another value")
        return {key: value for key, (_, value) in given.items()}

    @torch.no_grad()
    def _put(self, start: Start) -> None:
        """Apply a start that was checked, or that was the model's own."""
        context, given = self.context, self._given(start)
        before, kept, originals = context.originals, dict[int, Tensor](), dict[str, Tensor]()
        if not (given or before):  # as for most queries, which have another phi alone
            self.phi.copy_(start.phi)
            return
        own = self._own()
        for name, tensor in own.items():
            if id(tensor) in given and not same_bits(given[id(tensor)], before.get(name, tensor)):
                if id(tensor) not in kept:
                    kept[id(tensor)] = before[name] if name in before else tensor.detach().clone()
                originals[name] = kept[id(tensor)]
        for name, original in before.items():
            if name not in originals:
                own[name].copy_(original)
        context.originals = originals  # first: of a copy that fails, `remove` puts back all
        for name in originals:
            own[name].copy_(given[id(own[name])])
        self.phi.copy_(start.phi)

    def base_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the base: of the model without its adapter, and without what a start replaced.

        It loads strictly into a bare model.
        """
        prefix, originals = CONTEXT_NAME + ".", self.context.originals
        state = self.model.state_dict()
        return {key: originals.get(key, value) for key, value in state.items() if not key.startswith(prefix)}

    def merged_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of a merged copy, with what a start replaced; loads strictly into a bare model.

        Raises:
            AdapterError: As from `merge`.
        """
        return Adapter(copy.deepcopy(self.model))._merge().state_dict()

    def remove(self) -> nn.Module:
        """Detach, and restore the base bit for bit, including what a start replaced. Returns the model."""
        held, before = self.as_start(), KeptModules(self.model)
        try:
            self._put(Start(self.phi.detach()))
            return self._detach()
        except BaseException:
            before.put_back()
            self._put(held)
            raise

    def _detach(self) -> nn.Module:
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

        Every host can save, export and serve it, at no extra cost at inference. What a start replaced stays. Logit
        offsets give a layer without a bias one. If PEFT's ``save_pretrained`` would omit what phi was folded into, or
        what a start replaced, as it omits norms, a UserWarning says so. Returns the model.

        Raises:
            AdapterError: A modulated layer shares its weight with another, or computes it; nothing is changed.
        """
        merged = {
            f"{name}.{key}" if name else key: getattr(layer, key)
            for name, (layer, modulation) in zip(self.layers, self.modulations(), strict=True)
            for key in modulation.merges_into
        }
        if not (self.phi.is_meta or bool(self.phi.any())):
            merged = {}  # nothing changes there
        merged = {name: tensor for name, tensor in merged.items() if tensor is not None}
        own = self._own()
        merged |= {name: own[name] for name in self.context.originals}
        if merged and (message := left_out(self.model, merged)):  # before the merge, after which nothing can be undone
            warnings.warn(message, stacklevel=2)
        return self._merge()

    def check_merge(self) -> None:
        """Check that `merge` can fold phi in, before what finds it is spent.

        Raises:
            AdapterError: A modulated layer shares its weight with another, or computes it.
        """
        self._changed_by_merge()

    def _changed_by_merge(self) -> list[Tensor]:
        tensors = [
            t for module in self.model.modules() for t in (*module._parameters.values(), *module._buffers.values())
        ]
        owners, changed = Counter(map(id, tensors)), list[Tensor]()
        for name, (layer, modulation) in zip(self.layers, self.modulations(), strict=True):
            for key in modulation.merges_into:
                tensor = layer._parameters.get(key, layer._buffers.get(key))
                if tensor is None and layer._parameters.get(key, tensor) is None and key in layer._parameters:
                    continue  # a bias that is added
                if tensor is None:
                    raise AdapterError(
                        f"{name}.{key} is computed from other tensors, so phi can't be folded into it;"
                        " make it a plain parameter first, as torch.nn.utils.parametrize.remove_parametrizations and"
                        " prune.remove do, or keep the adapter and save it"
                    )
                if owners[id(tensor)] > 1:
                    raise AdapterError(
                        f"{name}.{key} is shared with another layer, which folding phi into it would change; give each"
                        " layer a copy of its own first, or keep the adapter and save it"
                    )
                changed.append(tensor)
            changed += modulation.changes(layer)
        return changed

    def _merge(self) -> nn.Module:
        before = [(tensor, tensor.detach().clone()) for tensor in self._changed_by_merge()]
        modules = KeptModules(self.model)
        try:
            for name, (layer, modulation) in zip(self.layers, self.modulations(), strict=True):
                bare = layer._parameters.get("bias", layer) is None
                modulation.merge_into(layer)
                weight, bias = (f"{name}.{key}" if name else key for key in ("weight", "bias"))
                if bare and layer.bias is not None and weight in self.context.thawed:
                    self.context.thawed.append(bias)
            return self._detach()
        except BaseException:
            modules.put_back()
            with torch.no_grad():
                for tensor, content in before:
                    tensor.copy_(content)
            raise

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that `load_adapter` puts into the base.

        It holds phi, A, B (or C) and where they act, what a start replaced, and a digest of the base, not its weights.
        """
        tensors, start = self._kept_tensors(), self.as_start()
        tensors |= {f"{REPLACED}{name}": value for name, value in start.tensors.items()}
        context = self.context
        described = Described(
            **self._place(),
            seed=context.seed,
            generator=context.generator,
            base=fingerprint(self.base_state_dict()),
        )
        write_tensors(path, tensors, FILE_FORMAT, asdict(described))

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote for an adapter of the same kind, dim and layers; a start is applied as by `apply`.

        The outputs must be the same too: their scale is a part of what phi means. If the file was saved for another
        base, a UserWarning says so.

        Raises:
            FileFormatError: The file is corrupt or not an adapter file; nothing is changed.
            AdapterError: The file's adapter differs from this one, or its start does not fit the model; nothing is
                changed.
        """
        self.load_saved(path, read_adapter(path))

    def load_saved(self, path: str | Path, saved: "Saved") -> None:
        """Take over what `read_adapter` read; see `load`."""
        described, tensors, replaced = saved
        for key, mine in self._place().items():
            theirs = getattr(described, key)
            if theirs != mine:
                raise AdapterError(f"{path}: {key} is {brief(theirs)}, but the attached adapter's is {brief(mine)}")
        own = self._kept_tensors()
        check_tensors(path, tensors, {name: value.shape for name, value in own.items()})
        start = Start(tensors["phi"], replaced)
        try:
            self.check(start)
        except AdapterError as error:
            raise AdapterError(f"{path}: {error}") from error
        held, matrices = self.as_start(), {name: value.clone() for name, value in own.items() if name != "phi"}
        seed, generator = self.context.seed, self.context.generator
        try:
            self._take({name: tensors[name] for name in matrices}, start, described.seed, described.generator)
            if described.base != fingerprint(self.base_state_dict()):
                warnings.warn(
                    f"{path} was saved for a model with other weights than {type(self.model).__name__} has: the metric"
                    " that it reached there does not hold here. Load the weights that it was tuned on first",
                    stacklevel=3,
                )
        except BaseException:
            self._take(matrices, held, seed, generator)
            raise

    def _take(self, matrices: dict[str, Tensor], start: Start, seed: int, generator: str) -> None:
        """Copy matrices, by their names in a file, and a start that was checked; ``seed`` is that of the matrices."""
        for name, value in self._kept_tensors().items():
            if name in matrices:
                value.copy_(matrices[name])
        self._put(start)
        context = self.context
        context.seed, context.generator = seed, generator
        context.signature[0] = seed
        self._tag_phi()

    def _kept_tensors(self) -> dict[str, Tensor]:
        """Return phi and the matrices, by their names in a file."""
        tensors = {"phi": self.phi.detach()}
        for name, (_, modulation) in zip(self.layers, self.modulations(), strict=True):
            tensors |= {f"{MATRIX}{name}.{key}": value for key, value in modulation.named_buffers()}
        return tensors

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


def refuse_wrapper(model: nn.Module) -> None:
    """Check that a model is none that wraps another, whose names and checkpoints differ from those of the model itself.

    Raises:
        AdapterError: It is; the message says how to get at the model.
    """
    kind = type(model).__name__
    if isinstance(model, PARALLEL):
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
