"""Settings of inference that are put where a test's metric reads them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


def put_into(now: dict[str, Any]) -> Callable[[dict[str, Any]], AbstractContextManager[None]]:
    """Return an ``apply`` for ``Settings`` that writes the values into a dictionary for as long as they hold."""

    @contextmanager
    def apply(values: dict[str, Any]) -> Iterator[None]:
        before = dict(now)
        now.update(values)
        try:
            yield
        finally:
            now.update(before)

    return apply
