"""What a model computed for some inputs, kept: to judge it in another way takes no pass through the model."""

import copy
import hashlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.errors import FileFormatError
from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.files import read_tensors, write_tensors
from metricopt_ext.utils.kept_modules import HELD
from metricopt_ext.utils.weights import where_and_how_often
from metricopt_ext.utils.words import brief

FORMAT = "metricopt-kept-outputs-1"
SUFFIX = ".outputs"

SIMPLE = (type(None), bool, int, float, str)

_NOTHING = object()  # where there is no output, which may be None


class KeptOutputs:
    """Outputs by what they depend on, in memory and perhaps on disk; what was used longest ago goes first.

    An output is a tensor, a number, text or None, or tuples, lists and dicts of these. It is kept as it is, on its
    device: who gets it must not change it.

    Args:
        gib: Most memory that the tensors may take, in GiB, on whatever device; at least 0.
        folder: Where they are kept on disk too, for other processes and later runs; None for memory alone. The folder
            is for nothing else.
        disk_gib: Most that the files there may take, in GiB; at least 0.

    Attributes:
        passes: How often an output was made.
        nbytes: Memory that the tensors take.

    Example:
        >>> kept = KeptOutputs()
        >>> [kept.of("logits", lambda: torch.zeros(2)).tolist() for _ in range(3)], kept.passes
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], 1)
    """

    def __init__(self, gib: float = 2.0, folder: str | Path | None = None, disk_gib: float = 8.0) -> None:
        check_at_least(0, gib=gib, disk_gib=disk_gib)
        self._most, self._most_on_disk = int(gib * 2**30), int(disk_gib * 2**30)
        self.folder = None if folder is None else Path(folder)
        self.passes = self.nbytes = 0
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._told: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeptOutputs":
        """Return itself: copies of a model that computes the same share what it computed."""
        return self

    def of(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what ``make()`` returned when the key was first asked for; it is called where nothing is kept.

        Args:
            key: All that the output depends on, such as the `ModelDigest` and the data's.
            make: Computes the output.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        output = self._read(key)
        if output is _NOTHING:
            self.passes += 1
            output = make()
            self._write(key, output)
        self._keep(key, output)
        return output

    def clear(self) -> None:
        """Forget what is in memory; files stay."""
        self._kept.clear()
        self.nbytes = 0

    def _keep(self, key: str, output: Any) -> None:
        size = _bytes(output)
        if size <= self._most:
            self._kept[key] = output, size
            self.nbytes += size
        while self.nbytes > self._most:
            self.nbytes -= self._kept.popitem(last=False)[1][1]
            self._warn_of_bound()
        if size > self._most:
            self._warn_of_bound()

    def _warn_of_bound(self) -> None:
        self._warn(
            "bound",
            f"kept outputs fill their {self._most / 2**30:.3g} GiB of memory; what no longer fits is"
            f" {'read from disk' if self.folder else 'computed'} again whenever it is needed. A larger gib keeps more",
        )

    def _warn(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, stacklevel=5)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}{SUFFIX}"

    def _read(self, key: str) -> Any:
        """What is on disk under a key; `_NOTHING` if nothing is, or what is there can't be used."""
        if self.folder is None or not (path := self._path(key)).exists():
            return _NOTHING
        try:
            tensors, described = read_tensors(path, FORMAT)
            if described["key"] != key:
                return _NOTHING
            output = _joined(described["output"], tensors)
        except (FileFormatError, LookupError, TypeError, ValueError) as error:
            self._warn("damaged", f"{path} can't be used and is made anew: {brief(error)}")
            return _NOTHING
        with suppress(OSError):  # a folder that can't be written to can be read
            os.utime(path)
        return output

    def _write(self, key: str, output: Any) -> None:
        if self.folder is None or _bytes(output) > self._most_on_disk:
            return
        tensors: dict[str, Tensor] = {}
        described = {"key": key, "output": _taken_apart(output, tensors)}
        try:
            # Parts of one storage, as of a tensor that was split, must be of their own in a file.
            write_tensors(self._path(key), {name: each.clone() for name, each in tensors.items()}, FORMAT, described)
            self._bound_disk()
        except OSError as error:
            self._warn("disk", f"outputs are kept in memory alone, as {brief(error)}")

    def _bound_disk(self) -> None:
        assert self.folder is not None
        files = [(file.stat(), file) for file in self.folder.glob(f"*{SUFFIX}")]
        used = sum(status.st_size for status, _ in files)
        for status, file in sorted(files, key=lambda each: each[0].st_mtime_ns):
            if used <= self._most_on_disk:
                return
            file.unlink(missing_ok=True)
            used -= status.st_size


