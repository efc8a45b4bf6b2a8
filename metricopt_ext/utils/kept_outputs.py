"""What a model computed for some inputs, kept: to judge it in another way takes no pass through the model."""

import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.kept_modules import HELD
from metricopt_ext.utils.weights import differing, some_entries, where_and_how_often

GIB = 2.0  # of memory that outputs may take

SIMPLE = (type(None), bool, int, float, str)

# Passes of which it is remembered what they went over: more than go over the data at once, as views do.
OPEN = 64

# Outputs of which it is remembered that they were kept, the latest.
GONE = 10_000


class KeptOutputs:
    """Outputs by what they depend on, in memory; what was used longest ago goes first.

    The data may be given in parts, such as batches: a pass goes over each of them once.

    An output is a tensor, a number, text or None, or tuples, lists and dicts of these. It is kept as it is, on its
    device: who gets it must not change it.

    Args:
        gib: Most memory that the tensors may take, in GiB, on whatever device; at least 0.
        room: Share of the memory that what is kept only if there is room may fill, from 0 to 1.

    Attributes:
        passes: Passes over the data that were made: of each model and view of the data, such as its mirrored images.
        nbytes: Memory that the tensors take.

    Examples:
        >>> kept = KeptOutputs()
        >>> [kept.of("logits", lambda: torch.zeros(2)).tolist() for _ in range(3)], kept.passes
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], 1)
    """

    def __init__(self, gib: float = GIB, room: float = 0.5) -> None:
        check_at_least(0, gib=gib)
        if not 0 <= room <= 1:
            raise ValueError(f"room is {room}; it must be a share, from 0 to 1")
        self._room = int(room * gib * 2**30)
        self._most = int(gib * 2**30)
        self.passes = self.nbytes = 0
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._open: OrderedDict[str, set[int]] = OrderedDict()  # of the latest passes, the parts that they went over
        self._gone: OrderedDict[int, None] = OrderedDict()
        self._told = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeptOutputs":
        """Return itself: copies of a model that computes the same share what it computed."""
        return self

    def of(
        self, key: str, make: Callable[[], Any], *, part: str = "", by_pass: bool = True, if_room: bool = False
    ) -> Any:
        """Return what ``make()`` returned when it was first asked for; it is called where nothing is kept.

        Args:
            key: All that the output depends on but the part of the data, such as `digest_of_model`, the view of the
                data, and `circumstances`.
            make: Computes the output.
            part: Tells the part of the data, such as a batch's `digest_of`; empty where the output is of all.
            by_pass: Whether making it is a pass over the data, which is counted.
            if_room: Whether to keep it only within the share ``room`` of the memory. For outputs that are large and
                asked for in each pass: what goes over all of them in turn would push each out before it is needed
                again.
        """
        whole = f"{key} {part}"
        if whole in self._kept:
            self._kept.move_to_end(whole)
            return self._kept[whole][0]
        if hash(whole) in self._gone:
            self._warn_of_bound(self._room if if_room else self._most)
        output = make()
        if by_pass:
            self._count(key, part)
        self._keep(whole, output, if_room)
        return output

    def get(self, key: str, part: str = "") -> Any:
        """Return what is in memory, as `of` does; None if nothing is."""
        whole = f"{key} {part}"
        if whole not in self._kept:
            return None
        self._kept.move_to_end(whole)
        return self._kept[whole][0]

    def _count(self, key: str, part: str) -> None:
        """Count a part of a pass: of one that goes on, or of a new one if that has the part already."""
        seen = self._open.get(key)
        if seen is None or hash(part) in seen:
            self.passes += 1
            seen = self._open[key] = set()
        seen.add(hash(part))
        self._open.move_to_end(key)
        if len(self._open) > OPEN:
            self._open.popitem(last=False)

    def clear(self) -> None:
        """Forget all of it."""
        self._kept.clear()
        self._gone.clear()
        self.nbytes = 0

    def _keep(self, key: str, output: Any, if_room: bool) -> None:
        size = _bytes(output)
        if size > self._most or (if_room and self.nbytes + size > self._room):
            self._went(key)
            return
        self._kept[key] = output, size
        self.nbytes += size
        while self.nbytes > self._most:
            oldest, (_, freed) = self._kept.popitem(last=False)
            self.nbytes -= freed
            self._went(oldest)

    def _went(self, key: str) -> None:
        """Remember what was not kept: only if it is asked for again is it worth a warning."""
        self._gone[hash(key)] = None
        if len(self._gone) > GONE:
            self._gone.popitem(last=False)

    def _warn_of_bound(self, most: int) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"kept outputs fill their {most / 2**30:.3g} GiB of memory; what no longer fits is computed again"
                " whenever it is needed. A larger gib keeps more",
                stacklevel=4,
            )


