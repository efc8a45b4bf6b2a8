"""phi in a model: it holds phi, and has the model compute with the tensors that phi moves."""

import json
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.layers import weight_of
from metricopt_ext.adapters.moves import KeepsPrecision, Move, moved
from metricopt_ext.adapters.signature import Signature

CONTEXT_NAME = "metricopt"

NORMS = nn.modules.batchnorm._NormBase  # with statistics


class Place(NamedTuple):
    """A tensor of a module.

    Attributes:
        module: Has it.
        name: What the module calls it.
        key: Its name in the model's state dict; a tied one has that of the first.
    """

    module: nn.Module
    name: str
    key: str

    def tensor(self) -> Tensor | None:
        """Return the module's tensor; None if it has none, as a layer without a bias."""
        return self._held()[self.name]

    def put(self, tensor: Tensor | None) -> None:
        """Have the module hold another tensor, which need not be a parameter."""
        self._held()[self.name] = tensor
        if isinstance(self.module, nn.RNNBase) and self.name in self.module._flat_weights_names:
            self.module._flat_weights[self.module._flat_weights_names.index(self.name)] = tensor

    def _held(self) -> dict[str, Tensor | None]:
        return self.module._parameters if self.name in self.module._parameters else self.module._buffers  # type: ignore[return-value]


