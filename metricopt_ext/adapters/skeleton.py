"""An adapter of a checkpoint whose model is not at hand: FiLM on the norms that the names of its tensors tell."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.affine import weight_of
from metricopt_ext.adapters.attach import attach_film, attach_outputs
from metricopt_ext.adapters.modulation import FiLM
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.errors import AdapterError, ConfigError
from metricopt_ext.utils.checkpoint_file import CheckpointFile
from metricopt_ext.utils.words import brief, nearest, shortened

Kind = Literal["BatchNorm", "LayerNorm or GroupNorm", "RMSNorm, scale alone", "offsets"]

# Logits per unit of an offset's coordinate. At the 2% by which the norms are moved first, offsets are 0.2 logits.
LOGITS = 10.0

GENERATOR = "normal/1, shifts by the weights"  # of the matrices; see `modulation.GENERATOR`


class Moved(NamedTuple):
    """What phi moves of a checkpoint's layer.

    Attributes:
        layer: Its name.
        kind: What it is, as the names of its tensors tell.
        keys: The keys of the tensors that move.
        channels: How many numbers each of them has.
    """

    layer: str
    kind: Kind
    keys: tuple[str, ...]
    channels: int


def movable(file: CheckpointFile) -> list[Moved]:
    """Return the norms of a checkpoint, in its order; tied ones once.

    ``P.weight`` and ``P.bias`` of one length are a norm, with ``P.running_var`` a BatchNorm. ``P.weight`` alone is a
    norm if its name has "norm" in it.
    """
    found, seen = list[Moved](), set[str]()
    for key in file.shapes:
        layer, _, name = key.rpartition(".")
        if name != "weight" or not layer or not _is_vector(file, key) or key in seen:
            continue
        channels, bias = file.shapes[key][0], f"{layer}.bias"
        if bias in file.shapes:
            if not _is_vector(file, bias) or file.shapes[bias] != (channels,):
                continue
            kind: Kind = "BatchNorm" if f"{layer}.running_var" in file.shapes else "LayerNorm or GroupNorm"
            keys: tuple[str, ...] = (key, bias)
        elif "norm" in layer.lower():
            kind, keys = "RMSNorm, scale alone", (key,)
        else:
            continue
        seen.update(alias for each in keys for alias in file.aliases(each))
        found.append(Moved(layer, kind, keys, channels))
    return found


def chosen(file: CheckpointFile, layers: Sequence[str] | None = None, offsets: str | None = None) -> list[Moved]:
    """Return what phi is to move of a checkpoint.

    Args:
        file: The checkpoint.
        layers: Patterns of names of layers; by default every norm.
        offsets: The key of a bias that gets offsets of its own, one for each of its numbers.

    Raises:
        AdapterError: There is nothing to move, a pattern matches no norm, or the key is no bias.
    """
    norms = movable(file)
    for pattern in layers or ():
        if not any(fnmatchcase(each.layer, pattern) for each in norms):
            names = [each.layer for each in norms]
            raise AdapterError(f"--layers {brief(pattern)} matches no norm of {file.path}{nearest(pattern, names)}")
    found = [each for each in norms if layers is None or any(fnmatchcase(each.layer, one) for one in layers)]
    if offsets is not None:
        bias = _bias(file, offsets)
        found = [*(each for each in found if each.layer != bias.layer), bias]
    if not found:
        raise AdapterError(
            f"{file.path} has no norm: no P.weight and P.bias of one length, and no P.weight with 'norm' in P; it has"
            f" {_like_norms(file)}. --offsets KEY moves a bias"
        )
    return found


def _bias(file: CheckpointFile, key: str) -> Moved:
    vectors = [name for name in file.shapes if _is_vector(file, name)]
    if key not in vectors:
        what = "is no vector of floats" if key in file.shapes else "is no tensor"
        biases = [name for name in vectors if name.endswith("bias")]
        raise AdapterError(f"--offsets {brief(key)} {what} of {file.path}{nearest(key, biases)}")
    return Moved(key.rpartition(".")[0] or key, "offsets", (key,), file.shapes[key][0])


def _is_vector(file: CheckpointFile, key: str) -> bool:
    dtype = file.dtypes[key]
    moves = dtype.is_floating_point and dtype.itemsize > 1  # eight bits are quantized
    return len(file.shapes[key]) == 1 and file.shapes[key][0] > 0 and moves


def _like_norms(file: CheckpointFile) -> str:
    vectors = [key for key, shape in file.shapes.items() if len(shape) == 1]
    named = [key for key in file.shapes if "norm" in key.lower() or ".bn" in key.lower()]
    return shortened(named or vectors or list(file.shapes))


def attach_checkpoint(file: CheckpointFile, moved: Sequence[Moved], *, dim: int = 16, seed: int = 0) -> Adapter:
    """Return an adapter of a model that has nothing but what moves, under its names and in float32 or float64.

    A norm's channel c of weight w becomes ``w_c (1 + (A phi)_c)``, its bias ``b_c (1 + (A phi)_c) + |w_c| (B phi)_c``:
    entries of phi are relative changes of what the norm puts out, which has a spread of about w_c around b_c.

    Args:
        file: The checkpoint.
        moved: What moves, from `chosen`.
        dim: Number of phi's coordinates that A and B multiply.
        seed: Seed of A and B.

    Raises:
        AdapterError: A layer's name can't be one of a module.
        ValueError: ``dim`` or ``seed`` is out of range.
    """
    skeleton = nn.Module()
    for each in moved:
        _add(skeleton, each.layer, _module(file, each))
    norms = [each.layer for each in moved if each.kind != "offsets"]
    outputs = next((Outputs(each.layer, LOGITS) for each in moved if each.kind == "offsets"), None)
    if not norms:
        return attach_outputs(skeleton, outputs)
    adapter = attach_film(skeleton, [_literally(name) for name in norms], dim=dim, seed=seed, outputs=outputs)
    for layer, modulation in adapter.modulations():
        if isinstance(modulation, FiLM):
            modulation.B.mul_(weight_of(layer).abs()[:, None])
    adapter.context.generator = GENERATOR
    return Adapter(skeleton)  # whose phi is tagged with it


def moved_tensors(adapter: Adapter, phi: Tensor, file: CheckpointFile, moved: Sequence[Moved]) -> dict[str, Tensor]:
    """Return the tensors that phi moves, by key, in the checkpoint's own types; none at phi = 0.

    Args:
        adapter: From `attach_checkpoint`; it is not changed.
        phi: ``d``.
        file: The checkpoint.
        moved: What moves.
    """
    if not phi.any():
        return {}
    return {key: value.to(file.dtypes[key]) for key, value in _at(adapter, phi, moved).items()}


def _at(adapter: Adapter, phi: Tensor, moved: Sequence[Moved]) -> dict[str, Tensor]:
    """Return what moves at phi, ``d``, by key, in the skeleton's own types."""
    own = Adapter(copy.deepcopy(adapter.model))
    own.set_phi(phi)
    state = own.merge().state_dict()
    return {key: state[f"{each.layer}.{name}"] for each in moved for key, name in _names(each)}


