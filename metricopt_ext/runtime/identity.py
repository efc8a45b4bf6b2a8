"""Whose a folder is: what its content depends on, and which process writes to it."""

import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.pace import followed
from metricopt_ext.utils.files import is_hidden, read_json, to_json, walked, write_json
from metricopt_ext.utils.words import brief

LOCK = ".lock"
FIRST_LOSS = "loss of the first batch"
ROUNDING = 1e-4  # far above what processors differ by in float32, far below what a change of settings does
NOISE = 1e-2  # of a loss, which a whole network rounds to, of another processor and its TF32; other data differ by more
ABSENT = "nothing"


def claim(path: str | Path, identity: dict[str, Any]) -> None:
    """Record what a folder's content depends on, or check it against what an earlier run recorded.

    Numbers with a fraction may differ by `ROUNDING` of their size, and `FIRST_LOSS` by `NOISE`: processors round
    differently.

    Raises:
        FileFormatError: The folder belongs to a run with other settings; the message names the first that differs.
    """
    identity = json.loads(to_json(identity))
    if not Path(path).exists():
        write_json(path, identity)
        return
    theirs = read_json(path)
    for key in {**identity, **theirs}:  # in the identity's order, so that causes can come before what follows from them
        if not same(theirs.get(key), identity.get(key), NOISE if key == FIRST_LOSS else ROUNDING):
            name, old, new = _first_that_differs(key, theirs.get(key), identity.get(key))
            raise FileFormatError(
                f"{Path(path).parent} holds another run: {name} was {brief(old)}, now {brief(new)};"
                " continue with the old settings or use another output folder"
            )


def _first_that_differs(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return the name and both values of the first key that differs, within those that hold further ones."""
    while isinstance(old, dict) and isinstance(new, dict):
        pairs = ((key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in {**new, **old})
        key, old, new = next(pair for pair in pairs if not same(*pair[1:]))
        name = f"{name}.{key}"
    return name, old, new


def same(a: Any, b: Any, rounding: float = ROUNDING) -> bool:
    """Whether two values of JSON are the same, numbers but for a share of their size."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=rounding) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def fingerprint(state: dict[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a state dict's names and tensors, whatever the device."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint_of_code(function: Any) -> str:
    """Return what identifies a function's own code, under one version of Python; what it calls is not looked at.

    Args:
        function: Any callable. Of a partial function and a bound method it is the function's code, of an object that
            is called that of its class; of one that is not written in Python, the name. Numbers and text that are
            default arguments or a partial function's count, too.
    """
    arguments: list[Any] = []
    while isinstance(function, partial):
        arguments += [_plain(function.args), _plain(function.keywords)]
        function = function.func
    function = inspect.unwrap(function)
    called = function if hasattr(function, "__code__") or inspect.ismethod(function) else type(function).__call__
    code = getattr(called, "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", type(function).__qualname__)
    for name in ("__defaults__", "__kwdefaults__"):
        arguments.append(_plain(getattr(called, name, None) or {}))
    described = "".join([_described_code(code), *(repr(each) for each in arguments if each)])
    digest = hashlib.blake2b(described.encode(), digest_size=8).hexdigest()
    return f"{digest} (Python {sys.version_info.major}.{sys.version_info.minor})"


def _plain(arguments: Any) -> dict[str, Any]:
    """Return the numbers and text among arguments, by place or name; others are data, which is not looked at."""
    named = arguments.items() if isinstance(arguments, dict) else enumerate(arguments)
    return {str(name): value for name, value in named if isinstance(value, bool | int | float | str | None)}


def _described_code(code: CodeType) -> str:
    def described(constant: Any) -> str:
        if isinstance(constant, frozenset):  # its order differs between processes
            return repr(sorted(map(repr, constant)))
        return _described_code(constant) if isinstance(constant, CodeType) else repr(constant)

    constants = [described(each) for each in code.co_consts]
    return repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars))


def fingerprint_of_files(paths: Iterable[Path], besides: Path | None = None) -> str:
    """Return 16 hexadecimal digits that identify files, and all files in folders, by name and size; none is read.

    Names count from each path on, so that a folder may be moved; links are followed. Hidden files do not count, which
    systems write by themselves (`is_hidden`). A path that does not exist is left to whoever reads it to report.

    Args:
        paths: The files and folders.
        besides: A folder that does not count where it is in one of these: the run's own.
    """
    digest = hashlib.blake2b(digest_size=8)
    own = cache(lambda folder: besides is not None and folder.resolve().is_relative_to(besides.resolve()))
    for number, path in enumerate(paths):
        names = walked(path)[0] if path.is_dir() else [""]
        told = [name for name in names if not (is_hidden(name) or own((path / name).parent))]
        for name in followed(told, f"tell {path} by its files", len(told)):
            if (path / name).is_file():
                digest.update(f"{number} {name} {(path / name).stat().st_size}\n".encode())
    return digest.hexdigest()


def fingerprint_of_content(file: Path) -> str:
    """Return 16 hexadecimal digits that identify what a file holds."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, partial(hashlib.blake2b, digest_size=8)).hexdigest()


@contextmanager
def sole_writer(folder: str | Path) -> Iterator[Callable[[], None]]:
    """Keep other processes from writing to a folder meanwhile; the lock ends with the process, however that ends.

    Yields:
        A function that raises a FileFormatError if the folder was left since or replaced, and an OSError if it was
        removed.

    Raises:
        FileFormatError: Another process writes to it, or its file system has no locks.
        OSError: The folder, or the lock's file in it, can't be made.
    """
    file = Path(folder) / LOCK
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise FileFormatError(
            f"{folder} is being written by another process; wait until it has ended, or use another output folder"
        ) from error
    except (OSError, NotImplementedError) as error:
        if getattr(error, "filename", None) is not None:  # what can't be made has a name, what can't be locked has none
            raise
        raise FileFormatError(
            f"{folder} can't be kept from other processes: its file system has no working locks ({brief(error)}), as"
            " some that are mounted over a network; use another output folder, on a local disk"
        ) from error
    taken = os.stat(file)  # the open file keeps its number from others

    def check() -> None:
        if not (lock.is_locked and os.path.samestat(os.stat(file), taken)):
            raise FileFormatError(
                f"{folder} was left to other processes, as by close(), or replaced, so nothing more is written; go on"
                " by a new search or run with resume=True"
            )

    try:
        yield check
    finally:
        with suppress(OSError):  # an error here would hide how the run ended; the lock ends with the process
            lock.release()


def described(part: Any) -> str:
    """Return ``repr``, but functions by name: their own repr holds an address, which differs between processes."""
    if isinstance(part, tuple):
        return f"({', '.join(map(described, part))})"
    if isinstance(part, (FunctionType, MethodType)):
        return part.__qualname__
    return repr(part)
