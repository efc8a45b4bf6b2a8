"""What phi moves of a checkpoint whose model is not at hand: the norms that its tensors' names tell, or a mixture."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.checkpoints import CheckpointReader
from metricopt_ext.adapters.context import CONTEXT_NAME, Context
from metricopt_ext.adapters.moves import Film, Mixture, Move, Offsets, gaussian, moved
from metricopt_ext.adapters.signature import Outputs, Signature
from metricopt_ext.errors import AdapterError, ConfigError
from metricopt_ext.runtime.identity import fingerprint, fingerprint_of_files
from metricopt_ext.utils.checkpoint_file import CheckpointFile
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.weights import has_mean
from metricopt_ext.utils.words import brief, nearest, shortened

OFFSETS, MIXED = "offsets", "weight in the mixture"  # kinds of parts besides norms

# Logits per unit of an offset's coordinate. At the 2% by which the norms are moved first, offsets are 0.2 logits.
LOGITS = 10.0

GENERATOR = "normal/1, shifts by the weights"  # of the matrices; see `moves.GENERATOR`


class Part(NamedTuple):
    """What phi moves of a checkpoint, as reports say it.

    Attributes:
        name: Of the layer, or of another checkpoint that is mixed in.
        kind: What it is, as the names of its tensors tell.
        keys: The keys of its tensors; none of another checkpoint.
        numbers: How many numbers move.
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    numbers: int


class FileMoves:
    """What phi makes of a checkpoint's tensors, which are held in memory; any thread may call it.

    Args:
        file: The checkpoint, phi = 0.
        parts: What moves, the bias that gets offsets last if there is one.
        moves: How, but for the offsets.
        dim: Number of phi's coordinates before the offsets.

    Attributes:
        base: The tensors that move, by key, at phi = 0.
        adapter: Holds phi for a search, of no model.
    """

    def __init__(self, file: CheckpointFile, parts: Sequence[Part], moves: Sequence[Move], dim: int) -> None:
        self.parts, self.moves = list(parts), list(moves)
        outputs, channels = None, tuple[int, ...]()
        if self.parts[-1].kind == OFFSETS:
            _, _, (key,), classes = self.parts[-1]
            outputs, channels = Outputs(key, LOGITS), (classes,)
            self.moves.append(Offsets(file.aliases(key)[:1], slice(dim, dim + classes), LOGITS))
        self.others = [Path(part.name) for part in self.parts if part.kind == MIXED]
        self.base = {key: file.tensor(key) for move in self.moves for key in move.keys}
        matrices = dict(nn.ModuleList(self.moves).named_buffers())
        drawn = f"{GENERATOR}, of {fingerprint(self.base | matrices)}"  # else f would fit any file's phi
        kind, holder = "mixture" if self.others else "film", nn.Module()
        context = Context(
            holder, [], Signature(kind, (), channels, 0, dim + sum(channels), drawn, outputs), _dtype(file)
        )
        holder.add_module(CONTEXT_NAME, context)
        self.adapter = Adapter(holder)

    def identity(self) -> dict[str, Any]:
        """Return what a run depends on besides the checkpoint."""
        keys = [key for part in self.parts for key in part.keys]
        return {"mix": fingerprint_of_files(self.others), "moved": keys}

    @torch.no_grad()
    def tensors(self, phi: Tensor) -> dict[str, Tensor]:
        """Return what phi, ``d``, makes of tensors, by key, in the checkpoint's own types; none at phi = 0."""
        return moved(self.moves, phi, self.base.__getitem__, self.base) if phi.any() else {}

    def gradients(self, given: Mapping[str, Tensor]) -> Tensor:
        """Return gradients of a loss in phi at 0, ``m x d``, from those in the tensors that move.

        Args:
            given: By key, each of the tensor's shape, or ``m`` of them stacked.

        Raises:
            ConfigError: One is missing, unknown, of another shape or number, or not finite.
        """
        if wrong := sorted(given.keys() ^ self.base.keys()):
            what = "have" if wrong[0] in given else "lack"
            raise ConfigError(f"the gradients {what} {brief(wrong[0])}; give one of each of {brief(list(self.base))}")
        origin, stacked = torch.zeros_like(self.adapter.phi.detach()), dict[str, Tensor]()
        for key, own in self.base.items():
            each = torch.as_tensor(given[key]).detach().to(origin)
            stacked[key] = each[None] if each.shape == own.shape else each
            count = next(iter(stacked.values())).shape[:1]
            if stacked[key].shape != (*count, *own.shape) or not each.isfinite().all():
                raise ConfigError(
                    f"the gradient of {key!r} is {tuple(each.shape)}; it must be finite and {tuple(own.shape)}, or m x"
                    " it with one m for all keys"
                )
        # The pass is in phi's precision, as a half would round the gradients too.
        at = partial(moved, self.moves, base=lambda key: self.base[key].to(origin), keys=self.base)
        pull_back = torch.func.vjp(at, origin)[1]
        found: Tensor = torch.func.vmap(pull_back)(stacked)[0]
        return found