def gradients_in_phi(adapter: Adapter, moved: Sequence[Moved], gradients: Mapping[str, Tensor]) -> Tensor:
    """Return gradients of a loss in phi, ``m x d``, from those in the tensors that move, which are linear in phi.

    Args:
        adapter: From `attach_checkpoint`; it is not changed.
        moved: What moves.
        gradients: By key, each of the tensor's shape, or ``m`` of them stacked.

    Raises:
        ConfigError: One is missing, unknown, of another shape or number, or not finite.
    """
    origin = torch.zeros_like(adapter.phi.detach())
    still, count = _at(adapter, origin, moved), dict[str, int]()
    if unknown := sorted(gradients.keys() - still.keys()):
        raise ConfigError(
            f"the gradients have {brief(unknown[0])}, which does not move; moved are {brief(list(still))}"
        )
    given: dict[str, Tensor] = {}
    for key, value in still.items():
        if key not in gradients:
            raise ConfigError(f"the gradients lack {key!r}, which moves; give one of each key")
        each = torch.as_tensor(gradients[key]).detach().double().cpu()
        each = each[None] if each.shape == value.shape else each
        if each.shape[1:] != value.shape or not each.isfinite().all():
            shape = tuple(value.shape)
            raise ConfigError(
                f"the gradient of {key!r} is {tuple(each.shape)}; it must be finite and {shape}, or m x it"
            )
        given[key], count[key] = each, len(each)
    if len(set(count.values())) > 1:
        raise ConfigError(f"the gradients differ in number: {brief(count)}; give as many of each key")
    columns = []
    for direction in torch.eye(len(origin)).to(origin):
        ahead = _at(adapter, direction, moved)
        slopes = {key: (ahead[key] - still[key]).double() for key in still}
        columns.append(torch.stack([(given[key] * slopes[key]).flatten(1).sum(1) for key in still]).sum(0))
    return torch.stack(columns, 1).to(origin)


