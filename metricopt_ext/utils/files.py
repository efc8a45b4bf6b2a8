"""Files that are either complete or absent: safetensors and JSON written to a temporary name, synced, then renamed."""

import hashlib
import inspect
import json
import math
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from metricopt_ext.errors import DataError, FileFormatError

LOCK = ".lock"
ROUNDING = 1e-4


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write ``data`` so that a reader, or a run after a crash, sees either all of it or the old file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # as for any other file; a temporary one is its owner's alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    umask = os.umask(0)  # it can only be read by setting it
    os.umask(umask)
    return umask


def write_json(path: str | Path, content: Any) -> None:
    """Write indented JSON atomically."""
    write_atomically(path, (_to_json(content, indent=2) + "\n").encode())


def _to_json(content: Any, **layout: Any) -> str:
    """Return JSON; a number of NumPy's is written like Python's."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{value!r} is a {type(value).__name__}, which JSON can't hold")

    return json.dumps(content, default=plain, **layout)


def read_json(path: str | Path) -> Any:
    """Read a JSON object.

    Raises:
        FileFormatError: The file is not JSON, or not a JSON object.
    """
    try:
        content = json.loads(Path(path).read_text())
    except ValueError as error:
        raise FileFormatError(f"{path} is not valid JSON ({error}); delete it to regenerate it") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{path} holds a {type(content).__name__}, not a JSON object; delete it to regenerate it")
    return content


def fingerprint(state: dict[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a state dict's names and tensors, whatever the device."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint_of_files(paths: Iterable[Path]) -> str:
    """Return 16 hexadecimal digits that identify files, and all files in folders, by name, size and content.

    Names count from each path on, so that a folder may be moved; everything is read once.

    Raises:
        DataError: A path does not exist.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in map(existing, paths):
        found = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        for file in found:
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "blake2b").hexdigest()
            digest.update(f"{file.relative_to(path)} {file.stat().st_size} {content}\n".encode())
    return digest.hexdigest()


def claim(path: str | Path, identity: dict[str, Any]) -> None:
    """Record what a folder's content depends on, or check it against what an earlier run recorded.

    Numbers with a fraction may differ by `ROUNDING` of their size: processors round differently.

    Raises:
        FileFormatError: The folder belongs to a run with other settings; the message names the first that differs.
    """
    identity = json.loads(_to_json(identity))
    if not Path(path).exists():
        write_json(path, identity)
        return
    theirs = read_json(path)
    for key in {**identity, **theirs}:  # in the identity's order, so that causes can come before what follows from them
        if not _same(theirs.get(key), identity.get(key)):
            raise FileFormatError(
                f"{Path(path).parent} holds another run: {key} was {theirs.get(key)!r}, now {identity.get(key)!r};"
                " continue with the old settings or use another output folder"
            )


def _same(a: Any, b: Any) -> bool:
    """Whether two values of JSON are the same but for rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=ROUNDING) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def fingerprint_of_code(function: Any) -> str:
    """Return what identifies a function's own code, under one version of Python; what it calls is not looked at.

    Args:
        function: Any callable. Of a partial function and a bound method it is the function's code, of an object that
            is called that of its class; of one that is not written in Python, the name.
    """
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    called = function if hasattr(function, "__code__") or inspect.ismethod(function) else type(function).__call__
    code = getattr(called, "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", type(function).__qualname__)
    digest = hashlib.blake2b(_described_code(code).encode(), digest_size=8).hexdigest()
    return f"{digest} (Python {sys.version_info.major}.{sys.version_info.minor})"


def _described_code(code: CodeType) -> str:
    def described(constant: Any) -> str:
        if isinstance(constant, frozenset):  # its order differs between processes
            return repr(sorted(map(repr, constant)))
        return _described_code(constant) if isinstance(constant, CodeType) else repr(constant)

    constants = [described(each) for each in code.co_consts]
    return repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars))


@contextmanager
def sole_writer(folder: str | Path) -> Iterator[None]:
    """Keep other processes from writing to a folder meanwhile; the lock ends with the process, however that ends.

    Raises:
        FileFormatError: Another process writes to it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(folder) / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise FileFormatError(
            f"{folder} is being written by another process; wait until it has ended, or use another output folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def write_tensors(path: str | Path, tensors: dict[str, Tensor], kind: str, described: dict[str, Any]) -> None:
    """Write tensors and their description to a safetensors file, atomically."""
    contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    metadata = {"format": kind, "described": _to_json(described)}
    write_atomically(path, safetensors.torch.save(contiguous, metadata=metadata))


def read_tensors(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote.

    Raises:
        FileFormatError: The file is missing, truncated, corrupt, or of another kind.
    """
    if not Path(path).is_file():
        raise FileFormatError(f"{path} does not exist")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise FileFormatError(f"{path} is truncated or not a safetensors file ({error})") from error
    if metadata.get("format") != kind:
        raise FileFormatError(
            f"{path} has format {metadata.get('format')!r}, expected {kind!r}: it holds something else, or was"
            " written by another version and must be made anew"
        )
    try:
        return tensors, json.loads(metadata["described"])
    except (KeyError, ValueError) as error:
        raise FileFormatError(f"{path} is corrupt: its description can't be read ({error})") from error


def save_checkpoint(path: str | Path, state: dict[str, Tensor]) -> None:
    """Write a state dict to a safetensors file, atomically; `load_checkpoint` and any other reader can load it."""
    write_atomically(path, safetensors.torch.save(state))


def load_checkpoint(model: nn.Module, path: Path, *, keep: Iterable[str] = ()) -> None:
    """Load a state dict into a model, from a safetensors file or a torch file without pickled code.

    A Detectron2 checkpoint works too: its state dict is the entry ``model``.

    Args:
        model: The model.
        path: The file.
        keep: Names of weights to leave as they are in the model, whatever the file holds.

    Raises:
        DataError: The file can't be read, or its weights are not the model's.
    """
    try:
        if path.suffix == ".safetensors":
            state = safetensors.torch.load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            state = loaded.get("model", loaded)
        own = model.state_dict()
        model.load_state_dict({**state, **{name: own[name] for name in keep}})
    except Exception as error:
        why = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise DataError(f"{path} holds no weights for {type(model).__name__}: {why}") from error


def existing(*candidates: str | os.PathLike[str]) -> Path:
    """Return the first of these paths that exists.

    Raises:
        DataError: None of them exists.
    """
    for candidate in candidates:
        if Path(candidate).exists():
            return Path(candidate)
    raise DataError(f"{' or '.join(map(str, candidates))} not found; set data.root=DIR to the data's folder")
