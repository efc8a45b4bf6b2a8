"""Files that are either complete or absent: safetensors and JSON written to a temporary name, synced, then renamed.

What is read may come from anywhere: none of it is run as code. Only what needs torch imports it: a tool may do without.
"""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from metricopt_ext.errors import DataError, FileFormatError, MetricOptError
from metricopt_ext.utils.text import text_of
from metricopt_ext.utils.words import brief

if TYPE_CHECKING:
    from torch import Tensor, nn

# How the name ends that a file has while it is written; it begins with a dot.
UNFINISHED = ".unfinished"

# What code raises that meets other content than it was written for; RuntimeError is PyTorch's.
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# What systems write into folders, besides names that begin with a dot.
SYSTEM = ("__MACOSX", "Thumbs.db", "desktop.ini")

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".tgz", ".7z", ".rar")

Module = TypeVar("Module", bound="nn.Module")


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write ``data`` so that a reader, or a run after a crash, sees either all of it or the old file.

    Raises:
        OSError: It can't be written, as where the disk is full; the old file is as it was.
    """
    with opened_atomically(path) as file:
        file.write(data)


@contextmanager
def opened_atomically(path: str | Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file to write it, and to read what was written, that takes the place of the old one once it is complete.

    Args:
        path: The file; its folder is made.
        durable: Whether it must outlive a crash of the machine; of the process, it does in any case.

    Raises:
        OSError: It can't be written, as where the disk is full; the old file is as it was.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # as for any other file; a temporary one is its owner's alone
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):  # where nothing can be written, nothing can be removed; the first error counts
                Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:  # which names the temporary file, or none
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove_unfinished(folder: str | Path) -> None:
    """Remove what processes that were killed while they wrote have left in a folder; nobody may write there now."""
    for path in Path(folder).glob(f".*{UNFINISHED}"):
        path.unlink(missing_ok=True)


def _umask() -> int:
    umask = os.umask(0)  # it can only be read by setting it
    os.umask(umask)
    return umask


def write_json(path: str | Path, content: Any) -> None:
    """Write indented JSON atomically."""
    write_atomically(path, (to_json(content, indent=2) + "\n").encode())


def to_json(content: Any, **layout: Any) -> str:
    """Return JSON; a number of NumPy's is written like Python's."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{value!r} is a {type(value).__name__}, which JSON can't hold")

    return json.dumps(content, default=plain, **layout)


def bytes_of(path: str | Path) -> bytes:
    """Return what is in a file.

    Raises:
        OSError: It can't be read; a pipe or a device, which could be waited for without end, is not even opened.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return Path(path).read_bytes()


def read_json(path: str | Path) -> Any:
    """Read a JSON object.

    Raises:
        FileFormatError: The file is not JSON, or not a JSON object.
    """
    try:
        content = parse_json(Path(path).read_bytes())
    except ValueError as error:
        raise FileFormatError(f"{path} is not valid JSON ({brief(error)}); delete it to regenerate it") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{path} holds a {type(content).__name__}, not a JSON object; delete it to regenerate it")
    return content


def walked(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of all that is below a folder, in order, those of folders with a slash at their end.

    Links to folders are followed, but each folder is entered once, so that links to a folder above, or many to one, end
    nowhere: the names of such links come second, and are not among the first.

    Raises:
        OSError: A folder can't be read.
    """
    names, again, links, entered = [], [], [""], set()
    while links:
        link = links.pop(0)
        inner = [link]
        while inner:
            name = inner.pop()
            status = os.stat(folder / name)
            if (status.st_dev, status.st_ino) in entered:
                again.append(name.removesuffix("/"))
                continue
            entered.add((status.st_dev, status.st_ino))
            names.append(name)
            with os.scandir(folder / name) as found:
                for each in sorted(found, key=lambda each: each.name):
                    if not each.is_dir():
                        names.append(name + each.name)
                    else:
                        (links if each.is_symlink() else inner).append(f"{name}{each.name}/")
    return sorted(names[1:]), sorted(again)


