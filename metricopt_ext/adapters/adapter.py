"""The handle to an attached adapter: set phi, apply a start, save and load both, merge them or remove them."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import RLock
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from metricopt_ext.adapters.context import CONTEXT_NAME, Context
from metricopt_ext.adapters.hosts import left_out
from metricopt_ext.adapters.moves import MATRIX, AdapterKind, Move
from metricopt_ext.adapters.signature import Outputs, Signature
from metricopt_ext.adapters.start import Start
from metricopt_ext.adapters.wrappers import COMPILED, PARALLEL
from metricopt_ext.errors import AdapterError, FileFormatError
from metricopt_ext.runtime.identity import fingerprint
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import check_tensors, content_of, read_tensors, write_tensors
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import kept_modes
from metricopt_ext.utils.weights import same_bits
from metricopt_ext.utils.words import brief, nearest, shortened

FILE_FORMAT = "metricopt_ext/adapter/4"

REPLACED = "replaced."  # begins the names of what a start replaces in a file

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what phi and matrices are kept in

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
        return list(self.signature.layers)

    @property
    def moves(self) -> dict[str, Move]:
        """What phi does, by the layers' names; the model's own is empty."""
        return dict(zip(self.layers, self.context.moves, strict=True))  # type: ignore[arg-type]

    @property
    def outputs(self) -> Outputs | None:
        """How phi acts on the logits, with their layer's name; None if it doesn't."""
        return self.signature.outputs

    @property
    def offsets(self) -> slice:
        """Which coordinates of phi are the classes' offsets, in units of ``outputs.scale`` logits; may be empty."""
        return self.signature.offsets

    @property
    def signature(self) -> Signature:
        """What phi means here. A value function is followed only under the signature that it was fitted for."""
        return self.context.means

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
        written = self.context.is_written()
        self.phi.copy_(phi)
        if written:
            self.context.restore()
            self.context.write()

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

        Moved tensors are substituted for the model's own, with gradients in phi. Other threads wait meanwhile
        (`alone`). A phi of another type or on another device is copied, as by `set_phi`.

        Raises:
            AdapterError: It is not ``d``.
        """
        self.check_phi(phi)
        with self.alone(), self.context.using(phi.to(self.phi)):
            yield self.model

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
        so call ``apply(Start(phi))`` before loading other weights. What phi moves is substituted while the model is
        called; within `applied`, as in a query, it is written too.

        Raises:
            AdapterError: As from `check`; nothing is changed.
        """
        self.check(start)
        held, written = self.as_start(), self.context.held.phi is not None
        try:
            self._put(start, written)
        except BaseException:
            self._put(held, written)
            raise

    @contextmanager
    def applied(self, start: Start) -> Iterator[nn.Module]:
        """Make the model be a start for a while, then put it back to what it held; other threads wait (`alone`).

        What phi moves is written into the model's own tensors meanwhile: whoever calls, exports or saves it has them.

        Raises:
            AdapterError: As from `check`; nothing is changed.
        """
        with self.alone():
            held, put_back_modes, written = self.as_start(), kept_modes(self.model), self.context.held.phi is not None
            self.check(start)
            try:
                self._put(start, write=True)
                yield self.model
                self._put(held, write=written)
            except BaseException:  # also one that cuts the line before short, or a pass in which modes are pinned
                put_back_modes()
                self._put(held, write=written)
                raise

    def as_start(self) -> Start:
        """Return copies of what the model holds beyond its base; `apply` brings it back."""
        originals = self.context.originals
        own = self._own() if originals else {}
        unique = {id(tensor): name for name, tensor in reversed(own.items()) if name in originals}
        unmoved = self._unmoved(own)
        replaced = {name: unmoved[name].detach().clone() for name in reversed(unique.values())}
        return Start(self.phi.detach().clone(), replaced)

    def _own(self) -> dict[str, Any]:
        """Return what the bare model's state dict names, each tensor itself; a tied one under each of its names."""
        prefix, state = CONTEXT_NAME + ".", self.model.state_dict(keep_vars=True)
        own = {id(place.tensor()): each for place, each in self.context.own.items()}
        return {key: own.get(id(each), each) for key, each in state.items() if not key.startswith(prefix)}

    def _unmoved(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return it as it is at phi = 0, without a bias that a layer has only while phi is written."""
        held = {id(own[key]): value for key, value in self.context.held.tensors.items() if key in own}
        return {key: value for key, each in own.items() if (value := held.get(id(each), each)) is not None}

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
    def _put(self, start: Start, write: bool = False) -> None:
        """Apply a start that was checked, or that was the model's own; with what phi moves written in place, or not."""
        context, used = self.context, self.context.override
        context.use(None)
        context.restore()
        given, before = self._given(start), context.originals
        if given or before:  # which most queries have not, but another phi alone
            self._replace(given, before)
        self.phi.copy_(start.phi)
        if write:
            context.write()
        context.use(used)

    def _replace(self, given: dict[int, Tensor], before: dict[str, Tensor]) -> None:
        """Put tensors in place of the model's own, by these ones' ids, and what was replaced before back."""
        own, kept, originals = self._own(), dict[int, Tensor](), dict[str, Tensor]()
        for name, tensor in own.items():
            if id(tensor) in given and not same_bits(given[id(tensor)], before.get(name, tensor)):
                if id(tensor) not in kept:
                    kept[id(tensor)] = before[name] if name in before else tensor.detach().clone()
                originals[name] = kept[id(tensor)]
        for name, original in before.items():
            if name not in originals:
                own[name].copy_(original)
        self.context.originals = originals  # first: of a copy that fails, `remove` puts back all
        for name in originals:
            own[name].copy_(given[id(own[name])])

    def base_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the base: of the model without its adapter, and without what a start replaced.

        It loads strictly into a bare model.
        """
        base = {key: self.context.originals.get(key, each) for key, each in self._unmoved(self._own()).items()}
        return {key: each.detach() if isinstance(each, Tensor) else each for key, each in base.items()}

    def merged_state_dict(self) -> dict[str, Any]:
        """Return the state dict of a merged copy, with what a start replaced; loads strictly into a bare model."""
        with self.applied(self.as_start()):
            return {
                key: copy.deepcopy(each.detach() if isinstance(each, Tensor) else each)
                for key, each in self._own().items()
            }

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

    def merge(self) -> nn.Module:
        """Leave what phi moved in the model's own tensors and detach: the plain model computes as the adapted one did.

        Every host can save, export and serve it, at no extra cost at inference. What a start replaced stays. Logit
        offsets give a layer without a bias one. If PEFT's ``save_pretrained`` would omit what phi has moved, or what a
        start replaced, as it omits norms, a UserWarning says so. Returns the model.
        """
        context, own = self.context, self._own()
        moved = context.keys if self.phi.is_meta or bool(self.phi.any()) else set()  # nothing changes at 0
        changed = {name: own[name] for name in (*moved, *context.originals) if name in own}
        if changed and (message := left_out(self.model, changed)):  # before it is done, and can't be undone
            warnings.warn(message, stacklevel=2)
        held, before = self.as_start(), KeptModules(self.model)
        try:
            self._put(held, write=True)
            for key, tensor in context.held.tensors.items():
                if tensor is None and f"{key.rpartition('.')[0]}.weight".lstrip(".") in context.thawed:
                    context.thawed.append(key)  # a bias that is new
            return self._detach()
        except BaseException:
            before.put_back()
            self._put(held)
            raise

    def _detach(self) -> nn.Module:
        context = self.context
        context.use(None)
        for handle in (*context.pins, *(each for host in context.hosts for each in host.handles)):
            handle.remove()
        thawed = set(context.thawed)
        for name, parameter in self.model.named_parameters():
            if name in thawed:
                parameter.requires_grad_(True)
        delattr(self.model, CONTEXT_NAME)
        return self.model

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that `load_adapter` puts into the base.

        It holds phi, the matrices and where they act, what a start replaced, and a digest of the base, not its weights.
        """
        replaced = {f"{REPLACED}{name}": value for name, value in self.as_start().tensors.items()}
        described = Described(self.signature, fingerprint(self.base_state_dict()))
        write_tensors(path, self._kept_tensors() | replaced, FILE_FORMAT, asdict(described))

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote for an adapter of the same signature; a start is applied as by `apply`.

        If the file was saved for another base, a UserWarning says so.

        Raises:
            FileFormatError: The file is corrupt or not an adapter file; nothing is changed.
            AdapterError: The file's adapter differs from this one, or its start does not fit the model; nothing is
                changed.
        """
        self.take(path, read_adapter(path))

    def take(self, path: str | Path, saved: "Saved") -> None:
        """Take over what `read_adapter` read; see `load`."""
        described, tensors, replaced = saved
        for what, mine, theirs in self.signature.differences(described.signature):
            raise AdapterError(
                f"{path}: {what} is {brief(theirs)}, but the attached adapter's is {brief(mine)}; remove() it, and"
                " load_adapter(model, path) attaches the file's"
            )
        own, start = self._kept_tensors(), Start(tensors.get("phi", self.phi), replaced)
        check_tensors(path, tensors, {name: value.shape for name, value in own.items()})
        try:
            self.check(start)
        except AdapterError as error:
            raise AdapterError(f"{path}: {error}") from error
        if described.base != fingerprint(self.base_state_dict()):
            warnings.warn(
                f"{path} was saved for a model with other weights than {type(self.model).__name__} has: the metric"
                " that it reached there does not hold here. Load the weights that it was tuned on first",
                stacklevel=3,
            )
        for name in own.keys() - {"phi"}:
            own[name].copy_(tensors[name])  # the same, unless a new torch draws others from the seed
        self.apply(start)

    def _kept_tensors(self) -> dict[str, Tensor]:
        """Return phi and the matrices, by their names in a file."""
        tensors = {"phi": self.phi.detach()}
        for name, move in self.moves.items():
            tensors |= {f"{MATRIX}{name}.{key}": value for key, value in move.named_buffers()}
        return tensors

    def __repr__(self) -> str:
        """Say what is attached and where."""
        means = self.signature
        outputs = "" if means.outputs is None else f", outputs={means.outputs}"
        return f"Adapter({means.kind}, dim={means.dim}, layers={shortened(self.layers)}, seed={means.seed}{outputs})"


@dataclass(frozen=True)
class Described:
    """What an adapter's file says besides its tensors.

    Attributes:
        signature: What phi means.
        base: Fingerprint of the base.
    """

    signature: Signature
    base: str


# What an adapter's file holds: what it says, phi and the matrices, and what replaces the model's own tensors.
Saved = tuple[Described, dict[str, Tensor], dict[str, Tensor]]


def read_adapter(path: str | Path) -> Saved:
    """Read what `Adapter.save` wrote.

    Raises:
        FileFormatError: The file is corrupt or not an adapter file.
    """
    tensors, content = read_tensors(path, FILE_FORMAT)
    with content_of(path, "adapter"):
        described = from_json(Described, content)
        if (kind := described.signature.kind) not in get_args(AdapterKind):
            raise ValueError(f"its kind is {brief(kind)}; known are {', '.join(get_args(AdapterKind))}")
    names = [name for name in tensors if name.startswith(REPLACED)]
    replaced = {name.removeprefix(REPLACED): tensors.pop(name) for name in names}
    for name, value in tensors.items():
        if value.dtype not in FLOATS:
            raise FileFormatError(f"{path} is corrupt: tensor {brief(name)} has type {value.dtype}, not a float's")
    return described, tensors, replaced


def refuse_wrapper(model: nn.Module) -> None:
    """Check that a model is none that wraps another, whose names and checkpoints differ from those of the model itself.

    Raises:
        AdapterError: It is; the message says how to get at the model.
    """
    kind = type(model).__name__
    if kind == COMPILED or isinstance(model, (*PARALLEL, AveragedModel)):
        raise AdapterError(
            f"{kind} wraps the model, with other names or weights of its own; attach before wrapping it, or pass the"
            f" model itself, its .{'_orig_mod' if kind == COMPILED else 'module'}"
        )


def signature_of(parameter: Tensor) -> Signature | None:
    """Return what a parameter's numbers mean if it is an adapter's phi, else None."""
    return getattr(parameter, TAG, None)