class ModelDigest:
    """A digest of all that a model's modules hold: parameters, buffers, other tensors, numbers and text.

    It is computed again where `where_and_how_often` tells of a change, or an attribute is another; hooks and code are
    not looked at.

    Args:
        model: The model.
        ignored: Names of attributes, dotted, that don't matter, such as a threshold that is applied afterwards.
    """

    def __init__(self, model: nn.Module, ignored: Iterable[str] = ()) -> None:
        self._model, self._ignored = model, frozenset(ignored)
        self._not_of: dict[str, set[str]] = {}
        for name in self._ignored:
            module, _, attribute = name.rpartition(".")
            self._not_of.setdefault(module, set()).add(attribute)
        self._state: tuple[Any, ...] = ()
        self._tensors: list[Tensor] = []  # held, so that no other can lie where they do
        self._digest = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelDigest":
        """Return that of the model's copy."""
        return ModelDigest(copy.deepcopy(self._model, memo), self._ignored)

    def __call__(self) -> str:
        """Return 80 hexadecimal digits."""
        tensors, plain = self._held()
        state = (list(map(where_and_how_often, tensors)), plain)
        if state != self._state:
            text = hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest()
            self._digest = digest_of(tensors) + text
            self._state, self._tensors = state, tensors
        return self._digest

    def _held(self) -> tuple[list[Tensor], list[Any]]:
        """The tensors of all modules, and what tells whose they are and what else there is."""
        tensors: list[Tensor] = []
        plain: list[Any] = []
        for name, module in self._model.named_modules():
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
                    tensors.append(value)
                elif kind in (tuple, list, dict) and _is_plain(value):
                    plain += (key, repr(value))  # as it is now
        return tensors, plain


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return 64 hexadecimal digits that identify tensors in their order, as of some inputs."""
    digest = hashlib.sha256()  # the fastest on most processors
    for each in tensors:
        digest.update(f"{each.dtype} {tuple(each.shape)}".encode())
        digest.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values())) and all(map(_is_plain, value))
    return type(value) in SIMPLE


def _bytes(output: Any) -> int:
    """Memory that an output's tensors take; what several of them share counts once."""
    tensors: dict[str, Tensor] = {}
    _taken_apart(output, tensors)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors.values()}
    return sum(storages.values())


def _taken_apart(output: Any, tensors: dict[str, Tensor]) -> Any:
    """Describe an output for a file's header; its tensors go into a dict, by number."""
    if isinstance(output, Tensor):
        tensors[str(len(tensors))] = output
        return {"tensor": str(len(tensors) - 1), "device": str(output.device)}
    if isinstance(output, tuple | list):
        return {"tuple" if isinstance(output, tuple) else "list": [_taken_apart(each, tensors) for each in output]}
    if isinstance(output, dict):
        return {"dict": [[key, _taken_apart(each, tensors)] for key, each in output.items()]}
    if output is None or isinstance(output, bool | int | float | str):
        return {"plain": output}
    raise TypeError(f"an output holds a {type(output).__name__}; it can be kept as a tensor, number, text or None")


def _joined(described: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the output that `_taken_apart` described."""
    if "tensor" in described:
        return tensors[described["tensor"]].to(torch.device(described["device"]))
    for kind in (tuple, list):
        if kind.__name__ in described:
            return kind(_joined(each, tensors) for each in described[kind.__name__])
    if "dict" in described:
        return {key: _joined(each, tensors) for key, each in described["dict"]}
    return described["plain"]