def is_hidden(name: str) -> bool:
    """Whether a path has a part that systems hide, or write by themselves beside what people put there."""
    return any(part.startswith(".") or part in SYSTEM for part in name.split("/"))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, of bytes in UTF-8.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return json.loads(text if isinstance(text, str) else text_of(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def content_of(path: str | Path, meant: str) -> Iterator[None]:
    """Turn what code raises that meets other content than it was written for into an error that names the file.

    Args:
        path: The file.
        meant: What it should hold.

    Raises:
        FileFormatError: The code raised one of `MISFITS`.
    """
    try:
        yield
    except MetricOptError:
        raise
    except MISFITS as error:
        # With its type: should the code be wrong and not the file, this says where to look.
        why = brief(error) if isinstance(error, KeyError) else f"{type(error).__name__}: {brief(error)}"
        raise FileFormatError(f"{path} is corrupt: it holds no {meant} ({why})") from error


def write_tensors(path: str | Path, tensors: dict[str, "Tensor"], kind: str, described: dict[str, Any]) -> None:
    """Write tensors and their description to a safetensors file, atomically; the same bytes for the same content.

    A checksum of both is kept with them.
    """
    import safetensors.torch

    contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    content = safetensors.torch.save(contiguous)
    # Not as its `metadata`, which safetensors writes in an order that changes from call to call.
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = {"format": kind, "described": (text := to_json(described)), "checksum": _checksum(text, content[end:])}
    header = json.dumps({"__metadata__": metadata, **json.loads(content[8:end])}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8
    write_atomically(path, len(header).to_bytes(8, "little") + header + content[end:])


def read_tensors(path: str | Path, kind: str) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
    """Read what `write_tensors` wrote.

    Raises:
        FileFormatError: The file is missing, truncated, corrupt, of another kind, or not as it was written.
    """
    import safetensors

    if not Path(path).is_file():
        raise FileFormatError(f"{path} does not exist")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") == kind:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise FileFormatError(f"{path} is truncated or not a safetensors file ({brief(error)})") from error
    if metadata.get("format") != kind:
        raise FileFormatError(
            f"{path} has format {brief(metadata.get('format'))}, expected {kind!r}: it holds something else, or was"
            " written by another version and must be made anew"
        )
    if metadata.get("checksum") != _checksum(metadata.get("described", ""), _after_header(path)):
        raise FileFormatError(f"{path} is damaged: its checksum is another than when it was written; make it anew")
    try:
        described = parse_json(metadata["described"])
    except (KeyError, ValueError) as error:
        raise FileFormatError(f"{path} is corrupt: its description can't be read ({brief(error)})") from error
    if not isinstance(described, dict):
        raise FileFormatError(f"{path} is corrupt: its description is {brief(described)}, not a JSON object")
    return tensors, described


def _checksum(described: str, tensors: bytes) -> str:
    return hashlib.blake2b(described.encode() + tensors, digest_size=8).hexdigest()


def _after_header(path: str | Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return file.read()


def check_tensors(path: str | Path, tensors: Mapping[str, "Tensor"], expected: Mapping[str, Iterable[int]]) -> None:
    """Reject a file that holds other tensors than it describes, or than what it is for has.

    Args:
        path: The file.
        tensors: What it holds.
        expected: The shape of each tensor that it should hold.

    Raises:
        FileFormatError: A tensor is missing, unknown or of another shape.
    """
    for name in sorted(tensors.keys() | expected.keys()):
        if name not in tensors:
            raise FileFormatError(f"{path} is corrupt: it has no tensor {brief(name)}")
        if name not in expected:
            raise FileFormatError(f"{path} is corrupt: it has a tensor {brief(name)}, which it does not describe")
        theirs, ours = tuple(tensors[name].shape), tuple(expected[name])
        if theirs != ours:
            raise FileFormatError(
                f"{path} is corrupt: tensor {brief(name)} has shape {brief(theirs)}, but should have {brief(ours)}"
            )


def module_of(path: str | Path, tensors: Mapping[str, "Tensor"], make: Callable[[], Module]) -> Module:
    """Build a module and load its tensors, but only if they are all of its own, by name and shape.

    Until then nothing is allocated, however large the module would be.

    Args:
        path: The file, for messages.
        tensors: What it holds.
        make: Builds the module that the file describes.

    Raises:
        FileFormatError: The file does not hold the tensors of this module.
    """
    import torch

    with torch.device("meta"):  # shapes without memory
        module = make()
    check_tensors(path, tensors, {name: value.shape for name, value in module.state_dict().items()})
    module.to_empty(device="cpu").load_state_dict(tensors)
    return module


def save_checkpoint(path: str | Path, state: dict[str, "Tensor"]) -> None:
    """Write a state dict to a safetensors file, atomically; `load_checkpoint` and any other reader can load it."""
    import safetensors.torch

    write_atomically(path, safetensors.torch.save(state))


def existing(*candidates: str | os.PathLike[str]) -> Path:
    """Return the first of these paths that exists.

    Raises:
        DataError: None of them exists, or it is an archive, which is not unpacked here, a pipe or a device.
    """
    for candidate in candidates:
        if Path(candidate).exists():
            if Path(candidate).name.lower().endswith(ARCHIVES):
                raise DataError(f"{candidate} is an archive, which is not read; unpack it and name the folder")
            if not Path(candidate).is_dir() and not Path(candidate).is_file():
                raise DataError(f"{candidate} is a pipe or a device; name a regular file")
            return Path(candidate)
    home = " (~ is taken as it stands)" if any(str(each).startswith("~") for each in candidates) else ""
    raise DataError(f"{' or '.join(map(str, candidates))} not found{home}; set data.root=DIR to the data's folder")