def digest_of_model(model: nn.Module, ignored: Iterable[str] = ()) -> str:
    """Return 80 hexadecimal digits that identify all that a model's modules hold, an adapter's phi in use too.

    These are parameters, buffers, other tensors, numbers and text; hooks and code are not looked at. Tensors are read
    again where `where_and_how_often` tells of a change, or where some entries differ: of each tensor 4,096, or all if
    it has no more. A change of the others that leaves no trace, as through ``.data``, goes unnoticed.

    Args:
        model: The model.
        ignored: Names of attributes, dotted, that don't matter, such as a threshold that is applied afterwards.
    """
    left_out = frozenset(ignored)
    digests = _DIGESTS.setdefault(model, {})
    if left_out not in digests:
        digests[left_out] = _ModelDigest(left_out)
    return digests[left_out].of(model)


class _Read(NamedTuple):
    """A tensor that was read.

    Attributes:
        tensor: Held, so that no other can lie where it does.
        state: What `where_and_how_often` told.
        live: Some entries, a view; None where there can be none.
        entries: The same, a copy.
        digest: Its digest.
    """

    tensor: Tensor
    state: tuple[int, int]
    live: Tensor | None
    entries: Tensor | None
    digest: str


class _ModelDigest:
    """The digest of a model, which is given each time: held here it would never be freed.

    Args:
        ignored: Names of attributes, dotted.
    """

    def __init__(self, ignored: frozenset[str]) -> None:
        self._not_of: dict[str, set[str]] = {}
        for name in ignored:
            module, _, attribute = name.rpartition(".")
            self._not_of.setdefault(module, set()).add(attribute)
        self._read: dict[str, _Read] = {}

    def of(self, model: nn.Module) -> str:
        tensors, plain = self.held(model)
        changed = set(differing({name: (each.live, each.entries) for name, each in self._read.items()}))
        self._read = {name: self._of_tensor(name, each, name in changed) for name, each in tensors.items()}
        text = hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest()
        return hashlib.sha256("".join(each.digest for each in self._read.values()).encode()).hexdigest() + text

    def _of_tensor(self, name: str, tensor: Tensor, changed: bool) -> _Read:
        state, read = where_and_how_often(tensor), self._read.get(name)
        if read is not None and read.tensor is tensor and read.state == state and not changed:
            return read
        live = some_entries(tensor)
        return _Read(tensor, state, live, None if live is None else live.clone(), digest_of([tensor]))

    def held(self, model: nn.Module) -> tuple[dict[str, Tensor], list[Any]]:
        """Return the tensors of all modules by name, and what tells whose they are and what else there is."""
        tensors: dict[str, Tensor] = {}
        plain: list[Any] = []
        for name, module in model.named_modules():
            plain += (name, type(module).__qualname__)
            ignored = self._not_of.get(name, ())
            for key, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
                if key in HELD or key in ignored:
                    continue
                kind = type(value)
                if kind in SIMPLE:
                    plain += (key, value)
                elif isinstance(value, Tensor):
                    plain.append(key)
                    tensors[f"{name}.{key}"] = value
                elif kind in (tuple, list, dict) and _is_plain(value):
                    plain += (key, repr(value))  # as it is now
        return tensors, plain


_DIGESTS: WeakKeyDictionary[nn.Module, dict[frozenset[str], _ModelDigest]] = WeakKeyDictionary()


def structure_of_model(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that identify which modules a model has and what they hold but tensors."""
    _, plain = _ModelDigest(frozenset()).held(model)
    return hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest()


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return 64 hexadecimal digits that identify tensors in their order, as of some inputs."""
    digest = hashlib.sha256()  # the fastest on most processors
    for each in tensors:
        digest.update(f"{each.dtype} {tuple(each.shape)}".encode())
        digest.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def circumstances(device: torch.device) -> str:
    """Return on what, besides model and inputs, the last digits of an output depend: device, precision and PyTorch."""
    kind = device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if casts else "as it is"
    return f"{kind} {cast} {torch.get_float32_matmul_precision()} torch {torch.__version__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values())) and all(map(_is_plain, value))
    return type(value) in SIMPLE


def _bytes(output: Any) -> int:
    """Memory that an output's tensors take; what several of them share counts once."""
    storages = [each.untyped_storage() for each in _tensors_in(output)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list | dict):
        for each in output.values() if isinstance(output, dict) else output:
            yield from _tensors_in(each)
    elif not isinstance(output, SIMPLE):
        raise TypeError(f"an output holds a {type(output).__name__}; it can be kept as a tensor, number, text or None")
