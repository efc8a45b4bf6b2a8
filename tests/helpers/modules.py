"""Modules that a test writes, which others must not find."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def forgotten(*names: str) -> Iterator[None]:
    """Forget modules of these names, and where they were found, at the end of the block."""
    before = sys.path[:]
    try:
        yield
    finally:
        sys.path[:] = before
        for name in names:
            sys.modules.pop(name, None)
