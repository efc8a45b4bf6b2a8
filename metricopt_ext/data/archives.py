"""Zip files of data, read without unpacking them, within bounds that their own headers can't lift."""

import os
import sys
import threading
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from metricopt_ext.data.labelled import MAX_BYTES
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import open_regular
from metricopt_ext.utils.words import brief

# The largest file within a zip file that is read: a photograph has 10 MB, and zeros shrink a thousandfold when zipped.
MEMBER_BYTES = 1 << 28

# The longest name of a file within one, folders included; Python's zipfile lists all folders of each name.
NAME_CHARACTERS = 1000

OTHERS = (".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")  # archives that are not read


class Archive:
    """A zip file that is open for reading.

    Args:
        path: Its path.
        file: The open file.
        max_bytes: Most bytes that all files read from it may have together.
    """

    def __init__(self, path: Path, file: zipfile.ZipFile, max_bytes: int) -> None:
        self.path, self.file, self.max_bytes = path, file, max_bytes
        self._left = max_bytes

    def names(self) -> list[str]:
        """Return the names of its files and folders; of several of one name the last is read, as by unzip."""
        return list(dict.fromkeys(self.file.namelist()))

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            DataError: There is none of this name; it is corrupt, encrypted, or larger than `MEMBER_BYTES`; or the files
                read so far have more bytes than allowed.
        """
        where = f"{self.path / name} can't be read"
        try:
            size = self.file.getinfo(name).file_size  # no more is unpacked, whatever there is
        except KeyError as error:
            raise DataError(f"{where}: the zip file has no such file") from error
        if size > MEMBER_BYTES:
            raise DataError(f"{where}: it has {size} bytes; at most {MEMBER_BYTES} are read from a file in a zip file")
        self._left -= size
        if self._left < 0:
            raise DataError(
                f"{where}: the files read from the zip file have more than {self.max_bytes} bytes; if that is right,"
                " raise max_bytes"
            )
        try:
            return self.file.read(name)
        except Exception as error:  # a decompressor's own errors are of many types
            raise DataError(f"{where} ({brief(error)})") from error


class ZipReader:
    """Reads files of a zip file by their names, again and again; each thread has a handle of its own.

    Each file has at most `MEMBER_BYTES`; how many bytes are read in all has no bound.

    Args:
        path: The zip file.

    Raises:
        DataError: As `open_zip`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own, self._opened = threading.local(), ExitStack()
        weakref.finalize(self, self._opened.close)
        self._lock = threading.Lock()
        self._archive()

    def names(self) -> list[str]:
        """Return the names of its files and folders, as `Archive.names`."""
        return self._archive().names()

    def __call__(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            DataError: As `Archive.read`.
        """
        return self._archive().read(name)

    def _archive(self) -> Archive:
        if getattr(self._own, "process", None) != os.getpid():  # a fork shares the place in a file with its parent
            with self._lock:
                self._own.archive = self._opened.enter_context(open_zip(self.path, sys.maxsize))
            self._own.process = os.getpid()
        archive: Archive = self._own.archive
        return archive


@contextmanager
def open_zip(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[Archive]:
    """Open a zip file.

    Args:
        path: The file.
        max_bytes: Most bytes that all files read from it may have together.

    Yields:
        The open archive.

    Raises:
        DataError: It is no complete zip file, or has a name of more than `NAME_CHARACTERS` characters or with an empty
            folder's name in it.
    """
    with ExitStack() as opened:
        try:
            file = opened.enter_context(zipfile.ZipFile(opened.enter_context(open_regular(path))))
        except Exception as error:  # of a corrupt directory: of many types
            unpack = "; unpack it" if path.name.lower().endswith(OTHERS) else ""
            raise DataError(f"{path} is neither a folder nor a complete zip file ({brief(error)}){unpack}") from error
        _with_slashes(file)
        file.filename = str(path)  # which paths within it are named by in messages; it is opened as a file of no name
        for name in file.namelist():
            # Python before 3.12.6 never ends on a name such as "//a".
            if len(name) > NAME_CHARACTERS or name.startswith("/") or "//" in name:
                raise DataError(
                    f"{path} has a file named {brief(name)}; a name must have at most {NAME_CHARACTERS} characters, and"
                    " none of its folders an empty name"
                )
        yield Archive(path, file, max_bytes)


def _with_slashes(file: zipfile.ZipFile) -> None:
    """Name files by slashes where all names have backslashes alone, as Windows' own programs once wrote them."""
    names = file.namelist()
    if any("\\" in name for name in names) and not any("/" in name for name in names):
        for each in file.filelist:
            each.filename = each.filename.replace("\\", "/")
        file.NameToInfo = {each.filename: each for each in file.filelist}
