"""A checkpoint of whatever framework, as a file: its tensors, and the same file again with some of them replaced."""

import json
import re
import shutil
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import safetensors
import torch
from torch import Tensor

from metricopt_ext.errors import DataError, FileFormatError
from metricopt_ext.utils.files import check_header, check_uncompressed, open_regular, opened_atomically
from metricopt_ext.utils.words import brief, shortened

SAFETENSORS = ".safetensors"
TORCH = (".pth", ".pt", ".th", ".ckpt", ".bin")

# Where training scripts put the state dict.
ENTRIES = ("state_dict", "state_dict_ema", "model", "model_state_dict")


class CheckpointFile:
    """A checkpoint's state dict, which may be an entry of a larger file.

    Attributes:
        path: The file.
        entry: The state dict's entry, None if it is the file itself.
        shapes: The tensors' shapes, by key, in the file's order.
        dtypes: Their types, by key.
    """

    path: Path
    entry: str | None
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def tensor(self, key: str) -> Tensor:
        """Return a copy of a tensor."""
        raise NotImplementedError

    def aliases(self, key: str) -> list[str]:
        """Return the keys, this one first, under which the file has the very same tensor, as of tied layers."""
        return [key]

    def write(self, path: str | Path, replaced: Mapping[str, Tensor], *, durable: bool = True) -> None:
        """Write the file again with other values of some tensors, atomically; any thread may call it.

        All else stays: nesting, keys, order, types, metadata, other entries, and which tensors share their storage.

        Args:
            path: The new file, which may be the old one.
            replaced: New values by key, of the old shapes and types.
            durable: As in `opened_atomically`.

        Raises:
            OSError: It can't be written, as where the disk is full.
        """
        with opened_atomically(path, durable=durable) as file:
            self._write(file, self._checked(replaced))

    def _write(self, file: IO[bytes], replaced: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def _checked(self, replaced: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for key, value in replaced.items():
            if (tuple(value.shape), value.dtype) != (self.shapes[key], self.dtypes[key]):
                raise ValueError(
                    f"{key} is {tuple(value.shape)}, {value.dtype}; it must be {self.shapes[key]}, {self.dtypes[key]}"
                )
        return replaced


def read_checkpoint(path: str | Path, entry: str | None = None) -> CheckpointFile:
    """Read a file of safetensors or of ``torch.save``; no code in it is run.

    Args:
        path: The file.
        entry: The state dict's key in a file of torch, with dots into further dictionaries; None to find it: the file
            itself, or the one of `ENTRIES` that it has.

    Raises:
        FileFormatError: The file is truncated, or holds more than tensors, numbers and text, and an unpickler that runs
            no code refuses it; the message has the lines of Python that export a state dict.
        DataError: The file holds no state dict, or several, or is of no known kind.
        OSError: It can't be read.
    """
    path = Path(path)
    if path.suffix == SAFETENSORS:
        if entry is not None:
            raise DataError(f"--entry {brief(entry)}: {path} is of safetensors, which has tensors alone; leave it out")
        return _Safetensors(path)
    if path.suffix in (".pkl", ".pickle"):
        raise FileFormatError(
            f"{path} is a pickle, which can run any code. If you trust it, export it:\n{_for(path, OF_PICKLE)}"
        )
    if path.suffix not in TORCH:
        kinds = ", ".join([SAFETENSORS, *TORCH])
        what = "is a folder; name its file" if path.is_dir() else f"ends in {brief(path.suffix)}; it must be a file"
        raise DataError(f"{path} {what} of one of the kinds {kinds}")
    return _Torch(path, entry)


OF_PICKLE = """\
  import pickle, torch
  content = pickle.load(open(IN, "rb"), encoding="latin1")
  state = content.get("model", content)
  torch.save({"model": {key: torch.as_tensor(value) for key, value in state.items()}}, OUT)"""

OF_TORCH = """\
  import torch
  content = torch.load(IN, map_location="cpu", weights_only=False)
  state = content.get("state_dict", content.get("model", content)) if isinstance(content, dict) else content
  state = state.state_dict() if hasattr(state, "state_dict") else state
  torch.save({"state_dict": {key: torch.as_tensor(value) for key, value in state.items()}}, OUT)"""


def _for(path: Path, lines: str) -> str:
    """Return lines of Python for a file."""
    names = {"IN": json.dumps(str(path)), "OUT": json.dumps(str(path.with_name(f"{path.stem}_state.pth")))}
    return re.sub(r"\b(IN|OUT)\b", lambda match: names[match[1]], lines)


class _Safetensors(CheckpointFile):
    """Read tensor by tensor, and copied byte by byte but for what is replaced."""

    entry = None

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path):
            pass  # that it is there, and no pipe
        try:
            check_header(path)
            with safetensors.safe_open(path, framework="pt") as file:  # which checks the header
                keys = list(file.keys())
            with open_regular(path) as opened:
                size = int.from_bytes(opened.read(8), "little")
                header: dict[str, Any] = json.loads(opened.read(size))
        except Exception as error:
            raise FileFormatError(f"{path} is truncated or not a safetensors file ({brief(error)})") from error
        self._begins = {key: 8 + size + int(header[key]["data_offsets"][0]) for key in keys}
        keys.sort(key=self._begins.__getitem__)
        self.shapes = {key: tuple(header[key]["shape"]) for key in keys}
        self.dtypes = {key: DTYPES.get(header[key]["dtype"], torch.uint8) for key in keys}

    def tensor(self, key: str) -> Tensor:
        with safetensors.safe_open(self.path, framework="pt") as file:
            found: Tensor = file.get_tensor(key)
        return found

    def _write(self, file: IO[bytes], replaced: Mapping[str, Tensor]) -> None:
        with open_regular(self.path) as old:
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


class _Torch(CheckpointFile):
    """Held in memory; to write it, what is replaced is put in place for a while, so that storages stay shared."""

    def __init__(self, path: Path, entry: str | None) -> None:
        self.path = path
        self._content = _loaded(path)
        self.entry, self._state = _state_dict(path, self._content, entry)
        tensors = {key: value for key, value in self._state.items() if isinstance(value, Tensor)}
        self.shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        self.dtypes = {key: value.dtype for key, value in tensors.items()}
        self._writing = threading.Lock()

    def tensor(self, key: str) -> Tensor:
        with self._writing:
            return self._of(key).clone()

    def aliases(self, key: str) -> list[str]:
        place = _place(self._of(key))
        return [key, *(other for other in self.shapes if other != key and _place(self._of(other)) == place)]

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


def _loaded(path: Path) -> Any:
    with open_regular(path) as file:
        begin = file.read(2)
    try:
        if begin[:1] != b"\x80" and begin != b"PK":
            raise ValueError("it begins as neither a zip file nor a pickle")
        _refuse_script(path)
        check_uncompressed(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if not isinstance(error, UnpicklingError):
            raise FileFormatError(f"{path} is truncated, or no file of torch.save ({brief(error)})") from error
        lines = [line.strip() for line in str(error).splitlines()]
        why = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
        raise FileFormatError(
            f"{path} holds more than tensors, numbers and text ({brief(ValueError(why))}), which is not read, as it can"
            f" run any code. If you trust it, export its state dict:\n{_for(path, OF_TORCH)}"
        ) from error


def _refuse_script(path: Path) -> None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise UnpicklingError("a model with its code, of TorchScript")


def _state_dict(path: Path, content: Any, entry: str | None) -> tuple[str | None, Mapping[str, Any]]:
    """Return the state dict and its entry, None for the content itself."""
    if entry is not None:
        found = within(content, entry)
        if not _is_state_dict(found):
            raise DataError(f"--entry {brief(entry)}: {path} has no state dict there; {_there_is(content)}")
        return entry, found
    entries = [name for name in ENTRIES if isinstance(content, dict) and _is_state_dict(content.get(name))]
    if len(entries) > 1:
        raise DataError(f"{path} has {len(entries)} state dicts, {entries}; name one by --entry")
    if entries:
        return entries[0], content[entries[0]]
    if not _is_state_dict(content):
        raise DataError(f"{path} has no state dict, itself or as one of {ENTRIES}; {_there_is(content)}")
    return None, content


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, dict) and any(isinstance(value, Tensor) for value in content.values())


def _there_is(content: Any) -> str:
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}"
    inner = [str(key) for key, value in content.items() if isinstance(value, dict)]
    return f"name one by --entry, of {shortened(inner)}" if inner else f"it has {shortened(list(map(str, content)))}"


def within(content: Any, key: str) -> Any:
    """Return what nested dictionaries and lists hold under a key with dots, None if nothing; keys may have dots too.

    Example:
        >>> within({"a": {"b.c": [1, 2]}}, "a.b.c.1")
        2
    """
    if isinstance(content, list) and key.partition(".")[0].isdecimal():
        at, _, rest = key.partition(".")
        inner = content[int(at)] if int(at) < len(content) else None
        return within(inner, rest) if rest else inner
    if not isinstance(content, dict):
        return None
    if key in content:
        return content[key]
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        begin = ".".join(parts[:count])
        if begin in content and (found := within(content[begin], ".".join(parts[count:]))) is not None:
            return found
    return None


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
