"""What every tool's command line does, without what most of them import: errors in one line, and ``--show-config``."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError, MetricOptError
from metricopt_ext.plain import MESSAGE, escape_unprintable, plain
from metricopt_ext.runtime.launched import is_of_another
from metricopt_ext.runtime.run_log import telling_warnings
from metricopt_ext.runtime.stopping import ending_when_stopped
from metricopt_ext.utils.config import COMMAND_LINE, load_with_origins
from metricopt_ext.utils.extras import naming_extras
from metricopt_ext.utils.shown_config import shown_config

SHOW = "--show-config"
LIMIT_BROKEN = 3
"""The exit status of a tool whose kept end breaks a limit (``subject_to``), as no point that was asked keeps to it."""


@contextmanager
def errors_in_one_line(*more: type[Exception], keeps: Path | None = None, resume: str = "") -> Iterator[None]:
    """End the process with one line for an error that a user can fix, and in a few when it is stopped.

    An error that several ranks share is told by the one that met it. Warnings are shown as plain text, and characters
    that standard output can't encode as escapes.

    Args:
        *more: Types of further errors that a user can fix.
        keeps: As in `ending_when_stopped`.
        resume: As in `ending_when_stopped`.
    """
    escape_unprintable()
    mendable: tuple[type[Exception], ...] = (MetricOptError, FloatingPointError, OSError, *more)
    with ending_when_stopped(keeps, resume), naming_extras(), telling_warnings(lambda line: None):
        try:
            yield
        except mendable as error:
            if is_of_another(error):
                sys.exit(1)
            sys.exit(f"error: {plain(' '.join(str(error).split()), MESSAGE)}")


def shows_config() -> bool:
    """Tell whether the command line asks for the configuration alone, which needs no output folder and no data."""
    return SHOW in sys.argv


def add_show_config(parser: argparse.ArgumentParser) -> None:
    """Add the option to a tool's command line."""
    said = "print all keys with their values and where each comes from, and stop"
    parser.add_argument(SHOW, action="store_true", help=said)


def show_config(schema: type[Any], file: str | Path | None, overrides: Sequence[str] = ()) -> None:
    """Print what `load_config` reads, as YAML that says where each value comes from.

    Raises:
        ConfigError: No file is given, or it can't be read.
    """
    if file is None:
        raise ConfigError(f"{SHOW} needs --config-file")
    print(shown_config(*load_with_origins(schema, file, {COMMAND_LINE: overrides})), end="")
