"""Refusals and warnings, known by what they name.

A name is the value, key, file or row that is refused, or the remedy. The words around it may be put otherwise.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest


def assert_refused(
    call: Callable[[], Any], error: type[BaseException] | tuple[type[BaseException], ...], *names: object
) -> None:
    """Check that the call raises this error, and that its message has each of these names."""
    with pytest.raises(error) as caught:
        call()
    assert_named(caught, *names)


def assert_warned(call: Callable[[], Any], *names: object) -> Any:
    """Check that the call warns with a message that has each of these names, and return what it returns."""
    with pytest.warns(UserWarning, match=having(*names)):
        return call()


def assert_named(caught: pytest.ExceptionInfo[BaseException], *names: object) -> None:
    """Check that the message of an error that was raised has each of these names."""
    said = str(caught.value)
    missing = [name for name in map(str, names) if not re.search(having(name), said)]
    assert not missing, f"{missing} not named in: {said}"


def having(*names: object) -> str:
    """Return a pattern of messages that have each of these names, as whole words, in any order."""
    return "(?s)" + "".join(rf"(?=.*(?<!\w){re.escape(str(name))}(?!\w))" for name in names)
