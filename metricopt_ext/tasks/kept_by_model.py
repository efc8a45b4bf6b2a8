"""What models gave, kept by what they computed with, so that the same model need not run again on the same inputs."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor, nn

from metricopt_ext.adapters.modulation import Context
from metricopt_ext.utils.identity import fingerprint
from metricopt_ext.utils.weights import where_and_how_often

Made = TypeVar("Made")

LIMIT = 2**28  # bytes that are kept
SMALL, ENTRIES = 4096, 64  # tensors of so few entries are always read, others' entries in part if no trace tells more


class KeptByModel:
    """Outputs by their keys, the latest within a limit of memory.

    Args:
        limit: Bytes of the tensors that are kept. What alone takes more is made anew each time.

    Attributes:
        passes: How often something was made: forward passes over some data.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.passes, self._size = limit, 0, 0
        self._kept = OrderedDict[Hashable, Any]()

    def of(self, key: Hashable, make: Callable[[], Made], *, passes: int = 1) -> Made:
        """Return what is kept under a key, or what ``make`` returns, by so many passes; nobody may change it."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]  # type: ignore[no-any-return]
        made = make()
        self.passes += passes
        if (size := _size(made)) <= self.limit:
            self._kept[key] = made
            self._size += size
        while self._size > self.limit:
            self._size -= _size(self._kept.popitem(last=False)[1])
        return made

    def clear(self) -> None:
        """Forget all outputs; the count of passes stays."""
        self._kept.clear()
        self._size = 0


def digest_of(*models: nn.Module) -> str:
    """Return 16 hexadecimal digits that identify what models compute with: parameters, buffers and the phi in use."""
    return fingerprint(_tensors(models))


class Digest:
    """The same of one model, asked often: large tensors are read again only if something tells of a change.

    A change that leaves no trace (`where_and_how_often`) is looked for in some entries of each.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._seen: dict[str, tuple[Any, Any, str]] = {}  # by name: the tensor, what told of changes, and its digest

    def __call__(self) -> str:
        """Return the digest of the model as it is now."""
        digests = [self._digest(name, each) for name, each in sorted(_tensors([self.model]).items())]
        return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()

    def _digest(self, name: str, tensor: Tensor) -> str:
        if tensor.numel() <= SMALL:
            return fingerprint({name: tensor})
        flat = tensor.detach().reshape(-1)
        some = fingerprint({name: flat[:: max(1, len(flat) // ENTRIES)]})
        told = (*where_and_how_often(tensor), some)
        seen = self._seen.get(name)
        if seen is None or seen[0]() is not tensor or seen[1] != told:
            seen = self._seen[name] = ref(tensor), told, fingerprint({name: tensor})
        return seen[2]


def _tensors(models: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, model in enumerate(models):
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, module in model.named_modules():
            if isinstance(module, Context) and module.override is not None:
                own[f"{name}.phi"] = module.override
        found |= {f"{number}.{name}": each for name, each in own.items()}
    return found


def _size(made: Any) -> int:
    if isinstance(made, Tensor):
        return made.numel() * made.element_size()
    if isinstance(made, Mapping):
        return sum(map(_size, made.values()))
    return sum(map(_size, made)) if isinstance(made, tuple | list) else 0
