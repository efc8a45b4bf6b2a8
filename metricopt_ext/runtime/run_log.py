"""A run's log: a file that receives a line with a time stamp for all that the progress shows, and how the run ended."""

import errno
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metricopt_ext.plain import MESSAGE, plain


@contextmanager
def run_log(path: str | Path) -> Iterator[Callable[[str], None]]:
    """Open a log, to whose end lines are added, and note the error with which the run ends, if one does.

    Args:
        path: The file; its folder exists.

    Yields:
        A function that writes a line; any thread may call it.

    Raises:
        OSError: The file can't be written.
    """
    if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, not a regular file", str(path))
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%S%z"))
    logger = logging.Logger("run")  # no child of the root logger, which belongs to the program
    logger.addHandler(handler)

    def write(line: str) -> None:
        logger.info(plain(" ".join(line.splitlines()), MESSAGE))

    try:
        yield write
    except KeyboardInterrupt:
        write("stopped")
        raise
    except Exception as error:
        write(f"error: {type(error).__name__}: {error}")
        raise
    finally:
        handler.close()


@contextmanager
def telling_warnings(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell of Python's warnings too, besides showing them, as plain text and without a line of code.

    Args:
        tell: Is given each warning that is shown, in a line.
    """
    before, formatted = warnings.showwarning, warnings.formatwarning

    def in_a_line(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
        return f"warning: {message}\n" if category is UserWarning else formatted(message, category, *where, **more)

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        text = plain(str(message), MESSAGE, lines=True)
        tell(f"{category.__name__}: {text}")
        before(message if text == str(message) else text, category, *where, **more)

    warnings.showwarning, warnings.formatwarning = show, in_a_line
    try:
        yield
    finally:
        warnings.showwarning, warnings.formatwarning = before, formatted