class Norms:
    """What phi moves of a checkpoint: its norms by FiLM, and the offsets of a bias.

    Args:
        file: The checkpoint.
        moved: What moves, from `chosen`.
        dim: As in `attach_checkpoint`.
        seed: As in `attach_checkpoint`.

    Raises:
        AdapterError, ValueError: As from `attach_checkpoint`.
    """

    def __init__(self, file: CheckpointFile, moved: Sequence[Moved], *, dim: int = 16, seed: int = 0) -> None:
        self.file, self.moved = file, list(moved)
        self.adapter: Adapter = attach_checkpoint(file, moved, dim=dim, seed=seed)

    @property
    def keys(self) -> list[str]:
        """The keys of what moves."""
        return [key for each in self.moved for key in each.keys]

    def identity(self) -> dict[str, Any]:
        """Return what a run depends on besides the checkpoint."""
        return {"moved": self.keys}

    def described(self) -> list[dict[str, Any]]:
        """Return what moves, for a report."""
        return [each._asdict() for each in self.moved]

    def rows(self) -> list[list[str]]:
        """Return what moves as rows of a table: the layer, its kind, how many numbers of it move."""
        return [[each.layer, each.kind, str(len(each.keys) * each.channels)] for each in self.moved]

    def tensors(self, phi: Tensor) -> dict[str, Tensor]:
        """Return the tensors that phi, ``d``, moves, by key, in the checkpoint's own types; none at phi = 0."""
        return moved_tensors(self.adapter, phi, self.file, self.moved)

    def gradients(self, given: Mapping[str, Tensor]) -> Tensor:
        """Return gradients in phi, ``m x d``, from those by key; see `gradients_in_phi`."""
        return gradients_in_phi(self.adapter, self.moved, given)


def _names(moved: Moved) -> Iterator[tuple[str, str]]:
    """Yield each key with the name of its tensor in the skeleton's layer."""
    for key in moved.keys:
        yield key, "bias" if moved.kind == "offsets" else key.rpartition(".")[2]


def _module(file: CheckpointFile, moved: Moved) -> nn.Module:
    tensors = {name: file.tensor(key) for key, name in _names(moved)}
    dtype = torch.float64 if torch.float64 in {value.dtype for value in tensors.values()} else torch.float32
    with torch.device("meta"):
        if moved.kind == "BatchNorm":
            module: nn.Module = nn.BatchNorm1d(moved.channels, track_running_stats=False)
        elif moved.kind == "offsets":
            module = nn.Linear(1, moved.channels)
        else:
            module = nn.RMSNorm(moved.channels) if len(moved.keys) == 1 else nn.LayerNorm(moved.channels)
    module = module.to_empty(device="cpu").to(dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[name]) if name in tensors else parameter.zero_()
    return module


def _add(skeleton: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module at its dotted name, below plain ones; what is there already keeps its children."""
    *above, last = name.split(".")
    parent = skeleton
    try:
        for part in above:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        if last in parent._modules:
            for child, inner in parent.get_submodule(last).named_children():
                module.add_module(child, inner)
            del parent._modules[last]
        parent.add_module(last, module)
    except KeyError as error:
        raise AdapterError(f"{brief(name)} can't be the name of a layer ({brief(error)})") from error


def _literally(name: str) -> str:
    """Return the pattern that matches nothing but a name."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)