class Host:
    """A module that computes with what phi makes of its tensors while it is called, with gradients in phi.

    Args:
        context: Holds phi.
        module: The module.
        moves: Those that act there.
        places: The tensors, of the module and those below it.
    """

    def __init__(
        self, context: "Context", module: nn.Module, moves: Iterable[nn.Module], places: Iterable[Place]
    ) -> None:
        self.context: Context = context
        self.moves: list[nn.Module] = list(moves)
        self.places: list[Place] = list(places)
        self.held: list[Place] = []
        # Hooks are bound methods, because a closure would not survive deepcopy.
        self.handles: list[Any] = [
            module.register_forward_pre_hook(self.enter, prepend=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, *_: Any) -> None:
        """Substitute the moved tensors, where the module's own are not these already: a hook before the call."""
        context = self.context
        if context.override is None and not context.is_written():
            self.hold(context.phi)

    def leave(self, *_: Any) -> None:
        """End that: a hook after the call."""
        if self.context.override is None:
            self.release()

    def hold(self, phi: Tensor) -> None:
        """Have the modules compute with what phi, ``d``, makes of their tensors, but those that another host holds."""
        self.release()  # what a call that was cut short has left
        own = self.context.own
        self.held = [place for place in self.places if place not in own]
        found = self.context.moved(phi, self.moves, {place.key for place in self.held})
        _fold_statistics(self.held, found)
        for place in self.held:
            if place.key in found:
                own[place] = place.tensor()
                place.put(found[place.key])

    def release(self) -> None:
        """Have them compute with their own tensors again."""
        for place in self.held:
            if place in self.context.own:
                place.put(self.context.own[place])
                del self.context.own[place]  # last: of what is cut short here, the next call puts back the rest
        self.held = []


class Context(KeepsPrecision):
    """Holds phi; registered in the model's module tree under the name ``metricopt``.

    The model's own tensors are those of phi = 0, and hosts substitute the moved ones while they are called. In a query
    they are written in place instead (`write`), so that whoever calls, exports or saves the model has them.

    Args:
        model: The model.
        moves: What phi does, one for each layer.
        means: What phi means; a layer's name is empty if it is the model itself.
        dtype: Type of phi.
        guessed: Whether the logits' layer is merely the last by definition.

    Attributes:
        phi: The tuned parameters, ``d``; 0 leaves the model as it was.
        signature: The seed and a checksum of what phi means, ``2``, so that a checkpoint can't be loaded into an
            adapter for which its phi means something else.
        originals: What a start replaced, by name in the bare model's state dict; no part of any state dict.
        own: The model's own tensors where hosts have put others.
        trial: Of ask and tell, the one that the model is at; None if it is at none.
    """

    signature: Tensor

    def __init__(
        self, model: nn.Module, moves: Sequence[Move], means: Signature, dtype: torch.dtype, guessed: bool = False
    ) -> None:
        super().__init__()
        self.means: Signature = means
        self.guessed: bool = guessed
        self.phi: nn.Parameter = nn.Parameter(torch.zeros(means.dim, dtype=dtype))
        self.moves: nn.ModuleList = nn.ModuleList(moves)
        self.register_buffer("signature", torch.tensor([means.seed, zlib.crc32(json.dumps(means.to_json()).encode())]))
        self.override: Tensor | None = None  # what is used in phi's place for a while
        self.originals: dict[str, Tensor] = {}
        self.own: dict[Place, Tensor | None] = {}
        self.held: Held = Held()
        self.trial: int | None = None
        self.thawed: list[str] = []
        self.pins: list[Any] = []
        self.hosts: list[Host] = []
        self._places = {place.key: place for place in reversed(list(places_of(model, self.keys)))}

    @property
    def keys(self) -> set[str]:
        """The tensors that phi moves, by their names in the model's state dict."""
        return {key for move in self.moves for key in move.keys}  # type: ignore[union-attr]

    def value(self) -> Tensor:
        """Return the phi in use, ``d``: the parameter, or what `Adapter.using` has put in its place."""
        return self.phi if self.override is None else self.override

    def base(self, key: str) -> Tensor:
        """Return a tensor at phi = 0; that of a bias that a layer is yet to get is 0."""
        place = self._places[key]
        own = self.held.tensors[key] if key in self.held.tensors else self.own.get(place, place.tensor())
        if own is None:
            weight = weight_of(place.module)
            own = weight.detach().new_zeros(len(weight))
        return own

    def moved(self, phi: Tensor, moves: Iterable[nn.Module], keys: Container[str]) -> dict[str, Tensor]:
        """Return what moves at phi, ``d``, make of the tensors with some keys, in their own types."""
        return moved(moves, phi, self.base, keys)  # type: ignore[arg-type]

    def host_in(self, model: nn.Module) -> None:
        """Have each layer compute with its moved tensors; with a mixture, the model and all below it."""
        if "" not in self.means.layers:
            for name, move in zip(self.means.layers, self.moves, strict=True):
                places = [self._places[key] for key in move.keys]  # type: ignore[union-attr]
                self.hosts.append(Host(self, model.get_submodule(name), [move], places))
            return
        norms = [name for name, module in model.named_modules() if isinstance(module, NORMS)]
        affine = {f"{name}.{own}".lstrip(".") for name in norms for own in ("weight", "bias")}
        places = list(places_of(model, self.keys | affine))
        for module in list(model.modules()):
            below = set(module.modules())
            if own := [place for place in places if place.module in below]:
                self.hosts.append(Host(self, module, self.moves, own))

    def is_written(self) -> bool:
        """Whether the model's own tensors are those of phi, and no gradient in phi is asked for."""
        # A compiler can't follow how often phi was changed.
        written = self.held.written if torch.compiler.is_compiling() else self.held.phi == self.phi._version
        return written and not (self.phi.requires_grad and torch.is_grad_enabled())

    @torch.no_grad()
    def write(self) -> None:
        """Have the model's own tensors be what phi makes of them, until `restore`."""
        version = self.phi._version
        if not self.phi.is_meta and not self.phi.any():
            self.held.phi, self.held.written = version, True  # it is as it should be
            return
        found = self.moved(self.phi, self.moves, self.keys)
        own_ones = {key: self._places[key].tensor() for key in found}
        self.held.tensors = {key: None if own is None else own.clone() for key, own in own_ones.items()}
        for key, value in found.items():
            place, own = self._places[key], self._places[key].tensor()
            if own is None:
                place.module._parameters[place.name] = nn.Parameter(value, requires_grad=False)
            else:
                own.copy_(value)
        self.held.phi, self.held.written = version, True

    @torch.no_grad()
    def restore(self) -> None:
        """Have the model's own tensors be those of phi = 0 again, bit for bit."""
        self.held.phi, self.held.written = None, False
        for key, value in self.held.tensors.items():
            place, own = self._places[key], self._places[key].tensor()
            if value is None:
                place.module._parameters[place.name] = None
            else:
                assert own is not None
                own.copy_(value)
        self.held.tensors = {}

    @contextmanager
    def using(self, phi: Tensor) -> Iterator[None]:
        """Have the model compute with phi, ``d``, in place of the parameter."""
        before = self.override
        try:
            self.use(phi)
            yield
            self.use(before)
        except BaseException:  # also one that cuts the line before short
            self.use(before)
            raise

    def use(self, phi: Tensor | None) -> None:
        """Have the model compute with phi, ``d``; None for its own. What a call that was cut short has left is gone."""
        self.override = phi
        for host in self.hosts:
            host.release()
        for host in self.hosts if phi is not None else ():
            host.hold(phi)  # type: ignore[arg-type]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Cast and move what is held as what is in its place: it is what a bare model would have by then."""
        kept = {id(each): each for each in (*self.originals.values(), *self.held.tensors.values()) if each is not None}
        cast = {each: fn(tensor) for each, tensor in kept.items()}
        self.originals = {name: cast[id(tensor)] for name, tensor in self.originals.items()}
        self.held.tensors = {key: None if own is None else cast[id(own)] for key, own in self.held.tensors.items()}
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: what is used in phi's place for a while, and the trial there, stay here."""
        return {**self.__dict__, "override": None, "trial": None}

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
                f" outputs or seed from this one (seed {self.means.seed}, dim {self.means.dim});"
                " attach with the checkpoint's settings before loading"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class Held:
    """What the model's own tensors are at phi = 0, while the moved ones are written in their place.

    Attributes:
        tensors: By key; None of a bias that the layer has not. Empty for phi = 0.
        phi: How often phi was changed in place by then; None where it is not written.
        written: Whether it is.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | None] = {}
        self.phi: int | None = None
        self.written: bool = False


def places_of(model: nn.Module, keys: set[str]) -> Iterator[Place]:
    """Yield where tensors are, a tied one in each module that has it."""
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            key = f"{name}.{own}" if name else own
            if tensor is not None:
                key = first.setdefault(id(tensor), key)
            if key in keys:
                yield Place(module, own, key)


def _fold_statistics(places: Iterable[Place], found: dict[str, Tensor]) -> None:
    """Put a norm's moved statistics m' and v' into its weight and bias, as torch's own has no gradient in these.

    With its own m and v it then computes the same: by the weight ``w ((v + eps) / (v' + eps)) ** 0.5`` and the bias
    ``b + (m - m') w / (v' + eps) ** 0.5``.
    """
    keys: dict[nn.Module, dict[str, str]] = {}
    for place in places:
        if isinstance(place.module, NORMS):
            keys.setdefault(place.module, {})[place.name] = place.key
    for norm, names in keys.items():
        if "running_var" not in names or not found[names["running_var"]].requires_grad:
            continue
        mean, var = found[names["running_mean"]], found[names["running_var"]]
        own_mean = found[names["running_mean"]] = norm.get_buffer("running_mean")
        own_var = found[names["running_var"]] = norm.get_buffer("running_var")
        weight, bias = (
            found.get(names["weight"], torch.ones_like(mean)),
            found.get(names["bias"], torch.zeros_like(mean)),
        )
        scale = weight * (var + norm.eps).rsqrt()  # type: ignore[operator]
        found[names["weight"]] = (scale * (own_var + norm.eps).sqrt()).to(weight.dtype)  # type: ignore[operator]
        found[names["bias"]] = (bias + (own_mean - mean) * scale).to(bias.dtype)
