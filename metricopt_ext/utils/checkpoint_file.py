"""A checkpoint of whatever framework, as a file: its tensors, and the same file again with some of them replaced."""

import json
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import safetensors
import torch
from torch import Tensor

from metricopt_ext.errors import DataError, FileFormatError
from metricopt_ext.utils.files import opened_atomically
from metricopt_ext.utils.state_dict import state_dict_in, torch_content
from metricopt_ext.utils.words import brief

SAFETENSORS = ".safetensors"
TORCH = (".pth", ".pt", ".th", ".ckpt", ".bin")


class CheckpointFile:
    """A checkpoint's state dict, which may be an entry of a larger file.

    Attributes:
        path: The file.
        entry: The state dict's entry, None if it is the file itself.
        shapes: The tensors' shapes, by key, in the file's order.
        dtypes: Their types, by key.
        packed: Keys of what holds tensors without being one, as quantized layers do.
    """

    path: Path
    entry: str | None
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    packed: Sequence[str] = ()
    _seen: tuple[int, ...] | None = None  # what tells whether the file is the one that was read

    def tensor(self, key: str) -> Tensor:
        """Return a copy of a tensor."""
        raise NotImplementedError

    def aliases(self, key: str) -> list[str]:
        """Return the keys, in the file's order, under which it has the very same tensor, as of tied layers."""
        return [key]

    def write(self, path: str | Path, replaced: Mapping[str, Tensor], *, durable: bool = True) -> None:
        """Write the file again with other values of some tensors, atomically; any thread may call it.

        All else stays: nesting, keys, order, types, metadata, other entries, and which tensors share their storage.

        Args:
            path: The new file, which may be the old one.
            replaced: New values by key, of the old shapes and types.
            durable: As in `opened_atomically`.

        Raises:
            DataError: The file changed since it was read.
            OSError: It can't be written, as where the disk is full.
        """
        self.check_unchanged()
        itself = Path(path).exists() and self.path.exists() and Path(path).samefile(self.path)
        with opened_atomically(path, durable=durable) as file:
            self._write(file, self._checked(replaced))
        if itself:
            self._seen = _seen(self.path)

    def check_unchanged(self) -> None:
        """Refuse to go on once another process has written the file anew, as a training does its last checkpoint.

        Raises:
            DataError: It did.
        """
        if self._seen is not None and _seen(self.path) != self._seen:
            raise DataError(f"{self.path} changed after it was read, so the results would be of two files; use a copy")

    def _write(self, file: IO[bytes], replaced: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def _checked(self, replaced: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for key, value in replaced.items():
            if (tuple(value.shape), value.dtype) != (self.shapes[key], self.dtypes[key]):
                raise ValueError(
                    f"{key} is {tuple(value.shape)}, {value.dtype}; it must be {self.shapes[key]}, {self.dtypes[key]}"
                )
        return replaced


def read_checkpoint(path: str | Path, entry: str | None = None, option: str = "--entry") -> CheckpointFile:
    """Read a file of safetensors or of ``torch.save``; no code in it is run.

    Args:
        path: The file.
        entry: The state dict's key in a file of torch, with dots into further dictionaries; None to find it: the file
            itself, or the one of `ENTRIES` that it has.
        option: What names the entry, for messages.

    Raises:
        FileFormatError: The file is truncated, or holds more than tensors, numbers and text, and an unpickler that runs
            no code refuses it; the message has the lines of Python that export a state dict.
        DataError: The file holds no state dict, or several, or is of no known kind.
        OSError: It can't be read.
    """
    path = Path(path)
    if path.suffix == SAFETENSORS:
        if entry is not None:
            raise DataError(f"{option} {brief(entry)}: {path} is of safetensors, which has tensors alone; leave it out")
        return _Safetensors(path)
    if path.suffix not in TORCH:
        kinds = ", ".join([SAFETENSORS, *TORCH])
        what = "is a folder; name its file" if path.is_dir() else f"ends in {brief(path.suffix)}; it must be a file"
        raise DataError(f"{path} {what} of one of the kinds {kinds}")
    return _Torch(path, entry, option)


class _Safetensors(CheckpointFile):
    """Read tensor by tensor, and copied byte by byte but for what is replaced."""

    entry = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = _seen(path)
        try:
            with safetensors.safe_open(path, framework="pt") as file:  # which checks the header
                keys = list(file.keys())
            with open(path, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header: dict[str, Any] = json.loads(opened.read(size))
        except OSError:
            raise
        except Exception as error:
            raise FileFormatError(f"{path} is truncated or not a safetensors file ({brief(error)})") from error
        self._begins = {key: 8 + size + int(header[key]["data_offsets"][0]) for key in keys}
        keys.sort(key=self._begins.__getitem__)
        self.shapes = {key: tuple(header[key]["shape"]) for key in keys}
        self.dtypes = {key: self._dtype(key, header[key]["dtype"]) for key in keys}

    def _dtype(self, key: str, name: str) -> torch.dtype:
        if name in DTYPES:
            return DTYPES[name]
        try:
            return self.tensor(key).dtype
        except Exception:  # whatever safetensors raises of a type that it or this torch doesn't know
            return torch.uint8  # which is copied, never moved

    def tensor(self, key: str) -> Tensor:
        self.check_unchanged()
        with safetensors.safe_open(self.path, framework="pt") as file:
            try:
                found: Tensor = file.get_tensor(key)
            except safetensors.SafetensorError as error:
                raise DataError(
                    f"{self.path}: {brief(key)} can't be read ({brief(error)}); convert it first"
                ) from error
        return found

    def _write(self, file: IO[bytes], replaced: Mapping[str, Tensor]) -> None:
        with open(self.path, "rb") as old:
            shutil.copyfileobj(old, file, 1 << 20)
        for key, value in replaced.items():
            file.seek(self._begins[key])
            file.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _seen(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:  # whoever opens it says so
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def packed_in(state: Mapping[str, Any]) -> list[str]:
    """Return the entries of a state dict that hold tensors without being one."""
    return [name for name, value in state.items() if isinstance(value, tuple | list) and _holds_tensor(value)]


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_holds_tensor, value)))


def _expanded(tensor: Tensor) -> bool:
    """Whether several of a tensor's numbers are one in memory."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Torch(CheckpointFile):
    """Held in memory; to write it, what is replaced is put in place for a while, so that storages stay shared."""

    def __init__(self, path: Path, entry: str | None, option: str) -> None:
        self.path, self._seen = path, _seen(path)
        self._content = torch_content(path)
        self.entry, self._state = state_dict_in(path, self._content, entry, option)
        tensors = {key: value for key, value in self._state.items() if isinstance(value, Tensor)}
        for key, value in tensors.items():
            if not isinstance(key, str):
                raise FileFormatError(f"{path} has a tensor under {brief(key)}; a state dict has names")
            if value.layout != torch.strided or value.is_meta or (value.is_floating_point() and _expanded(value)):
                raise FileFormatError(
                    f"{path}: {brief(key)} is sparse, without data, or an expanded view; save all its numbers, as of"
                    " .to_dense() or .clone()"
                )
        self.shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        self.dtypes = {key: value.dtype for key, value in tensors.items()}
        self._places = {key: _place(value) for key, value in tensors.items()}
        self.packed = packed_in(self._state)
        self._writing = threading.Lock()

    def tensor(self, key: str) -> Tensor:
        with self._writing:
            return self._of(key).clone()

    def aliases(self, key: str) -> list[str]:
        return [other for other, place in self._places.items() if place == self._places[key]]

    def _of(self, key: str) -> Tensor:
        found: Tensor = self._state[key].detach()
        return found

    def _write(self, file: IO[bytes], replaced: Mapping[str, Tensor]) -> None:
        with self._writing, self._holding(replaced):
            torch.save(self._content, file)

    @contextmanager
    def _holding(self, replaced: Mapping[str, Tensor]) -> Iterator[None]:
        before = {key: self._of(key).clone() for key in replaced}
        try:
            for key, value in replaced.items():
                self._of(key).copy_(value)
            yield
        finally:
            for key, value in before.items():
                self._of(key).copy_(value)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