def norms(
    file: CheckpointFile, layers: Sequence[str] | None = None, offsets: str | None = None, dim: int = 16, seed: int = 0
) -> FileMoves:
    """Move a checkpoint's norms by FiLM, and a bias by offsets.

    A norm's channel c of weight w becomes ``w_c (1 + (A phi)_c)``, its bias ``b_c (1 + (A phi)_c) + |w_c| (B phi)_c``:
    entries of phi are relative changes of what the norm puts out, which has a spread of about w_c around b_c.

    Args:
        file: The checkpoint.
        layers: Patterns of names of norms; by default every norm.
        offsets: The key of a bias that gets offsets of its own, one for each of its numbers.
        dim: Number of phi's coordinates that A and B multiply.
        seed: Seed of A and B.

    Raises:
        AdapterError: There is nothing to move, a pattern matches no norm, or the key is no bias.
        ValueError: The seed is negative.
    """
    every, bias = movable(file), _bias(file, offsets)
    names, patterns = [each.name for each in every], ["*"] if layers is None else layers
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names) and not (bias and layers is None):
            raise AdapterError(
                f"--layers {brief(pattern)} matches no norm of {file.path}{nearest(pattern, names)}; norms are P.weight"
                " and P.bias of one length, and P.weight with 'norm' in P. --offsets KEY moves any vector of"
                f" {shortened(list(file.shapes))}"
            )
    named = [each for each in every if any(fnmatchcase(each.name, pattern) for pattern in patterns)]
    parts = [each for each in named if offsets not in each.keys]
    moves = [_film(file, part.keys, dim, generator(seed, "film", index)) for index, part in enumerate(parts)]
    return FileMoves(file, [*parts, *bias], moves, dim if parts else 0)


def mixture(
    file: CheckpointFile, others: Sequence[Path], offsets: str | None = None, entry: str | None = None
) -> FileMoves:
    """Mix all floating tensors of a checkpoint with those of others, and move a bias by offsets.

    Args:
        file: The checkpoint.
        others: The others, one to eight, of any kind of file; each has the first one's tensors.
        offsets: As in `norms`.
        entry: The state dict's key in each of the others, as in `attach_mixture`.

    Raises:
        DataError: A file can't be read, or has other tensors; the message has the file and the tensor.
        AdapterError: There are no others or more than eight, two are alike, or the key is no bias.
    """
    bias, reader = _bias(file, offsets), CheckpointReader(file, entry)
    states = reader.to_mix(others)
    base = {key: reader.base[key] for key in reader.floating if file.aliases(key)[0] == key}
    parts = [Part(str(path), MIXED, (), 1) for path in others]
    return FileMoves(file, [*parts, *bias], [Mixture(base, states)], len(states))


def movable(file: CheckpointFile) -> list[Part]:
    """Return the norms of a checkpoint, in its order; tied ones once.

    ``P.weight`` and ``P.bias`` of one length are a norm, with ``P.running_var`` a BatchNorm. ``P.weight`` alone is a
    norm if its name has "norm" in it.
    """
    found, seen = list[Part](), set[str]()
    for key, shape in file.shapes.items():
        layer = key.removesuffix(".weight")
        keys = tuple(each for each in (key, f"{layer}.bias") if each in file.shapes)
        alike = all(_is_vector(file, each) and file.shapes[each] == shape for each in keys)
        named = len(keys) == 2 or "norm" in layer.lower()
        if layer == key or key in seen or not alike or not named:
            continue
        with_bias = "BatchNorm" if f"{layer}.running_var" in file.shapes else "LayerNorm or GroupNorm"
        kind = with_bias if len(keys) == 2 else "RMSNorm, scale alone"
        seen.update(alias for each in keys for alias in file.aliases(each))
        found.append(Part(layer, kind, keys, len(keys) * shape[0]))
    return found


def _film(file: CheckpointFile, keys: Sequence[str], dim: int, rng: torch.Generator) -> Film:
    weight = file.tensor(keys[0]).to(_dtype(file))
    A, *B = (gaussian(len(weight), dim, weight.dtype, rng) for _ in keys)
    return Film(keys, A, weight.abs()[:, None] * B[0] if B else None)


def _bias(file: CheckpointFile, key: str | None) -> list[Part]:
    """Return the bias that gets offsets, if one does."""
    if key is None:
        return []
    vectors = [name for name in file.shapes if _is_vector(file, name)]
    if key not in vectors:
        biases = [name for name in vectors if name.endswith("bias")]
        raise AdapterError(f"--offsets {brief(key)} is no vector of floats in {file.path}{nearest(key, biases)}")
    return [Part(key.rpartition(".")[0] or key, OFFSETS, (key,), file.shapes[key][0])]


def _is_vector(file: CheckpointFile, key: str) -> bool:
    shape, dtype = file.shapes[key], file.dtypes[key]
    return len(shape) == 1 and shape[0] > 0 and has_mean(torch.empty(0, dtype=dtype))


def _dtype(file: CheckpointFile) -> torch.dtype:
    """Return the type of phi and of the matrices."""
    return torch.float64 if torch.float64 in file.dtypes.values() else torch.float32
