"""What phi moves of a checkpoint whose model is not at hand: the norms that its tensors' names tell, or a mixture."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.checkpoints import CheckpointReader
from metricopt_ext.adapters.context import CONTEXT_NAME, Context
from metricopt_ext.adapters.moves import Film, Mixture, Move, Offsets, gaussian, moved
from metricopt_ext.adapters.signature import Outputs, Signature
from metricopt_ext.errors import AdapterError, ConfigError
from metricopt_ext.runtime.identity import fingerprint
from metricopt_ext.utils.checkpoint_file import CheckpointFile
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.weights import has_mean
from metricopt_ext.utils.words import brief, nearest, shortened

# Logits per unit of an offset's coordinate. At the 2% by which the norms are moved first, offsets are 0.2 logits.
LOGITS = 10.0


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
        parts: What moves, but for the offsets.
        moves: How.
        dim: Number of phi's coordinates before the offsets.
        bias: The key of a bias that gets offsets, or None.

    Attributes:
        others: The files that are mixed in.
        base: The tensors that move, by key, at phi = 0.
        adapter: Holds phi for a search, of no model.

    Raises:
        AdapterError: The key is no bias.
    """

    def __init__(self, file: CheckpointFile, parts: list[Part], moves: list[Move], dim: int, bias: str | None) -> None:
        self.parts, self.moves = parts, moves
        self.others = [Path(part.name) for part in parts if not part.keys]
        outputs, channels = None, tuple[int, ...]()
        if bias is not None:
            if bias not in (vectors := _vectors(file)):
                raise AdapterError(f"--offsets {brief(bias)} is no vector of {file.path}{nearest(bias, [*vectors])}")
            outputs, channels = Outputs(bias, LOGITS), vectors[bias]
            parts.append(Part(bias.rpartition(".")[0] or bias, "offsets", (bias,), *channels))
            moves.append(Offsets(file.aliases(bias)[:1], slice(dim, dim + channels[0]), LOGITS))
        self.base = {key: file.tensor(key) for move in moves for key in move.keys}
        content = fingerprint(self.base | dict(nn.ModuleList(moves).named_buffers()))  # else f would fit any file's phi
        drawn = f"normal/1, shifts by the weights, of {content}"  # see `moves.GENERATOR`
        kind, holder = "mixture" if self.others else "film", nn.Module()
        means = Signature(kind, (), channels, 0, dim + sum(channels), drawn, outputs)
        holder.add_module(CONTEXT_NAME, Context(holder, [], means, _dtype(file)))
        self.adapter = Adapter(holder)

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
            raise ConfigError(f"{brief(wrong[0])} has no gradient, or needs none; give those of {brief([*self.base])}")
        origin, stacked = torch.zeros_like(self.adapter.phi.detach()), dict[str, Tensor]()
        for key, own in self.base.items():
            each = torch.as_tensor(given[key]).detach().to(origin)
            stacked[key] = each[None] if each.shape == own.shape else each
            count = next(iter(stacked.values())).shape[:1]
            if stacked[key].shape != (*count, *own.shape) or not each.isfinite().all():
                raise ConfigError(f"gradients of {key!r} must be finite, [m x] {[*own.shape]}, not {[*each.shape]}")

        def at(phi: Tensor) -> dict[str, Tensor]:  # in phi's precision, as a half would round the gradients too
            return moved(self.moves, phi, lambda key: self.base[key].to(origin), self.base)

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
    every, patterns = list(movable(file)), layers or ["*"]
    names = [each.name for each in every]
    for pattern in patterns if layers or offsets is None else []:
        if not any(fnmatchcase(name, pattern) for name in names):
            near, keys = nearest(pattern, names), shortened(list(file.shapes))
            raise AdapterError(f"--layers {brief(pattern)} matches no norm{near}; --offsets moves any vector of {keys}")
    named = [each for each in every if any(fnmatchcase(each.name, pattern) for pattern in patterns)]
    parts = [each for each in named if offsets not in each.keys]
    moves, dtype = list[Move](), _dtype(file)
    for index, part in enumerate(parts):
        weight, rng = file.tensor(part.keys[0]).to(dtype), generator(seed, "film", index)
        A, *B = (gaussian(len(weight), dim, dtype, rng) for _ in part.keys)
        moves.append(Film(part.keys, A, weight.abs()[:, None] * B[0] if B else None))
    return FileMoves(file, parts, moves, dim if parts else 0, offsets)


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
    reader = CheckpointReader(file, entry)
    states = reader.to_mix(others)
    base = {key: reader.base[key] for key in reader.floating}
    parts = [Part(str(path), "weight in the mixture", (), 1) for path in others]
    return FileMoves(file, parts, [Mixture(base, states)], len(states), offsets)


def movable(file: CheckpointFile) -> Iterator[Part]:
    """Yield the norms of a checkpoint, in its order; tied ones once.

    ``P.weight`` and ``P.bias`` of one length are a norm, with ``P.running_var`` a BatchNorm. ``P.weight`` alone is a
    norm if its name has "norm" in it.
    """
    vectors = _vectors(file)
    for key, shape in vectors.items():
        layer, _, end = key.rpartition(".")
        keys = (key, bias) if (bias := f"{layer}.bias") in file.shapes else (key,)
        alike = all(vectors.get(each) == shape for each in keys)
        named = len(keys) == 2 or "norm" in layer.lower()
        if end == "weight" and alike and named and file.aliases(key)[0] == key:
            with_bias = "BatchNorm" if f"{layer}.running_var" in file.shapes else "LayerNorm or GroupNorm"
            kind = with_bias if len(keys) == 2 else "RMSNorm, scale alone"
            yield Part(layer, kind, keys, len(keys) * shape[0])


def _vectors(file: CheckpointFile) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the vectors of floating numbers, by key."""
    floats = {key for key, dtype in file.dtypes.items() if has_mean(torch.empty(0, dtype=dtype))}
    return {key: shape for key, shape in file.shapes.items() if key in floats and len(shape) == 1 and shape[0]}


def _dtype(file: CheckpointFile) -> torch.dtype:
    """Return the type of phi and of the matrices."""
    return torch.float64 if torch.float64 in file.dtypes.values() else torch.float32
